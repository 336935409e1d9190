"""Lay out the batches of coming steps while the present one is computed.

A step's batches are a function of its number, so nothing is lost with what was laid out ahead: a run that stops has
consumed the steps that it made, and no other.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from ckptrain.data.batches import BatchSource, MicroBatch
from ckptrain.data.stream import StreamSource


class Prefetcher:
    """The batches of steps in their order, `ahead` of them laid out in a thread; 0 lays each out when it is asked for.

    One thread, however many steps ahead: the work is copying from the page cache.
    """

    def __init__(self, source: BatchSource | StreamSource, *, first_step: int, ahead: int) -> None:
        self._source = source
        self._ahead = ahead
        self._next = first_step
        self._waiting: dict[int, Future[list[MicroBatch]]] = {}

    def __enter__(self) -> Self:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ckptrain-batches")
        self._look_ahead()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self) -> list[MicroBatch]:
        """Return the next step's micro-batches."""
        step = self._next
        self._next += 1
        waiting = self._waiting.pop(step, None)
        batches = self._source.micro_batches(step) if waiting is None else waiting.result()
        self._look_ahead()
        return batches

    def _look_ahead(self) -> None:
        for step in range(self._next, self._next + self._ahead):
            if step not in self._waiting:
                self._waiting[step] = self._thread.submit(self._source.micro_batches, step)
