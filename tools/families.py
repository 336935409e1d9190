"""A tiny random model of each family that ckptrain runs, in Hugging Face's format, made in a second.

Norms, biases and attention sinks are random too: what is left at 1 or 0 hides a weight that went elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny import LLAMA3_ROPE, VOCAB_SIZE, write_tokenizer

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,  # large enough for scores that differ, and so for attention that looks somewhere
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
_GEMMA = {"sliding_window": 16, "query_pre_attn_scalar": 12, "tie_word_embeddings": True}

# Name -> (transformers' name, what is particular to it). Windows are shorter than the probe, so that they show.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, tied embeddings": ("Llama", {"tie_word_embeddings": True}),
    "Llama, linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "Llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "Llama, yarn rope": ("Llama", {"rope_parameters": _YARN}),
    "Llama, dynamic rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "Llama, longrope": ("Llama", {"rope_parameters": _LONGROPE}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral, sliding window": ("Mistral", {"sliding_window": 16}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, sliding window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "Qwen3": ("Qwen3", {}),
    "Qwen3-MoE": ("Qwen3Moe", {**_EXPERTS, "moe_intermediate_size": 48, "norm_topk_prob": True}),
    "OLMoE": ("Olmoe", {**_EXPERTS, "intermediate_size": 48, "pad_token_id": 0}),
    "Gemma 2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "Gemma 3": (
        "Gemma3",
        {**_GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "GPT-OSS": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "sliding_window": 16,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
}


def write_family(directory: Path, name: str, **changes: Any) -> Path:
    """Write a tiny random model, with a tokenizer; `changes` are of its config."""
    import torch
    import transformers

    prefix, particular = FAMILIES[name]
    config_class = getattr(transformers, "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    sizes = {key: value for key, value in _SIZES.items() if prefix != "Olmoe" or key != "head_dim"}
    config = config_class(**{**sizes, **particular, **changes})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        for parameter in model.parameters():
            if parameter.ndim == 1 or parameter.shape == (config.vocab_size, 1):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory
