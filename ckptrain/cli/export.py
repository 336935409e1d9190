"""`ckptrain export`, `merge` and `import-adapter`: what was written, what it was let through by, how to load it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from ckptrain import api
from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import Row, facts
from ckptrain.cli.quiet import quiet_libraries
from ckptrain.cli.wording import bytes_text, plural
from ckptrain.config.base import locate_base
from ckptrain.config.schema import ModelConfig
from ckptrain.errors import ConfigError


def export_answer(checkpoint: Path, out: Path, **how: Any) -> Answer:
    """Export an adapter; `how` is as `ckptrain.export` takes it.

    Raises:
        CkptrainError: one of its kinds for whatever is refused or fails.
    """
    quiet_libraries()
    return _answer(api.export(checkpoint, out, **how), _show)


def megatron_answer(checkpoint: Path, out: Path, **how: Any) -> Answer:
    """Export an adapter for Megatron-Bridge; `how` is as `ckptrain.export_megatron` takes it.

    Raises:
        CkptrainError: one of its kinds for whatever is refused or fails.
    """
    quiet_libraries()
    written = api.export_megatron(checkpoint, out, **how)
    report = {**attrs.asdict(written), "path": str(written.path), "iteration": str(written.iteration)}
    return Answer(report=report, show=functools.partial(_show_megatron, report))


def merge_answer(checkpoint: Path, out: Path, **how: Any) -> Answer:
    """Merge an adapter into its base; `how` is as `ckptrain.merge` takes it.

    Raises:
        CkptrainError: one of its kinds for whatever is refused or fails.
    """
    quiet_libraries()
    return _answer(api.merge(checkpoint, out, **how), _show_merged)


def import_answer(peft: Path, out: Path, **how: Any) -> Answer:
    """Make a checkpoint of a PEFT adapter; `how` is as `ckptrain.import_adapter` takes it.

    Raises:
        CkptrainError: one of its kinds for whatever is refused or fails.
    """
    quiet_libraries()
    return _answer(api.import_adapter(peft, out, **how), _show_imported)


def _answer(written: Any, show: Callable[[Mapping[str, Any], Console], None]) -> Answer:
    report = {**attrs.asdict(written), "path": str(written.path)}
    return Answer(report=report, show=functools.partial(show, report))


def _show(report: Mapping[str, Any], console: Console) -> None:
    rows: list[Row] = [
        ("written", report["path"]),
        (
            "",
            (
                f"{plural(report['tensors'], 'tensor')}, {bytes_text(report['num_bytes'])} of {report['dtype']}; rank"
                f" {report['rank']}, alpha {report['alpha']}; {', '.join(report['target_modules'])}"
            ),
        ),
        ("from", _origin(report)),
        ("base", report["base"]),
    ]
    rows += _gate_rows(report)
    if report["warning"]:
        rows.append(("warning", Text(report["warning"], style="yellow")))
    console.print(facts(rows))
    console.print()
    for line in loading_lines(report["base"], report["path"]):
        console.print(line, markup=False, soft_wrap=True, style="cyan")


def _show_megatron(report: Mapping[str, Any], console: Console) -> None:
    rows: list[Row] = [
        ("written", report["iteration"]),
        (
            "",
            (
                f"{plural(report['tensors'], 'tensor')}, {bytes_text(report['num_bytes'])} of {report['dtype']};"
                f" {report['kind']}, rank {report['rank']}, alpha {report['alpha']}"
            ),
        ),
        ("base", report["base"]),
        *(("warning", Text(warning, style="yellow")) for warning in report["warnings"]),
    ]
    console.print(facts(rows))
    console.print()
    console.print(f"checkpoint.load={report['path']}", markup=False, soft_wrap=True, style="cyan")


def _show_merged(report: Mapping[str, Any], console: Console) -> None:
    rows: list[Row] = [
        ("written", report["path"]),
        (
            "",
            f"{plural(report['merged'], 'weight')} changed, {plural(report['files'], 'file')},"
            f" {bytes_text(report['num_bytes'])}",
        ),
        ("from", _origin(report)),
        ("base", report["base"]),
    ]
    console.print(facts([*rows, *_gate_rows(report)]))
    console.print()
    for line in (
        "from transformers import AutoModelForCausalLM",
        f"model = AutoModelForCausalLM.from_pretrained({report['path']!r})",
    ):
        console.print(line, markup=False, soft_wrap=True, style="cyan")


def _show_imported(report: Mapping[str, Any], console: Console) -> None:
    rows: list[Row] = [
        ("written", report["path"]),
        (
            "",
            (
                f"{plural(report['tensors'], 'tensor')}, {bytes_text(report['num_bytes'])} of {report['dtype']};"
                f" {plural(report['modules'], 'module')}, rank {report['rank']}, alpha {report['alpha']}"
            ),
        ),
        ("kind", report["kind"]),
        ("base", report["base"]),
        *(("note", note) for note in report["notes"]),
    ]
    console.print(facts(rows))
    console.print()
    console.print(f"ckptrain run CONFIG model.adapter={report['path']}", markup=False, soft_wrap=True, style="cyan")


def _origin(report: Mapping[str, Any]) -> str:
    """Return where an adapter comes from; one from elsewhere has neither a run nor a step."""
    return f"run {report['run_id']}, step {report['step']}" if report["run_id"] else report["source"]


def _gate_rows(report: Mapping[str, Any]) -> list[Row]:
    """Return the three numbers of the comparison, or why there was none."""
    gate = report["gate"]
    if gate is None:
        return [("verified", Text(f"no: {report['gate_reason']}", style="yellow"))]
    return [
        ("verified", Text(f"logits of {gate['tokens']} tokens, float32", style="green")),
        ("", f"{gate['difference']:.3g} from those under Megatron, at most {gate['allowed']:.3g} allowed"),
        ("", f"{gate['effect']:.3g} from those of the base alone"),
    ]


def loading_lines(base: str, path: str) -> list[str]:
    """Return three lines of Python that load the adapter on its base."""
    return [
        "from peft import PeftModel; from transformers import AutoModelForCausalLM",
        f"base = AutoModelForCausalLM.from_pretrained({_base_arguments(base)})",
        f"model = PeftModel.from_pretrained(base, {path!r})",
    ]


def _base_arguments(base: str) -> str:
    """Return what `from_pretrained` takes for a base; a GGUF file is named beside its directory."""
    if not base.endswith(".gguf"):
        return repr(base)
    try:
        path = locate_base(ModelConfig(pretrained=base)).path or Path(base)
    except ConfigError:  # it is on another machine: the lines are to be read there
        path = Path(base)
    return f"{str(path.parent)!r}, gguf_file={path.name!r}"
