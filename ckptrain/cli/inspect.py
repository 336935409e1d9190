"""`ckptrain inspect`: what a checkpoint says it is, and with --norms what the numbers in it are like."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from ckptrain.checkpoint.contents import stored_bytes, tensor_bytes
from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.manifest import Manifest
from ckptrain.checkpoint.reading import reading
from ckptrain.checkpoint.working_copy import as_given
from ckptrain.cli.foreign import foreign_answer
from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import Row, by_kind, facts, shape_text, table
from ckptrain.cli.quiet import quiet_libraries
from ckptrain.cli.wording import bytes_text, duration_text, plural
from ckptrain.config.layout import Layout
from ckptrain.convert.checkpoint_source import CheckpointSource
from ckptrain.convert.sources import open_source
from ckptrain.installed import TORCH, require
from ckptrain.lifecycle.fit import layout_text

_SHORT_DIGEST = 12
_B_WEIGHT = ".adapter.linear_out.weight"
_ALL_LAYERS = "decoder.layers."
"""How the name of an adapter weight begins that is stacked over all layers; a number follows where it is of one."""


def inspect_answer(path: Path, *, norms: bool, base: str | None = None) -> Answer:
    """Describe a checkpoint, a run's newest, or an adapter of another form; with `norms` every tensor is read.

    Raises:
        CheckpointNotFound: `path` is none of these.
        CheckpointDamaged: it is not whole, or with `norms` not what its manifest says.
        ConfigError: it is of another form, and its base is not here.
    """
    source = open_source(path, base=base)
    if not isinstance(source, CheckpointSource):
        return foreign_answer(source, norms=norms)
    checkpoint = source.checkpoint
    with reading(checkpoint):
        measured = _measured(checkpoint) if norms else None
    report = {
        "path": as_given(checkpoint.path),
        **_manifest(checkpoint.manifest),
        "tensors": [
            {
                "name": name,
                **attrs.asdict(entry),
                "num_bytes": tensor_bytes(entry),
                "values": (measured or {}).get(name),
            }
            for name, entry in checkpoint.manifest.tensors.items()
        ],
        "remarks": None if measured is None else list(_remarks(measured)),
    }
    return Answer(report=report, show=functools.partial(_show, report))


def _manifest(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest in JSON's types, but its tensors, with the sizes that follow from it."""
    age = datetime.now(UTC) - datetime.fromisoformat(manifest.created)
    values = {field.name: getattr(manifest, field.name) for field in attrs.fields(Manifest) if field.name != "tensors"}
    plain = {name: attrs.asdict(value) if attrs.has(type(value)) else value for name, value in values.items()}
    return {
        **plain,
        "layout": {**plain["layout"], "world_size": manifest.layout.world_size},
        "files": {name: attrs.asdict(file) for name, file in manifest.files.items()},
        "age_s": max(0.0, age.total_seconds()),
        "num_bytes": stored_bytes(manifest),
    }


def _measured(checkpoint: CommittedCheckpoint) -> dict[str, dict[str, Any]]:
    """Read the tensors whose values are numbers: the states of random generators are not."""
    require(TORCH, "--norms")
    quiet_libraries()
    from ckptrain.checkpoint.tensors import measure, read_each, zero_layers

    tensors = checkpoint.manifest.tensors
    measured: dict[str, dict[str, Any]] = {}
    for name, tensor in read_each(checkpoint, [name for name, entry in tensors.items() if entry.group != "rng"]):
        values = attrs.asdict(measure(tensor))
        stacked = name.startswith(_ALL_LAYERS) and not name.removeprefix(_ALL_LAYERS)[:1].isdigit()
        values["zero_layers"] = zero_layers(tensor) if stacked else None
        measured[name] = values
    return measured


