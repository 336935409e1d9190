"""How does a command end? With an answer or a failure, as text or as the one JSON object on stdout, and a status."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

import attrs
import click
import orjson

from ckptrain.cli.error_log import journal_of_run, write_trace
from ckptrain.errors import EXIT_DONE, EXIT_FAILURE, CkptrainError, PhaseError, ProblemsError, RankFailed

if TYPE_CHECKING:
    from rich.console import Console

EXIT_INTERRUPTED = 130
"""What shells give for a process that SIGINT ended: 128 + 2."""

DEBUG = "CKPTRAIN_DEBUG"
"""Environment variable: 1 shows tracebacks, as --debug does, which sets it for the processes of a launch."""
FAULT = "This is a fault in ckptrain"
"""Begins what is said of one."""

_DISK_HINTS = {
    errno.ENOSPC: "free some space and run it again",
    errno.EDQUOT: "free some of your quota and run it again",
    errno.EROFS: "the file system is read-only: use another directory",
    errno.EACCES: "check who may read and write there",
    errno.EPERM: "check who may read and write there",
    errno.EIO: "the disk or the network file system has a fault",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "free some memory and run it again",
}
_MEMORY = (
    "out of memory: try a smaller train.micro_batch_size or data.sequence_length, or spread the model with"
    " parallel.tensor; `ckptrain plan` estimates what is needed"
)
_FAULT_TEXT = f"{FAULT}; please report it with its log and the output of `ckptrain doctor --json`."


@attrs.frozen(kw_only=True)
class Answer:
    """What a command found out, in JSON's types, and how it is shown to people."""

    report: Mapping[str, Any]
    show: Callable[[Console], None] | None = None
    """None where everything has been shown already."""
    exit_status: int = EXIT_DONE


@attrs.frozen(kw_only=True)
class Failure:
    """Why a command did not get to its end."""

    kind: str
    message: str
    exit_status: int
    problems: tuple[str, ...] = ()
    trace: str = ""
    """The traceback; empty where there was no error in code, as for a word that is no command."""
    is_fault: bool = False
    """Whether it is one of ckptrain itself: everything else is told in full by the message."""
    log: Path | None = None
    """Where more about it is written."""

    def report(self) -> dict[str, Any]:
        """Return the failure in JSON's types."""
        log = None if self.log is None else str(self.log)
        error = {"kind": self.kind, "message": self.message, "problems": list(self.problems), "log": log}
        return {"error": error, "exit_status": self.exit_status}


class JsonStdout:
    """Keeps stdout for one JSON object: while entered, whatever else is printed goes to stderr.

    The descriptor is redirected too, because libraries in C, and children, know nothing of `sys.stdout`.
    """

    def __enter__(self) -> Self:
        self._stream: TextIO = sys.stdout
        self._kept: int | None = None
        self._stream.flush()
        with contextlib.suppress(io.UnsupportedOperation, OSError):  # a stream in memory has no descriptor
            self._number = self._stream.fileno()
            self._kept = os.dup(self._number)
            os.dup2(sys.stderr.fileno(), self._number)
        sys.stdout = sys.stderr
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout.flush()
        sys.stdout = self._stream
        if self._kept is not None:
            os.dup2(self._kept, self._number)
            os.close(self._kept)
            self._kept = None


def print_json(report: Mapping[str, Any]) -> None:
    """Print one object; on one line where it goes to a program, indented where a person reads it."""
    option = orjson.OPT_INDENT_2 if sys.stdout.isatty() else 0
    print(orjson.dumps(report, option=option, default=str).decode())


def failure_of(error: Exception) -> Failure:
    """Return how an error is told: what a caller can act on by its message, a fault of ours as one."""
    from ckptrain.checkpoint.working_copy import as_given

    failure = _failure_of(error)
    problems = tuple(as_given(problem) for problem in failure.problems)
    return attrs.evolve(failure, message=as_given(failure.message), problems=problems)


