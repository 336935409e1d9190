"""`ckptrain diff`: what two checkpoints differ in, from what they say to the numbers in them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from ckptrain.checkpoint.contents import digests_in, directory_of
from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.manifest import Manifest
from ckptrain.checkpoint.reading import reading
from ckptrain.checkpoint.resolve import resolve_checkpoint
from ckptrain.checkpoint.working_copy import as_given
from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import Row, by_kind, facts, shape_text, table
from ckptrain.cli.quiet import quiet_libraries
from ckptrain.cli.wording import plural
from ckptrain.installed import TORCH, require
from ckptrain.lifecycle.drift import ABSENT, Difference, Kind, differences

_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "position": ("step", "consumed_samples", "consumed_tokens", "optimizer"),
    "run": ("run_id", "created"),
    "base": ("base", "shape", "tokenizer_fingerprint"),
    "data": ("data",),
    "program": ("program",),
    "lora": ("lora",),
    "layout": ("layout",),
    "metrics": ("metrics",),
    "versions": ("versions",),
}
"""What a manifest says besides its config, tensors and files: the fields of it that are compared, in this order."""
_LONGEST = 60
"""Characters of a list that is told as it is."""
_DIGEST, _SHORT_DIGEST = re.compile(r"[0-9a-f]{64}"), 12


def diff_answer(a: Path, b: Path, *, tensors: bool) -> Answer:
    """Compare two checkpoints, or the newest ones of runs; with `tensors` the numbers too, where files differ.

    Raises:
        CheckpointNotFound: a path is neither.
        CheckpointDamaged: one is not whole, or where it is read not what its manifest says.
    """
    before, after = resolve_checkpoint(a), resolve_checkpoint(b)
    with reading(before), reading(after):
        compared = _tensors(before, after, read=tensors)
    report = {
        "a": _identity(before),
        "b": _identity(after),
        "facts": list(_facts(before.manifest, after.manifest)),
        "config": [_change(change) for change in _config(before.manifest, after.manifest)],
        "tensors": compared,
    }
    return Answer(report=report, show=functools.partial(_show, report))


def _identity(checkpoint: CommittedCheckpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "path": as_given(checkpoint.path),
        "run_id": manifest.run_id,
        "step": manifest.step,
        "created": manifest.created,
    }


def _facts(before: Manifest, after: Manifest) -> Iterator[dict[str, Any]]:
    """Give what the manifests say otherwise, by section and dotted key; null where one does not say it."""
    for section, fields in _SECTIONS.items():
        old, new = ({key: v for field in fields for key, v in _dotted(side, field)} for side in (before, after))
        for key in dict.fromkeys([*old, *new]):
            if old.get(key) != new.get(key):
                yield {"section": section, "key": key, "a": old.get(key), "b": new.get(key)}


def _dotted(manifest: Manifest, field: str) -> Iterator[tuple[str, Any]]:
    value = getattr(manifest, field)
    yield from _leaves(field, attrs.asdict(value) if attrs.has(type(value)) else value)


def _leaves(key: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, member in value.items():
            yield from _leaves(f"{key}.{name}", member)
    else:
        yield key, list(value) if isinstance(value, tuple) else value


def _config(before: Manifest, after: Manifest) -> list[Difference]:
    """Return the config keys that differ; an imported adapter has no config to compare."""
    return differences(before.config, after.config) if before.config and after.config else []


def _change(change: Difference) -> dict[str, Any]:
    """Return one key, and what its change would mean to a resume from A with the config of B."""
    verdict = "refused" if change.refused else "noted" if change.rule.kind is Kind.NOTED else "free"
    return {"key": change.key, "a": change.old, "b": change.new, "resume": verdict, "effect": change.rule.effect}


def _tensors(before: CommittedCheckpoint, after: CommittedCheckpoint, *, read: bool) -> dict[str, Any]:
    """Compare the tensors by name and form, and their values unless their files are equal."""
    old, new = before.manifest.tensors, after.manifest.tensors
    alike = [name for name in old if old[name] == new.get(name)]
    unlike = [name for name in old if name in new and old[name] != new[name]]
    suspect = {
        directory
        for directory in {directory_of(old[name]) for name in alike}
        if digests_in(before.manifest, directory) != digests_in(after.manifest, directory)
    }
    different = [name for name in alike if directory_of(old[name]) in suspect]
    changed = _values(before, after, different) if read and different else []
    return {
        "same": len(alike) - len(changed if read else different),
        "changed": changed,
        "not_compared": 0 if read else len(different),
        "other_form": [{"name": name, "a": attrs.asdict(old[name]), "b": attrs.asdict(new[name])} for name in unlike],
        "only_in_a": sorted(old.keys() - new.keys()),
        "only_in_b": sorted(new.keys() - old.keys()),
    }


def _values(before: CommittedCheckpoint, after: CommittedCheckpoint, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tensors of `names` whose values differ, and by how much; states of random generators only differ."""
    require(TORCH, "comparing numbers")
    quiet_libraries()
    from ckptrain.checkpoint.tensors import compare, read_each

    changed = []
    for (name, old), (_, new) in zip(read_each(before, names), read_each(after, names), strict=True):
        change = compare(old, new)
        if change is not None:
            group = before.manifest.tensors[name].group
            by_how_much = {**attrs.asdict(change), "relative": change.relative} if group != "rng" else None
            changed.append({"name": name, "group": group, "change": by_how_much})
    return changed


