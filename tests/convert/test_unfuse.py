"""Names and rows: what each fused layer is made of, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ckptrain.config.shape import ModelShape, shape_of
from ckptrain.convert.checkpoint_source import module_problem
from ckptrain.convert.unfuse import fuse_rows, huggingface_layers, parse_module, target_modules, unfuse_rows

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


@pytest.fixture
def shape() -> ModelShape:
    """Return the shape of a model with six heads, two to each of three key-value heads, of four features."""
    return shape_of(_CONFIG, "small")


def test_query_rows_come_with_their_key_value_head(shape: ModelShape) -> None:
    """Row by row, as megatron-core lays them: the queries of a group, its key, its value, then the next group."""
    labels = [(kind, group, feature) for group in range(3) for kind in ("q0", "q1", "k", "v") for feature in range(4)]
    fused = torch.arange(len(labels))[:, None].repeat(1, 5)
    q, k, v = ([labels[row] for row in part[:, 0].tolist()] for part in unfuse_rows("linear_qkv", fused, shape))
    assert q == [(f"q{head}", group, feature) for group in range(3) for head in range(2) for feature in range(4)]
    assert k == [("k", group, feature) for group in range(3) for feature in range(4)]
    assert v == [("v", group, feature) for group in range(3) for feature in range(4)]


def test_gate_comes_before_up(shape: ModelShape) -> None:
    """The first half of linear_fc1 is gate_proj."""
    gate, up = unfuse_rows("linear_fc1", torch.arange(80)[:, None], shape)
    assert (gate[0].item(), gate[-1].item(), up[0].item(), up[-1].item()) == (0, 39, 40, 79)


def test_fusing_undoes_unfusing(shape: ModelShape) -> None:
    """Row for row, for every layer."""
    for short, rows in (("linear_qkv", 48), ("linear_fc1", 80), ("linear_fc2", 24), ("linear_v", 12)):
        matrix = torch.randn(rows, 5)
        assert torch.equal(fuse_rows(short, unfuse_rows(short, matrix, shape), shape), matrix)


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("decoder.layers.0.mlp.router", "Hugging Face has no layer"),
        ("decoder.layers.0.self_attention.linear_fc1", "expected it in mlp"),
        ("decoder.layers.2.mlp.linear_fc1", "the base has 2 layers"),
        ("decoder.layers.0.mlp.experts.linear_fc1", "the base has 0 experts"),
    ],
)
def test_modules_without_a_counterpart_are_refused(shape: ModelShape, module: str, problem: str) -> None:
    """Nothing is left out silently: an adapter that Hugging Face has no place for is an error."""
    assert problem in str(module_problem(module, shape))


def test_a_part_with_an_adapter_of_its_own_is_one_layer(shape: ModelShape) -> None:
    """Its rows are those of Hugging Face as they are."""
    key = parse_module("decoder.layers.1.self_attention.linear_k")
    assert key is not None
    assert huggingface_layers(key, shape) == {"model.layers.1.self_attn.k_proj": (24, 12)}


def test_short_target_names_are_for_whole_models_only(shape: ModelShape) -> None:
    """PEFT matches short names in every layer, so an adapter of some layers must spell them out."""
    both = [parse_module(f"decoder.layers.{layer}.self_attention.linear_qkv") for layer in range(2)]
    modules = [module for module in both if module is not None]
    assert target_modules(modules, shape) == ("k_proj", "q_proj", "v_proj")
    assert target_modules(modules[1:], shape) == tuple(f"model.layers.1.self_attn.{part}_proj" for part in "kqv")
