"""What is particular to a family of models: weights by name, settings, and layers that megatron-core has none of.

Megatron-Bridge's layers of Gemma are made of Transformer Engine's and hold the norm after a projection inside of it,
where LoRA's part of the projection would come after the norm; its OLMoE has no names for single experts. Those three
have conversions of their own here, and run with local layers only, as GPT-OSS does.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor
from torch.nn.functional import gelu

from ckptrain.config.shape import LOCAL_ONLY
from ckptrain.errors import ConfigError
from ckptrain.megatron.attention import PackedDotProductAttention
from ckptrain.megatron.norms import ZeroCentredRMSNorm, whole_key_norm, whole_query_norm
from ckptrain.megatron.platform import Backend
from ckptrain.megatron.rope import SLIDING, attention_factor, read_ropes

_GEMMA = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
# Architectures that look at a window of the text in all layers, and those whose config says in which.
_WINDOW_EVERYWHERE = ("MistralForCausalLM", "Qwen3MoeForCausalLM")
_WINDOW_BY_LAYER = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", *_GEMMA, "GptOssForCausalLM")
_gelu_tanh = partial(gelu, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    """Compute GPT-OSS's activation; megatron-core's is compiled at its first use, in twenty seconds."""
    return x * torch.sigmoid(1.702 * x)


def family_settings(hf_config: Any, architecture: str, backend: Backend) -> dict[str, Any]:
    """Return what megatron-core's configuration has to say of a base, by Hugging Face's own config.

    Raises:
        ConfigError: these layers cannot run this model.
    """
    if backend == "transformer_engine" and architecture in LOCAL_ONLY:
        raise ConfigError(
            "Transformer Engine's layers cannot run this model",
            ["Megatron-Bridge's own for its family were never compared with Hugging Face; set model.backend=local"],
        )
    activation = {"activation_func": _quick_gelu} if architecture == "GptOssForCausalLM" else {}
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    scalar = hf_config.query_pre_attn_scalar if architecture in _GEMMA else head_dim
    return {
        # q and k are multiplied by the factor, and so their products by its square.
        "softmax_scale": scalar**-0.5 * attention_factor(read_ropes(hf_config)) ** 2,
        # The model's rotary embedding is replaced: megatron-core is to have no factor of its own.
        "position_embedding_type": "rope",
        "yarn_rotary_scaling_factor": None,
        **activation,
        **_windows(hf_config, architecture),
    }


def _windows(hf_config: Any, architecture: str) -> dict[str, Any]:
    """Return how far a token looks back, and in which layers that is so: Megatron counts without the token itself."""
    width = getattr(hf_config, "sliding_window", None)
    if width is None or architecture not in (*_WINDOW_EVERYWHERE, *_WINDOW_BY_LAYER):
        return {"window_size": None}
    if architecture in _WINDOW_EVERYWHERE:
        return {"window_size": (width - 1, 0), "window_attn_skip_freq": None}
    return {"window_size": (width - 1, 0), "window_attn_skip_freq": [kind == SLIDING for kind in hf_config.layer_types]}


def local_layers(hf_config: Any, architecture: str) -> Callable[[Any], Any]:
    """Return a maker of this process's layers, of megatron-core's local ones and attention over packed sequences."""

    def build(provider: Any) -> Any:
        spec = get_gpt_layer_local_spec(
            num_experts=provider.num_moe_experts,
            moe_grouped_gemm=provider.moe_grouped_gemm,
            qk_layernorm=provider.qk_layernorm,
            normalization=provider.normalization,
        )
        attention = spec.submodules.self_attention
        softcap = getattr(hf_config, "attn_logit_softcapping", None) if architecture in _GEMMA else None
        attention.submodules.core_attention = partial(PackedDotProductAttention, softcap=softcap)
        if architecture == "OlmoeForCausalLM":
            attention.submodules.q_layernorm = whole_query_norm
            attention.submodules.k_layernorm = whole_key_norm
        if architecture not in _GEMMA:
            return spec
        attention.module = _PostNormSelfAttention
        if provider.qk_layernorm:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = ZeroCentredRMSNorm
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = ZeroCentredRMSNorm
        spec.submodules.mlp = partial(_PostNormMLP.as_mlp_submodule, **spec.submodules.mlp.keywords)
        layers = [spec] * get_num_layers_to_build(provider)
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=ZeroCentredRMSNorm)

    return build


def finish_model(model: Any, hf_config: Any, architecture: str) -> None:
    """Add what a family does between megatron-core's modules: Gemma to embedded tokens and to logits."""
    if architecture == "GptOssForCausalLM":
        for name, module in model.named_modules():
            if ".local_experts." in name and name.endswith(".linear_fc2"):
                module.register_forward_hook(_copy_output)
    if architecture not in _GEMMA:
        return
    if model.pre_process:
        model.embedding.register_forward_hook(partial(_scale_embedding, hf_config.hidden_size**0.5))
    if model.post_process and (cap := hf_config.final_logit_softcapping) is not None:
        model.output_layer.register_forward_hook(partial(_cap_logits, cap))


def _scale_embedding(scale: float, _: Any, __: Any, embedded: Tensor) -> Tensor:
    return embedded * torch.tensor(scale, dtype=embedded.dtype)  # rounded first, as Hugging Face does


