"""Start the processes of a run on one machine, pass signals on to them, and end as they end.

torch's launcher is not used for this: it kills the other processes the moment one exits, and thirty seconds after a
signal, and a run that was asked to stop needs as long as a step and a save take, and exits with a status of its own
(75). The processes see the environment that torchrun would give them. No torch here: nothing is loaded twice.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import IO

import attrs
import click

from ckptrain.cli.wording import plural

LAUNCHER = "CKPTRAIN_LAUNCHER"
"""Environment variable of a launched process: the launcher's process id."""

_PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    # A lost terminal is a request to save and stop like any other; under nohup it is ignored, and stays so.
    signal.SIGHUP: signal.SIGTERM,
}
_POLL_S = 0.05
_SETTLE_S = 60.0
"""How long the others may take to end by themselves once one has ended badly: rank 0 may be writing its last lines."""
_TERMINATE_S = 10.0
"""How long they may take after SIGTERM: a process inside a collective does not hear it."""
_KILLING_SIGNAL = 3
"""The first is a request to save and stop, the second ends the processes where they listen, this one in any case."""
_TOLD_BYTES = 6000
_PR_SET_PDEATHSIG = 1


@attrs.frozen(kw_only=True)
class Launched:
    """How a launch ended."""

    exit_status: int
    stdout: bytes
    """What rank 0 printed, where that was to be captured."""


def is_launched(environment: Mapping[str, str]) -> bool:
    """Tell whether this process is one of a launch already: ours, torchrun's, or another that sets RANK."""
    return "RANK" in environment or "TORCHELASTIC_RUN_ID" in environment


def launch(command: Sequence[str], num_processes: int, *, capture_stdout: bool = False) -> Launched:
    """Run `command` in as many processes, as the ranks of one launch, and wait for them.

    Rank 0 has this process's stdout and stderr. What the others print is kept, and told only where one of them failed
    in a way that rank 0 cannot know of.

    Signals are passed on, and nothing is killed for being slow to save; after a second signal the processes end at once
    by themselves, and a third kills them. A process that dies takes the others with it after a minute.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(_signals_received())
        port = stack.enter_context(_reserved_port())
        ranks = [
            _start(command, number, num_processes, port, stack, capture_stdout=capture_stdout)
            for number in range(num_processes)
        ]
        first = _wait(ranks, signals)
        if first is not None:
            _tell(first, ranks, asked=bool(signals))
        return Launched(
            exit_status=0 if first is None else _exit_status(first.ended_with),
            stdout=_content(ranks[0].stdout) if capture_stdout else b"",
        )


def follow_launcher(environment: Mapping[str, str]) -> None:
    """Have the kernel send this process SIGTERM when its launcher is gone, so that no rank is left behind."""
    if sys.platform != "linux" or LAUNCHER not in environment:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(environment[LAUNCHER]):  # it was gone before the kernel was told
        os.kill(os.getpid(), signal.SIGTERM)


@attrs.define(kw_only=True)
class _Rank:
    """One process of the launch."""

    number: int
    process: subprocess.Popen[bytes]
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    ended_with: int = 0
    """Its return code once it has ended: negative for a signal."""


def _start(
    command: Sequence[str], number: int, num_processes: int, port: int, stack: ExitStack, *, capture_stdout: bool
) -> _Rank:
    first = number == 0
    stdout = _kept_output(stack) if first and capture_stdout else None
    stderr = None if first else _kept_output(stack)
    process = subprocess.Popen(  # noqa: S603  the command is this program
        command,
        env=_environment(number, num_processes, port),
        stdin=subprocess.DEVNULL,
        stdout=stdout if first else subprocess.DEVNULL,
        stderr=stderr,
        # In a group of its own: Ctrl-C goes to a whole group, and with the one passed on it would count as two.
        process_group=0,
    )
    stack.callback(_reap, process)
    return _Rank(number=number, process=process, stdout=stdout, stderr=stderr)


def _kept_output(stack: ExitStack) -> IO[bytes]:
    """Open a file for what a process prints: a pipe that nobody reads would fill and stop it."""
    return stack.enter_context(tempfile.TemporaryFile())


def _environment(number: int, num_processes: int, port: int) -> dict[str, str]:
    """Return what torchrun would set, and a share of the cores for each process where nothing else was asked for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // num_processes)),
        **os.environ,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        LAUNCHER: str(os.getpid()),
    }


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Find a free port and keep it from others until rank 0 listens on it.

    A socket that is bound and not listened on, with SO_REUSEADDR, lets another with SO_REUSEADDR (torch's store sets
    it) bind and listen, and keeps the kernel from giving the port to a connection in the meantime.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def _signals_received() -> Iterator[list[signal.Signals]]:
    """Give a list that every signal to be passed on is appended to."""
    received: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    previous = {number: signal.getsignal(number) for number in _PASSED_ON}
    heard = [number for number, handler in previous.items() if handler is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number in heard:
            signal.signal(number, previous[number])


def _wait(ranks: Sequence[_Rank], signals: Sequence[signal.Signals]) -> _Rank | None:
    """Wait until all have ended; return the first that ended with anything but 0."""
    first: _Rank | None = None
    failed_at = 0.0
    passed_on = 0
    hurry = [(_SETTLE_S, signal.SIGTERM), (_SETTLE_S + _TERMINATE_S, signal.SIGKILL)]
    while running := [rank for rank in ranks if rank.process.poll() is None]:
        for number in signals[passed_on:]:
            passed_on += 1
            _send(running, _PASSED_ON[number] if passed_on < _KILLING_SIGNAL else signal.SIGKILL)
        if first is None and (first := _first_failed(ranks)) is not None:
            failed_at = time.monotonic()
        if first is not None and hurry and time.monotonic() - failed_at >= hurry[0][0]:
            _send(running, hurry.pop(0)[1])
        time.sleep(_POLL_S)
    return first or _first_failed(ranks)


def _first_failed(ranks: Sequence[_Rank]) -> _Rank | None:
    """Return the process to blame of those that failed since the last look: one that a signal killed before others."""
    failed = []
    for rank in ranks:
        if rank.process.returncode:
            rank.ended_with = rank.process.returncode
            failed.append(rank)
    return min(failed, key=lambda rank: (rank.ended_with > 0, rank.number), default=None)


def _send(ranks: Sequence[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        rank.process.send_signal(number)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Leave no process behind, whatever ended the launcher."""
    if process.poll() is None:
        process.kill()
        process.wait()


def _exit_status(return_code: int) -> int:
    """Return what a shell would: 128 + n for a process that signal n killed."""
    return 128 - return_code if return_code < 0 else return_code


def _tell(first: _Rank, ranks: Sequence[_Rank], *, asked: bool) -> None:
    """Say on stderr what rank 0 cannot have said: that a process was killed, or how another than it failed."""
    who = f"process {first.number + 1} of {plural(len(ranks), 'process')} (rank {first.number})"
    if first.ended_with < 0 and not asked:
        name = signal.Signals(-first.ended_with).name
        hint = "; the kernel does that when memory runs out" if name == "SIGKILL" else ""
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(f"{who} was killed by {name}{hint}", err=True)
    words = _content(first.stderr)[-_TOLD_BYTES:].decode(errors="replace").strip()
    # An error that all ranks share ends them all alike and has no traceback.
    shared = ranks[0].process.returncode == first.ended_with and "Traceback (most recent call last)" not in words
    if words and not shared:
        click.echo(f"{who} ended first, with:\n{words}", err=True)


def _content(file: IO[bytes] | None) -> bytes:
    if file is None:
        return b""
    file.seek(0)
    return file.read()
