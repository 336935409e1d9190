"""Put a checkpoint's state into a model, and prove it by a receipt.

The base is loaded before this and adapters come from the checkpoint alone. What the start plan promised is compared
with what is in memory afterwards; a difference stops the run before it has made a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from ckptrain.checkpoint.dcp_metadata import ADAPTER_DIRECTORY, OPTIMIZER_DIRECTORY
from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.ranks import gather_to_all, together
from ckptrain.checkpoint.sharded import load_tensors
from ckptrain.config.schedule import learning_rate
from ckptrain.config.schema import RunConfig
from ckptrain.convert.source import AdapterSource
from ckptrain.errors import RestoreMismatch
from ckptrain.lifecycle.start_plan import Resume
from ckptrain.megatron.adapters import fill_adapters
from ckptrain.megatron.optimizer import master_of, set_step_count, step_count
from ckptrain.megatron.state import StateView, rng_of_row, rng_row, rng_state, set_rng_state
from ckptrain.megatron.world import seed_generators
from ckptrain.training.setup import ModelSetup


@attrs.frozen(kw_only=True)
class Receipt:
    """What was restored, counted after the fact."""

    checkpoint: str
    tensors_per_rank: tuple[tuple[int, int], ...]
    """For each rank: tensors read, tensors that the model and the optimizer have there."""
    adapter_norm: float
    """Euclidean norm of all adapter weights on rank 0: an adapter that does nothing has a zero in it."""
    optimizer: str
    optimizer_step: int
    next_step: int
    next_learning_rate: float
    rng: str
    consumed_samples: int
    next_row: int
    """Position in the order of rows at which the next step begins."""

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt in JSON's types, for the journal."""
        return attrs.asdict(self)


def restore_run(plan: Resume, checkpoint: CommittedCheckpoint, setup: ModelSetup, config: RunConfig) -> Receipt:
    """Fill adapters, optimizer and random generators from a checkpoint of this run; collective.

    Raises:
        RestoreMismatch: the checkpoint does not hold what the model has, or memory does not hold what the plan says.
        CheckpointDamaged: its files cannot be read.
    """
    view = setup.store.adapters()
    read, wanted = _load(view, checkpoint, "adapter", ADAPTER_DIRECTORY), len(view.shapes)
    if plan.restore_optimizer:
        view = setup.store.optimizer(setup.optimizer)
        read, wanted = read + _load(view, checkpoint, "optimizer", OPTIMIZER_DIRECTORY), wanted + len(view.shapes)
        set_step_count(setup.optimizer, int(checkpoint.manifest.optimizer["step"]))
        told = f"restored: moments{' and float32 masters' if config.model.dtype == 'bfloat16' else ''}"
    else:
        # The float32 masters are copies of the adapters as they were before this restore.
        setup.optimizer.reload_model_params()
        told = "new: restore.optimizer is false"
    rng = _restore_rng(plan, checkpoint, config)
    counts = gather_to_all(step_count(setup.optimizer))  # a pipeline stage may have no adapters
    receipt = Receipt(
        checkpoint=checkpoint.path.name,
        tensors_per_rank=tuple(gather_to_all((read, wanted))),
        adapter_norm=_norm(setup),
        optimizer=told,
        optimizer_step=next(count for count in counts if count is not None),
        next_step=plan.first_step,
        next_learning_rate=learning_rate(config.optimizer, config.train.steps, plan.first_step),
        rng=rng,
        consumed_samples=checkpoint.manifest.consumed_samples,
        next_row=plan.step * config.train.global_batch_size,
    )
    # Adam's own count is not the step where an earlier resume left the moments out.
    expected = int(checkpoint.manifest.optimizer["step"]) if plan.restore_optimizer else 0
    _check_receipt(receipt, plan, counts, expected)
    return receipt


def warm_start(source: AdapterSource, setup: ModelSetup) -> int:
    """Fill the adapters, and nothing else, from one that lies elsewhere; returns how many on this rank; collective.

    Float32 masters take what is stored as it is, and not what the type of the adapters leaves of it.

    Raises:
        RestoreMismatch: it does not hold what the model has; on every rank.
        CheckpointDamaged: it cannot be read; on every rank.
    """

    def fill() -> int:
        with source.layers() as read:
            filled: int = fill_adapters(setup.adapters, read)
            setup.optimizer.reload_model_params()
            fill_adapters([master for adapter in setup.adapters if (master := master_of(adapter)) is not None], read)
        return filled

    return together(fill)