def _cap_logits(cap: float, _: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    logits, bias = output
    return torch.tanh(logits / cap) * cap, bias


def _copy_output(_: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Give megatron-core a tensor to add an expert's bias to in place: autograd forbids that of the layer's own."""
    product, bias = output
    return product.clone(), bias


class _PostNormSelfAttention(SelfAttention):
    """Gemma's: a norm after the output projection, and rotary angles by the kind of layer."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_layernorm = ZeroCentredRMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        """Attend, project, norm: [tokens, 1, hidden] -> the same, and no bias."""
        if rotary_pos_emb is not None and rotary_pos_emb.ndim == 5:  # other layers, local layers
            local = self.config.window_attn_skip_freq[self.layer_number - 1]
            rotary_pos_emb = rotary_pos_emb[int(local)]
        output, bias = super().forward(hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)
        return self.post_layernorm(output), bias


class _PostNormMLP(MLP):
    """Gemma's: a norm after the second projection."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_layernorm = ZeroCentredRMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute and norm: [tokens, 1, hidden] -> the same, and no bias."""
        output, bias = super().forward(*args, **kwargs)
        return self.post_layernorm(output), bias


def _registry(names: dict[str, str], mlp: str, their_mlp: str) -> Any:
    """Return where every weight of a decoder goes, by the names that local layers have.

    Args:
        names: what a layer has besides, Megatron's name -> Hugging Face's.
        mlp: the place of a gated MLP in a layer.
        their_mlp: the same in Hugging Face.
    """
    layer, theirs = "decoder.layers.*", "model.layers.*"
    replicated = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        f"{layer}.input_layernorm.weight": f"{theirs}.input_layernorm.weight",
        f"{layer}.self_attention.linear_proj.weight": f"{theirs}.self_attn.o_proj.weight",
        f"{layer}.self_attention.q_layernorm.weight": f"{theirs}.self_attn.q_norm.weight",
        f"{layer}.self_attention.k_layernorm.weight": f"{theirs}.self_attn.k_norm.weight",
        f"{layer}.{mlp}.linear_fc2.weight": f"{theirs}.{their_mlp}.down_proj.weight",
        **{f"{layer}.{name}": f"{theirs}.{their_name}" for name, their_name in names.items()},
    }
    qkv = {part: f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv"}
    gate_up = {part: f"{theirs}.{their_mlp}.{part}_proj.weight" for part in ("gate", "up")}
    return MegatronMappingRegistry(
        *(AutoMapping(name, their_name) for name, their_name in replicated.items()),
        QKVMapping(f"{layer}.self_attention.linear_qkv.weight", **qkv),
        GatedMLPMapping(f"{layer}.{mlp}.linear_fc1.weight", **gate_up),
    )


class _DecoderBridge(MegatronModelBridge):
    """A gated decoder under RMS norms, without biases."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return megatron-core's configuration."""
        provider = super().provider_bridge(hf_pretrained)
        provider.normalization = "RMSNorm"
        provider.gated_linear_unit = True
        provider.add_bias_linear = False
        provider.add_qkv_bias = False
        provider.hidden_dropout = 0.0
        return provider


class _GemmaBridge(_DecoderBridge):
    """Gemma 2 and 3: their particular norms are modules of the local layers."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return megatron-core's configuration."""
        provider = super().provider_bridge(hf_pretrained)
        provider.activation_func = _gelu_tanh
        provider.qk_layernorm = hf_pretrained.config.model_type == "gemma3_text"
        return provider

    def mapping_registry(self) -> Any:
        """Return where every weight goes."""
        names = {
            "self_attention.post_layernorm.weight": "post_attention_layernorm.weight",
            "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
            "mlp.post_layernorm.weight": "post_feedforward_layernorm.weight",
        }
        return _registry(names, "mlp", "mlp")


class _OlmoeBridge(_DecoderBridge):
    """OLMoE, with a module for every expert."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return megatron-core's configuration."""
        provider = super().provider_bridge(hf_pretrained)
        hf_config = hf_pretrained.config
        provider.qk_layernorm = True
        provider.kv_channels = hf_config.hidden_size // hf_config.num_attention_heads
        provider.moe_ffn_hidden_size = hf_config.intermediate_size
        provider.moe_router_pre_softmax = not hf_config.norm_topk_prob
        return provider

    def mapping_registry(self) -> Any:
        """Return where every weight goes."""
        names = {
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "mlp.router.weight": "mlp.gate.weight",
        }
        return _registry(names, "mlp.experts.local_experts.*", "mlp.experts.*")


@cache
def register() -> None:
    """Tell Megatron-Bridge of the conversions made here; once in a process."""
    import transformers

    for name, bridge in (
        ("Gemma2ForCausalLM", _GemmaBridge),
        ("Gemma3ForCausalLM", _GemmaBridge),
        ("OlmoeForCausalLM", _OlmoeBridge),
    ):
        MegatronModelBridge.register_bridge(source=getattr(transformers, name), target=GPTModel)(bridge)
    AutoMapping.register_module_type(PackedDotProductAttention.__name__, "column")  # attention sinks, one a head
