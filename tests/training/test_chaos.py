"""A dozen of the kills of tools/chaos.py, and proof that it would say so if a promise were broken."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from chaos import MODES, main, mode_of, write_inputs
from killing import Trial, run_straight
from promises import (
    BrokenPromiseError,
    CheckpointHarmedError,
    CheckpointLostError,
    check_end,
    check_plan,
    look,
    read_end,
)

from ckptrain.checkpoint.store import CheckpointStore

STEPS, KEEP_LAST = 12, 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the model and the data of the kill test."""
    return write_inputs(tmp_path_factory.mktemp("chaos") / "inputs")


@pytest.fixture(scope="module")
def ended(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that nobody killed; it holds steps 11 and 12."""
    run_dir = tmp_path_factory.mktemp("chaos") / "straight" / "run"
    run_straight(run_dir, mode_of("sync-single", inputs))
    return run_dir


@pytest.fixture
def copy(ended: Path, tmp_path: Path) -> Path:
    """Return a copy of that run, to be harmed."""
    return Path(shutil.copytree(ended, tmp_path / "run"))


def newest(run_dir: Path) -> Path | None:
    """Return the newest checkpoint."""
    found = CheckpointStore(run_dir).newest()
    return None if found is None else found.path


def remove_newest(run_dir: Path) -> None:
    """Lose the newest checkpoint, where there is one."""
    if (path := newest(run_dir)) is not None:
        shutil.rmtree(path)


def change_a_byte(run_dir: Path) -> None:
    """Flip one bit in the newest checkpoint, where there is one; names and sizes stay as they are."""
    if (path := newest(run_dir)) is not None:
        file = max(path.glob("adapter/*.distcp"), key=lambda file: file.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def leave_half_a_checkpoint(run_dir: Path) -> None:
    """Leave a checkpoint without a manifest under a final name."""
    (run_dir / "checkpoints/step-00000099/adapter").mkdir(parents=True)


@pytest.mark.parametrize("name", MODES)
def test_killed_runs_lose_nothing_and_end_as_the_one_that_nobody_killed(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    """Three kills a mode: every kill is followed by a start from the newest checkpoint, every run ends equal."""
    trial = Trial(mode_of(name, inputs), tmp_path)
    trial.kill(3, seed=3)
    tally = trial.tally
    assert tally.kills == tally.restarts == tally.in_start_up + tally.in_training + tally.in_save == 3
    assert (tally.lost, tally.damaged) == (0, 0)
    assert tally.equal_ends >= 1


@pytest.mark.parametrize(
    ("disturb", "error", "counted"),
    [(remove_newest, CheckpointLostError, (1, 0)), (change_a_byte, CheckpointHarmedError, (0, 1))],
)
def test_harm_between_a_kill_and_the_next_start_is_told(
    disturb: Callable[[Path], None],
    error: type[Exception],
    counted: tuple[int, int],
    inputs: Path,
    tmp_path: Path,
) -> None:
    """A checkpoint that is gone after a kill, or has another byte, ends the rounds and is counted; the run is kept."""
    trial = Trial(mode_of("sync-single", inputs), tmp_path, disturb)
    with pytest.raises(error, match="step-000000"):
        trial.kill(9, seed=3)
    assert (trial.tally.lost, trial.tally.damaged) == counted
    assert len([path for path in tmp_path.iterdir() if path.name != "sync-single-straight"]) == 1


def test_a_broken_promise_is_exit_status_1_and_keeps_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the checkpoint, the directory that it names is there, and the JSON file has the table."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    status = main(["--kills", "4", "--json", str(tmp_path / "out.json")], disturb=leave_half_a_checkpoint)
    told = capsys.readouterr().err
    assert status == 1
    assert "step-00000099 is under its final name and is not whole: manifest.json is missing" in told
    assert Path(told.strip().rpartition(" ")[2]).is_dir()
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["broken_promise"] in told
    assert [(mode["mode"], mode["kills"], mode["damaged"]) for mode in report["modes"]] == [("sync-single", 1, 1)]


def test_what_was_seen_whole_must_stay_though_no_journal_reports_it(copy: Path) -> None:
    """Reported as saved or seen before: the newest two of either must be there."""
    assert look(copy, {12}, KEEP_LAST) == frozenset(range(1, STEPS + 1))
    (copy / "journal.jsonl").unlink()
    assert look(copy, {11, 12}, KEEP_LAST) == {11, 12}
    shutil.rmtree(copy / "checkpoints/step-00000011")
    assert look(copy, {12}, KEEP_LAST) == {12}
    with pytest.raises(CheckpointLostError, match="has lost step-00000011:"):
        look(copy, {11, 12}, KEEP_LAST)


def test_a_quarantine_is_harm(copy: Path) -> None:
    """A start that found something damaged after a kill has either chosen wrongly or found a half-written one."""
    CheckpointStore(copy).quarantine(copy / "checkpoints/step-00000011", ["it was not"])
    with pytest.raises(CheckpointHarmedError, match="quarantine"):
        look(copy, (), keep_last=1)


@pytest.mark.parametrize(
    ("plan", "newest_step", "is_right"),
    [
        ({"plan": "FreshStart"}, 0, True),
        ({"plan": "FreshStart"}, 3, False),
        ({"plan": "Resume", "step": 3}, 3, True),
        ({"plan": "Resume", "step": 2}, 3, False),
        ({"plan": "Resume", "step": 1}, 0, False),
        ({"plan": "AlreadyDone", "step": 12}, 12, True),
        ({"plan": "AlreadyDone", "step": 11}, 11, False),
    ],
)
def test_a_start_goes_on_from_the_newest_and_from_nothing_else(
    plan: dict[str, object], newest_step: int, is_right: bool
) -> None:
    """The plan in the journal is compared with what lies on the disk."""
    if is_right:
        check_plan({**plan, "reason": ""}, newest_step, STEPS)
    else:
        with pytest.raises(BrokenPromiseError, match="a start's plan is"):
            check_plan({**plan, "reason": ""}, newest_step, STEPS)


def test_every_difference_of_two_ends_is_told(copy: Path) -> None:
    """Bytes, manifest, metrics and leftovers are compared; the run itself has no differences."""
    end = read_end(copy, STEPS)
    check_end(copy, STEPS, end)

    name = next(iter(end.files))
    with (copy / "metrics.jsonl").open("a") as file:
        file.write((copy / "metrics.jsonl").read_text().splitlines()[-1] + "\n")
    (copy / "checkpoints/.staging-step-00000012-x").mkdir()
    other = attrs.evolve(
        end, files={**end.files, name: end.files[name] + b"x"}, manifest=attrs.evolve(end.manifest, consumed_tokens=1)
    )
    with pytest.raises(BrokenPromiseError) as told:
        check_end(copy, STEPS, other)
    for problem in (
        f"{name} differs",
        "consumed_tokens in its manifest differs",
        "metrics.jsonl:13 says (12, ",
        ".staging-step-00000012-x is left over",
    ):
        assert problem in str(told.value)


def test_a_run_without_its_last_checkpoint_has_lost_it(copy: Path) -> None:
    """An end before the last step is no end."""
    remove_newest(copy)
    with pytest.raises(CheckpointLostError, match="has ended and has no step-00000012"):
        read_end(copy, STEPS)
