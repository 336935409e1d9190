"""Who is told what happens: the interface, and how several are told as one.

Observers run on rank 0 only. They are told after the fact and cannot change a run; printing is left to `cli`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class StepRecord:
    """What one optimizer step did."""

    step: int
    loss: float
    """Mean cross-entropy over the learnt tokens of the global batch, in nats."""
    lr: float
    grad_norm: float
    tokens: int
    """Tokens computed in this step, padding included, over all ranks."""
    learnt_tokens: int
    padding_share: float
    """Share of `tokens` that are padding, between 0 and 1."""
    tokens_per_s: float
    seconds: float
    data_s: float
    """Seconds of it in which the step waited for its batches."""
    tflops_per_s: float
    """10^12 FLOPs of the model (`ckptrain.config.flops`) a second, of each process."""
    mfu: float | None = None
    """Those as a share of what the GPU can do in bfloat16; None where that is not known, or not what it computes in."""
    peak_memory_bytes: int | None = None
    """The most that tensors have taken on rank 0's GPU since training began; None on a CPU."""


@attrs.frozen(kw_only=True)
class SampleAnswer:
    """A question of the validation set, the answer it wants, and what the model says."""

    step: int
    prompt: str
    reference: str
    answer: str


class Observer:
    """Told of a run; override what you care for."""

    def on_plan(self, plan: dict[str, Any], facts: dict[str, Any]) -> None:
        """The start is decided."""

    def on_progress(self, text: str) -> None:
        """Something that takes a while is beginning, or a fact is worth a line."""

    def on_tokenising(self, name: str, done: int, total: int | None) -> None:
        """So many rows of a source have become tokens; `total` is None where a file does not say how many it has."""

    def on_warning(self, text: str) -> None:
        """Something does not work as it should, and the run goes on."""

    def on_step(self, record: StepRecord) -> None:
        """An optimizer step is done."""

    def on_validation(self, step: int, val_loss: float) -> None:
        """The validation set was looked at after `step` steps."""

    def on_sample(self, sample: SampleAnswer) -> None:
        """The model answered the sample question."""

    def on_saved(self, step: int, path: Path, num_bytes: int, seconds: float) -> None:
        """A checkpoint is committed."""

    def on_save_failed(self, step: int, message: str) -> None:
        """The checkpoint of a step could not be written; the one before is untouched and training goes on."""

    def on_stop(self, reason: str) -> None:
        """The run was asked to stop; it saves now."""

    def on_end(self) -> None:
        """The run is over, however it ended."""


class Observers(Observer):
    """Several observers as one; on ranks other than 0 there are none."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        self._recorders: list[Observer] = []
        self._failed: set[int] = set()

    def add_recorders(self, recorders: Iterable[Observer]) -> None:
        """Tell these too from now on; one that fails is reported once, and never ends a run."""
        self._recorders += recorders

    def _tell(self, event: str, *args: object) -> None:
        for observer in self._observers:
            getattr(observer, event)(*args)
        for recorder in self._recorders:
            try:
                getattr(recorder, event)(*args)
            except Exception as error:  # told to the observers; what is recorded is worth less than what is trained
                self._report(recorder, error, "" if event == "on_end" else "; training goes on")

    def _report(self, recorder: Observer, error: Exception, consequence: str) -> None:
        if id(recorder) not in self._failed:
            self._failed.add(id(recorder))
            self.on_warning(f"{type(recorder).__name__} cannot record: {error}{consequence}")

    def on_plan(self, plan: dict[str, Any], facts: dict[str, Any]) -> None:
        self._tell("on_plan", plan, facts)

    def on_progress(self, text: str) -> None:
        self._tell("on_progress", text)

    def on_tokenising(self, name: str, done: int, total: int | None) -> None:
        self._tell("on_tokenising", name, done, total)

    def on_warning(self, text: str) -> None:
        self._tell("on_warning", text)

    def on_step(self, record: StepRecord) -> None:
        self._tell("on_step", record)

    def on_validation(self, step: int, val_loss: float) -> None:
        self._tell("on_validation", step, val_loss)

    def on_sample(self, sample: SampleAnswer) -> None:
        self._tell("on_sample", sample)

    def on_saved(self, step: int, path: Path, num_bytes: int, seconds: float) -> None:
        self._tell("on_saved", step, path, num_bytes, seconds)

    def on_save_failed(self, step: int, message: str) -> None:
        self._tell("on_save_failed", step, message)

    def on_stop(self, reason: str) -> None:
        self._tell("on_stop", reason)

    def on_end(self) -> None:
        self._tell("on_end")
