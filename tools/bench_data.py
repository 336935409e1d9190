"""uv run python tools/bench_data.py --json OUT

What it costs to get from a file of conversations to the first batch, and to go on from there: ckptrain beside
`datasets.map` and TRL's packing, on the same rows, with the same tokenizer, on the same machine in one run.

Each start is a process of its own, cold (nothing tokenised yet) and then warm (a second run); rounds go through the
contestants forwards and backwards. Every sample of both is compared: token by token, learnt by learnt. Memory is that
of the process and its children together, what they share counted once; "private" leaves out what is mapped from files.

What to expect, before measuring, on C cores with a tokenizer that makes e tokens a second on one of them; `expected` in
the table is for the e that was measured in the same run:

- tokens/s of ckptrain: reading, rendering and marking take a third of the tokenizer's time. Without workers the
  tokenizer has C threads and the rest one: 1 / (1 / (C e) + 1 / (3 e)). With workers C e / (1 + 1 / 3), after some
  seconds in which they start.
- of TRL: it calls the template and the tokenizer for each row, asks for each token that is learnt, and goes through all
  tokens twice more, in Python and through Arrow: e / 2 in one process, and C times that with C.
- cold: the tokens divided by that. Warm: ckptrain hashes the file and packs again, a second for a million rows; TRL
  looks up what it has kept. For both the imports are what counts.
- memory: that of the imports (torch and transformers, 0.5 GB) and tens of MB. A worker of ckptrain has no torch: 0.1
  GB. TRL's processes are forks, and share what was imported.
- on disk: 5 bytes a token for ckptrain, 8 for each of the token, its label and its mask for TRL, and once more packed.
- padding: best-fit decreasing leaves nearly nothing where many samples are short beside a row. TRL packs a thousand
  samples at a time, and of each thousand the last row is not full: half a row in 65.
- batches: a copy of memory, some million tokens a second. TRL's become lists of Python integers first: a tenth.
- a million rows: the first run's memory is that of a small one and some 100 bytes a row, for packing; its time is in
  proportion to the tokens. The second takes what it takes to read and hash the file, twice, and two seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import data_contestants as contestants
from bench_convert import facts, forget, in_fresh_process
from data_contestants import CONSUMED_PER_S, Packed, Started, Task
from data_memory import MemoryOfChildren
from data_shapes import Rows, draw_lengths, prepare
from data_tables import MB, show
from rich.console import Console

OURS, THEIRS = "ckptrain", "datasets.map + TRL"
MOST_PADDING = 0.03
MOST_WAITING = 0.01
"""Of the time of a loop that takes CONSUMED_PER_S, with two steps laid out ahead, as is the default."""
MOST_WARM_S = 10.0
"""For the million, after the imports."""
MOST_GROWTH = 0.1
"""Of the first run's memory for each row more, beside what the row's tokens take on disk."""
_ROW_BYTES = 5
"""Of a token on disk: its id, and whether it is learnt."""
_PACKED_TOKENS = (2048, 4096, 8192)
_MILLION_TOKENS = 500


@attrs.frozen(kw_only=True)
class Contestant:
    """One of the two, with so many processes that tokenise; 0 is the one that trains."""

    name: str
    start: Callable[[Task], Started]
    workers: int

    @property
    def label(self) -> str:
        """Name it in the tables."""
        return f"{self.name}, {f'{self.workers} processes' if self.workers else 'in the training process'}"

    @property
    def is_ours(self) -> bool:
        """Whether it is ckptrain."""
        return self.name == OURS

    def expected_tokens_per_s(self, encoded_per_s: float, cores: int) -> float:
        """Return the tokens it makes in a second, if the tokenizer alone makes so many on one core."""
        if not self.is_ours:
            return encoded_per_s / 2 * min(max(self.workers, 1), cores)
        if self.workers:
            return encoded_per_s / (1 + 1 / 3) * min(self.workers, cores)
        return encoded_per_s / (1 / cores + 1 / 3)


def all_contestants(workers: Sequence[int]) -> list[Contestant]:
    """Return both, with each number of processes."""
    both = ((OURS, contestants.start_ours), (THEIRS, contestants.start_theirs))
    return [Contestant(name=name, start=start, workers=number) for number in workers for name, start in both]


def measure_start(start: Callable[[Task], Started], task: Task) -> dict[str, Any]:
    """Start in a fresh process; returns the numbers for JSON."""
    with MemoryOfChildren() as memory:
        begun = time.monotonic()
        started: Started = in_fresh_process(start, task)
    peak = memory.peak(started.ready_at)
    numbers = attrs.asdict(started)
    parts = started.parts_s
    return {
        "process_s": numbers.pop("ready_at") - begun,
        "tokenise_s": sum(parts.get(name, 0.0) for name in contestants.TOKENISE),
        "pack_s": sum(parts.get(name, 0.0) for name in contestants.PACK),
        "disk_bytes": sum(file.stat().st_size for file in task.cache.rglob("*") if file.is_file()),
        "memory": None if peak is None else attrs.asdict(peak, filter=lambda field, _: field.name != "at"),
        **numbers,
    }


def measure_all(
    work: Path, everyone: Sequence[Contestant], asked: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """Let everyone start on the same rows, cold and warm, so many times; the last warm start is looked at closely."""
    found: list[dict[str, Any]] = []
    for number in range(asked.repeats):
        for who in everyone if number % 2 == 0 else reversed(everyone):
            cache = work / "cache"
            for state in ("cold", "warm"):
                is_last = state == "warm" and number == asked.repeats - 1
                task = Task(
                    data=work / "rows.jsonl",
                    tokenizer=work / "tokenizer",
                    cache=cache,
                    workers=who.workers,
                    sequence_length=asked.sequence_length,
                    look_for_s=asked.seconds if is_last else 0.0,
                    has_content=is_last,
                )
                numbers = measure_start(who.start, task)
                found.append({"contestant": who.label, "round": number, "state": state, **numbers})
                console.print(f"{who.label}, {state}: first batch after {numbers['process_s']:.1f} s")
            shutil.rmtree(cache)
    return found


def summarise(
    starts: Sequence[Mapping[str, Any]], everyone: Sequence[Contestant], num_rows: int, encoded_per_s: float
) -> list[dict[str, Any]]:
    """Return for each contestant the medians of its rounds, and what its last start was looked at for."""
    keys = ("tokenise_s", "pack_s", "first_batch_s", "process_s", "cpu_s", "disk_bytes")
    cores = len(os.sched_getaffinity(0))
    rows = []
    for who in everyone:
        own = [start for start in starts if start["contestant"] == who.label]
        last = next(start for start in reversed(own) if start["content"] is not None)
        row: dict[str, Any] = {"contestant": who.label, "is_ours": who.is_ours}
        for state in ("cold", "warm"):
            same = [start for start in own if start["state"] == state]
            row[state] = {key: statistics.median(start[key] for start in same) for key in keys}
            for key in ("total_bytes", "private_bytes"):
                row[state][key] = statistics.median((start["memory"] or {key: 0})[key] for start in same)
        row["rows_per_s"] = num_rows / row["cold"]["tokenise_s"]
        row["tokens_per_s"] = last["content"]["tokens"] / row["cold"]["tokenise_s"]
        row["expected_tokens_per_s"] = who.expected_tokens_per_s(encoded_per_s, cores)
        rows.append({**row, **{key: last[key] for key in ("rows", "fill", "content", "laid_out_per_s", "waiting")}})
    return rows


def measure_packing(num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Pack lengths of the distribution into rows of several lengths, which longer samples are cut to."""
    lengths = draw_lengths(num_rows, seed)
    found = []
    for sequence_length in _PACKED_TOKENS:
        packed: tuple[Packed, Packed] = in_fresh_process(contestants.pack_both, lengths, sequence_length)
        ours, theirs = map(attrs.asdict, packed)
        found.append({"sequence_length": sequence_length, "samples": num_rows, "ours": ours, "theirs": theirs})
    return found


def measure_million(work: Path, num_rows: int, seconds: float, console: Console) -> dict[str, Any]:
    """Start ckptrain on many rows of one length: a tenth of them, all, and all again from what the first run has kept.

    Nothing is held in the page cache for the second run.
    """

    def task(name: str, look_for_s: float) -> Task:
        return Task(
            data=work / f"{name}.jsonl",
            tokenizer=work / "tokenizer",
            cache=work / f"cache-{name}",
            workers=None,
            sequence_length=4 * _MILLION_TOKENS,
            look_for_s=look_for_s,
        )

    found: dict[str, Any] = {"records": num_rows, "tokens_per_record": _MILLION_TOKENS}
    for name, count in (("tenth", num_rows // 10), ("million", num_rows)):
        rows = Rows(count=count, num_tokens=_MILLION_TOKENS)
        in_fresh_process(prepare, work, (), work / "tokenizer", {name: rows})
        numbers = measure_start(contestants.start_ours, task(name, 0.0))
        found[f"first_run_{name}"] = {"records": count, **numbers}
        console.print(f"first run on {count:,} rows: first batch after {numbers['process_s']:.1f} s")
    found["file_bytes"] = (work / "million.jsonl").stat().st_size
    forget(work / "million.jsonl")
    forget(work / "cache-million")
    numbers = measure_start(contestants.start_ours, task("million", seconds))
    found["second_run"] = {"records": num_rows, **numbers}
    return found


def goals(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what was to be reached, whether it was, and the numbers."""
    for case in report["packing"]:
        padding = 1 - case["ours"]["fill"]
        yield {
            "goal": f"rows of {case['sequence_length']:,} tokens: padding under {MOST_PADDING:.0%}",
            "met": padding < MOST_PADDING,
            "found": f"{padding:.2%}; TRL {1 - case['theirs']['fill']:.2%}",
        }
    contents = {row["contestant"]: row["content"] for row in report["contestants"]}
    digests = {content["digest"] for content in contents.values()}
    yield {
        "goal": "all train on the same tokens, and learn the same of them",
        "met": len(digests) == 1,
        "found": "; ".join(
            f"{label}: {content['tokens']:,}, {content['learnt_tokens']:,} learnt"
            for label, content in contents.items()
        ),
    }
    for row in report["contestants"]:
        if row["is_ours"]:
            yield {
                "goal": f"{row['contestant']}: a loop at {CONSUMED_PER_S:,} tokens/s does not wait",
                "met": row["waiting"][2] < MOST_WAITING,
                "found": f"{row['waiting'][2]:.2%} of its time, {row['waiting'][0]:.2%} with nothing laid out ahead;"
                f" {row['laid_out_per_s']:,.0f} tokens/s are laid out",
            }
    if (million := report["million"]) is not None:
        yield from _goals_of_million(million)


def _goals_of_million(million: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    again = million["second_run"]
    yield {
        "goal": f"{million['records']:,} rows, second run: trains within {MOST_WARM_S:g} s of the imports",
        "met": again["first_batch_s"] < MOST_WARM_S,
        "found": f"{again['first_batch_s']:.1f} s; {again['process_s']:.1f} s from the start of the process",
    }
    fewer, more = million["first_run_tenth"], million["first_run_million"]
    if fewer["memory"] is None:
        return
    grown = more["memory"]["private_bytes"] - fewer["memory"]["private_bytes"]
    each = grown / (more["records"] - fewer["records"])
    on_disk = _ROW_BYTES * million["tokens_per_record"]
    yield {
        "goal": f"{million['records']:,} rows, first run: memory that hardly grows with the rows",
        "met": each < MOST_GROWTH * on_disk,
        "found": f"{more['memory']['private_bytes'] / MB:,.0f} MB, of {fewer['records']:,} rows"
        f" {fewer['memory']['private_bytes'] / MB:,.0f} MB: {each:,.0f} bytes a row, whose tokens have {on_disk:,}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print everything, and return the exit status: 1 where the two do not train on the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16_000, help="conversations")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[0, cores], help="processes that tokenise; 0 is the one that trains"
    )
    parser.add_argument("--repeats", type=int, default=2, help="rounds of cold and warm starts")
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each way of taking batches")
    parser.add_argument(
        "--million", type=int, default=0, metavar="ROWS", help="start on so many rows of 500 tokens too"
    )
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files to draw text from, instead of our docs")
    parser.add_argument("--tokenizer", type=Path, help="a Hugging Face directory, instead of SmolLM2's")
    parser.add_argument("--directory", type=Path, help="for the files; that for temporary files otherwise")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    asked = parser.parse_args(arguments)
    console = Console(width=180, highlight=False)
    work = Path(tempfile.mkdtemp(prefix="ckptrain-bench-", dir=asked.directory))
    try:
        in_fresh_process(prepare, work, asked.text, asked.tokenizer, {"rows": Rows(count=asked.rows)})
        everyone = all_contestants(asked.workers)
        starts = measure_all(work, everyone, asked, console)
        encoded = in_fresh_process(contestants.encoded_per_s, work / "rows.jsonl", work / "tokenizer")
        summary = summarise(starts, everyone, asked.rows, encoded)
        report: dict[str, Any] = {
            "machine": in_fresh_process(facts, work),
            "rows": asked.rows,
            "sequence_length": asked.sequence_length,
            "lengths": _lengths(asked.rows, summary[0]["content"]["tokens"]),
            "encoded_per_s": encoded,
            "contestants": summary,
            "starts": starts,
            "packing": measure_packing(asked.rows, seed=1),
            "million": measure_million(work, asked.million, asked.seconds, console) if asked.million else None,
        }
    finally:
        shutil.rmtree(work)
    report["goals"] = list(goals(report))
    show(report, console)
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if len({row["content"]["digest"] for row in summary}) > 1 else 0


def _lengths(num_rows: int, num_tokens: int) -> dict[str, float]:
    drawn = draw_lengths(num_rows, 0)
    return {"mean": num_tokens / num_rows, "median": float(statistics.median(drawn)), "longest": int(drawn.max())}


if __name__ == "__main__":
    sys.exit(main())
