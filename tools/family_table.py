"""uv run python tools/family_table.py [--only NAME] [--json OUT]

Measure what each family of models computes under Megatron and under Hugging Face, and write docs/families.md.

Every number is the largest difference of two logits of one probe, in float32 on the CPU, for a tiny random model. What
a family cannot do is answered by ckptrain itself: the reasons are its own errors.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
from families import FAMILIES, write_family
from family_cells import (
    COLUMNS,
    Case,
    Outcome,
    Refusal,
    attempt,
    quiet,
    refuses_experts,
    refuses_experts_of_peft,
    refuses_transformer_engine,
    shape,
)
from tiny import write_chats

from ckptrain.config.base import read_json
from ckptrain.config.shape import REFUSED, shape_of

DOCUMENT = Path(__file__).parents[1] / "docs/families.md"
# What a config.json can ask of a family that is refused: the family's name in FAMILIES and what is changed.
OTHERWISE: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("Llama", {"attention_bias": True}),
    ("Llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("Mistral", {"rope_parameters": {"rope_type": "yarn"}}),
    ("Qwen3-MoE", {"mlp_only_layers": [0]}),
    ("OLMoE", {"clip_qkv": 8.0}),
    ("Gemma 2", {"use_bidirectional_attention": True}),
    ("Gemma 3", {"attn_logit_softcapping": 50.0}),
    ("GPT-OSS", {"quantization_config": {"quant_method": "mxfp4"}}),
)
_PACKAGES = ("torch", "transformers", "peft", "megatron-core", "megatron-bridge")


@attrs.frozen(kw_only=True)
class Row:
    """What was found of a family."""

    name: str
    architecture: str
    cells: Mapping[str, Outcome]
    limits: tuple[str, ...]
    """What it cannot do, in the words of ckptrain's errors."""


def measure_family(name: str, work: Path, columns: Sequence[str] = tuple(COLUMNS)) -> Row:
    """Make a model of a family and measure it."""
    quiet()
    case = Case(name=name, base=write_family(work / "base", name), work=work)
    write_chats(work / "chats.jsonl", 8)
    architecture = shape(case.base).architecture
    limits = {"experts": refuses_experts(case), "backend": refuses_transformer_engine(architecture)}
    if limits["experts"]:
        case = attrs.evolve(case, targets=("lora.target_modules=[linear_qkv, linear_proj]",))
    cells = {column: attempt(lambda column=column: COLUMNS[column](case)) for column in columns}
    reasons = [outcome.reason for outcome in cells.values() if isinstance(outcome, Refusal)]
    if "imported" in columns:
        limits["import"] = refuses_experts_of_peft(case)
    found = [limit for limit in (*limits.values(), *reasons) if limit]
    return Row(name=name, architecture=architecture, cells=cells, limits=tuple(dict.fromkeys(found)))


def refusals(work: Path) -> dict[str, str]:
    """Return what a config.json can ask that is refused, each with ckptrain's reason."""
    quiet()
    found = {}
    for name, changes in OTHERWISE:
        directory = work / f"{name}-{next(iter(changes))}"
        config = {**read_json(write_family(directory, name) / "config.json"), **changes}
        outcome = attempt(lambda config=config, name=name: shape_of(config, name).num_layers)
        assert isinstance(outcome, Refusal), f"{name} with {changes} was not refused"
        found[f"{name}, {next(iter(changes))}"] = outcome.reason
    for architecture in REFUSED:
        outcome = attempt(lambda architecture=architecture: shape_of({"architectures": [architecture]}, "x").num_layers)
        assert isinstance(outcome, Refusal)
        found[architecture] = outcome.reason.partition(": ")[2].partition("; supported are")[0]
    return found


def cell_text(outcome: Outcome | None) -> str:
    """Return a cell of the table."""
    if outcome is None:
        return ""
    if isinstance(outcome, Refusal):
        return "no"
    return f"{outcome:.1e}" if outcome else "0"


def document(rows: Sequence[Row], refused: Mapping[str, str]) -> str:
    """Return docs/families.md."""
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    head = f"""# Families of models

Written by `uv run python tools/family_table.py`, with {packages}.

A number is the largest difference of two logits, of one probe and in float32 on the CPU, for a tiny random model of the
family; 1e-6 to 1e-5 is what the order of sums makes. What is compared:

- **base**: Megatron with Hugging Face, no adapter.
- **adapters** at a layout: Megatron with random adapters under tensor (TP) or pipeline (PP) parallelism with Hugging
  Face PEFT and the adapter that was exported from the checkpoint saved there.
- **exported**, **merged**: the number by which `ckptrain export --verify` and `ckptrain merge --verify` let pass.
- **imported**: an adapter that PEFT made and saved, under PEFT and, imported, under Megatron; where experts are
  adapted, the one that was exported.

Adapters are in every linear layer of the decoder, experts too, unless the family has a line below that says otherwise.

| family | architecture | {" | ".join(COLUMNS)} |
|---|---|{"---|" * len(COLUMNS)}
"""
    lines = [
        f"| {row.name} | {row.architecture} | {' | '.join(cell_text(row.cells.get(name)) for name in COLUMNS)} |"
        for row in rows
    ]
    by_limit: dict[str, list[str]] = {}
    for row in rows:
        for limit in row.limits:
            by_limit.setdefault(limit, []).append(row.name)
    limits = [f"- {', '.join(names)}: {limit}" for limit, names in by_limit.items()]
    otherwise = [f"- {name}: {why}" for name, why in refused.items()]
    return "\n".join(
        [
            head + "\n".join(lines),
            "\n## What a family cannot do\n\nIn the words of the error that ckptrain raises.\n",
            *limits,
            "\n## What is refused\n\nBefore anything is loaded: architectures, and what a config.json can say.\n",
            *otherwise,
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code, 1 where a family that is to run gave no number for its base."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--only", choices=tuple(FAMILIES), help="one family; nothing is written but what --json asks")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    asked = parser.parse_args(arguments)
    quiet()
    rows = []
    with tempfile.TemporaryDirectory(prefix="ckptrain-families-") as directory:
        for number, name in enumerate([asked.only] if asked.only else FAMILIES):
            work = Path(directory) / str(number)
            work.mkdir()
            rows.append(measure_family(name, work))
            print(f"{name}: " + ", ".join(f"{key} {cell_text(cell)}" for key, cell in rows[-1].cells.items()))
            print("".join(f"  {limit}\n" for limit in rows[-1].limits), end="", flush=True)
        refused = refusals(Path(directory) / "refused")
    if asked.json:
        asked.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n")
    if not asked.only:
        DOCUMENT.write_text(document(rows, refused))
        print(f"wrote {DOCUMENT}")
    return int(any(isinstance(row.cells["base"], Refusal) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
