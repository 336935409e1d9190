"""uv run python tools/compare_curves.py --cpu
uv run python tools/compare_curves.py --gpu --data FILE --validation FILE [--base BASE] [--steps N]

Are ckptrain's curves those of Hugging Face Transformers and PEFT? The same base, the same initial adapter (PEFT makes
it), the same samples in the same order and the same hyperparameters, on both sides; nothing else is shared. It prints
how far losses and gradient norms are apart, and writes the numbers and a picture below docs/.

--cpu: a tiny Llama in float32, where nothing but rounding may differ, and every setting on its own.
--gpu: a real base in bfloat16, where rounding is large, beside the spread of PEFT's own seeds: the first seed's initial
adapter is ckptrain's too, the others have another A, and the same samples in the same order.

The status is 1 where they are further apart than they may be.
"""  # noqa: D205  # the commands first, as in the other tools

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
from bench_cpu import MODEL, base_directory
from compare_curves_adapters import check_dropout, check_inits
from compare_curves_case import Case, Curve, Difference, Kind, all_apart, apart, difference, settings_of
from compare_curves_ours import sample_order, training
from compare_curves_picture import draw
from compare_curves_settings import TOLERANCE, Row, check_settings
from forked import launch

from ckptrain.cli.quiet import quiet_libraries

DOCS = Path(__file__).parent.parent / "docs"
NAMES: Mapping[Kind, str] = {"canonical": "canonical LoRA", "lora": "fused LoRA, PEFT's A tied"}
BFLOAT16_MEAN = 0.01
"""How far losses in bfloat16 may be apart in the mean, in nats."""


@attrs.frozen(kw_only=True)
class Comparison:
    """One kind of adapter on both sides."""

    kind: Kind
    ours: Curve
    theirs: list[Curve]
    """By seed; the first started where ours did."""

    @property
    def difference(self) -> Difference:
        """How far ours is from theirs."""
        return difference(self.ours, self.theirs[0])

    @property
    def spread(self) -> Difference | None:
        """How far their other seeds are from their first: at most, and in the mean of all seeds."""
        others = [difference(curve, self.theirs[0]) for curve in self.theirs[1:]]
        if not others:
            return None
        largest = {
            name: max(getattr(other, name) for other in others)
            for name in ("loss_max", "validation_max", "grad_norm_max", "learning_rate_max")
        }
        mean = sum(other.loss_mean for other in others) / len(others)
        return Difference(**largest, loss_mean=mean, same_tokens=all(other.same_tokens for other in others))

    @property
    def agrees(self) -> bool:
        """Whether ours is as close as it must be: to rounding, or within the spread of their seeds."""
        apart, spread = self.difference, self.spread
        if not apart.same_tokens or apart.learning_rate_max > 1e-9:
            return False
        if spread is None:
            return apart.largest <= TOLERANCE
        within = apart.loss_mean <= spread.loss_mean and apart.validation_max <= spread.validation_max
        return within and apart.loss_mean <= BFLOAT16_MEAN


def compare(case: Case, work: Path, num_seeds: int = 1, theirs: Case | None = None) -> Comparison:
    """Train a case on both sides; `theirs` is what the other side trains where it is to be another one."""
    other = theirs or case
    order = sample_order(case)
    start = work / f"{case.kind}-start"

    adapters = apart(case, partial(_write_adapters, case, other, start, num_seeds))
    trainings = [partial(_train_theirs, other, adapter, order) for adapter in adapters]
    ours, *others = all_apart(case, [training(case, start, work / f"{case.kind}-run"), *trainings])
    return Comparison(kind=case.kind, ours=ours, theirs=others)


def _write_adapters(case: Case, other: Case, start: Path, num_seeds: int) -> list[Path]:
    from compare_curves_theirs import write_adapter

    write_adapter(case, start, seed=0)
    return [write_adapter(other, start.with_name(f"{start.name}-{seed}"), seed) for seed in range(num_seeds)]


def _train_theirs(case: Case, adapter: Path, order: Sequence[int]) -> Curve:
    from compare_curves_theirs import train_theirs

    return train_theirs(case, adapter, order)


