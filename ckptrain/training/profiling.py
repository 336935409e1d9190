"""Record some steps with torch's profiler, and say where they went: `train.profile`."""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Iterator
from pathlib import Path

import attrs
import orjson
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ckptrain.lifecycle.journal import Journal
from ckptrain.training.observers import Observer
from ckptrain.training.trace import STEP_MARK, Profile, profile_of

STEPS_BEFORE = 2
"""Steps of a start that are not recorded: they load and compile kernels."""


class StepProfiler:
    """Records consecutive steps of this process; all others cost nothing."""

    def __init__(self, run_dir: Path, done: int, num_steps: int | None, journal: Journal, told: Observer) -> None:
        """Take the steps done before this start, and how many to record; None records nothing."""
        self._directory = run_dir / "profile"
        first = done + STEPS_BEFORE + 1
        self._steps = range(first, first + (num_steps or 0))
        self._profiler: profile | None = None
        self._journal, self._told = journal, told

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Make a step inside of it."""
        if step not in self._steps:
            yield
            return
        if self._profiler is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it calls it an error that there is no GPU
            on_device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *on_device])
            self._profiler.start()
        try:
            with record_function(STEP_MARK):
                yield
        except BaseException:
            self._profiler.stop()
            self._profiler = None
            raise

    def ended(self, step: int, *, is_last: bool) -> None:
        """Write what was recorded, where `step` was the last to be; `is_last` says that no step follows."""
        if self._profiler is None or not (is_last or step == self._steps[-1]):
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        stem = self._directory / f"step-{self._steps[0]:08d}"
        try:
            found = _write(profiler, stem, self._steps[0])
        except (OSError, ValueError) as error:  # what is recorded is worth less than what is trained
            self._told.on_warning(f"cannot write the profile {stem}: {error}; training goes on")
            return
        self._journal.record("profile", files=f"{self._directory.name}/{stem.name}", **attrs.asdict(found))
        self._told.on_progress(f"profile: {stem}.txt, and {stem.name}.trace.json.gz for https://ui.perfetto.dev")


def _write(profiler: profile, stem: Path, first_step: int) -> Profile:
    """Write STEM.trace.json.gz (the trace), STEM.txt (the table) and STEM.json (the same)."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    trace = stem.with_suffix(".trace.json.gz")
    profiler.export_chrome_trace(str(trace))
    with gzip.open(trace) as file:
        found = profile_of(orjson.loads(file.read())["traceEvents"], first_step)
    stem.with_suffix(".txt").write_text(found.table())
    stem.with_suffix(".json").write_bytes(orjson.dumps(attrs.asdict(found), option=orjson.OPT_INDENT_2) + b"\n")
    return found
