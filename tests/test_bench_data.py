"""tools/bench_data.py measures what it says: both contestants train on the same tokens, and goals are judged."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import bench_data
import numpy as np
import pytest
from bench_data import all_contestants, goals
from data_memory import MemoryOfChildren, peak_of_process
from data_shapes import LONGEST, MEDIAN, SHORTEST, draw_lengths
from tiny import write_tokenizer
from transformers import AutoTokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


_CLEAN = """
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

sys.path[:0] = {paths!r}
import bench_data
import data_contestants
import trl.trainer.sft_trainer  # before the forks, and so once


def in_fork(function, *arguments):
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


bench_data.in_fresh_process = in_fork
"""


def in_clean_process(code: str, *arguments: str) -> str:
    """Run code in an interpreter that has none of what other tests have left in this one, and return what it printed.

    A benchmark has to import everything anew for each start; its test imports once, and forks.
    """
    paths = [str(Path(bench_data.__file__).parent), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", _CLEAN.format(paths=paths) + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tokenizer with a token for every byte, and a template that says what is learnt."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    changed = AutoTokenizer.from_pretrained(directory)
    changed.chat_template = TEMPLATE
    changed.save_pretrained(directory)
    return directory


def test_both_train_on_the_same_tokens(tmp_path: Path, tokenizer: Path) -> None:
    """A small run gives a table and a JSON, and no file is left."""
    out, work = tmp_path / "out.json", tmp_path / "work"
    work.mkdir()
    small = ["--rows", "40", "--repeats", "1", "--seconds", "0.1", "--million", "20", "--workers", "0"]
    places = ["--tokenizer", str(tokenizer), "--directory", str(work), "--json", str(out)]
    printed = in_clean_process("sys.exit(bench_data.main(sys.argv[1:]))", *small, *places)
    report = json.loads(out.read_text())
    ours, theirs = report["contestants"]
    assert ours["content"] == theirs["content"]
    assert ours["content"]["samples"] == 40
    assert 0 < ours["content"]["learnt_tokens"] < ours["content"]["tokens"]
    assert report["lengths"]["mean"] * 40 == pytest.approx(ours["content"]["tokens"])
    assert [(start["contestant"], start["state"]) for start in report["starts"]] == [
        (row["contestant"], state) for row in report["contestants"] for state in ("cold", "warm")
    ]
    for start in report["starts"]:
        assert start["pack_s"] + start["tokenise_s"] <= start["first_batch_s"] < start["process_s"]
    for row in report["contestants"]:
        assert row["warm"]["tokenise_s"] < row["cold"]["tokenise_s"]
        assert row["laid_out_per_s"] > 0
        assert row["fill"] == pytest.approx(row["content"]["tokens"] / (row["rows"] * 8192))
    assert [case["ours"]["fill"] >= case["theirs"]["fill"] for case in report["packing"]] == [True] * 3
    million = report["million"]
    assert [million[key]["records"] for key in ("first_run_tenth", "first_run_million", "second_run")] == [2, 20, 20]
    assert million["second_run"]["tokenise_s"] < million["first_run_million"]["tokenise_s"]
    assert "the same tokens" in printed
    assert list(work.iterdir()) == []


_CHANGED = """
from pathlib import Path
from data_contestants import Task, start_ours, start_theirs
from data_shapes import Rows, prepare

work, tokenizer = Path(sys.argv[1]), Path(sys.argv[2])
in_fork(prepare, work, (), tokenizer, {"rows": Rows(count=3)})
task = Task(
    data=work / "rows.jsonl",
    tokenizer=work / "tokenizer",
    cache=work / "cache",
    workers=0,
    sequence_length=8192,
    has_content=True,
)
their_samples = data_contestants._their_samples


def changed(packed):
    samples = list(their_samples(packed))
    learnt = samples[0][1]
    learnt[len(learnt) - 2] ^= True
    return iter(samples)


