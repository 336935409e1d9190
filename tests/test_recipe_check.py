"""tools/recipe_check.py finds that a recipe holds, and would find that it does not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import recipe_check
from click.testing import CliRunner
from forked import launch
from recipe_check import judge, main, recipes
from support.told_runs import record, write_lines

from ckptrain.cli.main import cli


def test_a_tiny_recipe_is_run_and_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are in the JSON; read again it holds too, and not where a bound is lower than what was found."""

    def run(words: list[str], **_: Any) -> SimpleNamespace:
        # A process of its own would import Megatron anew.
        return SimpleNamespace(returncode=CliRunner().invoke(cli, words[3:]).exit_code)

    monkeypatch.setattr(recipe_check, "subprocess", SimpleNamespace(run=run))
    run_dir, out = tmp_path / "run", tmp_path / "out.json"
    words = ["tulu3_lora_tiny", "log.sample_tokens=0", "--run-dir", str(run_dir), "--json", str(out)]
    assert launch(1, lambda: main(words)) == [0]
    report = json.loads(out.read_text())
    assert [finding["holds"] for finding in report["findings"]] == [True] * 3
    assert [step["step"] for step in report["steps"]] == [1, 2, 3, 4, 5, 6]
    assert main(["tulu3_lora_tiny", "--read", str(run_dir)]) == 0
    assert main(["tulu3_lora_tiny", "--read", str(run_dir), "--check", "loss@6 < 1.0"]) == 1


def test_a_run_that_does_not_end_gives_its_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is judged then."""
    ended = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=75))
    monkeypatch.setattr(recipe_check, "subprocess", ended)
    assert main(["tulu3_lora", "--run-dir", str(tmp_path)]) == 75


@pytest.mark.parametrize(
    ("check", "found", "holds"),
    [
        ("loss@1 < 1.0", 0.9, True),
        ("loss@50 < 0.8", 0.8, False),
        ("loss@51 < 0.8", None, False),
        ("max peak_memory_gb < 60", 61.0, False),
        ("mean seconds from 2 < 30", 2.0, True),
        ("mean mfu from 2 < 1", None, False),
    ],
)
def test_a_check_is_held_against_what_was_measured(
    check: str, found: float | None, holds: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step, the most and a mean; what was not measured does not hold."""
    steps = [record(step, loss=0.9 if step < 50 else 0.8, seconds=100.0 if step == 1 else 2.0) for step in range(1, 51)]
    steps[7]["peak_memory_bytes"] = 61_000_000_000
    for step in steps:
        step["peak_memory_bytes"] = step["peak_memory_bytes"] or 50_000_000_000
    write_lines(tmp_path / "metrics.jsonl", [*steps, {"step": 50, "val_loss": 0.7}])
    assert main(["tulu3_lora", "--read", str(tmp_path), "--check", check]) == (0 if holds else 1)
    shown = capsys.readouterr().out
    assert ("not measured" if found is None else f"{found:.4f}") in shown
    assert shown.rstrip().endswith("DOES NOT HOLD") != holds


def test_every_check_of_every_recipe_can_be_read() -> None:
    """And a misspelt one is named."""
    for recipe in recipes().values():
        assert len(judge(recipe.checks, {})) == len(recipe.checks) > 0
    with pytest.raises(ValueError, match="is no check"):
        judge(["loss at 50 < 1"], {})