def _show(report: Mapping[str, Any], console: Console) -> None:
    console.print(facts([(side.upper(), _identity_text(report[side])) for side in ("a", "b")]))
    told = {change["key"].replace("lora.", "lora.settings.") for change in report["config"]}
    facts_lines = [(fact["key"], *_two(fact["a"], fact["b"])) for fact in report["facts"] if fact["key"] not in told]
    if facts_lines:
        console.print()
        console.print(table(("", "A", "B"), facts_lines))
    if report["config"]:
        config_lines = [
            (change["key"], *_two(change["a"], change["b"]), _verdict(change)) for change in report["config"]
        ]
        console.print()
        console.print(table(("config", "A", "B", "a resume from A with it"), config_lines))
    console.print()
    _show_tensors(report["tensors"], console)


def _identity_text(side: Mapping[str, Any]) -> str:
    return f"{side['path']}: step {side['step']:,} of run {side['run_id']}, saved {side['created']}"


def _two(a: object, b: object) -> tuple[str, str]:
    """Write two values; of long lists what only one of them has."""
    texts = (_value_text(a), _value_text(b))
    if isinstance(a, list) and isinstance(b, list) and max(map(len, texts)) > _LONGEST:
        return _members_text(a, b), _members_text(b, a)
    return texts


def _members_text(members: Sequence[object], others: Sequence[object]) -> str:
    own = [str(member) for member in members if member not in others]
    told = ", ".join(own[:2]) + (f" and {len(own) - 2} more" if len(own) > 2 else "")
    return f"{plural(len(members), 'value')}" + (f", only here {told}" if own else "")


def _value_text(value: object) -> str:
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        return value[:_SHORT_DIGEST]
    return "-" if value is None or value == ABSENT else str(value)


def _verdict(change: Mapping[str, Any]) -> Text:
    if change["resume"] == "free":
        return Text("allowed", style="dim")
    style = "red" if change["resume"] == "refused" else "yellow"
    return Text.assemble((change["resume"], style), f": it {change['effect']}")


def _show_tensors(tensors: Mapping[str, Any], console: Console) -> None:
    rows: list[Row] = [("tensors", f"{plural(tensors['same'], 'tensor')} equal")]
    if tensors["not_compared"]:
        rows.append(("", f"{plural(tensors['not_compared'], 'tensor')} not compared: their files differ"))
    rows += [
        ("other form", f"{tensor['name']}: {_form_text(tensor['a'])} in A, {_form_text(tensor['b'])} in B")
        for tensor in tensors["other_form"]
    ]
    for side in ("a", "b"):
        rows += [(f"only in {side.upper()}", name) for name in tensors[f"only_in_{side}"]]
    console.print(facts(rows))
    for kind, members in by_kind(tensors["changed"]).items():
        changes = [tensor["change"] for _, tensor in members]
        console.print(Text(f"\n{kind}: {plural(len(members), 'tensor')} changed{_together(changes)}", style="bold"))
        lines = [(*_cells(tensor["change"]), name) for name, tensor in members if tensor["change"] is not None]
        if lines:
            titles = ("relative", "norm", "largest", "change of tensor")
            console.print(table(titles, lines, right=titles[:-1]))


def _together(changes: Sequence[Mapping[str, float] | None]) -> str:
    """Say by how much tensors changed, as if they were one."""
    norms = [(change["norm"], change["norm_before"]) for change in changes if change is not None]
    before = math.hypot(*(norm for _, norm in norms))
    return f", by {math.hypot(*(norm for norm, _ in norms)) / before:.3g} of their norm in A" if before else ""


def _cells(change: Mapping[str, Any]) -> tuple[str, str, str]:
    relative = "-" if change["relative"] is None else f"{change['relative']:.3g}"
    largest = "not finite" if change["num_not_finite"] else f"{change['largest']:.4g}"
    return (relative, f"{change['norm']:.4g}", largest)


def _form_text(entry: Mapping[str, Any]) -> str:
    return f"{entry['dtype']} {shape_text(entry['shape'])}"
