"""Where does dropout fall, and what do adapters start from? Seen in the matrices of a run's first checkpoint.

Draws differ from one implementation to the other, so what is compared is what must be true of any: which features have
no gradient, and how the numbers are distributed. Where PEFT has no counterpart (dropout after B, most initial values),
what is compared with is a formula or torch's own function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch
from compare_curves_case import Case, Curve
from compare_curves_ours import train_ours
from compare_curves_settings import TOLERANCE, Row
from forked import launch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import init

type Matrices = dict[str, Tensor]

DROPPED = 0.98
INITS: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "xavier": ("torch's xavier_normal_", init.xavier_normal_),
    "kaiming": ("torch's kaiming_uniform_(a=√5)", lambda matrix: init.kaiming_uniform_(matrix, a=5**0.5)),
    "normal": ("torch's normal_(std=0.2)", lambda matrix: init.normal_(matrix, std=0.2)),
    "zero": ("zeros, as PEFT's B", init.zeros_),
}
PAIRS = (("xavier", "zero"), ("kaiming", "normal"), ("normal", "kaiming"), ("zero", "xavier"))
"""Methods of A and B: each is seen of both."""


def matrices(adapter: Path) -> Matrices:
    """Read the matrices of a PEFT directory."""
    found: Matrices = load_file(adapter / "adapter_model.safetensors")
    return found


def check_dropout(case: Case, work: Path) -> list[Row]:
    """Find where dropout falls by what a first step leaves as it was.

    Before A it hides input features, after B output features. One that is hidden at every position has no gradient: a
    column of A, or a row of B, that Adam then leaves alone. Of n positions that is a share of DROPPED ** n.
    """
    path = work / "one.jsonl"
    path.write_text(case.train.read_text(encoding="utf-8").split("\n", 1)[0] + "\n", encoding="utf-8")
    changes = {"steps": 1, "samples_per_step": 1, "warmup_steps": 0, "weight_decay": 0.0, "dropout": DROPPED}
    case = attrs.evolve(case, train=path, targets=("down_proj",), **changes)

    def theirs() -> tuple[int, Curve]:
        from compare_curves_theirs import num_positions, train_theirs, write_adapter

        start = write_adapter(case, work / "start", seed=0, random_b=True)
        return num_positions(case), train_theirs(case, start, [0], work / "theirs")

    [(positions, their_curve)] = launch(1, theirs)
    start = matrices(work / "start")
    layers = len(start) // 2
    # In the last layer only the positions that predict something learnt have a gradient.
    share = ((layers - 1) * DROPPED**positions + DROPPED ** their_curve.learnt_tokens[0]) / layers
    of_peft = untouched(start, matrices(work / "theirs"))
    rows = []
    for place, against in (("pre", f"formula (PEFT has {of_peft[0]:.2f}, {of_peft[1]:.2f})"), ("post", "formula")):
        run_dir, out = work / place, work / f"{place}-adapter"
        ours = train_ours(attrs.evolve(case, dropout_position=place), work / "start", run_dir, out=out)
        columns, lines = untouched(start, matrices(out))
        name = f"dropout_position {place}"
        expected = (share, 0.0) if place == "pre" else (0.0, share)
        for what, found, wanted in zip(("columns of A", "rows of B"), (columns, lines), expected, strict=True):
            measure = f"share of {what} without a gradient"
            rows.append(
                Row(
                    setting=name,
                    against=against,
                    measure=measure,
                    ours=found,
                    expected=wanted,
                    tolerance=0.1 if wanted else 0.0,
                )
            )
        rows.append(
            Row(
                setting=name,
                against="PEFT",
                measure="validation loss before training: no dropout",
                ours=ours.validation[0],
                expected=their_curve.validation[0],
                tolerance=TOLERANCE,
            )
        )
    return rows


def untouched(before: Matrices, after: Matrices) -> tuple[float, float]:
    """Return the shares of the columns of all A, and of the rows of all B, that are as they were."""
    columns = [(after[name] == start).all(0) for name, start in before.items() if "lora_A" in name]
    lines = [(after[name] == start).all(1) for name, start in before.items() if "lora_B" in name]
    return float(torch.cat(columns).float().mean()), float(torch.cat(lines).float().mean())


def check_inits(case: Case, work: Path, of_peft: Path) -> list[Row]:
    """Compare what adapters start from with draws of torch, method for method, and with an adapter of PEFT."""
    rows = []
    # The first step of a warm-up has rate 0, so its checkpoint holds what the run started from.
    case = attrs.evolve(case, steps=1, samples_per_step=1, warmup_steps=1, schedule="constant")
    for number, (of_a, of_b) in enumerate(PAIRS):
        run_dir, out = work / f"init-{number}", work / f"init-{number}-adapter"
        train_ours(case, None, run_dir, {"lora_A_init_method": of_a, "lora_B_init_method": of_b}, out)
        found = matrices(out)
        for matrix, method in (("A", of_a), ("B", of_b)):
            ours = _matrices_of(matrix, found)
            against, draw = INITS[method]
            rows.append(_compare(f"lora_{matrix}_init_method {method}", against, ours, _drawn(ours, draw)))
        if of_a == "kaiming":
            peft = _matrices_of("A", matrices(of_peft))
            rows.append(_compare("lora_A_init_method kaiming", "PEFT's own A", _matrices_of("A", found), peft))
    return rows


def _matrices_of(matrix: str, adapter: Matrices) -> list[Tensor]:
    return [adapter[name] for name in sorted(adapter) if f"lora_{matrix}" in name]


def _drawn(like: list[Tensor], draw: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.stack([draw(torch.empty_like(matrix)) for _ in range(8)]) for matrix in like]


def _compare(name: str, against: str, ours: list[Tensor], theirs: list[Tensor]) -> Row:
    """Compare the distributions of all numbers, each in units of the root mean square that theirs has in its matrix."""
    units = [matrix.square().mean().sqrt() or 1.0 for matrix in theirs]
    mine, drawn = (
        torch.cat([matrix.flatten() / unit for matrix, unit in zip(side, units, strict=True)])
        for side in (ours, theirs)
    )
    return Row(
        setting=name,
        against=against,
        measure="Kolmogorov-Smirnov distance",
        ours=largest_gap(mine, drawn),
        expected=0.0,
        # Two samples of one distribution are further apart once in a thousand times.
        tolerance=1.95 * (1 / len(mine) + 1 / len(drawn)) ** 0.5,
    )


def largest_gap(one: Tensor, other: Tensor) -> float:
    """Return how far the distribution functions of two samples are apart at most (Kolmogorov and Smirnov)."""
    at = torch.cat([one, other]).sort().values
    shares = [torch.searchsorted(sample.sort().values, at, right=True) / len(sample) for sample in (one, other)]
    return float((shares[0] - shares[1]).abs().max())
