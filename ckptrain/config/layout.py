"""How does the model lie over the processes? The layout, what keeps it from fitting, and a step's arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from ckptrain.config.modules import COLUMN_PARALLEL
from ckptrain.config.schema import RunConfig
from ckptrain.config.shape import ModelShape
from ckptrain.config.targets import Targets, resolve_targets
from ckptrain.errors import ConfigError


@attrs.frozen(kw_only=True)
class Layout:
    """Sizes of the parallel groups; experts are split by expert parallelism alone, never by tensor parallelism."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int

    @property
    def world_size(self) -> int:
        """Number of processes; expert parallelism takes its processes from the others and adds none."""
        return self.tensor * self.pipeline * self.context * self.data


@attrs.frozen(kw_only=True)
class BatchArithmetic:
    """One optimizer step in numbers; a row is `data.sequence_length` tokens at most."""

    rows_per_step: int
    micro_batches_per_rank: int
    rows_per_micro_batch: int
    tokens_per_step_max: int
    tokens_per_micro_batch_max: int
    pipeline_bubble: float


def layout_of(config: RunConfig, shape: ModelShape, world_size: int) -> Layout:
    """Lay a model of this shape over `world_size` processes as the config says.

    Raises:
        ConfigError: with every reason why it does not fit, and the numbers that would.
    """
    parallel = config.parallel
    model_size = parallel.tensor * parallel.pipeline * parallel.context
    data = world_size // model_size if world_size % model_size == 0 else 0
    problems = [
        *_world(config, world_size, model_size),
        *_dimensions(config, shape),
        *_experts(config, shape, parallel.tensor * parallel.context * data),
        *_batch(config, data),
    ]
    if problems:
        raise ConfigError(f"cannot lay the model over {_processes(world_size)}", problems)
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        expert=parallel.expert,
        data=data,
    )


def batch_arithmetic(config: RunConfig, layout: Layout) -> BatchArithmetic:
    """Work out what each process does in one optimizer step.

    `pipeline_bubble` is the share of a step that a stage waits, (p - 1) / (m + p - 1) for p stages and m micro-batches
    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2, as a share of the whole).
    """
    rows, micro = config.train.global_batch_size, config.train.micro_batch_size
    micro_batches = rows // (micro * layout.data)
    return BatchArithmetic(
        rows_per_step=rows,
        micro_batches_per_rank=micro_batches,
        rows_per_micro_batch=micro,
        tokens_per_step_max=rows * config.data.sequence_length,
        tokens_per_micro_batch_max=micro * config.data.sequence_length,
        pipeline_bubble=(layout.pipeline - 1) / (micro_batches + layout.pipeline - 1),
    )


def _world(config: RunConfig, world_size: int, model_size: int) -> Iterator[str]:
    if world_size % model_size:
        parallel = config.parallel
        yield (
            f"{_processes(world_size)} cannot be laid out as tensor={parallel.tensor} x pipeline={parallel.pipeline} x"
            f" context={parallel.context}: that takes a multiple of {model_size}; start"
            f" {_multiples_near(world_size, model_size)}, or change parallel.*"
        )


def _dimensions(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Check what tensor and pipeline parallelism split; a vocabulary that does not divide is padded by Megatron."""
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    split = {"attention heads": shape.num_heads, "hidden features": shape.hidden_size}
    if not shape.num_experts:
        split["MLP features"] = shape.ffn_hidden_size
    for what, size in split.items():
        if size % tensor:
            yield f"parallel.tensor={tensor} does not divide the {size} {what} of this model"
    # TransformerConfig.__post_init__: fewer key-value heads than processes are shared between processes.
    if shape.num_kv_heads % tensor and tensor % shape.num_kv_heads:
        yield (
            f"parallel.tensor={tensor} is neither a divisor nor a multiple of the {shape.num_kv_heads} key-value heads"
            " of this model"
        )
    if shape.num_layers % pipeline:
        yield f"parallel.pipeline={pipeline} does not divide the {shape.num_layers} layers of this model"
    if config.data.sequence_length > shape.max_positions:
        yield (
            f"data.sequence_length={config.data.sequence_length} is more than the {shape.max_positions} positions that"
            " this model knows"
        )
    if config.lora.splits_fused and tensor > shape.num_kv_heads:
        yield (
            f"parallel.tensor={tensor} is more than the {shape.num_kv_heads} key-value heads of this model, and"
            f" lora.kind={config.lora.kind} adapts k and v by themselves: set parallel.tensor={shape.num_kv_heads} or"
            " less, or lora.kind=lora"
        )
    yield from _rank(config, shape)


def _rank(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Check the rank: Bridge's ParallelLinearAdapter splits A by rows where the layer splits its output.

    Where the layer splits its input (linear_proj, linear_fc2), A is split by columns and the rank may be any; experts
    are not split at all.
    """
    tensor, dim = config.parallel.tensor, config.lora.dim
    if dim % tensor == 0:
        return
    try:
        targets = resolve_targets(config.lora, shape)
    except ConfigError as error:
        yield from error.problems
        return
    split = sorted({name.rpartition(".")[2] for name in _split_by_output(targets)})
    if split:
        yield (
            f"lora.dim={dim} is not a multiple of parallel.tensor={tensor}, which splits the adapters of"
            f" {', '.join(split)} by their rank: set lora.dim to {_multiples_near(dim, tensor)}"
        )


def _split_by_output(targets: Targets) -> Iterator[str]:
    for name in targets.modules:
        if name.rpartition(".")[2] in COLUMN_PARALLEL and ".experts." not in name:
            yield name


def _experts(config: RunConfig, shape: ModelShape, processes_per_stage: int) -> Iterator[str]:
    expert, parallel = config.parallel.expert, config.parallel
    if not shape.num_experts:
        if expert > 1:
            yield f"parallel.expert={expert}, but this model has no experts: set parallel.expert=1"
        return
    if shape.num_experts % expert:
        yield f"parallel.expert={expert} does not divide the {shape.num_experts} experts of this model"
    if processes_per_stage % expert:
        yield (
            f"parallel.expert={expert} does not divide the {processes_per_stage} processes of a pipeline stage"
            " (tensor x context x data)"
        )
    if parallel.tensor > 1 and shape.architecture == "OlmoeForCausalLM":
        yield (
            f"parallel.tensor={parallel.tensor} cuts the heads of {shape.architecture}, whose norms of q and k are over"
            " all of them: set parallel.tensor=1"
        )
    elif parallel.tensor > 1 and not parallel.sequence:
        # MoELayer.forward raises during training.
        yield (
            f"parallel.tensor={parallel.tensor} with experts needs sequence parallelism in Megatron: set"
            " parallel.sequence=true, or parallel.tensor=1"
        )


def _batch(config: RunConfig, data: int) -> Iterator[str]:
    rows, micro, tensor = config.train.global_batch_size, config.train.micro_batch_size, config.parallel.tensor
    if data and rows % (micro * data):
        step = micro * data
        yield (
            f"train.global_batch_size={rows} is not a multiple of {step} (micro_batch_size={micro} x {data} data"
            f" parallel processes): set it to {_multiples_near(rows, step)}"
        )
    if config.parallel.sequence and micro * config.data.sequence_length % tensor:
        yield (
            f"parallel.sequence splits the {micro * config.data.sequence_length} tokens of a micro-batch, which are not"
            f" a multiple of parallel.tensor={tensor}: change data.sequence_length"
        )


def _multiples_near(number: int, step: int) -> str:
    """Name the multiples of `step` below and above `number`, the least of them being `step`."""
    below = max(number // step, 1) * step
    return f"{below} or {below + step}"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
