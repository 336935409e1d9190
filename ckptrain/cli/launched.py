"""One process of several that `ckptrain.cli.launch` has started: it leaves its pid and its exit status as files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

LAUNCH = "CKPTRAIN_LAUNCH"
"""Environment variable of a launched process: the directory where it leaves `pid.RANK.PID` and `status.RANK.STATUS`."""

_POLL_S = 0.05
_SETTLE_S = 60.0
"""How long a process that has failed leaves the others to end by themselves: rank 0 may be writing its last lines."""
_PR_SET_PDEATHSIG = 1


def is_launched(environment: Mapping[str, str]) -> bool:
    """Tell whether this process is one of a launch already: ours, torchrun's, or another that sets RANK."""
    return "RANK" in environment or "TORCHELASTIC_RUN_ID" in environment


@contextlib.contextmanager
def as_rank(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Be one of the processes of `launch`, where this is one: answer to its signals, leave it the exit status.

    The kernel sends this process SIGTERM when its launcher is gone, so that no rank is left behind.
    """
    name = environment.pop(LAUNCH, None)  # not for the children of this process
    if name is None:
        yield
        return
    directory, rank = Path(name), environment["RANK"]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    (directory / f"pid.{rank}.{os.getpid()}").touch()
    # It was gone before the kernel was told, or had a signal before it knew whom to pass it on to.
    if str(os.getppid()) != (directory / "launcher").read_text() or (directory / "asked").exists():
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        yield
    except SystemExit as end:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads any more
                stream.flush()
        (directory / f"status.{rank}.{end.code}").touch()
        if end.code and not _others_end(directory, int(environment["WORLD_SIZE"])):
            raise  # so that the agent ends them: they may wait for this process in a collective
        raise SystemExit(0) from None


def _others_end(directory: Path, num_processes: int) -> bool:
    """Wait until all processes have left their status; return False where one died without, or they take too long."""
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        gone = {rank for rank, pid in left_in(directory, "pid").items() if not _is_there(pid)}
        ended = left_in(directory, "status").keys()  # read last: a process leaves it before it goes
        if len(ended) == num_processes:
            return True
        if gone - ended:
            return False
        time.sleep(_POLL_S)
    return False


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def left_in(directory: Path, kind: str) -> dict[int, int]:
    """Return what the ranks have left of a kind, their pids or their statuses, in the order of time."""
    found = [(path.stat().st_mtime_ns, *map(int, path.name.split(".")[1:])) for path in directory.glob(f"{kind}.*")]
    return {rank: value for _, rank, value in sorted(found)}
