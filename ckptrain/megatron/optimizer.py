"""The optimizer: megatron-core's data parallel wrapper and Adam over the adapters, and its state by name."""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from ckptrain.config.schema import OptimizerConfig
from ckptrain.megatron.adapters import AdapterParameter

# The moments that Adam keeps for each parameter, by torch's and Transformer Engine's name for them.
MOMENTS = ("exp_avg", "exp_avg_sq")
# The float32 copy that megatron-core steps where the parameter itself is bfloat16.
MASTER = "fp32_param"


def wrap_for_training(model: Any, *, deterministic: bool) -> Any:
    """Wrap a model with adapters for mixed precision and data parallelism; frozen weights get no gradient buffers."""
    config = model.config
    if config.bf16:
        model = Float16Module(config, model)
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=False,
            check_for_nan_in_grad=False,  # the step looks at the loss and the gradient norm itself
        ),
        model,
        disable_bucketing=deterministic,
    )
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def build_optimizer(wrapped: Any, config: OptimizerConfig, dtype: torch.dtype) -> Any:
    """Build megatron-core's AdamW over the trainable parameters (fused where Transformer Engine is installed).

    Every process holds the moments of all its adapters. They are small next to the base, and are then ordinary sharded
    tensors that move between layouts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                decoupled_weight_decay=True,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=False,
                log_num_zeros_in_grad=False,
            ),
            [wrapped],
        )
    wrapped.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the rate of the next step; the schedule itself is a function of the step and has no state."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _torch_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield the torch optimizers inside megatron-core's wrappers (one for dense and one for expert parameters)."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            yield part.optimizer


def adam_states(optimizer: Any) -> dict[Tensor, dict[str, Any]]:
    """Return Adam's own state of every tensor that it steps: the parameter, or its float32 master.

    What Adam makes in its first step, moments of zero and a count of 0, is made here where it is not there yet, so that
    a state can be filled or saved before any step.
    """
    states = {}
    for torch_optimizer in _torch_optimizers(optimizer):
        by_group = _counts_by_group(torch_optimizer)
        for group in torch_optimizer.param_groups:
            if by_group:
                group.setdefault("step", 0)
            for stepped in group["params"]:
                state = states[stepped] = torch_optimizer.state[stepped]
                for name in MOMENTS:
                    if name not in state:
                        state[name] = torch.zeros_like(stepped.data)
                if not by_group:
                    state.setdefault("step", torch.tensor(0.0))
    return states


def optimizer_tensors(states: Mapping[Tensor, Mapping[str, Any]], adapter: AdapterParameter) -> dict[str, Tensor]:
    """Return the optimizer's tensors of one adapter weight, each of the weight's local shape, out of `adam_states`.

    They are the tensors that Adam updates in place from step to step.
    """
    master = getattr(adapter.parameter, "main_param", None)
    state = states[adapter.parameter if master is None else master]
    moments = {name: state[name] for name in MOMENTS}
    return moments if master is None else {**moments, MASTER: master.data}


def master_of(adapter: AdapterParameter) -> AdapterParameter | None:
    """Return the float32 master of an adapter weight in the weight's place; None where it has none."""
    master = getattr(adapter.parameter, "main_param", None)
    return None if master is None else attrs.evolve(adapter, parameter=master)


def _counts_by_group(torch_optimizer: Any) -> bool:
    """Tell whether Adam counts steps once for a parameter group (Transformer Engine) or for each parameter (torch)."""
    return type(torch_optimizer).__module__.startswith("transformer_engine")


def step_count(optimizer: Any) -> int | None:
    """Return how many steps Adam has made, by its own count (its bias correction depends on it); 0 before the first.

    None on a pipeline stage that has no adapters.
    """
    counts: set[int] = set()
    for torch_optimizer in _torch_optimizers(optimizer):
        for group in torch_optimizer.param_groups:
            if _counts_by_group(torch_optimizer):
                counts.add(int(group.get("step", 0)))
            else:
                counts |= {int(torch_optimizer.state[p].get("step", 0)) for p in group["params"]}
    if len(counts) > 1:
        raise RuntimeError(f"the optimizer's parameters disagree on the number of steps: {sorted(counts)}")
    return counts.pop() if counts else None


def set_step_count(optimizer: Any, steps: int) -> None:
    """Make Adam go on counting from `steps`."""
    for torch_optimizer in _torch_optimizers(optimizer):
        for group in torch_optimizer.param_groups:
            if _counts_by_group(torch_optimizer):
                group["step"] = steps
                continue
            for parameter in group["params"]:
                torch_optimizer.state[parameter]["step"] = torch.tensor(float(steps))
