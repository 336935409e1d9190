"""The optimizer steps of a run, one after the other: batches taken, learnt from, and measured.

Measured is what is known anyway: the device is not waited for once more than the step itself does.
"""

from __future__ import annotations

import math
import socket
import time
from pathlib import Path

import torch

from ckptrain.checkpoint.ranks import gather_to_all, together, world_size
from ckptrain.config.flops import peak_flops_per_s, training_flops
from ckptrain.config.schedule import learning_rate
from ckptrain.data.batches import BatchSource
from ckptrain.data.prefetch import Prefetcher
from ckptrain.data.stream import StreamSource
from ckptrain.errors import TrainingDiverged
from ckptrain.lifecycle.journal import Journal, NullJournal
from ckptrain.megatron.optimizer import set_learning_rate
from ckptrain.megatron.own_loss import OwnLoss, check_loss
from ckptrain.megatron.pace import Pace, paced_processes
from ckptrain.megatron.platform import enter_platform
from ckptrain.megatron.step import StepResult, train_step
from ckptrain.training.observers import Observer, StepRecord
from ckptrain.training.setup import ModelSetup
from ckptrain.training.start import Survey
from ckptrain.training.stragglers import Stragglers


class Steps:
    """Makes the steps of a run."""

    def __init__(
        self,
        survey: Survey,
        setup: ModelSetup,
        source: BatchSource | StreamSource,
        batches: Prefetcher,
        journal: Journal | NullJournal,
        told: Observer,
    ) -> None:
        """Try the loss of the program, if it has one; collective.

        Raises:
            ConfigError: it does not give what a loss must.
        """
        self._config = survey.config
        self._setup, self._source, self._batches = setup, source, batches
        self._flops = training_flops(survey.shape, survey.config.lora, survey.targets)
        self._num_processes = world_size()
        self._loss = _loss_of(survey)
        self._stragglers = _stragglers(journal, told)
        self._pace = None if self._stragglers is None else Pace(setup.model)
        self._is_cuda = enter_platform().is_cuda
        self._peak: float | None = None
        if self._is_cuda:
            if survey.config.model.dtype == "bfloat16":
                self._peak = peak_flops_per_s(torch.cuda.get_device_name())
            torch.cuda.reset_peak_memory_stats()  # loading, and the look at Hugging Face's model, may have taken more

    def make(self, step: int, last_good: Path | None) -> StepRecord:
        """Make a step; `last_good` is the newest checkpoint, to be named where this step went wrong.

        Raises:
            TrainingDiverged: the loss or the gradient is not finite.
        """
        started = time.perf_counter()
        micro_batches = self._batches.take()
        data_s = time.perf_counter() - started
        lr = learning_rate(self._config.optimizer, self._config.train.steps, step)
        set_learning_rate(self._setup.optimizer, lr)
        before_s = 0.0 if self._pace is None else self._pace.begin(data_s)
        result = train_step(self._setup.model, self._setup.optimizer, micro_batches, self._loss, before_s)
        _check_finite(step, result, last_good)
        if self._stragglers is not None and all(result.own_s):
            self._stragglers.look(step - 1, result.own_s)
        seconds = time.perf_counter() - started
        size = self._source.size_of(step - 1)
        flops = self._flops.of(
            tokens=size.tokens - size.padding, learnt_tokens=result.learnt_tokens, attended_pairs=size.attended_pairs
        )
        flops_per_s = flops / seconds / self._num_processes
        return StepRecord(
            step=step,
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            tokens=size.tokens,
            learnt_tokens=result.learnt_tokens,
            padding_share=size.padding / size.tokens,
            tokens_per_s=size.tokens / seconds,
            seconds=seconds,
            data_s=data_s,
            tflops_per_s=flops_per_s / 1e12,
            mfu=None if self._peak is None else flops_per_s / self._peak,
            peak_memory_bytes=torch.cuda.max_memory_allocated() if self._is_cuda else None,
        )


def _stragglers(journal: Journal | NullJournal, told: Observer) -> Stragglers | None:
    """Return what looks at the pace of processes, where there are several; collective."""
    hosts, paced = gather_to_all(socket.gethostname()), paced_processes()
    if len(paced) == 1:
        return None
    share = "" if len(paced) == world_size() else " (or one that shares its layers)"
    return Stragglers([f"rank {each} on {hosts[each]}{share}" for each in paced], journal, told)


def _loss_of(survey: Survey) -> OwnLoss | None:
    """Return the loss of the program, if it has one, tried on all ranks: in a step an error is that of one alone."""
    if survey.program.loss is None:
        return None
    given = survey.program.loss
    loss = OwnLoss(name=given.name, function=given.function, vocab_size=survey.shape.vocab_size)
    together(lambda: check_loss(loss, enter_platform().device))
    return loss


def _check_finite(step: int, result: StepResult, last_good: Path | None) -> None:
    for name, value in (("loss", result.loss), ("gradient norm", result.grad_norm)):
        if not math.isfinite(value):
            kept = f"the last good checkpoint is {last_good}" if last_good else "no checkpoint had been saved"
            raise TrainingDiverged(
                f"the {name} of step {step} is {value}; nothing was saved of it, {kept}; try a lower optimizer.lr, a"
                " longer optimizer.warmup_steps or a smaller optimizer.clip_grad"
            )
