"""Is every process of a launch alive, and does it get on? Each says so to all, without its main thread or a collective.

A process that is lost leaves the others waiting for it in a collective, where no Python runs: NCCL waits for half an
hour, and says then which call it was. So a thread of each process writes a sign of life into the store of the launch
every few seconds: what it does, since when, and where in the code its main thread is. Rank 0 reads them all; the others
read that of rank 0, and its verdict. Silence, or a step that does not end, ends the run on all ranks by a message that
names the process, and the next start goes on from the last checkpoint.

Only changes count, by the clock of who looks: those of hosts need not agree.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import attrs
import orjson
import torch.distributed as dist

from ckptrain.checkpoint.processes import born, is_alive, pid_space
from ckptrain.checkpoint.ranks import gather_to_all, rank, world_size
from ckptrain.errors import EXIT_FAILURE, CkptrainError, RankLost
from ckptrain.megatron.world import connect_to_store

_BEAT_S = 5.0
"""Between two signs; a sixth of the time-out where that is shorter."""
_GRACE_BEATS = 6
"""For which a process that has failed leaves the others to end by themselves."""
_SUSPENDED_BEATS = 3
"""Without a sign, after which a process is named as silent where a step does not end: its step began before that."""
_LAST_WORDS_S = 5.0
"""For what is written down of a verdict: a disk that hangs must not keep the process from its end."""
_VERDICT = "verdict"


@attrs.frozen(kw_only=True)
class Sign:
    """What a process says of itself."""

    rank: int
    host: str
    pid_space: str
    """Where `pid` means this process: containers on one host may have one name, and each a process of that number."""
    pid: int
    born: int
    """When it began: its number is given to another in time."""
    beat: int
    """Differs from one sign to the next."""
    doing: str
    is_step: bool
    """Whether what it does must come to an end within the time-out."""
    for_s: float
    at: str
    """Where its main thread is in the code."""
    error: str | None
    """By which it ends; not one that only says that another process is gone."""

    def who(self) -> str:
        """Name it."""
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class Watchdog:
    """Watches the processes of a launch while entered; collective. One process alone is not watched."""

    def __init__(self, timeout_s: float) -> None:
        """Take for how long a step may last, or a process be silent."""
        self._rank, self._world_size = rank(), world_size()
        self._store: Any = None  # a connection of its own: the main thread may wait in another
        self._timeout_s = timeout_s
        self._beat_s = min(_BEAT_S, timeout_s / 6)
        self._where: Callable[[], tuple[str, bool]] = lambda: ("starting", False)
        self._on_verdict: Callable[[RankLost], object] = lambda _: None
        self._is_over: Callable[[], bool] = lambda: False
        self._main, self._born = threading.get_ident(), born(os.getpid())
        self._error: str | None = None
        self._beats = 0
        self._changed: tuple[str, float] = ("", time.monotonic())
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._looked_at = time.monotonic()
        self._threads = [
            threading.Thread(target=target, name="watchdog", daemon=True) for target in (self._watch, self._guard)
        ]

    def __enter__(self) -> Self:
        if self._world_size > 1:
            self._store = connect_to_store()
            self._say()
            gather_to_all(None)  # so that all have said something
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            if thread.ident:
                thread.join(2 * self._beat_s)

    def follow(
        self,
        where: Callable[[], tuple[str, bool]],
        on_verdict: Callable[[RankLost], object],
        is_over: Callable[[], bool],
    ) -> None:
        """Say from now on what `where` returns, and whether that is a step; tell `on_verdict` of the end of the run.

        Where the run `is_over` nobody is waited for: the others may leave, while a program has more to do on one rank.
        """
        self._where, self._on_verdict, self._is_over = where, on_verdict, is_over

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Say the error that the block ends by to the others; of a lost connection, say what became of who was there.

        Raises:
            RankLost: in the place of an error that only says that another process does not answer.
        """
        try:
            yield
        except BaseException as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error

    def _explained(self, error: BaseException) -> BaseException:
        if self._world_size == 1 or isinstance(error, CkptrainError) or not isinstance(error, Exception):
            return error
        try:
            if not _is_of_connection(error):
                self._say()
                self._error = f"{type(error).__name__}: {error}"
                self._say()
                return error
            found = self._who_failed()
        except dist.DistError:  # the store is gone as well
            found = self._store_is_gone()
        return error if found is None else RankLost(found)

    def _who_failed(self) -> str | None:
        """Look for a process that says its error, or says nothing any more, for some beats."""
        before = self._read(range(self._world_size))
        for _ in range(6):
            time.sleep(self._beat_s / 2)
            now = self._read(range(self._world_size))
            signs = {number: _parsed(data) for number, data in now.items()}
            for sign in signs.values():
                if sign.error is not None:
                    return f"{sign.who()} has failed while {sign.doing}: {sign.error}"
                if sign.rank != self._rank and _is_gone(sign):
                    return f"{sign.who()} is gone, killed or dead without a word; its last sign was of {sign.doing}"
        silent = [signs[number] for number in now if now[number] == before[number] and number != self._rank]
        return (
            "; ".join(f"{sign.who()} says nothing any more; its last sign was of {sign.doing}" for sign in silent)
            or None
        )

    def _watch(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                verdict = self._look()
            except dist.DistError:
                if self._ended.wait(_GRACE_BEATS * self._beat_s):
                    return
                verdict = self._store_is_gone()
            self._looked_at = time.monotonic()
            if verdict is not None and not self._ended.is_set() and not self._is_over():
                self._end(verdict)

    def _guard(self) -> None:
        """See that `_watch` does not wait for a store whose process is suspended: it would, for as long as that is."""
        while not self._ended.wait(self._beat_s):
            silent_s = time.monotonic() - self._looked_at
            if silent_s > self._timeout_s + _GRACE_BEATS * self._beat_s and not self._is_over():
                self._end(self._store_is_gone())

    def _look(self) -> str | None:
        """Say a sign; return why the run has to end, where it has to."""
        self._say()
        if self._store.check([_VERDICT]):
            return str(self._store.get(_VERDICT).decode())
        watched = range(self._world_size) if self._rank == 0 else [0]
        now = time.monotonic()
        signs = []
        for number, data in self._read(watched).items():
            if self._heard.get(number, (b"", 0.0))[0] != data:
                self._heard[number] = (data, now)
            signs.append(_parsed(data))
        silent_s = {sign.rank: now - self._heard[sign.rank][1] for sign in signs}
        verdict = self._verdict(signs, silent_s)
        if verdict is not None and self._rank == 0 and not self._is_over():
            self._store.set(_VERDICT, verdict)
        return verdict

    def _verdict(self, signs: Sequence[Sign], silent_s: dict[int, float]) -> str | None:
        stuck = [sign for sign in signs if sign.is_step and sign.for_s > self._timeout_s] if self._rank == 0 else []
        limit_s = _SUSPENDED_BEATS * self._beat_s if stuck else self._timeout_s
        silent = [sign for sign in signs if silent_s[sign.rank] > limit_s and sign.error is None]
        if silent:
            return "; ".join(
                f"{sign.who()} {'is gone' if _is_gone(sign) else 'has said nothing'} for {silent_s[sign.rank]:.0f} s;"
                f" its last sign was of {sign.doing}, at {sign.at}"
                for sign in silent
            )
        failed = [sign for sign in signs if sign.error and silent_s[sign.rank] > _GRACE_BEATS * self._beat_s]
        if failed:
            return f"{failed[0].who()} has failed while {failed[0].doing}: {failed[0].error}"
        return _stuck(stuck, signs) if stuck else None

    def _end(self, verdict: str) -> None:
        """End this process, whatever its main thread waits for."""
        sys.stderr.write(f"error (rank {self._rank}): {verdict}\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        told = threading.Thread(target=self._on_verdict, args=(RankLost(verdict),), daemon=True)
        told.start()
        told.join(_LAST_WORDS_S)
        os._exit(EXIT_FAILURE)

    def _say(self) -> None:
        with self._lock:
            doing, is_step = self._where()
            now = time.monotonic()
            if doing != self._changed[0] and self._error is None:
                self._changed = (doing, now)
            self._beats += 1
            sign = Sign(
                rank=self._rank,
                host=socket.gethostname(),
                pid_space=pid_space(),
                pid=os.getpid(),
                born=self._born,
                beat=self._beats if self._error is None else 0,  # the last one
                doing=self._changed[0],
                is_step=is_step,
                for_s=now - self._changed[1] if self._error is None else 0.0,
                at=_place(sys._current_frames().get(self._main)),
                error=self._error,
            )
            self._store.set(f"sign-{self._rank}", orjson.dumps(attrs.asdict(sign)))

    def _read(self, ranks: Sequence[int]) -> dict[int, bytes]:
        with self._lock:
            found = self._store.multi_get([f"sign-{number}" for number in ranks])
        return dict(zip(ranks, found, strict=True))

    def _store_is_gone(self) -> str:
        keeper = "the process that keeps it, rank 0 or torchrun on its host, is gone or suspended"
        return f"the store of the launch does not answer: {keeper}"


def _parsed(data: bytes) -> Sign:
    return Sign(**orjson.loads(data))


def _stuck(stuck: Sequence[Sign], signs: Sequence[Sign]) -> str:
    """Say of a step that does not end where everybody is: those that wait for others last."""
    places: dict[str, list[Sign]] = {}
    for sign in signs:
        places.setdefault(f"{sign.doing}, at {sign.at}", []).append(sign)
    by_wait = sorted(places.items(), key=lambda item: (_waits(item[1][0].at), len(item[1])))
    where = "; ".join(f"{', '.join(sign.who() for sign in there)}: {place}" for place, there in by_wait)
    longest = max(stuck, key=lambda sign: sign.for_s)
    return f"{longest.doing} has not ended for {longest.for_s:.0f} s (train.timeout_minutes): {where}"


def _waits(at: str) -> bool:
    """Tell whether a place is one where a process waits for others."""
    return "distributed" in at.partition(",")[0]


def _place(frame: FrameType | None) -> str:
    """Return the innermost function of a stack, and the innermost of ckptrain's that has called it."""
    if frame is None:
        return "its end"
    package = str(Path(__file__).parents[1])
    found = [_shown(frame)]
    while frame is not None and not frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    if frame is not None and _shown(frame) != found[0]:
        found.append(f"called by {_shown(frame)}")
    return ", ".join(found)


def _shown(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({path.parent.name}/{path.name}:{frame.f_lineno})"


def _is_gone(sign: Sign) -> bool:
    """Tell whether a process is known to be gone, because it would be seen from here."""
    return is_alive(sign.pid, sign.pid_space, sign.born) is False


def _is_of_connection(error: Exception) -> bool:
    """Tell whether an error says no more than that another process does not answer."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
