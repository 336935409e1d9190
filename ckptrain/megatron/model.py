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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ckptrain.config.layout import Layout
from ckptrain.config.schema import RunConfig
from ckptrain.errors import ConfigError
from ckptrain.megatron.attention import PackedDotProductAttention, PackedRotaryEmbedding
from ckptrain.megatron.bridge import auto_bridge
from ckptrain.megatron.platform import Backend, enter_platform

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
_ROPE_KINDS = ("default", "linear", "llama3")


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
    """
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
    frequencies = _rope_frequencies(bridge.hf_pretrained.config).to(enter_platform().device)
    if backend == "local":
        model.rotary_pos_emb = PackedRotaryEmbedding(frequencies)
    else:
        model.rotary_pos_emb.inv_freq = frequencies
        model.rotary_pos_emb.seq_len_interpolation_factor = None  # linear scaling is in the frequencies already
    # How the step is to describe packed sequences: Transformer Engine's kernels know THD, our attention needs no name.
    model.config.packed_format = "sbhd" if backend == "local" else "thd"
    return model


def load_base_weights(bridge: Any, model: Any) -> None:
    """Read the base's weights into the model; once, before adapters are attached and before wrapping."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it draws a progress bar of its own
        warnings.simplefilter("ignore")
        bridge.load_hf_weights([model])
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
    if backend == "local":
        settings |= {name: False for name in _LOCAL_BACKEND_OFF if hasattr(provider, name)}
        settings["transformer_layer_spec"] = _packed_local_spec
        if getattr(provider, "num_moe_experts", None):
            settings["moe_token_dispatcher_type"] = "allgather"  # noqa: S105  # a token of text
    for name, value in settings.items():
        if not hasattr(provider, name):
            raise AttributeError(f"megatron-bridge's provider has no setting {name}")
        setattr(provider, name, value)
    return provider


def _packed_local_spec(provider: Any) -> Any:
    """Return megatron-core's local layers with attention that knows packed sequences."""
    spec = get_gpt_layer_local_spec(
        num_experts=provider.num_moe_experts,
        moe_grouped_gemm=provider.moe_grouped_gemm,
        qk_layernorm=provider.qk_layernorm,
        normalization=provider.normalization,
    )
    spec.submodules.self_attention.submodules.core_attention = PackedDotProductAttention
    return spec


def _rope_frequencies(hf_config: Any) -> Tensor:
    """Return the rotary frequencies that Hugging Face computes from its config, float32 [head_dim / 2].

    Megatron-Bridge passes on the scaling factor alone and megatron-core has the other constants of llama3 scaling
    built in, so a base with others (original_max_position_embeddings, say) would get wrong logits without any error.

    Raises:
        ConfigError: a kind of rope whose frequencies are not constant, or scale the attention.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = hf_config.rope_parameters
    kind = parameters["rope_type"]
    if kind not in _ROPE_KINDS:
        raise ConfigError(
            "this model cannot be run", [f"its rope_type is {kind!r}; ckptrain knows {', '.join(_ROPE_KINDS)}"]
        )
    if kind == "default":
        dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return frequencies.float()
