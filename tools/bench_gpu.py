"""python3 tools/bench_gpu.py --json OUT

LoRA training on one GPU: tokens/s, memory and TFLOP/s of ckptrain beside Unsloth, a bare megatron-core loop,
Megatron-Bridge, Hugging Face PEFT and the same with Liger's kernels. Rank 16 on all seven projections, bfloat16, AdamW,
random weights in the shape of known models, sequences of 4096 tokens.

Each contestant trains each model in a process of its own, with micro-batches of 1, 2, 4, ... rows until memory is out
or throughput falls; 3 steps warm up, the median of 8 counts. What fails is told and the others go on. OUT is written
after every result, and what it holds already is kept: several calls fill one table, which `--table OUT` prints.

Unsloth needs other versions of some packages: `--unsloth-site` (or CKPTRAIN_UNSLOTH_SITE) is a directory that has them.

What to expect: a token costs the operations that `Shape.flops_per_token` counts, and the best that is known runs them
at 55 % (1B) and 70 % (8B) of the rate of a large matrix product, which is measured in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from gpu_contestants import CONTESTANTS, Found, Spec
from gpu_shapes import SHAPES
from gpu_tables import show, tflops
from rich.console import Console

_CHILD = Path(__file__).with_name("gpu_contestants.py")
_ROOT = Path(__file__).parent.parent
UNSLOTH_SITE = "CKPTRAIN_UNSLOTH_SITE"
MICRO_BATCHES = (1, 2, 4, 8)
_BRIDGE_MICRO_BATCHES = (4,)
_ON_CHATS = ("hf", "liger")
"""Contestants for models that train on chats, besides ckptrain's."""
_WITHOUT_BASE = ("megatron",)
"""Contestants that draw random weights themselves."""
_POLL_S = 0.1
_LAST_LINES = 40
_LEAST_S = 20.0
"""With less time left than this no process is started any more."""