def _load(view: StateView, checkpoint: CommittedCheckpoint, group: str, directory: str) -> int:
    """Read tensors into place and return how many were filled, by looking at them."""
    _check_shapes(view.shapes, checkpoint, group)
    buffers = view.to_load()
    load_tensors(buffers, checkpoint.path / directory)
    return view.take(buffers)


def _restore_rng(plan: Resume, checkpoint: CommittedCheckpoint, config: RunConfig) -> str:
    if not plan.restore_rng:
        seed_generators(config.train.seed, plan.step)
        return "seeded from (seed, step, rank): restore.rng is false"
    if plan.layout_changed:
        seed_generators(config.train.seed, plan.step)
        return "seeded from (seed, step, rank): the layout differs from the checkpoint's"
    state = rng_state()
    row = rng_row(state)
    if _holds(checkpoint, row):
        load_tensors(row, checkpoint.path / OPTIMIZER_DIRECTORY)
        state = rng_of_row(row, state)
    elif _holds(checkpoint, state):  # before manifests of version 3 each generator was a tensor of its own
        load_tensors(state, checkpoint.path / OPTIMIZER_DIRECTORY)
    else:
        seed_generators(config.train.seed, plan.step)
        return "seeded from (seed, step, rank): the checkpoint's generators are another platform's"
    set_rng_state(state)
    return "restored on every rank"


def _holds(checkpoint: CommittedCheckpoint, state: Mapping[str, Tensor]) -> bool:
    """Tell whether a checkpoint has all of this for every rank: a GPU's generators have other sizes than a CPU's."""
    held = checkpoint.manifest.tensors
    return all(gather_to_all(all(name in held and held[name].shape == (*own.shape,) for name, own in state.items())))


def _check_shapes(wanted: Mapping[str, tuple[int, ...]], checkpoint: CommittedCheckpoint, group: str) -> None:
    """Compare what the model has with what the checkpoint holds, by name and whole shape, on all ranks together."""
    held = {name: entry.shape for name, entry in checkpoint.manifest.tensors.items() if entry.group == group}
    everywhere: dict[str, tuple[int, ...]] = {}
    for shapes in gather_to_all(dict(wanted)):
        everywhere |= shapes
    problems = [f"{name} is not in it" for name in sorted(everywhere.keys() - held.keys())]
    problems += [
        f"{name} is in it, and this model has no such tensor" for name in sorted(held.keys() - everywhere.keys())
    ]
    problems += [
        f"{name} has shape {list(held[name])} there and {list(shape)} here"
        for name, shape in sorted(everywhere.items())
        if name in held and tuple(shape) != tuple(held[name])
    ]
    if problems:
        shown = "".join(f"\n  - {problem}" for problem in problems[:10])
        raise RestoreMismatch(
            f"cannot restore from {checkpoint.path}: its {group} tensors are not those of this model{shown}"
        )


def _norm(setup: ModelSetup) -> float:
    squares = [float(adapter.parameter.detach().double().pow(2).sum()) for adapter in setup.adapters]
    return math.sqrt(sum(squares))


def _check_receipt(receipt: Receipt, plan: Resume, counts: Sequence[int | None], expected: int) -> None:
    """Stop where memory is not what the plan promised; every rank looks, rank 0's receipt is told."""
    problems = [
        f"rank {number} read {read} tensors of {wanted}"
        for number, (read, wanted) in enumerate(receipt.tensors_per_rank)
        if read != wanted
    ]
    problems += [
        f"on rank {number} the optimizer has made {count} steps, expected {expected}"
        for number, count in enumerate(counts)
        if count not in (None, expected)
    ]
    if receipt.next_row != plan.consumed_samples:
        problems.append(f"the next step begins at row {receipt.next_row}, expected {plan.consumed_samples}")
    problems = [problem for found in gather_to_all(problems) for problem in found]
    if problems:
        shown = "".join(f"\n  - {problem}" for problem in dict.fromkeys(problems))
        raise RestoreMismatch(f"what came back from {receipt.checkpoint} is not what the start plan promised{shown}")
