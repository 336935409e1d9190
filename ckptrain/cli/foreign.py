"""`ckptrain inspect` of an adapter that ckptrain did not save: what it is, with --norms what its numbers are like."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import Row, facts, shape_text, table
from ckptrain.cli.quiet import quiet_libraries
from ckptrain.cli.wording import plural
from ckptrain.convert.source import AdapterSource
from ckptrain.installed import TORCH, require


def foreign_answer(source: AdapterSource, *, norms: bool) -> Answer:
    """Describe an adapter; with `norms` its matrices are read, one layer after the other.

    Raises:
        CheckpointDamaged: with `norms`, it cannot be read.
    """
    found = source.facts
    report = {
        "path": str(source.path),
        "form": found.form,
        "step": source.step,
        "base": {"name": source.base.name, "architecture": source.shape.architecture},
        "lora": attrs.asdict(found.lora),
        "dtype": found.dtype,
        "notes": list(found.notes),
        "matrices": list(_measured(source)) if norms else None,
        "problems": source.problems() if norms else None,
    }
    return Answer(report=report, show=functools.partial(_show, report))


def _measured(source: AdapterSource) -> Iterator[dict[str, Any]]:
    require(TORCH, "--norms")
    quiet_libraries()
    from ckptrain.checkpoint.tensors import measure

    layers = sorted({int(module.split(".")[2]) for module in source.facts.lora.modules})
    with source.layers() as read:
        for layer in layers:
            for name, matrix in read(layer).items():
                yield {"name": name, "shape": list(matrix.shape), **attrs.asdict(measure(matrix))}


def _show(report: Mapping[str, Any], console: Console) -> None:
    settings, modules = report["lora"]["settings"], report["lora"]["modules"]
    kinds = sorted({name.rpartition(".")[2] for name in modules})
    rows: list[Row] = [
        (report["form"], report["path"]),
        ("base", f"{report['base']['name']}, {report['base']['architecture']}"),
        (
            "adapters",
            f"{plural(len(modules), 'module')} ({', '.join(kinds)}), kind {settings['kind']}, rank {settings['dim']},"
            f" alpha {settings['alpha']}, {report['dtype']}",
        ),
        *(("note", note) for note in report["notes"]),
        *(("problem", Text(problem, style="red")) for problem in report["problems"] or ()),
    ]
    console.print(facts(rows))
    if report["matrices"] is not None:
        console.print()
        lines = [
            (shape_text(found["shape"]), f"{found['norm']:.4g}", f"{found['largest']:.4g}", found["name"])
            for found in report["matrices"]
        ]
        console.print(table(("shape", "norm", "largest", "matrix"), lines, right=("norm", "largest")))
