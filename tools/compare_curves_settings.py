"""Does each setting mean what PEFT and torch mean by it? One at a time, each with its effect beside the difference.

A setting that does nothing would agree with anything, so its row says too what it changes in the other side's curve.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from compare_curves_case import Case, Curve, difference
from compare_curves_ours import sample_order, train_ours
from forked import launch

TOLERANCE = 1.0e-4
"""Of a loss in float32, in nats."""
SEEN = 10 * TOLERANCE
"""What a setting must change in the other side's losses, so that agreeing says something."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "alpha / dim: 16 / 8 → 48 / 8": {"alpha": 48},
    "alpha / dim: 16 / 8 → 16 / 2": {"rank": 2},
    "weight decay: 0.1 → 5": {"weight_decay": 5.0},
    "clipping: at 0.5 → at 1e-6": {"clip_grad": 1.0e-6},
    "clipping: at 0.5 → none": {"clip_grad": 0.0},
    "betas: (0.9, 0.95) → (0.5, 0.999)": {"betas": (0.5, 0.999)},
    "eps: 1e-8 → 1e-3": {"eps": 1.0e-3},
    "schedule: cosine → constant": {"schedule": "constant"},
    "warm-up: 2 → 4 steps": {"warmup_steps": 4},
}


@attrs.frozen(kw_only=True)
class Row:
    """One setting."""

    setting: str
    against: str
    """What it is compared with."""
    measure: str
    ours: float
    expected: float
    tolerance: float
    effect: float | None = None
    """What the setting changes on the other side; must be above `SEEN`."""

    @property
    def agrees(self) -> bool:
        """Whether the two are close enough, and the setting is seen."""
        return abs(self.ours - self.expected) <= self.tolerance and (self.effect is None or self.effect >= SEEN)


def check_settings(case: Case, work: Path, names: list[str] | None = None) -> list[Row]:
    """Change the settings of a case one after the other, on both sides."""
    cases = {"": case, **{name: attrs.evolve(case, **SETTINGS[name]) for name in names or SETTINGS}}
    theirs = train_all_theirs(cases, work / "theirs")
    rows = []
    for number, (name, changed) in enumerate(cases.items()):
        if not name:
            continue
        ours = train_ours(changed, work / "theirs" / str(number), work / f"ours-{number}")
        rows.append(
            Row(
                setting=name,
                against="PEFT" if name.startswith("alpha") else "torch, Transformers",
                measure="largest difference of a loss",
                ours=difference(ours, theirs[name]).largest,
                expected=0.0,
                tolerance=TOLERANCE,
                effect=difference(theirs[name], theirs[""]).largest,
            )
        )
    return rows


def train_all_theirs(cases: Mapping[str, Case], work: Path) -> dict[str, Curve]:
    """Train cases under PEFT in one process, each from an adapter in a directory of its number."""
    order = sample_order(next(iter(cases.values())))

    def act() -> dict[str, Curve]:
        from compare_curves_theirs import train_theirs, write_adapter

        return {
            name: train_theirs(case, write_adapter(case, work / str(number), seed=0), order)
            for number, (name, case) in enumerate(cases.items())
        }

    curves: dict[str, Curve]
    [curves] = launch(1, act, timeout_s=3600)
    return curves
