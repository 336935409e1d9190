"""How large is the base model? Its dimensions from config.json or a GGUF header, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from ckptrain.config.base import Base, read_json
from ckptrain.config.gguf_header import read_gguf_header
from ckptrain.errors import ConfigError

SUPPORTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
)
# What people may well try, and why it is not to be had.
REFUSED = {
    "GemmaForCausalLM": "it was never compared with Hugging Face, as Gemma 2 and Gemma 3 were",
    "Gemma3ForConditionalGeneration": "it reads images too; its text model alone is a Gemma3ForCausalLM",
    "MixtralForCausalLM": "Megatron-Bridge has no conversion for it",
    "Phi3ForCausalLM": "Megatron-Bridge has no conversion for it",
}
# Layers that are ckptrain's own or megatron-core's, and were never compared under Transformer Engine.
LOCAL_ONLY = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
# llama.cpp calls Mistral llama too. Not qwen3moe: transformers does not read the experts' width from a GGUF file.
_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "Gemma3ForCausalLM")
_QKV_BIAS = ("Qwen2ForCausalLM", "GptOssForCausalLM")
# Four norms in a layer: before and after attention, before and after the MLP.
_POST_NORMS = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
# Their config.json may leave it out, and the width of the hidden state divided by the heads is not what it means then.
_HEAD_DIM_REQUIRED = (*_POST_NORMS, "GptOssForCausalLM")
_ACTIVATIONS = dict.fromkeys(_POST_NORMS, ("hidden_activation", "gelu_pytorch_tanh"))
_REQUIRED = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
# What an expert's width is called; other architectures have no experts.
_EXPERT_WIDTH = {
    "Qwen3MoeForCausalLM": "moe_intermediate_size",
    "OlmoeForCausalLM": "intermediate_size",
    "GptOssForCausalLM": "intermediate_size",
}
_GGUF_KEYS = {
    "num_layers": "block_count",
    "hidden_size": "embedding_length",
    "ffn_hidden_size": "feed_forward_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "max_positions": "context_length",
}


@attrs.frozen(kw_only=True)
class ModelShape:
    """The dimensions of a decoder of gated MLPs under RMS norms; `num_experts` is 0 for a dense model."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    gated_mlp: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    experts_per_token: int = 0

    @property
    def qkv_size(self) -> int:
        """Output features of the fused q, k and v projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, which are those of the output layer too."""
        return self.vocab_size * self.hidden_size

    @property
    def adapts_experts(self) -> bool:
        """Tell whether PEFT can hold adapters of the experts as they are trained.

        GPT-OSS keeps all experts of a layer in one tensor with gate and up interleaved, and PEFT passes over adapters
        that are named as single experts' layers.
        """
        return self.num_experts > 0 and self.architecture != "GptOssForCausalLM"

    @property
    def is_local_only(self) -> bool:
        """Tell whether its layers were never compared under Transformer Engine, so that only the local ones run it."""
        return self.architecture in LOCAL_ONLY

    @property
    def keeps_scores(self) -> bool:
        """Tell whether its attention writes the scores, [heads, length, length]: no fused kernel has its form."""
        return self.architecture in ("Gemma2ForCausalLM", "GptOssForCausalLM")

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer; 0 for a dense model."""
        hidden, ffn = self.hidden_size, self.moe_ffn_hidden_size
        biases = 2 * ffn + hidden if self.architecture == "GptOssForCausalLM" else 0
        return self.num_experts * (3 * hidden * ffn + biases)

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of one layer without its experts."""
        hidden = self.hidden_size
        attention = hidden * self.qkv_size + self.num_heads * self.head_dim * hidden
        attention += self.qkv_size if self.qkv_bias else 0
        norms = (4 if self.architecture in _POST_NORMS else 2) * hidden
        if self.architecture == "OlmoeForCausalLM":  # a norm over all heads together
            norms += (self.num_heads + self.num_kv_heads) * self.head_dim
        elif self.qk_norm:
            norms += 2 * self.head_dim
        mlp = hidden * self.num_experts if self.num_experts else 3 * hidden * self.ffn_hidden_size
        if self.architecture == "GptOssForCausalLM":  # biases of the output projection and the router, attention sinks
            attention += hidden + self.num_heads
            mlp += self.num_experts
        return attention + norms + mlp

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied embeddings counted once."""
        layers = self.num_layers * (self.dense_layer_parameters + self.expert_parameters)
        return layers + self.hidden_size + self.embedding_parameters * (1 if self.tied_embeddings else 2)


def read_shape(base: Base) -> ModelShape:
    """Read the dimensions of a base model.

    Raises:
        ConfigError: not downloaded, an architecture not supported, or keys missing, all named.
    """
    if base.path is None:
        raise ConfigError(f"cannot read the shape of {base.name}", ["it is not downloaded: hf download " + base.name])
    if base.kind == "gguf":
        return _from_gguf(base.name, base.path)
    return shape_of(read_json(base.path / "config.json"), base.name)


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Read the dimensions from the content of a config.json; `name` is for messages.

    Raises:
        ConfigError: as `read_shape`.
    """
    architecture = _architecture(config.get("architectures"), name)
    required = dict(_REQUIRED)
    # Left out means none shared for these; the others' defaults are particular numbers, not to be guessed.
    values = dict(config)
    if architecture in ("LlamaForCausalLM", "OlmoeForCausalLM") and values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if architecture in _EXPERT_WIDTH:
        if "num_experts" not in values:
            values["num_experts"] = values.get("num_local_experts")  # as transformers 5 writes it
        required |= {"num_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
        required["moe_ffn_hidden_size"] = _EXPERT_WIDTH[architecture]
    extra = ("head_dim",) if architecture in _HEAD_DIM_REQUIRED else ()
    problems = [*_missing(values, dict.fromkeys([*required.values(), *extra])), *_unsupported(values, architecture)]
    if problems:
        raise ConfigError(f"cannot use the base model {name}: its config.json", problems)
    numbers = {field: values[key] for field, key in required.items()}
    head_dim = values.get("head_dim") or numbers["hidden_size"] // numbers["num_heads"]
    return ModelShape(
        architecture=architecture,
        head_dim=head_dim,
        tied_embeddings=bool(values.get("tie_word_embeddings", architecture in _POST_NORMS)),
        qkv_bias=architecture in _QKV_BIAS,
        qk_norm=architecture in _QK_NORM,
        **numbers,
    )


def _architecture(listed: Any, name: str) -> str:
    architecture = listed[0] if isinstance(listed, list) and len(listed) == 1 else listed
    if architecture in SUPPORTED:
        return str(architecture)
    found = "it names no architecture" if not architecture else f"it is a {architecture}"
    why = f": {REFUSED[architecture]}" if isinstance(architecture, str) and architecture in REFUSED else ""
    raise ConfigError(f"cannot use the base model {name}", [f"{found}{why}; supported are {', '.join(SUPPORTED)}"])


def _missing(values: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    problems = []
    for key in keys:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "it is missing" if value is None else f"found {value!r}"
            problems.append(f"{key}: expected a positive whole number, {found}")
    return problems


def _unsupported(values: Mapping[str, Any], architecture: str) -> list[str]:
    """Name what these architectures can have and would be left out under Megatron."""
    problems = [*_other_than_usual(values, architecture), *_rope(values, architecture)]
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "an unnamed method")
        problems.append(f"quantization_config: the weights are quantised ({method}); give the unquantised model")
    if architecture == "Qwen3MoeForCausalLM":
        if values.get("mlp_only_layers"):
            problems.append(f"mlp_only_layers is {values['mlp_only_layers']}: expected experts in every layer")
        if values.get("decoder_sparse_step", 1) != 1:
            problems.append(f"decoder_sparse_step is {values['decoder_sparse_step']}: expected experts in every layer")
    if architecture == "OlmoeForCausalLM" and values.get("clip_qkv") is not None:
        problems.append(f"clip_qkv is {values['clip_qkv']}: Megatron has no place for a clamp of q, k and v")
    if architecture in _POST_NORMS and values.get("use_bidirectional_attention"):
        problems.append("use_bidirectional_attention is true: expected a model that reads from left to right")
    if architecture == "Gemma3ForCausalLM" and values.get("attn_logit_softcapping") is not None:
        problems.append(
            f"attn_logit_softcapping is {values['attn_logit_softcapping']}: transformers passes over it in Gemma 3, so"
            " there is nothing to agree with; expected null"
        )
    return problems


def _other_than_usual(values: Mapping[str, Any], architecture: str) -> list[str]:
    problems = []
    has_bias = architecture == "GptOssForCausalLM"
    if has_bias and not values.get("attention_bias", True):
        problems.append("attention_bias is false: expected a GPT-OSS with biases, as Megatron-Bridge has it")
    problems += [
        f"{key} is true: Megatron-Bridge carries no such bias over for {architecture}"
        for key in ("attention_bias", "mlp_bias")
        if values.get(key) and not has_bias
    ]
    key, expected = _ACTIVATIONS.get(architecture, ("hidden_act", "silu"))
    if values.get(key, expected) != expected:
        problems.append(f"{key} is {values[key]!r}: expected {expected!r}")
    kinds = sorted(set(values.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    problems += [
        f"layer_types has {kind}: expected full_attention or sliding_attention in every layer" for kind in kinds
    ]
    return problems


def _rope(values: Mapping[str, Any], architecture: str) -> list[str]:
    """Name what is unknown of the rotary embedding: transformers 5 calls it rope_parameters, earlier rope_scaling.

    Gemma 3 has two in one, for its local layers and for the others.
    """
    problems = []
    for key in ("rope_parameters", "rope_scaling"):
        found = values.get(key) or {}
        if not isinstance(found, Mapping):
            problems.append(f"{key}: expected an object, found {found!r}")
            continue
        for parameters in [part for part in found.values() if isinstance(part, Mapping)] or [found]:
            kind = parameters.get("rope_type", parameters.get("type", "default"))
            if kind not in ROPE_KINDS:
                problems.append(f"{key}: rope_type is {kind!r}; ckptrain knows {', '.join(ROPE_KINDS)}")
            if kind == "yarn" and architecture == "MistralForCausalLM":
                problems.append(f"{key}: rope_type is 'yarn', which Megatron-Bridge's conversion of Mistral fails on")
            if parameters.get("partial_rotary_factor", 1.0) != 1.0:
                problems.append(f"{key}: partial_rotary_factor is {parameters['partial_rotary_factor']}: expected 1")
    return problems


def _from_gguf(name: str, path: Path) -> ModelShape:
    header = read_gguf_header(path)
    family = str(header.metadata.get("general.architecture"))
    if family not in _GGUF_ARCHITECTURES:
        supported = ", ".join(_GGUF_ARCHITECTURES)
        raise ConfigError(
            f"cannot use the base model {name}",
            [f"its GGUF architecture is {family}, supported are {supported}: use the Hugging Face directory instead"],
        )
    values = {field: header.metadata.get(f"{family}.{key}") for field, key in _GGUF_KEYS.items()}
    embedding = header.tensors.get("token_embd.weight", ())
    problems = _missing(header.metadata, [f"{family}.{key}" for key in _GGUF_KEYS.values()])
    if header.metadata.get(f"{family}.expert_count"):
        problems.append(f"{family}.expert_count is set: mixture-of-experts models are not read from GGUF files")
    if len(embedding) != 2:
        problems.append("token_embd.weight: expected a tensor of two dimensions")
    if problems:
        raise ConfigError(f"cannot use the base model {name}: its GGUF header", problems)
    numbers: dict[str, Any] = values
    head_dim = header.metadata.get(f"{family}.attention.key_length") or numbers["hidden_size"] // numbers["num_heads"]
    return ModelShape(
        architecture=_GGUF_ARCHITECTURES[family],
        head_dim=head_dim,
        vocab_size=embedding[0],
        tied_embeddings="output.weight" not in header.tensors,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        **numbers,
    )
