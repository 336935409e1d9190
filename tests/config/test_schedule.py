"""The learning rate of every step, against Megatron's own scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptrain.config.schedule import learning_rate
from ckptrain.config.schema import OptimizerConfig


def megatron_rates(optimizer: OptimizerConfig, steps: int) -> list[float]:
    """Return the rate in force at each optimizer step of Megatron's loop: step the optimizer, then the scheduler."""
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    group: dict[str, Any] = {}
    scheduler = module.OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        lr_warmup_steps=optimizer.warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style=optimizer.schedule,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
    rates = []
    for _ in range(steps + 3):
        rates.append(group["lr"])
        scheduler.step(increment=1)
    return rates


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (10, 0), (10, 1), (10, 9), (100, 17)])
@pytest.mark.parametrize("min_lr", [0.0, 1e-6, 1e-4])
def test_every_step_has_the_rate_that_megatron_gives_it(
    schedule: Literal["cosine", "constant"], steps: int, warmup: int, min_lr: float
) -> None:
    """Bit for bit, and three steps beyond the end."""
    optimizer = OptimizerConfig(lr=1e-4, min_lr=min_lr, schedule=schedule, warmup_steps=warmup)
    ours = [learning_rate(optimizer, steps, step) for step in range(1, steps + 4)]
    assert ours == megatron_rates(optimizer, steps)


@given(st.integers(2, 500), st.data())
def test_the_rate_rises_through_the_warm_up_and_falls_after_it(steps: int, data: st.DataObject) -> None:
    """Never above lr, never below min_lr once warmed up."""
    warmup = data.draw(st.integers(0, steps - 1))
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-5, warmup_steps=warmup)
    rates = [learning_rate(optimizer, steps, step) for step in range(1, steps + 1)]
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == 1e-3
    assert min(rates[warmup:]) >= 1e-5


def test_steps_are_counted_from_one() -> None:
    """Step 0 does not exist."""
    with pytest.raises(ValueError, match="counted from 1, got 0"):
        learning_rate(OptimizerConfig(), 10, 0)
