"""A process of a launch that is lost, hangs or fails ends the run on all, by a message that names it; nobody waits."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.launch import Ranks, launch, run_training
from support.processes import wait_until
from support.records import journal

import ckptrain
from ckptrain.config.schema import RunConfig
from ckptrain.errors import RankLost
from ckptrain.training import session as session_module
from ckptrain.training import steps as steps_module

Make = Callable[..., RunConfig]
SHORT = "train.timeout_minutes=0.05"
TIMEOUT_S = 3.0
STEP = 3


def in_step(act: Callable[[], Any], victim: int) -> None:
    """Let rank `victim` do something at the beginning of a step."""
    made, steps = steps_module.train_step, []

    def step(*given: Any) -> Any:
        steps.append(None)
        if len(steps) == STEP and os.environ["RANK"] == str(victim):
            act()
        return made(*given)

    steps_module.train_step = step


def stop_itself() -> None:
    """Be suspended, as by a debugger or a host that has no memory left, when it has said that it makes the step."""
    time.sleep(TIMEOUT_S / 3)
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_for_long() -> None:
    """Be alive, and not get on."""
    time.sleep(600)


def fail() -> None:
    """Fail as one process may, and the others do not."""
    raise MemoryError("no room for 2 GiB")


@pytest.fixture
def ranks(tiny_config: Make, tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """Return what starts two ranks of a run in `tmp_path`, one of which comes to harm in step 3; none is left."""
    started: list[Ranks] = []

    def start(act: Callable[[], Any], victim: int = 1) -> Ranks:
        config = tiny_config(SHORT, "train.steps=6", "checkpoint.every_steps=2", "checkpoint.asynchronous=false")

        def on_rank() -> None:
            in_step(act, victim)
            run_training(config, tmp_path)

        started.append(Ranks(2, on_rank))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def last_error(run_dir: Path) -> str:
    """Return the message of the error by which a run ended."""
    [error] = journal(run_dir, "error")
    assert error["kind"] == "RankLost"
    return str(error["message"])


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "is gone, killed or dead without a word; its last sign was of"),
        (fail, f"has failed while making step {STEP}: MemoryError: no room for 2 GiB"),
    ],
    ids=["killed", "failed"],
)
def test_a_process_that_ends_is_named_at_once(
    act: Callable[[], Any], said: str, ranks: Callable[..., Ranks], tiny_config: Make, tmp_path: Path
) -> None:
    """By the others, in their own error, instead of a lost connection; and the run can be gone on with."""
    began = time.monotonic()
    launched = ranks(act)
    victim = launched.processes[1].pid
    with pytest.raises(RankLost, match=rf"rank 1 \(process {victim} on "):
        launched.wait()
    assert time.monotonic() - began < 60
    assert said in last_error(tmp_path)
    results = launch(2, lambda: run_training(tiny_config("train.steps=6", "checkpoint.every_steps=2"), tmp_path))
    assert [(result.plan.kind, result.plan.step, result.step) for result in results] == [("Resume", 2, 6)] * 2


@pytest.mark.parametrize(
    ("act", "said"),
    [(stop_itself, "has said nothing for"), (sleep_for_long, f"making step {STEP} has not ended for")],
    ids=["suspended", "asleep"],
)
def test_a_process_that_does_not_get_on_ends_the_others_after_the_time_out(
    act: Callable[[], Any], said: str, ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    """The others wait in a collective: they end all the same, and say who does not get on, and where it is."""
    launched = ranks(act)
    launched.processes[0].join(60)
    assert launched.processes[0].exitcode == 1
    message = last_error(tmp_path)
    assert said in message
    victim = f"rank 1 (process {launched.processes[1].pid} on "
    assert victim in message.partition("rank 0")[0], "the one that does not wait for others comes first"
    assert "making step" in message
    if act is sleep_for_long:
        assert "sleep_for_long (clusters/test_dead_ranks.py" in message.partition("rank 0")[0]
        launched.processes[1].join(60)
        assert launched.processes[1].exitcode == 1, "it ends by the same verdict"


@pytest.mark.parametrize(
    "act", [stop_itself, lambda: os.kill(os.getpid(), signal.SIGKILL)], ids=["suspended", "killed"]
)
def test_without_rank_0_the_others_end_too(
    act: Callable[[], Any], ranks: Callable[..., Ranks], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It keeps the store in which all say that they are alive; who is left says what is known of it."""
    launched = ranks(act, victim=0)
    wait_until(lambda: not launched.processes[1].is_alive())
    said = capfd.readouterr().err
    victim = launched.processes[0].pid
    if act is stop_itself:
        assert launched.processes[1].exitcode == 1
        assert "error (rank 1): the store of the launch does not answer" in said
    else:  # by the store, or by the process, whichever is missed first
        assert re.search(rf"RankLost: (the store of the launch does not answer|rank 0 \(process {victim} )", said)
    assert journal(tmp_path, "error") == []


def test_what_takes_long_is_waited_for_where_all_are_alive(
    tiny_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 tokenises for longer than the time-out, then the program does something else for as long."""
    prepared = session_module.set_up_data

    def slowly(*given: Any) -> Any:
        if os.environ["RANK"] == "0":
            time.sleep(1.5 * TIMEOUT_S)
        return prepared(*given)

    monkeypatch.setattr(session_module, "set_up_data", slowly)

    def on_rank() -> str:
        with ckptrain.Trainer(tiny_config(SHORT, "train.steps=4"), run_dir=tmp_path) as trainer:
            trainer.run_until(2)
            time.sleep(1.5 * TIMEOUT_S)
            return str(trainer.run().status)

    assert launch(2, on_rank) == ["finished"] * 2


@pytest.mark.parametrize("last", [0, 1])
def test_a_run_that_is_over_is_not_ended_by_who_has_left(last: int, tiny_config: Make, tmp_path: Path) -> None:
    """A program has more to do on one rank, for longer than the time-out, while the other is at its end."""

    def on_rank() -> None:
        with ckptrain.Trainer(tiny_config(SHORT, "train.steps=4"), run_dir=tmp_path) as trainer:
            trainer.run()
            if os.environ["RANK"] == str(last):
                time.sleep(3 * TIMEOUT_S)

    ended = Ranks(2, on_rank)
    for process in ended.processes:
        process.join(60)
    codes = [process.exitcode for process in ended.processes]
    ended.kill()
    assert codes == [0, 0]
    assert journal(tmp_path, "error") == []
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "finished"


def test_one_process_is_not_watched(tiny_config: Make, tmp_path: Path) -> None:
    """A step of a large model on a laptop may take as long as it takes."""

    def on_rank() -> str:
        in_step(lambda: time.sleep(2), 0)
        return run_training(tiny_config("train.timeout_minutes=0.01", "train.steps=4"), tmp_path).status

    assert launch(1, on_rank) == ["finished"]
