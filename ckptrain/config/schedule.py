"""Which learning rate has a step? A function of the step alone, so that nothing is restored and nothing can shift."""

from __future__ import annotations

import math

from ckptrain.config.schema import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, steps: int, step: int) -> float:
    """Return the learning rate that optimizer step `step` (the first is 1) of a run of `steps` uses.

    Megatron's convention, value for value (OptimizerParamScheduler.get_lr with init_lr = 0, stepped after the
    optimizer): step k uses position k - 1. So the first step of a warm-up has rate 0, the step after `warmup_steps` is
    the first at the full rate, and `min_lr` is what a step after the last would use.

    Raises:
        ValueError: `step` is below 1.
    """
    if step < 1:
        raise ValueError(f"steps are counted from 1, got {step}")
    position, warmup = step - 1, optimizer.warmup_steps
    if warmup > 0 and position <= warmup:
        return optimizer.lr * float(position) / float(warmup)
    if optimizer.schedule == "constant":
        return optimizer.lr
    if position > steps:
        return optimizer.min_lr
    progress = float(position - warmup) / float(steps - warmup)
    coefficient = 0.5 * (math.cos(math.pi * progress) + 1.0)
    return optimizer.min_lr + coefficient * (optimizer.lr - optimizer.min_lr)
