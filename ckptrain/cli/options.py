"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

type Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class PlacePath(click.Path):
    """A path, or the URL of a run in an object store, which becomes the path of its working copy."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if isinstance(value, str) and "://" in value:
            from ckptrain.checkpoint.working_copy import local_path

            return local_path(value)
        return super().convert(value, param, ctx)


def json_option(*, exposed: bool = False) -> Decorator:
    """Accept --json; the group acts on it, so that most commands need not know."""
    text = "Print one JSON object on stdout."
    return click.option("--json", "as_json", is_flag=True, expose_value=exposed, help=text)


def quiet_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Accept --quiet."""
    return click.option("-q", "--quiet", is_flag=True, help="Print only warnings, errors and the end.")(command)


def processes_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Accept --nproc-per-node."""
    return click.option(
        "--nproc-per-node",
        "num_processes",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help="Processes on this machine, one for each GPU; the launcher decides where there is one (torchrun, srun).",
    )(command)


def run_dir_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Accept --run-dir."""
    return click.option(
        "--run-dir",
        type=PlacePath(),
        help="Where the run lives, a directory or a URL such as s3://BUCKET/NAME; runs/CONFIG-NAME if left out.",
    )(command)


def overwrite_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Accept --overwrite."""
    return click.option("--overwrite", is_flag=True, help="Replace an earlier one at OUT.")(command)


def verify_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Accept --verify and --no-verify; None where neither is given."""
    return click.option(
        "--verify/--no-verify",
        default=None,
        help="Compare logits with those under Megatron first; left out, where the base is here and small.",
    )(command)


def base_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Accept --base."""
    return click.option(
        "--base",
        metavar="MODEL",
        help="The base model, where the adapter names none or one that lies elsewhere; a Hub id or a path.",
    )(command)


def overrides(command: Callable[..., Any]) -> Callable[..., Any]:
    """Accept any number of key=value."""

    def complete(*asked: Any) -> list[CompletionItem]:
        from ckptrain.cli.completion import complete_overrides

        return complete_overrides(*asked)

    return click.argument("overrides", nargs=-1, metavar="[key=value ...]", shell_complete=complete)(command)


def run_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Accept a run directory."""
    return click.argument("run_dir", metavar="RUN", type=PlacePath(), shell_complete=complete_directory)(command)


def complete_directory(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete a directory."""
    return [CompletionItem(incomplete, type="dir")]


def complete_section(*asked: Any) -> list[CompletionItem]:
    """Complete the name of a section of a config."""
    from ckptrain.cli.completion import complete_sections

    return complete_sections(*asked)
