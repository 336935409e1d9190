"""RUN/tensorboard: what was measured, as TensorBoard reads it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import attrs

from ckptrain.training.observers import Observer, StepRecord


class TensorBoard(Observer):
    """RUN/tensorboard, a file of events for each start; it begins with the order to forget what a lost stretch wrote.

    torch's SummaryWriter keeps events for two minutes before it writes them, in a thread: a kill after a save would
    lose steps that are not made again. Here they are in the kernel's hands when a step is told.
    """

    def __init__(self, directory: Path, *, last_step: int, every_steps: int) -> None:
        """Take where a run stands that has done `last_step` steps; -1 is one that has not even validated."""
        self._directory, self._every_steps = directory, every_steps
        self._last_step = last_step
        self._writer: Any = None
        self._has_purged = False

    def on_step(self, record: StepRecord) -> None:
        if record.step % self._every_steps == 0:
            values = attrs.asdict(record)
            step = values.pop("step")
            self._put({f"train/{name}": value for name, value in values.items() if value is not None}, step)

    def on_validation(self, step: int, val_loss: float) -> None:
        self._put({"val/loss": val_loss}, step)

    def on_end(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        # Readers take the files of a directory in the order of their names.
        now_ns = time.time_ns()
        name = f"events.out.tfevents.{now_ns // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{now_ns}"
        self._writer = RecordWriter((self._directory / name).open("xb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if not self._has_purged:  # readers drop what they have from this step on
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=self._last_step + 1, session_log=start))
            self._has_purged = True

    def _put(self, values: dict[str, float], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._open()
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))

    def _write(self, event: Any) -> None:
        """Write one event; readers give a file up at an event that was cut short, so that the next is in another."""
        try:
            self._writer.write(event.SerializeToString())
            self._writer.flush()
        except OSError:
            self._writer = None
            raise
