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
)
# llama.cpp calls Mistral llama too. Not qwen3moe: transformers does not read the experts' width from a GGUF file.
_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_REQUIRED = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
_REQUIRED_MOE = {
    "num_experts": "num_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "experts_per_token": "num_experts_per_tok",
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
    """The dimensions of a decoder of gated MLPs (SwiGLU) under RMS norms; `num_experts` is 0 for a dense model."""

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
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer; 0 for a dense model."""
        return self.num_experts * 3 * self.hidden_size * self.moe_ffn_hidden_size

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of one layer without its experts."""
        hidden = self.hidden_size
        attention = hidden * self.qkv_size + self.num_heads * self.head_dim * hidden
        attention += self.qkv_size if self.qkv_bias else 0
        norms = 2 * hidden + (2 * self.head_dim if self.qk_norm else 0)
        mlp = hidden * self.num_experts if self.num_experts else 3 * hidden * self.ffn_hidden_size
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
    moe = architecture == "Qwen3MoeForCausalLM"
    required = {**_REQUIRED, **(_REQUIRED_MOE if moe else {})}
    # Left out means none shared for Llama; the others' defaults are particular numbers, not to be guessed.
    values = dict(config)
    if architecture == "LlamaForCausalLM" and values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if moe and "num_experts" not in values:
        values["num_experts"] = values.get("num_local_experts")  # as transformers 5 writes it
    problems = [*_missing(values, required.values()), *_unsupported(values, architecture)]
    if problems:
        raise ConfigError(f"cannot use the base model {name}: its config.json", problems)
    numbers = {field: values[key] for field, key in required.items()}
    head_dim = values.get("head_dim") or numbers["hidden_size"] // numbers["num_heads"]
    return ModelShape(
        architecture=architecture,
        head_dim=head_dim,
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture in _QK_NORM,
        **numbers,
    )


def _architecture(listed: Any, name: str) -> str:
    architecture = listed[0] if isinstance(listed, list) and len(listed) == 1 else listed
    if architecture not in SUPPORTED:
        found = "names no architecture" if not architecture else f"is a {architecture}"
        raise ConfigError(f"cannot use the base model {name}", [f"it {found}; supported are {', '.join(SUPPORTED)}"])
    return str(architecture)


def _missing(values: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    problems = []
    for key in keys:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "it is missing" if value is None else f"found {value!r}"
            problems.append(f"{key}: expected a positive whole number, {found}")
    return problems


def _unsupported(values: Mapping[str, Any], architecture: str) -> list[str]:
    """Name what these architectures can have and Megatron-Bridge has no place for."""
    problems = [
        f"{key} is true: Megatron-Bridge carries no such bias over for {architecture}"
        for key in ("attention_bias", "mlp_bias")
        if values.get(key)
    ]
    if values.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {values['hidden_act']!r}: expected 'silu'")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "an unnamed method")
        problems.append(f"quantization_config: the weights are quantised ({method}); give the unquantised model")
    if architecture == "Qwen3MoeForCausalLM":
        if values.get("mlp_only_layers"):
            problems.append(f"mlp_only_layers is {values['mlp_only_layers']}: expected experts in every layer")
        if values.get("decoder_sparse_step", 1) != 1:
            problems.append(f"decoder_sparse_step is {values['decoder_sparse_step']}: expected experts in every layer")
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
