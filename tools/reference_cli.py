"""docs/reference/cli.md: every command with its arguments and options, as click knows them."""

from __future__ import annotations

from typing import Any

import click
from reference_fields import cell, code, either_text, table

from ckptrain.cli.main import cli

HEAD = """# Command line

`ckptrain COMMAND --help` prints the same. `--json` prints one object on stdout, errors included, and everything else on
stderr. In a checkout, `uv run ckptrain` finds the environment.

| exit status | meaning |
|---|---|
| 0 | done |
| 2 | wrong usage, or the path is no run or checkpoint |
| 65 | a checkpoint is damaged |
| 69 | the start is refused; the message says why, and what to do |
| 75 | stopped early and saved: run it again |
| 78 | the config, the model or the data cannot be used |
| 130 | interrupted while it was starting |
| 1 | anything else |
"""


def cli_page() -> str:
    """Return the page."""
    context = click.Context(cli, info_name="ckptrain")
    return HEAD + "".join(_command(name, command, context) for name, command in cli.commands.items())


def _command(name: str, command: click.Command, parent: click.Context) -> str:
    context = click.Context(command, info_name=name, parent=parent)
    usage = command.get_usage(context).removeprefix("Usage: ")
    text = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n")).strip()
    rows = [
        (_names(option), _meaning(option, context))
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
    ]
    options = table(("option", "meaning"), rows) if rows else ""
    return f"\n## ckptrain {name}\n\n```text\n{' '.join(usage.split())}\n```\n\n{text}\n\n{options}"


def _names(option: click.Option) -> str:
    names = [*option.opts, *option.secondary_opts]
    value = "" if option.is_flag else f" {option.metavar or _kind(option)}"
    return ", ".join(code(f"{name}{value}") for name in names)


def _kind(option: click.Option) -> str:
    return "CHOICE" if isinstance(option.type, click.Choice) else option.type.name.upper()


def _meaning(option: click.Option, context: click.Context) -> str:
    """Return what an option means, what it may be, and what it is where it is not given."""
    parts = [cell(option.help or "")]
    if isinstance(option.type, click.Choice):
        parts.append(f"CHOICE is {either_text([code(str(choice)) for choice in option.type.choices])}.")
    default: Any = option.get_default(context)
    if option.show_default and default is not None:
        parts.append(f"Default {code(str(default))}.")
    return " ".join(parts)
