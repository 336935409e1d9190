"""Which layers compute a run, fused ones or plain ones? Decided without the model, so a plan says what will be run."""

from __future__ import annotations

import attrs

from ckptrain.config.layout import Layout
from ckptrain.config.schema import RunConfig
from ckptrain.config.shape import ModelShape
from ckptrain.errors import ConfigError

# Decoders of RMS norms around weights, attention that norms neither q nor k, and a SwiGLU without biases.
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
# Rows of logits that the fused loss has at a time (`ckptrain.megatron.fused.loss.ROWS`).
LOSS_ROWS = 2048


@attrs.frozen(kw_only=True)
class LayerChoice:
    """How the layers of a model are computed, and why."""

    fused: bool
    reason: str
    graphs: bool = False
    """Whether their kernels are recorded and launched together (`ckptrain.megatron.fused.graph`)."""
    graphs_reason: str = "nothing was asked of them"


@attrs.frozen(kw_only=True)
class AssumedLayers:
    """What a run's layers will be where it is planned, which need not be where it runs."""

    choice: LayerChoice
    transformer_engine: bool
    """Whether they are Transformer Engine's; otherwise megatron-core's own."""
    gpu: bool


def fusion_obstacle(config: RunConfig, shape: ModelShape, layout: Layout) -> str | None:
    """Return what of a run the fused layers do not compute; None is nothing."""
    obstacles = {
        "DoRA's magnitudes are not in them": config.lora.has_magnitudes,
        "there is no dropout in them": config.lora.dropout > 0,
        "parallel.sequence is true": config.parallel.sequence,
        "parallel.tensor does not divide the key-value heads": shape.num_kv_heads % layout.tensor != 0,
        "parallel.context is above 1": layout.context > 1,
        "the model has experts": shape.num_experts > 0,
        "the model norms q and k": shape.qk_norm,
        f"{shape.architecture} is none of {', '.join(FAMILIES)}": shape.architecture not in FAMILIES,
        f"the size of a head, {shape.head_dim}, is not a power of two": shape.head_dim & (shape.head_dim - 1) != 0,
    }
    return next((text for text, found in obstacles.items() if found), None)


def fused_or_plain(config: RunConfig, obstacle: str | None, *, without_gpu: str | None) -> LayerChoice:
    """Return whether layers are computed fused.

    Args:
        config: what was asked for.
        obstacle: what they do not compute; None is nothing.
        without_gpu: why `auto` does without them where there is no GPU; None where there is one.

    Raises:
        ConfigError: `lora.fused` is always or `model.fp8` is set, and they cannot be.
    """
    if config.lora.fused == "never":
        return LayerChoice(fused=False, reason="lora.fused is never")
    if config.model.fp8 is not None:
        if obstacle is not None:
            raise ConfigError(
                f"model.fp8 is {config.model.fp8}, which is not possible here", [obstacle, "set model.fp8=null"]
            )
        return LayerChoice(fused=True, reason="model.fp8 needs it")
    if config.lora.fused == "always":
        if obstacle is not None:
            raise ConfigError("lora.fused is always, which is not possible here", [obstacle, "set lora.fused=auto"])
        return LayerChoice(fused=True, reason="lora.fused is always")
    reason = obstacle or without_gpu
    if reason is not None:
        return LayerChoice(fused=False, reason=reason)
    return LayerChoice(fused=True, reason="they compute this model and these adapters")


def with_graphs(choice: LayerChoice, config: RunConfig, layout: Layout, *, transformer_engine: bool) -> LayerChoice:
    """Return a choice that says whether CUDA graphs may be used; `transformer_engine` tells whose attention it is.

    Raises:
        ConfigError: `train.cuda_graphs` is always, and they cannot be.
    """
    obstacles = {
        "train.cuda_graphs is never": config.train.cuda_graphs == "never",
        "the layers are plain": not choice.fused,
        "megatron-core's own layers read lengths on the host": not transformer_engine,
        "train.recompute is full": config.train.recompute == "full",
        "several processes compute the model": layout.tensor * layout.pipeline * layout.context > 1,
    }
    obstacle = next((text for text, found in obstacles.items() if found), None)
    if obstacle is not None and config.train.cuda_graphs == "always":
        raise ConfigError(
            "train.cuda_graphs is always, which is not possible here", [obstacle, "set train.cuda_graphs=auto"]
        )
    return attrs.evolve(choice, graphs=obstacle is None, graphs_reason=obstacle or "they can record these layers")


def assumed_layers(config: RunConfig, shape: ModelShape, layout: Layout) -> AssumedLayers:
    """Return the layers of a run on a GPU with Transformer Engine, or without both where `model.backend` is local.

    A plan is often made on another machine than the run, so what this one has says nothing.

    Raises:
        ConfigError: as `fused_or_plain`.
    """
    gpu = config.model.backend != "local"
    choice = fused_or_plain(
        config,
        fusion_obstacle(config, shape, layout),
        without_gpu=None if gpu else "model.backend is local, so no GPU is assumed",
    )
    # Its attention over packed sequences computes in 16 bits (`ckptrain.megatron.platform.choose_backend`).
    engine = gpu and config.model.dtype == "bfloat16" and not shape.is_local_only
    choice = with_graphs(choice, config, layout, transformer_engine=engine)
    return AssumedLayers(choice=choice, transformer_engine=engine, gpu=gpu)
