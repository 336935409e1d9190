"""Which models are computed by fused layers, and the change from megatron-core's own forward pass to them."""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from ckptrain.config.fusion import LayerChoice, fused_or_plain, fusion_obstacle, with_graphs
from ckptrain.config.layout import Layout
from ckptrain.config.schema import RunConfig
from ckptrain.config.shape import ModelShape
from ckptrain.megatron.fused.graph import GraphedDecoder
from ckptrain.megatron.fused.layer import FusedLayer
from ckptrain.megatron.platform import Platform

_WITH_FP8 = (9, 0)
"""The compute capability that has them."""


def choose_layers(model: Any, config: RunConfig, shape: ModelShape, layout: Layout, platform: Platform) -> LayerChoice:
    """Return whether a model's layers are computed fused, and recorded.

    Raises:
        ConfigError: `lora.fused` is always or `model.fp8` is set, and they cannot be.
    """
    obstacle = fusion_obstacle(config, shape, layout)
    if model.config.hidden_dropout > 0:  # the shape does not know of it
        obstacle = "the model has dropout, and there is none in them"
    if config.model.fp8 is not None and platform.is_cuda and torch.cuda.get_device_capability() < _WITH_FP8:
        obstacle = f"{torch.cuda.get_device_name()} has no products in 8 bits: that began with Hopper"
    without_gpu = None if platform.is_cuda else "there is no GPU, and on a CPU they are not faster"
    choice = fused_or_plain(config, obstacle, without_gpu=without_gpu)
    is_engine = platform.is_cuda and model.config.packed_format == "thd"
    return with_graphs(choice, config, layout, transformer_engine=is_engine)


def apply_choice(choice: LayerChoice, model: Any, config: RunConfig) -> None:
    """Let the layers of an unwrapped model with adapters be computed as chosen."""
    if choice.fused:
        _fuse_layers(model, config)
    if choice.graphs:
        always = config.train.cuda_graphs == "always"
        model.decoder.forward = GraphedDecoder(model.decoder, lambda: adapters_changed(model), always=always)
        model.config.few_shapes = True


def _fuse_layers(model: Any, config: RunConfig) -> None:
    for layer in model.decoder.layers:
        layer.forward = FusedLayer(
            layer, recompute_mlp=config.train.recompute == "selective", in_8_bits=config.model.fp8 is not None
        )


def release_graphs(model: Any) -> None:
    """Give up what was recorded of a model, once it is trained: a process may train another one after it."""
    decoder = get_attr_wrapped_model(model, "decoder")
    if isinstance(decoder.forward, GraphedDecoder):
        decoder.forward.release()


def adapters_changed(model: Any) -> None:
    """Tell fused layers to look at their adapters again: a step of the optimizer or a restore may have changed them."""
    for layer in get_attr_wrapped_model(model, "decoder").layers:
        if isinstance(layer.forward, FusedLayer):
            layer.forward.is_stale = True
