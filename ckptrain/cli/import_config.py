"""`ckptrain import-config`: another trainer's config as one of ours, with what changed and what has no counterpart."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import Row, facts
from ckptrain.config.foreign import read_foreign
from ckptrain.config.from_bridge import from_bridge, is_bridge
from ckptrain.config.from_nemo_rl import from_nemo_rl, is_nemo_rl
from ckptrain.config.imported import Imported, shown_values
from ckptrain.config.load import unflatten
from ckptrain.errors import ConfigError

_TEMPLATE_SUFFIX = ".jinja"


def import_config_answer(path: Path, out: Path | None, *, overwrite: bool) -> Answer:
    """Write our config for one of NeMo-RL or Megatron-Bridge; without `out` it is printed.

    Raises:
        ConfigError: the file cannot be read, or is of no kind that is known.
        click.UsageError: `out` is there already.
    """
    foreign = read_foreign(path)
    if is_nemo_rl(foreign):
        found = from_nemo_rl(foreign)
    elif is_bridge(foreign):
        found = from_bridge(foreign)
    else:
        raise ConfigError(
            f"cannot import {path}",
            [
                "it is neither a config of NeMo-RL (it has no section `policy`) nor a run_config.yaml of"
                " Megatron-Bridge (it has no sections `model` and `train` with train_iters)"
            ],
        )
    _place_template(found, out, overwrite=overwrite)
    text = found.to_yaml(path.name)
    if out is not None:
        _write(out, text, overwrite=overwrite)
    report = {
        "form": found.form,
        "out": None if out is None else str(out),
        "config": unflatten(found.settings),
        "missing": list(found.missing),
        "problems": found.problems(),
        "changed": found.changed,
        "no_counterpart": found.dropped,
        "ignored": found.ignored,
        "yaml": text,
    }
    return Answer(report=report, show=functools.partial(_show, found, report))


def _place_template(found: Imported, out: Path | None, *, overwrite: bool) -> None:
    """Write a chat template that the config has as text into a file beside ours."""
    if found.template is None:
        return
    if out is None:
        found.note("data.chat_template", "the file has a chat template as text: with --out it is put into a file")
        return
    path = out.with_suffix(_TEMPLATE_SUFFIX)
    _write(path, found.template, overwrite=overwrite)
    found.set("data.chat_template", path.name, "policy.tokenizer.chat_template")


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise click.UsageError(f"{path} is there already; --overwrite replaces it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _show(found: Imported, report: Mapping[str, Any], console: Console) -> None:
    if report["out"] is None:
        print(report["yaml"], end="")
        return
    rows: list[Row] = [
        (found.form, f"{len(found.settings)} keys written to {report['out']}, each with where it is from"),
        *(("give", Text(f"{key}: the file does not say it", style="bold yellow")) for key in report["missing"]),
        *(("mend", Text(problem, style="red")) for problem in report["problems"]),
        *(
            ("changed", Text.assemble((key, "cyan"), f": {text}"))
            for key, texts in found.changed.items()
            for text in texts
        ),
        *(("dropped", text) for text in (*found.ignored, *shown_values(found.dropped))),
    ]
    console.print(facts(_once(rows)))
    if not (report["missing"] or report["problems"]):
        console.print(f"Look before you start: ckptrain plan {report['out']}")


def _once(rows: list[Row]) -> list[Row]:
    """Leave out a label that the row above has."""
    return [
        ("" if number and rows[number - 1][0] == label else label, text) for number, (label, text) in enumerate(rows)
    ]
