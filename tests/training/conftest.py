"""Fixtures of this room."""

from __future__ import annotations

import pytest
from tiny import VOCAB_SIZE, write_tokenizer


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a Hugging Face directory of a random mixture of four experts."""
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("experts")
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)
    return str(directory)
