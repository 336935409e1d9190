"""Who works in a run directory? One run at a time, on local and on network file systems, and a crash lets go of it.

Two things say so. The kernel's lock on RUN/.lock goes with the process that holds it, but a file system may have none
(Lustre mounted without flock, NFS without a lock daemon), or one that other hosts do not see (localflock). The other is
a record, RUN/.lock-N for the Nth start, which its holder writes anew every few seconds.

A start takes over at once from a holder that it knows to be dead, and is refused at once where it knows it to be alive.
Where it cannot know, it watches the record: a change is a beat, silence over several beats a death. Only changes count,
because the clocks of two hosts need not agree. To take over from N is to create N+1, which one process can, and to
remove N, by which a holder that was only paused finds out. No number is used twice: the record of a run that has ended
stays, marked as released, until the next start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import attrs
import orjson
from filelock import FileLock, Timeout

from ckptrain.checkpoint import processes, strict_json
from ckptrain.checkpoint.lock_records import LOCK, Records, records_of
from ckptrain.errors import ClaimLost, SaveFailed, StartRefused

_RECORD_BYTES = 640
_NO_FLOCK = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}


@attrs.frozen(kw_only=True)
class Pace:
    """How often a holder shows that it is alive, and how long a start waits for that."""

    beat_s: float = 5.0
    """Seconds between two beats, and between two looks of a start that watches."""
    patience: int = 12
    """Looks in a row without a beat after which a holder counts as dead. Looks and not seconds: while the file system
    hangs, the look hangs as well as the beat."""


PACE = Pace()
OBJECT_PACE = Pace(beat_s=15.0, patience=6)
"""In an object store, where every beat is a request that costs something."""


@attrs.frozen(kw_only=True)
class Holder:
    """The run that holds a directory, or died without letting go of it."""

    pid: int
    host: str
    started: str
    """UTC, by the clock of its host."""
    held_s: float
    """For how long it had held the directory at its last beat, by its own clock."""
    alive: bool | None
    """None where that cannot be told from here, because it is on another host or in another container."""

    def describe(self) -> str:
        """Return which process it is and for how long, for a message."""
        age = timedelta(seconds=int(self.held_s))
        return f"process {self.pid} on {self.host}, started {age} ago ({self.started})"


@attrs.frozen(kw_only=True)
class _Record:
    """What a holder says of itself in its file; what changes comes last, so that a torn one still has its token."""

    token: str
    pid: int
    host: str
    pid_space: str
    """Where `pid` means this process: a boot of a kernel, and a PID namespace of it; empty where that is not known."""
    born: int
    """When the process began, in ticks since that boot: a number is given to another process in time."""
    started: str
    beat_s: float
    held_s: float
    """Differs from one beat to the next."""
    released: bool = False

    def to_bytes(self) -> bytes:
        """Return one line of JSON, always of the same length: a record written over another leaves no rest of it."""
        return orjson.dumps(attrs.asdict(self)).ljust(_RECORD_BYTES - 1) + b"\n"

    def holder(self) -> Holder:
        """Return what others need to know of it."""
        return Holder(pid=self.pid, host=self.host, started=self.started, held_s=self.held_s, alive=_is_alive(self))


@attrs.frozen(kw_only=True)
class _Sight:
    """The newest record as it was read at one moment; number 0 where there is none."""

    number: int
    data: bytes

    def record(self) -> _Record | None:
        """Return what it says; None where it is being written, was torn, or is of another version."""
        problems: list[str] = []
        try:
            record: _Record | None = strict_json.read(_Record, strict_json.decode(self.data), "", problems)
        except ValueError:
            return None
        return None if problems else record

    def is_of(self, token: str) -> bool:
        """Tell whether the holder with this token wrote it, be it torn."""
        return token.encode() in self.data


@attrs.frozen(kw_only=True)
class Claim:
    """A run directory held by this run; can be sent to other processes, which may ask but not let go."""

    run_dir: Path
    number: int
    token: str

    @property
    def path(self) -> Path:
        """Return the file with the holder's record."""
        return self.run_dir / f"{LOCK}-{self.number}"

    def check(self) -> None:
        """Make sure that no other run has taken over, as it may while this process or its machine is suspended.

        Raises:
            ClaimLost: one has; nothing may be committed any more.
            SaveFailed: the directory cannot be read.
        """
        try:
            newest = _newest(records_of(self.run_dir), at_least=self.number)
        except OSError as error:
            raise SaveFailed(
                f"cannot read {self.path}: {error.strerror}; it tells whether this run still holds its directory, and"
                " without that nothing is committed; see that the disk or the store is there, and run it again"
            ) from error
        if newest.is_of(self.token):
            return
        record = newest.record()
        successor = f"by {record.holder().describe()}" if record is not None else f"or {self.path} was removed by hand"
        raise ClaimLost(
            f"this run no longer holds {self.run_dir}: it was suspended or cut off for so long that it counted as dead,"
            f" and the directory was taken over {successor}; what it had committed is there, and that run goes on from"
            " it; to go on here, stop that run and start again"
        )


@contextlib.contextmanager
def hold(run_dir: Path, *, pace: Pace | None = None, tell: Callable[[str], object] = lambda _: None) -> Iterator[Claim]:
    """Hold an existing directory for this process as long as the block lasts.

    Args:
        run_dir: the directory.
        pace: of this holder, where it is not the usual one; it is written in the record, and a start that watches goes
            by the slower of both.
        tell: is told what is waited for, where a start has to watch.

    Raises:
        StartRefused: another run holds it.
        OSError: the directory cannot be read or written.
    """
    records = records_of(run_dir)
    pace = pace or (PACE if records.under_kernel else OBJECT_PACE)
    kernel = FileLock(run_dir / LOCK, timeout=0, fallback_to_soft=False)
    locked = _lock(kernel)
    if locked and not records.under_kernel:
        locked = None  # it keeps others from this working copy, and says nothing of other machines
    try:
        claim, record = _take(run_dir, records, pace, tell, locked=locked)
        with _beating(records, claim.number, record):
            for older in records.numbers():
                if older < claim.number:
                    records.remove(older)
            yield claim
    finally:
        kernel.release()


def holder(run_dir: Path) -> Holder | None:
    """Return who holds a directory, as far as can be read; None for nobody. Nothing is locked or changed."""
    try:
        record = _newest(records_of(run_dir)).record()
    except OSError:
        return None
    return None if record is None or record.released else record.holder()


def _lock(kernel: FileLock) -> bool | None:
    """Take the kernel's lock; False where another process has it, None where the file system has no such lock."""
    try:
        kernel.acquire()
    except Timeout:
        return False
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return None
    return True


def _take(
    run_dir: Path, records: Records, pace: Pace, tell: Callable[[str], object], *, locked: bool | None
) -> tuple[Claim, _Record]:
    """Become the holder, or find that there is one; every turn of the loop follows something that another run did."""
    newest = _newest(records)
    while True:
        record, held = newest.record(), _is_held(newest)
        if held and not locked:
            raise _refusal(run_dir, record)
        if held is not False or locked is False:
            later = _watch(run_dir, records, newest, pace, tell)
            if later != newest:
                moved = later.record()
                if record is not None and moved is not None and moved.token == record.token and not moved.released:
                    raise _refusal(run_dir, moved)
                newest = later
                continue
            # A silent holder may leave a lock behind: a lost host with the daemon of its server, a parent with its
            # child. Then the record decides; a lock without a record is somebody else's.
            if locked is False and (record is None or record.released):
                raise _refusal(run_dir, None)
        if (taken := _create(run_dir, records, newest.number + 1, pace)) is not None:
            return taken
        newest = _newest(records, at_least=newest.number + 1)


def _is_held(newest: _Sight) -> bool | None:
    """Tell whether the newest holder's process is there; None where only watching the record can tell."""
    record = newest.record()
    if newest.number == 0 or (record is not None and record.released):
        return False
    # One of this very process may be at work, or one that the disk did not let be marked as released.
    return None if record is None or record.pid == os.getpid() else _is_alive(record)


def _watch(run_dir: Path, records: Records, newest: _Sight, pace: Pace, tell: Callable[[str], object]) -> _Sight:
    """Return the first sight that differs from `newest`, or `newest` once patience is over."""
    record = newest.record()
    beat_s = pace.beat_s if record is None else max(pace.beat_s, record.beat_s)
    whom = "a run that is starting" if record is None or record.released else record.holder().describe()
    tell(f"{run_dir} is held by {whom}: waiting up to {beat_s * pace.patience:g} s for a sign of life")
    for _ in range(pace.patience):
        time.sleep(beat_s)
        later = _newest(records, at_least=newest.number)
        if later != newest:
            return later
    return newest


def _create(run_dir: Path, records: Records, number: int, pace: Pace) -> tuple[Claim, _Record] | None:
    """Write the record of this process under a number; None if another run has taken it."""
    record = _Record(
        token=secrets.token_hex(16),
        pid=os.getpid(),
        host=socket.gethostname(),
        pid_space=processes.pid_space(),
        born=processes.born(os.getpid()),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        beat_s=pace.beat_s,
        held_s=0.0,
    )
    if not records.create(number, record.to_bytes()):
        return None
    return Claim(run_dir=run_dir, number=number, token=record.token), record


@contextlib.contextmanager
def _beating(records: Records, number: int, record: _Record) -> Iterator[None]:
    """Renew a record until the block ends, then mark it as released; a forked child does neither."""
    stop, owner, began = threading.Event(), os.getpid(), time.monotonic()

    def beat(*, released: bool = False) -> None:
        # A disk that is full or away for a while must not end the run: the next beat tries again.
        with contextlib.suppress(OSError):
            now = attrs.evolve(record, held_s=time.monotonic() - began, released=released)
            records.rewrite(number, record.token, now.to_bytes())

    def beat_on() -> None:
        while not stop.wait(record.beat_s):
            beat()

    thread = threading.Thread(target=beat_on, name="ckptrain-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        if os.getpid() == owner:
            stop.set()
            thread.join()
            beat(released=True)


def _newest(records: Records, at_least: int = 0) -> _Sight:
    """Read the newest record.

    Args:
        records: those of the run directory.
        at_least: a number known to be taken: NFS may list a directory as it was half a minute ago.

    Raises:
        OSError: they cannot be read.
    """
    number = max([at_least, *records.numbers()])
    return _Sight(number=number, data=records.read(number) if number else b"")


def _is_alive(record: _Record) -> bool | None:
    """Tell whether a record's process is alive; None where this process cannot see it."""
    return processes.is_alive(record.pid, record.pid_space, record.born)


def _refusal(run_dir: Path, record: _Record | None) -> StartRefused:
    """Return the error that names who holds a directory."""
    who = f"a process that has left no record of itself has locked {run_dir / LOCK}"
    if record is not None:
        who = record.holder().describe()
    return StartRefused(
        f"cannot start in {run_dir}: another run is at work in it",
        [f"{who}; wait for it, stop it (it saves on SIGTERM), or use another --run-dir"],
    )
