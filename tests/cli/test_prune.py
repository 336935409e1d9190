"""What `ckptrain prune` removes, what it keeps and why, and what it leaves alone whatever it is asked."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.checkpoint.reading import reading
from ckptrain.config.load import dump_config, load_config

Ask = Callable[..., Result]
AskJson = Callable[..., dict[str, Any]]
Save = Callable[..., Any]


def left(run_dir: Path) -> list[int]:
    """Return the steps of what lies in the run."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir())


def fates(report: dict[str, Any]) -> dict[int, tuple[str, list[str]]]:
    """Return what became of each step, and why."""
    return {row["step"]: (row["fate"], row["reasons"]) for row in report["checkpoints"]}


@pytest.fixture
def saved(run_dir: Path, save: Save) -> dict[int, Any]:
    """Save five checkpoints of which the second is the best, in a run that keeps three."""
    losses = {10: 1.0, 20: 0.5, 30: 0.9, 40: 0.8, 50: 0.7}
    return {step: save(step, {"val_loss": loss}) for step, loss in losses.items()}


def test_a_run_is_pruned_as_its_config_says(ask_json: AskJson, run_dir: Path, saved: dict[int, Any]) -> None:
    """Every checkpoint is accounted for, with its size, and so are the bytes that are free now."""
    report = ask_json("prune", run_dir)
    assert report["retention"] == {"keep_last": 3, "keep_every": None, "keep_best": 0, "metric": "val_loss"}
    assert fates(report) == {
        10: ("removed", []),
        20: ("removed", []),
        30: ("kept", ["one of the last 3"]),
        40: ("kept", ["one of the last 3"]),
        50: ("kept", ["newest"]),
    }
    sizes = {step: sum(f.num_bytes for f in checkpoint.manifest.files.values()) for step, checkpoint in saved.items()}
    assert {row["step"]: row["num_bytes"] for row in report["checkpoints"]} == sizes
    assert report["freed_bytes"] == sizes[10] + sizes[20]
    assert left(run_dir) == [30, 40, 50]


def test_options_take_the_place_of_the_config(ask: Ask, run_dir: Path, saved: dict[int, Any]) -> None:
    """And the page says why what is kept is kept."""
    result = ask("prune", run_dir, "--keep-last", 1, "--keep-every", 30, "--keep-best", 1)
    text = " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert "kept best val_loss" in text
    assert "kept every 30th step" in text
    assert "kept newest" in text
    assert "2 checkpoints removed" in text
    assert left(run_dir) == [20, 30, 50]


def test_zero_takes_back_what_the_config_keeps(ask_json: AskJson, run_dir: Path, saved: dict[int, Any]) -> None:
    """A run that keeps every tenth step for good can be pruned of them."""
    config = load_config(run_dir / "run.yaml", ["checkpoint.keep_every=10", "checkpoint.metric=loss"])
    (run_dir / "run.yaml").write_text(dump_config(config))
    assert ask_json("prune", run_dir, "--keep-last", 1)["freed_bytes"] == 0
    report = ask_json("prune", run_dir, "--keep-last", 1, "--keep-every", 0, "--keep-best", 1, "--metric", "val_loss")
    assert report["retention"] == {"keep_last": 1, "keep_every": None, "keep_best": 1, "metric": "val_loss"}
    assert left(run_dir) == [20, 50]


def test_a_dry_run_tells_the_same_and_changes_nothing(ask: Ask, ask_json: AskJson, run_dir: Path, saved: Any) -> None:
    """Not a name and not a time on disk."""
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    dry = ask_json("prune", run_dir, "--keep-last", 2, "--dry-run")
    text = ask("prune", run_dir, "--keep-last", 2, "--dry-run").stdout
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
    wet = ask_json("prune", run_dir, "--keep-last", 2)
    assert (dry.pop("dry_run"), wet.pop("dry_run")) == (True, False)
    assert dry == wet
    assert "would go" in text
    assert "3 checkpoints would be removed" in text


@pytest.mark.parametrize("dry", [True, False])
def test_a_checkpoint_that_is_read_is_left(ask_json: AskJson, run_dir: Path, saved: dict[int, Any], dry: bool) -> None:
    """An export takes longer than a prune."""
    with reading(saved[10]):
        report = ask_json("prune", run_dir, *(["--dry-run"] if dry else []))
    assert fates(report)[10] == ("kept", ["in use"])
    assert fates(report)[20] == ("removed", [])
    assert (10 in left(run_dir), 20 in left(run_dir)) == (True, dry)


def test_a_run_without_its_data_can_be_pruned(ask: Ask, run_dir: Path, saved: dict[int, Any]) -> None:
    """Disks are tidied up on other machines, and after the data has gone."""
    (source,) = load_config(run_dir / "run.yaml").data.train
    Path(str(source.path)).unlink()
    assert ask("prune", run_dir).exit_code == 0
    assert left(run_dir) == [30, 40, 50]


def test_damaged_checkpoints_are_shown_and_neither_counted_nor_touched(
    ask: Ask, ask_json: AskJson, run_dir: Path, saved: dict[int, Any]
) -> None:
    """The newest good one is kept although a damaged one is newer."""
    (saved[50].path / "adapter" / "__0_0.distcp").write_bytes(b"")
    report = ask_json("prune", run_dir, "--keep-last", 1)
    assert fates(report)[40] == ("kept", ["newest"])
    fate, problems = fates(report)[50]
    assert fate == "damaged"
    assert "truncated" in problems[0]
    assert left(run_dir) == [40, 50]
    assert "damaged" in ask("prune", run_dir).stdout


def test_nothing_goes_while_the_newest_is_damaged_in_its_contents(
    ask: Ask, run_dir: Path, saved: dict[int, Any]
) -> None:
    """Names and sizes do not show it, and the one before it would have been removed."""
    path = saved[50].path / "adapter" / "__0_0.distcp"
    path.write_bytes(b"N" + path.read_bytes()[1:])
    for option in ([], ["--dry-run"]):
        result = ask("prune", run_dir, "--keep-last", 1, *option)
        assert result.exit_code == 65
        assert "nothing is removed" in result.stderr
        assert "step-00000050" in result.stderr
        assert "adapter/__0_0.distcp has other contents" in result.stderr
    assert left(run_dir) == [10, 20, 30, 40, 50]
    assert ask("prune", run_dir, "--keep-last", 5).exit_code == 0  # nothing would go, so nothing is read


def test_two_prunes_at_once_do_not_fail_on_each_other(run_dir: Path, save: Save) -> None:
    """A run prunes while a person does: whoever comes second passes over what is gone."""
    for step in range(1, 25):
        save(step)
    command = [sys.executable, "-m", "ckptrain.cli", "prune", str(run_dir), "--keep-last", "1"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert left(run_dir) == [24]
    assert open_checkpoint(run_dir / "checkpoints" / "step-00000024").step == 24


def test_a_run_without_checkpoints_has_nothing_to_prune(ask: Ask, ask_json: AskJson, run_dir: Path) -> None:
    """That is no error."""
    assert ask_json("prune", run_dir)["checkpoints"] == []
    assert "no checkpoint yet" in ask("prune", run_dir).stdout


def test_keeping_none_of_the_last_is_a_usage_error(ask: Ask, run_dir: Path, saved: dict[int, Any]) -> None:
    """As is a path that is no run."""
    assert ask("prune", run_dir, "--keep-last", 0).exit_code == 2
    assert ask("prune", run_dir / "nothing").exit_code == 2
    assert left(run_dir) == [10, 20, 30, 40, 50]
