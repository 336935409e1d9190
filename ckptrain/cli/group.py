"""How a command is run: its answer is shown, or its error told, and its status is the process's."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from ckptrain.cli.error_log import keep_logs_in
from ckptrain.cli.outcome import (
    DEBUG,
    Answer,
    Failure,
    JsonStdout,
    answer_or_failure,
    print_json,
    tell_failure,
    wants,
    with_log,
)


def debug_option() -> click.Option:
    """Return --debug; the group acts on it before it reads the rest."""
    text = f"Show the traceback of an error; so does {DEBUG}=1."
    return click.Option(["--debug"], is_flag=True, expose_value=False, help=text)


class Commands(click.Group):
    """A group whose commands return an `Answer`; it shows the answer, or tells the error, and exits with its status."""

    def main(  # type: ignore[override]  # what click would do in its standalone mode is done here
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run one command and exit."""
        words = list(sys.argv[1:] if args is None else args) or ["--help"]
        as_json = wants("--json", words)
        if wants("--debug", words):
            os.environ[DEBUG] = "1"
        keep_logs_in(None)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a model's answer may hold what a terminal has no sign for

        def ask() -> Any:
            return super(Commands, self).main(words, prog_name or "ckptrain", standalone_mode=False, **extra)

        if as_json:
            with JsonStdout():
                outcome = answer_or_failure(ask)
        else:
            outcome = answer_or_failure(ask)
        if isinstance(outcome, Failure):
            outcome = with_log(outcome, os.environ)
            tell_failure(outcome, os.environ)
        if as_json and os.environ.get("RANK", "0") == "0":
            print_json(_report(outcome))
        elif isinstance(outcome, Answer) and outcome.show is not None:
            from ckptrain.cli.page import open_console

            outcome.show(open_console())
        sys.exit(outcome.exit_status)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command, with the option that all of them have."""
        cmd.params.append(debug_option())
        super().add_command(cmd, name)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's interface
        """Return the commands in the order in which they are written here: that of a run's life."""
        return list(self.commands)


def _report(outcome: Answer | Failure) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return outcome.report()
    return {**outcome.report, "exit_status": outcome.exit_status}