def table(comparisons: Sequence[Comparison]) -> str:
    """Lay out how far curves are apart, as Markdown."""
    lines = [
        "| | loss, largest | loss, mean | validation, largest | gradient norm, largest, relative | same tokens | |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in comparisons:
        lines.append(_line(NAMES[one.kind], one.difference, "agrees" if one.agrees else "DIFFERS"))
        if one.spread is not None:
            lines.append(_line(f"{NAMES[one.kind]}: spread of {len(one.theirs)} seeds", one.spread, ""))
    return "\n".join(lines)


def _line(name: str, apart: Difference, verdict: str) -> str:
    numbers = (apart.loss_max, apart.loss_mean, apart.validation_max, apart.grad_norm_max)
    cells = [name, *(f"{number:.1e}" for number in numbers), "yes" if apart.same_tokens else "NO", verdict]
    return f"| {' | '.join(cells)} |"


def settings_table(rows: Sequence[Row]) -> str:
    """Lay out the settings, as Markdown."""
    lines = ["| setting | against | what | ckptrain | expected | may differ by | its effect | |", "|" + "---|" * 8]
    for row in rows:
        numbers = (f"{row.ours:.3g}", f"{row.expected:.3g}", f"{row.tolerance:.2g}")
        effect = "" if row.effect is None else f"{row.effect:.2g}"
        cells = [row.setting, row.against, row.measure, *numbers, effect, "agrees" if row.agrees else "DIFFERS"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tiny_case(work: Path, steps: int) -> Case:
    """Write a tiny Llama and chats."""
    from tiny import write_chats, write_llama

    return Case(
        base=write_llama(work / "base"),
        train=write_chats(work / "train.jsonl", 4 * steps + 16),
        validation=write_chats(work / "validation.jsonl", 10, seed=1),
        steps=steps,
    )


def real_case(base: str, data: Path, validation: Path, steps: int, longest: int) -> Case:
    """Take a real base and real conversations."""
    [directory] = launch(1, lambda: base_directory(base), timeout_s=600)
    return Case(
        base=directory,
        dtype="bfloat16",
        train=data.absolute(),
        validation=validation.absolute(),
        longest_tokens=longest,
        forks=False,
        rank=16,
        alpha=32,
        steps=steps,
        lr=1.0e-3,
        warmup_steps=max(1, steps // 20),
        weight_decay=0.01,
        clip_grad=1.0,
        eval_every_steps=max(1, steps // 8),
    )


def report(case: Case, comparisons: Sequence[Comparison], rows: Sequence[Row]) -> dict[str, Any]:
    """Return everything in JSON's types."""
    packages = ("torch", "transformers", "peft", "megatron-core", "megatron-bridge")
    return {
        "versions": {name: version(name) for name in packages},
        "case": settings_of(case),
        "comparisons": [
            {
                "kind": one.kind,
                "agrees": one.agrees,
                "difference": attrs.asdict(one.difference),
                "spread": None if one.spread is None else attrs.asdict(one.spread),
                "ckptrain": attrs.asdict(one.ours),
                "peft": [attrs.asdict(curve) for curve in one.theirs],
            }
            for one in comparisons
        ],
        "settings": [{**attrs.asdict(row), "agrees": row.agrees} for row in rows],
    }


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cpu", action="store_true", help="a tiny Llama in float32, 20 steps")
    where.add_argument("--gpu", action="store_true", help="a real base in bfloat16, 200 steps; on a CPU it takes long")
    parser.add_argument("--data", type=Path, help="with --gpu: JSON lines of `messages`, four for each step")
    parser.add_argument("--validation", type=Path, help="with --gpu: JSON lines of `messages`")
    parser.add_argument("--base", default=None, help="with --gpu: as model.pretrained; else the quickstart's")
    parser.add_argument("--seeds", type=int, default=3, help="with --gpu: PEFT's seeds, two at least")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kinds", nargs="+", choices=NAMES, default=list(NAMES), help="of adapters; else both")
    parser.add_argument("--longest", type=int, default=1024, help="with --gpu: tokens of the longest sample")
    parser.add_argument("--json", type=Path, help="else docs/benchmarks/curves_{cpu,gpu}.json")
    parser.add_argument("--picture", type=Path, help="else docs/pictures/curves_{cpu,gpu}.svg")
    asked = parser.parse_args(words)
    if asked.gpu and (asked.data is None or asked.validation is None):
        parser.error("--gpu needs --data and --validation")
    if asked.gpu and asked.seeds < 2:
        parser.error("--seeds must be 2 at least: one alone has no spread")
    return asked


def main(words: Sequence[str] | None = None) -> int:
    """Compare, print the tables, and write the numbers and the picture."""
    asked = parse(words)
    name = "cpu" if asked.cpu else "gpu"
    with tempfile.TemporaryDirectory(prefix="compare-curves-") as directory:
        work = Path(directory)
        rows: list[Row] = []
        base = asked.base or MODEL
        case = (
            tiny_case(work, asked.steps or 20)
            if asked.cpu
            else real_case(base, asked.data, asked.validation, asked.steps or 200, asked.longest)
        )
        seeds = 1 if asked.cpu else asked.seeds
        comparisons = []
        for kind in asked.kinds:
            started = time.monotonic()
            comparisons.append(compare(attrs.evolve(case, kind=kind), work, seeds))
            print(f"{NAMES[kind]}: {time.monotonic() - started:.0f} s", file=sys.stderr)
        print(table(comparisons), flush=True)
        if asked.cpu:
            short = attrs.evolve(case, steps=min(case.steps, 8))
            rows = [
                *check_settings(short, work),
                *check_dropout(short, work),
                *check_inits(short, work, work / "canonical-start"),
            ]
            print(f"\n{settings_table(rows)}")
        title = f"{'a tiny Llama' if asked.cpu else Path(base).name}, {case.dtype}, {case.steps} steps"
    _write(asked.json or DOCS / f"benchmarks/curves_{name}.json", json.dumps(report(case, comparisons, rows)) + "\n")
    pairs = {NAMES[one.kind]: (one.ours, one.theirs) for one in comparisons}
    _write(asked.picture or DOCS / f"pictures/curves_{name}.svg", draw(title, pairs))
    return 0 if all(one.agrees for one in comparisons) and all(row.agrees for row in rows) else 1


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(main())
