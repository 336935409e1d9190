"""Hosts of a launch that differ: in their clocks and names, which does not matter, or in what they compute, which does."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launch import launch, run_training
from support.records import column, journal

from ckptrain.config.schema import RunConfig
from ckptrain.errors import StartRefused
from ckptrain.training import agreement

Make = Callable[..., RunConfig]
HOURS = 3600.0


def be_another_host(clock_s: float = 0.0) -> None:
    """Have another name than rank 0, and a clock that is off."""
    if os.environ["RANK"] != "0":
        now, now_ns = time.time, time.time_ns
        socket.gethostname = lambda: "b"
        time.time = lambda: now() + clock_s
        time.time_ns = lambda: now_ns() + int(clock_s * 1e9)


@pytest.mark.parametrize("clock_s", [-7 * HOURS, 7 * HOURS], ids=["behind", "ahead"])
def test_clocks_that_are_hours_off_do_not_matter(clock_s: float, tiny_config: Make, tmp_path: Path) -> None:
    """To who holds the run directory, what is newest, or what a run is; the losses are those of hosts with one clock."""
    common = ["train.steps=4", "checkpoint.every_steps=2", "checkpoint.asynchronous=false"]

    def on_rank(run_dir: Path, *overrides: str) -> Any:
        be_another_host(clock_s)
        return run_training(tiny_config(*common, *overrides), run_dir)

    launch(2, lambda: run_training(tiny_config(*common, "train.steps=6"), tmp_path / "straight"))
    launch(2, lambda: on_rank(tmp_path / "run"))
    results = launch(2, lambda: on_rank(tmp_path / "run", "train.steps=6"))
    assert [(result.plan.kind, result.plan.step) for result in results] == [("Resume", 4)] * 2
    assert column(tmp_path / "run", "loss")[:2] == column(tmp_path / "straight", "loss")[:2]
    assert [entry["host"] for entry in journal(tmp_path / "run", "plan")] == [socket.gethostname()] * 2


def another_version() -> None:
    """Have another torch."""
    versions = agreement.versions
    agreement.versions = lambda: versions() | {"torch": "2.9.1"}


def other_code() -> None:
    """Have a checkout that was edited."""
    agreement._digest_of_code = lambda: "0" * 64


@pytest.mark.parametrize(
    ("differ", "overrides", "said"),
    [
        (
            another_version,
            [],
            r"version of torch is 2\.9\.1 for rank 1 on b, 2\.\S+ for rank 0 on .*: install the same",
        ),
        (other_code, [], r"code of ckptrain is 000000000000\.\.\. for rank 1 on b, .*: install the same on all hosts"),
        (
            lambda: None,
            ["train.steps=9"],
            r"train\.steps is 9 for rank 1 on b, 4 for rank 0 .*: start all with the same",
        ),
    ],
    ids=["version", "code", "config"],
)
def test_processes_that_would_compute_something_else_are_refused(
    differ: Callable[[], None], overrides: list[str], said: str, tiny_config: Make, tmp_path: Path
) -> None:
    """On all ranks, by host and by what differs, before anything is loaded or written."""

    def on_rank() -> None:
        be_another_host()
        is_other = os.environ["RANK"] == "1"
        if is_other:
            differ()
        run_training(tiny_config("train.steps=4", *(overrides if is_other else [])), tmp_path / "run")

    with pytest.raises(StartRefused, match=said):
        launch(2, on_rank)
    assert not (tmp_path / "run" / "journal.jsonl").exists()


def test_gpus_that_differ_are_told(tiny_config: Make, tmp_path: Path) -> None:
    """The run is as fast as the slowest; its numbers are not those of two equal ones, which only rounding shows."""

    class Told(list[str]):
        def on_warning(self, text: str) -> None:
            self.append(text)

    def on_rank() -> list[str]:
        from ckptrain.checkpoint.ranks import rank
        from ckptrain.megatron.world import open_process_group
        from ckptrain.training.start import survey_run

        be_another_host()
        agreement._gpu_name = lambda: f"GPU {os.environ['RANK']}"
        survey, told = survey_run(tiny_config(), 2), Told()
        with open_process_group():
            agreement.check_agreement(survey, rank(), told.on_warning)
        return list(told)

    [text], _ = launch(2, on_rank)
    assert "rank 0" in text
    assert text.endswith("rank 1 on b: GPU 1")
