"""What a run left: its metrics, its journal, and what it trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def column(run_dir: Path, key: str) -> list[float]:
    """Return what the metrics have under a key, in the order of steps."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def apart(found: list[float], expected: list[float]) -> float:
    """Return the largest difference."""
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def journal(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """Return the entries of one kind."""
    entries = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["event"] == event]


def phase(run_dir: Path, name: str) -> dict[str, Any]:
    """Return what the journal says of a phase."""
    return next(entry for entry in journal(run_dir, "phase") if entry["to"] == name)


def exported(run_dir: Path, out: Path) -> dict[str, Tensor]:
    """Return the trained adapter as PEFT has it; the directory may have it already."""
    from safetensors.torch import load_file

    from ckptrain.convert.to_peft import export_adapter

    if not out.exists():
        export_adapter(run_dir, out)
    return load_file(out / "adapter_model.safetensors")


def assert_same_run(run_dir: Path, single: Path) -> None:
    """Compare two whole runs within rounding: losses, gradient norms, validation, answers, and what was trained."""
    assert column(run_dir, "learnt_tokens") == column(single, "learnt_tokens")
    for key in ("loss", "grad_norm", "val_loss"):
        assert len(column(single, key)) > 1
        assert apart(column(run_dir, key), column(single, key)) < 1e-5
    assert column(single, "loss")[-1] < column(single, "loss")[0] - 0.1, "something is learnt"
    found, expected = (exported(path, path / "exported") for path in (run_dir, single))
    assert found.keys() == expected.keys()
    assert max((found[key] - expected[key]).abs().max().item() for key in expected) < 1e-5
    answers = [[entry["answer"] for entry in journal(path, "sample")] for path in (run_dir, single)]
    assert answers[0] == answers[1]