def _remarks(measured: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Say what is wrong with the numbers, or at least strange."""
    for name, values in measured.items():
        if values["num_not_finite"]:
            yield f"{name} has {plural(values['num_not_finite'], 'value')} that are NaN or infinite"
    b_weights = {name: values for name, values in measured.items() if name.endswith(_B_WEIGHT)}
    zero = [name for name, values in b_weights.items() if not values["norm"] and not values["num_not_finite"]]
    if zero and len(zero) == len(b_weights):
        yield "every linear_out weight is zero: the adapter changes nothing, as before its first step"
        return
    for name in zero:
        yield f"{name} is all zero: that adapter changes nothing"
    for name, values in b_weights.items():
        if values["zero_layers"] and name not in zero:
            layers = ", ".join(map(str, values["zero_layers"]))
            yield f"{name} is all zero in layer {layers}: those adapters change nothing"


def _show(report: Mapping[str, Any], console: Console) -> None:
    console.print(facts(_rows(report)))
    _show_tensors(report["tensors"], console)
    console.print()
    files = report["files"]
    console.print(Text(f"{plural(len(files), 'file')}, {bytes_text(report['num_bytes'])}", style="bold"))
    lines = [(bytes_text(file["num_bytes"]), file["sha256"][:_SHORT_DIGEST], name) for name, file in files.items()]
    console.print(table(("size", "SHA-256", "file"), lines, right=("size",)))
    if report["remarks"]:
        console.print()
        console.print(facts(("remark", Text(remark, style="yellow")) for remark in report["remarks"]))


def _rows(report: Mapping[str, Any]) -> list[Row]:
    base, settings, modules = report["base"], report["lora"]["settings"], report["lora"]["modules"]
    revision = f" at {base['revision']}" if base["revision"] else ""
    kinds = sorted({name.rpartition(".")[2] for name in modules})
    dropout = f", dropout {settings['dropout']:g}" if settings["dropout"] else ""
    brought = [f"{part} {name!r}" for part, name in report["program"].items() if name is not None]
    return [
        ("checkpoint", report["path"]),
        (
            "step",
            (
                f"{report['step']:,}, {plural(report['consumed_samples'], 'sample')},"
                f" {plural(report['consumed_tokens'], 'token')}"
            ),
        ),
        ("run", f"{report['run_id']}, saved {report['created']} ({duration_text(report['age_s'])} ago)"),
        ("base", f"{base['name']}{revision}"),
        ("", f"{report['shape']['architecture']}, fingerprint {base['fingerprint'][:_SHORT_DIGEST]}"),
        (
            "adapters",
            (
                f"{plural(len(modules), 'module')} ({', '.join(kinds)}), rank {settings['dim']}, alpha"
                f" {settings['alpha']}{dropout}"
            ),
        ),
        ("layout", f"{layout_text(_layout(report['layout']))}, {plural(report['layout']['world_size'], 'process')}"),
        *([("program", ", ".join(brought))] if brought else []),
        ("metrics", ", ".join(f"{name} {value:.4f}" for name, value in report["metrics"].items()) or "none"),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(report["versions"].items()))),
    ]


def _layout(values: Mapping[str, int]) -> Layout:
    return Layout(**{name: size for name, size in values.items() if name != "world_size"})


def _show_tensors(tensors: Sequence[Mapping[str, Any]], console: Console) -> None:
    for kind, members in by_kind(tensors).items():
        size = bytes_text(sum(tensor["num_bytes"] for _, tensor in members))
        console.print(Text(f"\n{kind}: {plural(len(members), 'tensor')}, {size}", style="bold"))
        measured = any(tensor["values"] is not None for _, tensor in members)
        titles = ("type", "shape", *(("norm", "largest") if measured else ("size",)), "tensor")
        console.print(table(titles, ((*_cells(tensor), name) for name, tensor in members), right=titles[2:-1]))


def _cells(tensor: Mapping[str, Any]) -> tuple[str, ...]:
    form = (tensor["dtype"], shape_text(tensor["shape"]))
    values = tensor["values"]
    if values is None:
        return (*form, bytes_text(tensor["num_bytes"]))
    largest = "not finite" if values["num_not_finite"] else f"{values['largest']:.4g}"
    return (*form, f"{values['norm']:.4g}", largest)
