"""Build the base model under Megatron and fill it: Hugging Face weights in, logits like Hugging Face's out."""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from ckptrain.config.layout import Layout
from ckptrain.config.schema import RunConfig
from ckptrain.megatron.base_weights import fill_parameters
from ckptrain.megatron.bridge import auto_bridge
from ckptrain.megatron.families import family_settings, finish_model, local_layers
from ckptrain.megatron.platform import Backend, enter_platform
from ckptrain.megatron.rope import PackedRotaryEmbedding, constant_frequencies, read_ropes
from ckptrain.megatron.sequence import layers_of_slices

# What the local layers cannot do: kernels of Transformer Engine or Apex, and CUDA's only.
_LOCAL_BACKEND_OFF = (
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "bias_activation_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "cross_entropy_loss_fusion",
    "moe_permute_fusion",
)

# What megatron-core computes again in the backward pass instead of keeping it.
_RECOMPUTATION: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def open_bridge(directory: Path, architecture: str) -> Any:
    """Return Megatron-Bridge's converter for a local Hugging Face directory; reads its config, no weights yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return auto_bridge(architecture).from_hf_pretrained(str(directory))


def build_model(bridge: Any, config: RunConfig, layout: Layout, backend: Backend) -> Any:
    """Build this process's part of the model, without weights, on the current device.

    Returns:
        megatron-core's GPTModel, not yet wrapped: pipeline stage `pp`, tensor shard `tp` of it.

    Raises:
        ConfigError: these layers cannot run this model, or not in this layout.
    """
    hf_config = bridge.hf_pretrained.config
    provider = _provider(bridge, config, layout, backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        provider.finalize()
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        model = provider.provide(
            pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage()
        )
    model.to(enter_platform().device)  # the local norms are made on the CPU
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    finish_model(model, hf_config, _architecture(hf_config))
    ropes = read_ropes(hf_config)
    if backend == "local":
        model.rotary_pos_emb = PackedRotaryEmbedding(ropes)
    else:
        frequencies = constant_frequencies(ropes, config.data.sequence_length)
        model.rotary_pos_emb.inv_freq = frequencies.to(enter_platform().device)
        model.rotary_pos_emb.seq_len_interpolation_factor = None  # linear scaling is in the frequencies already
    # How the step is to describe packed sequences: Transformer Engine's kernels know THD, our attention needs no name.
    model.config.packed_format = "sbhd" if backend == "local" else "thd"
    # Recorded layers (`ckptrain.megatron.fused.graph`) want micro-batches of few shapes.
    model.config.few_shapes = False
    # On a GPU the logits of a micro-batch can be most of the memory; a family may do more to them than one product.
    is_alone = enter_platform().is_cuda and layout.tensor == 1
    model.config.loss_in_portions = is_alone and model.post_process and not model.output_layer._forward_hooks
    if config.train.recompute != "none" and model.pre_process:
        # megatron-core's recomputation gives no gradients to a module whose input needs none; the embedding is frozen.
        model.embedding.register_forward_hook(lambda *call: call[-1].requires_grad_(torch.is_grad_enabled()))
    return model


def load_base_weights(bridge: Any, model: Any) -> None:
    """Read the base's weights into the model; once, before adapters are attached and before wrapping; collective.

    Raises:
        ModelMismatch: the base has no weight for a parameter, which Megatron-Bridge would leave as it was.
    """
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # what is missing is told below
        warnings.simplefilter("ignore")
        fill_parameters(bridge, model)
    model.requires_grad_(requires_grad=False)


def _provider(bridge: Any, config: RunConfig, layout: Layout, backend: Backend) -> Any:
    dtype = torch_dtype(config.model.dtype)
    provider = bridge.to_megatron_provider(load_weights=False)
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": config.parallel.sequence,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": False,
        "seq_length": config.data.sequence_length,
        # Gradients are summed over learnt tokens and divided once, by their number in the whole global batch.
        "calculate_per_token_loss": True,
        # Weights are read from the base, adapters are filled by name: nothing is drawn at random here.
        "perform_initialization": False,
        # A kernel of Apex for weight gradients, which the frozen base has none of.
        "gradient_accumulation_fusion": False,
        "deterministic_mode": config.train.deterministic,
        **_RECOMPUTATION[config.train.recompute],
        # The vocabulary is cut evenly; the padding rows are never looked up and their logits are masked by the loss.
        "should_pad_vocab": layout.tensor > 1,
        "make_vocab_size_divisible_by": 1,
    }
    if getattr(provider, "num_moe_experts", None):
        # One adapter for each expert: the grouped layers would share one among all of a rank's experts.
        settings |= {"moe_grouped_gemm": False, "expert_tensor_parallel_size": 1}
        # Megatron-Bridge turns a loss on that balances the experts. It counts the tokens of a micro-batch, padding
        # too, so what is learnt would depend on the layout; and the router that it is for is frozen.
        settings |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    hf_config = bridge.hf_pretrained.config
    settings |= family_settings(hf_config, _architecture(hf_config), backend)
    if backend == "local":
        settings |= {name: False for name in _LOCAL_BACKEND_OFF if hasattr(provider, name)}
        settings["transformer_layer_spec"] = layers_of_slices(local_layers(hf_config, _architecture(hf_config)))
        if getattr(provider, "num_moe_experts", None):
            settings["moe_token_dispatcher_type"] = "allgather"  # noqa: S105  # a token of text
    for name, value in settings.items():
        if not hasattr(provider, name):
            raise AttributeError(f"megatron-bridge's provider has no setting {name}")
        setattr(provider, name, value)
    return provider


def _architecture(hf_config: Any) -> str:
    return str(hf_config.architectures[0])
