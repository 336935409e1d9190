"""What a start takes, part by part, against a clock of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.launch import launch, run_training

from ckptrain.config.schema import RunConfig
from ckptrain.lifecycle.journal import Journal, read_journal
from ckptrain.training import startup
from ckptrain.training.observers import Observer
from ckptrain.training.startup import StartClock, StartReport, process_began_s

PARTS = {
    "imports",
    "plan",
    "process groups",
    "recorders",
    "data",
    "model",
    "base",
    "parity check",
    "adapters",
    "optimizer",
    "restore",
    "validation",
    "first step",
}


class Lines(Observer):
    """Keeps what a person is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_progress(self, text: str) -> None:
        """Keep it."""
        self.lines.append(text)


def startups(run_dir: Path) -> list[dict[str, Any]]:
    """Return the journal's entries of starts."""
    return [entry for entry in read_journal(run_dir / "journal.jsonl") if entry["event"] == "startup"]


def written_at(entry: dict[str, Any]) -> float:
    """Return when an entry was written, in seconds since 1970."""
    return datetime.fromisoformat(entry["time"]).timestamp()


@pytest.fixture
def config_file(tiny_llama: Path, chats: tuple[Path, Path], tmp_path: Path) -> Path:
    """Return a configuration file of a run of two steps."""
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""
model: {{pretrained: {tiny_llama}, dtype: float32}}
data: {{train: {chats[0]}, validation: {chats[1]}, sequence_length: 128}}
train: {{steps: 2, global_batch_size: 4}}
log: {{tensorboard: false}}
"""
    )
    return path


def test_the_parts_add_up_to_what_a_person_waited_in_a_fresh_start_and_in_a_resume(
    config_file: Path, tmp_path: Path
) -> None:
    """From the start of the process, as its parent saw it, to the first step; within 5 %."""
    run_dir = tmp_path / "run"
    for number, arguments in enumerate(
        (["run", str(config_file), "--run-dir", str(run_dir)], ["resume", str(run_dir), "train.steps=4"])
    ):
        began = time.time()
        command = [sys.executable, "-m", "ckptrain.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        entry = startups(run_dir)[number]
        assert entry["seconds"].keys() == PARTS
        assert sum(entry["seconds"].values()) == pytest.approx(entry["total_s"], rel=0.01)
        assert entry["total_s"] == pytest.approx(written_at(entry) - began, rel=0.05)
        assert f"first step after {entry['total_s']:.1f} s: imports " in done.stdout


def test_two_processes_count_from_the_command_that_launched_them(config_file: Path, tmp_path: Path) -> None:
    """Its own imports and its plan are the part `launch`."""
    run_dir = tmp_path / "run"
    began = time.time()
    arguments = ["run", str(config_file), "--run-dir", str(run_dir), "--nproc-per-node", "2"]
    subprocess.run([sys.executable, "-m", "ckptrain.cli", *arguments], capture_output=True, check=True)
    [entry] = startups(run_dir)
    assert entry["seconds"].keys() == PARTS | {"launch"}
    assert entry["seconds"]["launch"] > 0.5
    assert entry["total_s"] == pytest.approx(written_at(entry) - began, rel=0.05)


def test_a_program_that_embeds_a_run_counts_from_its_call(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """And journals how the first step compares with the next three."""

    def on_rank() -> float:
        time.sleep(1.0)
        began = time.monotonic()
        run_training(tiny_config("train.steps=4"), tmp_path)
        return time.monotonic() - began

    [waited_s] = launch(1, on_rank)
    [entry] = startups(tmp_path)
    assert entry["total_s"] < waited_s
    [first] = [entry for entry in read_journal(tmp_path / "journal.jsonl") if entry["event"] == "first_step"]
    assert first["seconds"] <= entry["seconds"]["first step"] + 1e-3
    assert first["median_of_next_s"] > 0


def test_the_kernel_tells_when_a_process_began() -> None:
    """Of a child that this one has just started, to a clock tick; of none that is not there."""
    before = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        began = process_began_s(child.pid)
    assert began is not None
    assert before - 0.02 <= began <= time.monotonic()
    assert process_began_s(child.pid) is None


def test_without_the_kernels_word_the_clock_begins_where_ckptrain_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as on macOS."""
    monkeypatch.setattr(startup, "process_began_s", lambda _: None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert StartClock.of_command().began_s == startup.ckptrain.IMPORTED_S


@pytest.mark.parametrize(("for_good", "is_enabled"), [(False, True), (True, True), (False, False)])
def test_imports_are_not_interrupted_by_collections(for_good: bool, is_enabled: bool) -> None:
    """Only a process that is the run's own is told to leave for good what it has made; a program's setting is kept."""
    code = f"""
import gc
from ckptrain.training.startup import without_collection
({"gc.enable" if is_enabled else "gc.disable"})()
before = gc.get_freeze_count()
with without_collection(for_good={for_good}):
    inside = gc.isenabled()
print(inside, gc.isenabled(), gc.get_freeze_count() > before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(found) for found in (False, is_enabled, for_good)]


def test_a_rank_that_torchs_agent_restarted_counts_from_its_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent may have begun days before."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    clock = StartClock.of_command()
    assert clock.seconds == {}
    assert clock.began_s == pytest.approx(process_began_s(os.getpid()), abs=0.02)


def test_a_line_has_the_longest_part_first_and_leaves_out_what_takes_no_time() -> None:
    """Parts that are marked twice are one."""
    clock = StartClock(100.0)
    for part, at_s in (
        ("imports", 101.0),
        ("plan", 101.01),
        ("imports", 108.1),
        ("base", 114.1),
        ("first step", 116.0),
    ):
        clock.mark(part, at_s=at_s)
    assert clock.describe() == "first step after 16.0 s: imports 8.1, base 6.0, first step 1.9"


@pytest.mark.parametrize(("seconds", "is_told"), [([9.0, 0.5, 0.4, 0.6, 0.1], True), ([0.5, 0.5, 0.4, 0.5], False)])
def test_a_first_step_that_took_much_longer_than_the_next_is_told(
    seconds: list[float], is_told: bool, tmp_path: Path
) -> None:
    """Kernels are loaded and compiled in it; it is journaled in any case, once."""
    told, journal = Lines(), Journal(tmp_path / "journal.jsonl")
    report = StartReport(StartClock(), journal, told)
    for step_s in seconds:
        report.add(step_s)
    assert any(line == "the first step took 9.00 s, those after it 0.50 s: kernels were loaded and compiled" for line in told.lines) is is_told  # fmt: skip
    [entry] = [entry for entry in read_journal(tmp_path / "journal.jsonl") if entry["event"] == "first_step"]
    assert entry["median_of_next_s"] == 0.5