def ask(command: Sequence[str], answers: Path, limit_s: float, **popen: Any) -> Iterator[Found]:
    """Run a process and yield the JSON lines that it writes to a file, as they come; at last, if it failed, an error.

    It and its children are killed after `limit_s` seconds, and when the caller stops listening.
    """
    answers.touch()
    ends = time.monotonic() + limit_s
    with tempfile.TemporaryFile("w+", errors="replace") as log, answers.open() as lines:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, **popen)
        try:
            pending, running, timed_out = "", True, False
            while running:
                running = process.poll() is None  # asked first: what is written before the end is read after it
                timed_out = running and time.monotonic() > ends
                pending += lines.read()
                *whole, pending = pending.split("\n")
                yield from map(json.loads, whole)
                if timed_out:
                    break
                time.sleep(_POLL_S if running else 0.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if timed_out or process.returncode:
            error = f"not done in {limit_s:.0f} s" if timed_out else f"ended with status {process.returncode}"
            log.seek(0)
            yield {"error": error, "message": "".join(log.readlines()[-_LAST_LINES:])[-8000:]}


class Benchmark:
    """What is asked for, what was found so far, and until when."""

    def __init__(self, asked: argparse.Namespace, work: Path) -> None:
        self.asked, self.work = asked, work
        self.bases = (asked.directory or work) / "bases"
        self.ends = time.monotonic() + asked.total_s
        self.console = Console(width=160, highlight=False)
        self.report: dict[str, Any] = {"visits": [], "rows": []}
        if asked.json and asked.json.exists():
            self.report = json.loads(asked.json.read_text())
        self.visit = len(self.report["visits"])
        started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        self.report["visits"].append({"started": started, "command": asked.command})
        self._number = 0

    def run(self) -> None:
        """Measure everything that is asked for."""
        if self.asked.same_visit and self.visit:
            self.report["visits"].pop()
            self.visit -= 1
        else:
            for found in self._process(Spec(contestant="matrix-rate", model=self.asked.models[0])):
                self.report["visits"][self.visit].update(found)
                self.write()
        for model in self.asked.models:
            for contestant in self.asked.contestants:
                for spec in specs(self.asked, contestant, model):
                    self._measure(spec)

    def _measure(self, spec: Spec) -> None:
        if spec.contestant not in _WITHOUT_BASE and not (self.bases / spec.model).exists():
            self._make_base(spec.model)
        spec = attrs.evolve(spec, base=str(self.bases / spec.model))
        for found in self._process(spec):
            row = {"model": spec.model, "contestant": spec.contestant, "visit": self.visit, **found}
            row |= {"tflops_per_s": tflops(row)} if "tokens_per_s" in row else {}
            self.report["rows"].append(row)
            self.write()
            told = {name: value for name, value in row.items() if isinstance(value, int | float | str)}
            told |= {"message": row["message"][-300:]} if "message" in row else {}
            self.console.print(json.dumps(told), markup=False, soft_wrap=True)

    def _make_base(self, model: str) -> None:
        self.bases.mkdir(parents=True, exist_ok=True)
        for found in self._process(Spec(contestant="make-base", model=model, base=str(self.bases / model))):
            self.console.print(f"base {model}: {json.dumps(found)}", markup=False, soft_wrap=True)

    def _process(self, spec: Spec) -> Iterator[Found]:
        """Let a process act out a spec in a directory of its own."""
        self._number += 1
        scratch = self.work / f"{self._number}-{spec.contestant}"
        scratch.mkdir()
        left = self.ends - time.monotonic()
        if left < _LEAST_S:
            yield {"error": "not run", "message": f"{max(left, 0):.0f} s were left of --total-s"}
            return
        environment = environment_of(spec.contestant, scratch, self.asked.unsloth_site)
        if environment is None:
            message = f"give --unsloth-site or {UNSLOTH_SITE}: a directory with Unsloth and what it imports"
            yield {"error": "not run", "message": message}
            return
        asked = json.dumps(attrs.asdict(attrs.evolve(spec, scratch=str(scratch))))
        answers = scratch / "answers.jsonl"
        command = [sys.executable, str(_CHILD), asked, str(answers)]
        yield from ask(command, answers, min(self.asked.limit_s, left), env=environment, cwd=scratch)
        shutil.rmtree(scratch, ignore_errors=True)

    def write(self) -> None:
        """Write what is known, so that a killed call leaves it; never half of it."""
        if self.asked.json:
            part = self.asked.json.with_name(self.asked.json.name + ".part")
            part.write_text(json.dumps(self.report, indent=1) + "\n")
            part.replace(self.asked.json)


def specs(asked: argparse.Namespace, contestant: str, model: str) -> Iterator[Spec]:
    """Yield what is measured of a contestant on a model, a process each; nothing where the two do not go together."""
    on_chats = SHAPES[model].trains_on_chats
    if on_chats and (asked.gsm8k is None or not (contestant in _ON_CHATS or contestant.startswith("ckptrain"))):
        return
    if contestant == "bridge" and model not in ("tiny", "1b"):
        return
    micro_batches = tuple(asked.micro_batches or (_BRIDGE_MICRO_BATCHES if contestant == "bridge" else MICRO_BATCHES))
    spec = Spec(
        contestant=contestant,
        model=model,
        micro_batches=micro_batches,
        warm_up_steps=asked.warm_up_steps,
        steps=asked.steps,
        chats=str(asked.gsm8k) if on_chats else None,
        save_every=asked.save_every if contestant == "ckptrain" else None,
    )
    if contestant == "bridge":  # its state is global
        yield from (attrs.evolve(spec, micro_batches=(micro_batch,)) for micro_batch in micro_batches)
    else:
        yield spec


def environment_of(contestant: str, scratch: Path, unsloth_site: Path | None) -> Mapping[str, str] | None:
    """Return the environment of a contestant's process; None where it has no packages to import."""
    quiet = {
        "CKPTRAIN_CACHE": str(scratch / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    other = str(unsloth_site) if contestant.startswith("unsloth") else os.environ.get("PYTHONPATH")
    if contestant.startswith("unsloth") and unsloth_site is None:
        return None
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), other)))}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    site = os.environ.get(UNSLOTH_SITE)
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", choices=SHAPES, default=["1b", "8b"])
    made.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    made.add_argument(
        "--micro-batches", nargs="+", type=int, help=f"of {MICRO_BATCHES}; bridge {_BRIDGE_MICRO_BATCHES}"
    )
    made.add_argument("--steps", type=int, default=8, help="timed steps")
    made.add_argument("--warm-up-steps", type=int, default=3, help="steps before them")
    made.add_argument("--json", type=Path, help="write the numbers here, beside those that it has already")
    made.add_argument("--table", type=Path, help="print the table of such a file, and measure nothing")
    made.add_argument("--directory", type=Path, help="keep the random models here for the next call")
    made.add_argument("--unsloth-site", type=Path, default=Path(site) if site else None)
    made.add_argument("--gsm8k", type=Path, help="conversations (JSONL) for SmolLM2")
    made.add_argument(
        "--same-visit", action="store_true", help="go on with OUT's last visit: the same machine, still on"
    )
    made.add_argument("--save-every", type=int, help="ckptrain also trains with a save every so many steps")
    made.add_argument("--limit-s", type=float, default=240.0, help="longest time of one process")
    made.add_argument("--total-s", type=float, default=570.0, help="longest time of all together")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for and print the table; returns 1 where something failed that was asked for."""
    asked = parser().parse_args(arguments)
    words = arguments if arguments is not None else sys.argv[1:]
    asked.command = [Path(word).name if word.startswith("/") else word for word in words]
    for name in ("json", "directory", "unsloth_site", "gsm8k"):  # processes have working directories of their own
        if (path := getattr(asked, name)) is not None:
            setattr(asked, name, path.absolute())
    if asked.table:
        show(json.loads(asked.table.read_text()), Console(width=160, highlight=False))
        return 0
    work = Path(tempfile.mkdtemp(prefix="ckptrain-bench-"))
    try:
        benchmark = Benchmark(asked, work)
        benchmark.run()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    show(benchmark.report, benchmark.console)
    failed = [row for row in benchmark.report["rows"] if row["visit"] == benchmark.visit and "error" in row]
    return 1 if any(row["error"] != "out of memory" for row in failed) else 0


if __name__ == "__main__":
    sys.exit(main())