def _failure_of(error: Exception) -> Failure:
    kind, message = type(error).__name__, str(error)
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, click.exceptions.Abort):
        return Failure(kind="Interrupted", message="interrupted", exit_status=EXIT_INTERRUPTED)
    if isinstance(error, click.ClickException):
        return Failure(kind=kind, message=_usage(error), exit_status=error.exit_code)
    if isinstance(error, RankFailed):
        # The process in which it happened has the traceback, and keeps it; the others say whose it is.
        here = error.__cause__ is not None
        said = f"{message}\n{_FAULT_TEXT}" if here else message
        return Failure(kind=kind, message=said, exit_status=error.exit_status, trace=trace, is_fault=here)
    if isinstance(error, PhaseError):
        return Failure(kind=kind, message=message, exit_status=error.exit_status, trace=trace, is_fault=True)
    if isinstance(error, CkptrainError):
        problems = error.problems if isinstance(error, ProblemsError) else ()
        return Failure(kind=kind, message=message, exit_status=error.exit_status, problems=problems, trace=trace)
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != "ckptrain":
        from ckptrain.installed import EVERYTHING

        package = error.name.partition(".")[0]
        message = f"the Python package {package} is needed here and not installed: install it, or {EVERYTHING}"
        return Failure(kind=kind, message=message, exit_status=EXIT_FAILURE, trace=trace)
    if isinstance(error, OSError) and error.errno in _DISK_HINTS:
        where = f" ({error.filename})" if error.filename else ""
        message = f"{error.strerror}{where}; {_DISK_HINTS[error.errno]}"
        return Failure(kind=kind, message=message, exit_status=EXIT_FAILURE, trace=trace)
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError":  # torch's, which is not imported for its name
        first = message.splitlines()[0] if message else "no details"
        return Failure(kind=kind, message=f"{_MEMORY}\n({first})", exit_status=EXIT_FAILURE, trace=trace)
    return Failure(
        kind=kind,
        message=f"{kind}: {message}\n{_FAULT_TEXT}",
        exit_status=EXIT_FAILURE,
        trace=trace,
        is_fault=True,
    )


def with_log(failure: Failure, environment: Mapping[str, str]) -> Failure:
    """Keep the traceback of a fault in a file, and say where there is more to read about a failure."""
    log = write_trace(failure.trace, environment) if failure.is_fault else journal_of_run()
    return attrs.evolve(failure, log=log)


def tell_failure(failure: Failure, environment: Mapping[str, str]) -> None:
    """Print a failure on stderr, red on a terminal; the traceback only where that is asked for, or kept nowhere.

    An error that all processes of a launch share is told in full by the first one. The others, whose stderr may be the
    same terminal, give its first line, so that an error of theirs alone is not lost.
    """
    rank = environment.get("RANK", "0")
    label, message = "error: ", failure.message
    if rank != "0":
        label = f"error (rank {rank}): "
        message = message if failure.is_fault else message.partition("\n")[0]
    click.secho(label, fg="red", bold=True, nl=False, err=True)
    click.echo(message, err=True)
    if failure.log is not None and (failure.is_fault or rank == "0"):
        click.echo(f"log: {failure.log}", err=True)
    if environment.get(DEBUG) == "1" or (failure.is_fault and failure.log is None):
        click.echo(failure.trace, nl=False, err=True)


def _usage(error: click.ClickException) -> str:
    """Return a usage error with the way to the command's help."""
    context = getattr(error, "ctx", None)
    message = error.format_message()
    return message if context is None else f"{message}\nSee `{context.command_path} --help`."


def answer_or_failure(ask: Callable[[], Any]) -> Answer | Failure:
    """Run a command to its end, whatever that is."""
    try:
        found = ask()
    except Exception as error:
        return failure_of(error)
    # Click returns a status of its own where it answered by itself, as for --help.
    return found if isinstance(found, Answer) else Answer(report={}, exit_status=int(found or 0))


def wants(option: str, arguments: Sequence[str]) -> bool:
    """Tell whether a flag that all commands have is given, before the arguments are known to make sense."""
    words = list(arguments)
    return option in (words[: words.index("--")] if "--" in words else words)
