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
    """Return the trained adapter as PEFT has it."""
    from safetensors.torch import load_file

    from ckptrain.convert.to_peft import export_adapter

    export_adapter(run_dir, out)
    return load_file(out / "adapter_model.safetensors")
