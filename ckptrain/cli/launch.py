"""Start the processes of a run on one machine through torch's launcher, and end as they end.

torch's agent ends the other processes as soon as one exits with anything but 0, and thirty seconds after a signal of
its own. A run that was asked to stop needs as long as a step and a save take, and has a status of its own (75). So the
processes leave their status as a file for the launcher and exit with 0, and signals are passed on to them here; what
the agent is left with is a process that dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import attrs
import click

from ckptrain.cli.launched import LAUNCH, left_in
from ckptrain.cli.outcome import FAULT
from ckptrain.cli.wording import plural

# A lost terminal is a request to save and stop like any other.
_PASSED_ON_AS = {number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)} | {
    signal.SIGHUP: signal.SIGTERM
}
_KILLING_SIGNAL = 3
"""The first is a request to save and stop, the second ends the processes where they listen, this one in any case."""
_POLL_S = 0.05
_TOLD_BYTES = 6000


@attrs.frozen(kw_only=True)
class Launched:
    """How a launch ended."""

    exit_status: int
    stdout: bytes
    """What rank 0 printed, where that was to be captured."""


def launch(command: Sequence[str], num_processes: int, *, capture_stdout: bool = False) -> Launched:
    """Run `command`, which enters `as_rank`, in as many processes, as the ranks of one launch, and wait for them.

    Rank 0 has this process's stdout and stderr. What the others print is kept, and told only where one of them failed
    in a way that rank 0 cannot know of. The status is that of the first that failed: the others' are its consequence.

    Signals are passed on, and nothing is killed for being slow to save; after a second signal the processes end at once
    by themselves, and a third kills them.
    """
    with tempfile.TemporaryDirectory(prefix="ckptrain-launch-") as name:
        directory = Path(name)
        (directory / "launcher").write_text(str(os.getpid()))
        os.environ[LAUNCH] = name
        with _signals_passed_on(directory) as signals:
            died = _run_agent(command, num_processes, directory, capture_stdout=capture_stdout)
        statuses = left_in(directory, "status")
        first = next((item for item in statuses.items() if item[1]), None)
        if died is not None and not statuses.get(died[0]):  # one that had failed before it died failed first
            first = died
        if first is not None:
            _tell(*first, num_processes, directory, known=first[1] == statuses.get(0), asked=bool(signals))
        status = 0 if first is None else first[1]
        return Launched(
            exit_status=status if status >= 0 else 128 - status,
            stdout=_printed(directory, 0, "stdout"),
        )


@contextlib.contextmanager
def _signals_passed_on(directory: Path) -> Iterator[Sequence[int]]:
    """Pass signals on to the ranks, and give a list of those received."""
    received: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        (directory / "asked").touch()
        sent = _PASSED_ON_AS[signal.Signals(number)] if len(received) < _KILLING_SIGNAL else signal.SIGKILL
        for pid in left_in(directory, "pid").values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)

    heard = [number for number in _PASSED_ON_AS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    previous = {number: signal.signal(number, pass_on) for number in heard}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_agent(
    command: Sequence[str], num_processes: int, directory: Path, *, capture_stdout: bool
) -> tuple[int, int] | None:
    """Run the processes under torch's agent; return the rank that died first with its exit code, None if none did."""
    # What its modules log, each with a level of its own, is told here in our words.
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // num_processes)))
    kept = dict.fromkeys(range(1, num_processes), Std.ERR) | ({0: Std.OUT} if capture_stdout else {})
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=_POLL_S,
        signals_to_handle="",
        logs_specs=DefaultLogsSpecs(log_dir=str(directory), redirects=kept, local_ranks_filter={0}),
    )
    try:
        # It puts the rank in place of ${local_rank}, and one dollar in place of two.
        elastic_launch(config, command[0])(*(word.replace("$", "$$") for word in command[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return rank, failure.exitcode
    return None


def _tell(rank: int, ended_with: int, num_processes: int, directory: Path, *, known: bool, asked: bool) -> None:
    """Say on stderr what rank 0 cannot have said: that a process was killed, or how another than it failed."""
    who = f"process {rank + 1} of {plural(num_processes, 'process')} (rank {rank})"
    if ended_with < 0 and not asked:
        name = signal.Signals(-ended_with).name
        hint = "; the kernel does that when memory runs out" if name == "SIGKILL" else ""
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(f"{who} was killed by {name}{hint}", err=True)
    words = _printed(directory, rank, "stderr")[-_TOLD_BYTES:].decode(errors="replace").strip()
    # An error that all ranks share ends them all alike and is no fault.
    if words and not (known and FAULT not in words and "Traceback (most recent call last)" not in words):
        click.echo(f"{who} ended first, with:\n{words}", err=True)


def _printed(directory: Path, rank: int, stream: str) -> bytes:
    """Return what a process wrote to a stream that is kept; torch chooses the path."""
    return b"".join(path.read_bytes() for path in directory.glob(f"*/attempt_0/{rank}/{stream}.log"))