same = in_fork(start_ours, task).content
assert in_fork(start_theirs, task).content == same
data_contestants._their_samples = changed
other = in_fork(start_theirs, task).content
assert other.digest != same.digest
assert (other.samples, other.tokens) == (same.samples, same.tokens)
print("told apart")
"""


def test_samples_that_differ_are_told(tmp_path: Path, tokenizer: Path) -> None:
    """One token that is learnt by one of them only is another digest, though as many samples and tokens."""
    assert "told apart" in in_clean_process(_CHANGED, str(tmp_path), str(tokenizer))


def test_lengths_are_those_of_instruction_data() -> None:
    """Log-normal, within bounds, and the same for one seed."""
    lengths = draw_lengths(20_000, seed=1)
    assert (lengths.min(), lengths.max()) == (SHORTEST, LONGEST)
    assert np.median(lengths) == pytest.approx(MEDIAN, rel=0.03)
    assert np.array_equal(lengths, draw_lengths(20_000, seed=1))


def test_memory_of_a_child_is_seen() -> None:
    """What it has allocated, as its own and of all children, while it had it."""
    with MemoryOfChildren() as memory:
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
            peak = pool.submit(_allocate, 200_000_000).result()
        ended = time.monotonic()
    seen = memory.peak(ended)
    if not Path("/proc").is_dir():
        assert (seen, peak) == (None, None)
        return
    assert seen is not None
    assert seen.private_bytes > 200_000_000
    assert peak > 200_000_000
    assert memory.peak(0.0) is None


def _allocate(num_bytes: int) -> int | None:
    held = np.ones(num_bytes, dtype=np.uint8)
    time.sleep(1.0)
    assert held.all()
    return peak_of_process()


def report_of(**changes: Any) -> dict[str, Any]:
    """Return what the benchmark knows of a run in which everything was reached."""

    def first_run(records: int, private_bytes: int) -> dict[str, Any]:
        return {"records": records, "memory": {"private_bytes": private_bytes}}

    content = {"digest": "a", "tokens": 10, "learnt_tokens": 5}
    known: dict[str, Any] = {
        "fill": 0.99,
        "digest": "a",
        "waiting": 0.001,
        "warm_s": 5.0,
        "more_bytes": 10_000_000,
        **changes,
    }
    both = [
        {
            "contestant": who.label,
            "is_ours": who.is_ours,
            "content": {**content, "digest": known["digest"] if who.is_ours else "a"},
            "waiting": {2: known["waiting"], 0: 0.5},
            "laid_out_per_s": 1e6,
        }
        for who in all_contestants([0])
    ]
    return {
        "packing": [{"sequence_length": 2048, "ours": {"fill": known["fill"]}, "theirs": {"fill": 0.5}}],
        "contestants": both,
        "million": {
            "records": 1_000_000,
            "tokens_per_record": 500,
            "first_run_tenth": first_run(100_000, 500_000_000),
            "first_run_million": first_run(1_000_000, 500_000_000 + known["more_bytes"]),
            "second_run": {"first_batch_s": known["warm_s"], "process_s": 20.0},
        },
    }


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"fill": 0.96}, [0]),
        ({"digest": "b"}, [1]),
        ({"waiting": 0.02}, [2]),
        ({"warm_s": 11.0}, [3]),
        ({"more_bytes": 300_000_000}, [4]),
    ],
)
def test_goals_are_judged(changes: dict[str, Any], missed: list[int]) -> None:
    """Padding, the same tokens, waiting, the second start and the first run's memory, each by itself."""
    judged = [goal["met"] for goal in goals(report_of(**changes))]
    assert [number for number, met in enumerate(judged) if not met] == missed
    assert len(judged) == 5


def test_what_is_expected_is_of_the_tokenizer_and_the_cores() -> None:
    """With workers on all cores ckptrain is expected to be 1.5 times as fast as TRL; without, less than with."""
    ours, theirs, ours_on_all, theirs_on_all = (
        who.expected_tokens_per_s(1e6, cores=2) for who in all_contestants([0, 2])
    )
    assert ours_on_all == pytest.approx(1.5 * theirs_on_all)
    assert theirs < ours < ours_on_all
