"""Names and rows: what each fused layer is made of, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ckptrain.config.shape import ModelShape, shape_of
from ckptrain.convert.unfuse import adapter_problems, by_layer, parse_module, target_modules, unfuse_rows

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
_QKV = "decoder.layers.1.self_attention.linear_qkv"


@pytest.fixture
def shape() -> ModelShape:
    """Return the shape of a model with six heads, two to each of three key-value heads, of four features."""
    return shape_of(_CONFIG, "small")


def _stored(**changes: tuple[int, ...] | None) -> dict[str, Tensor]:
    sizes = {"linear_in": (8, 24), "linear_out": (48, 8)} | changes
    return {f"{_QKV}.adapter.{half}.weight": torch.empty(size) for half, size in sizes.items() if size is not None}


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


def test_a_whole_adapter_has_no_problems(shape: ModelShape) -> None:
    """The names and shapes of a run of ckptrain pass."""
    assert adapter_problems(_stored(), [_QKV], 8, shape) == []


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (_stored(linear_out=None), f"{_QKV}.adapter.linear_out.weight is missing"),
        (_stored(linear_out=(40, 8)), f"{_QKV}.adapter.linear_out.weight is [40, 8], expected [48, 8]"),
        (_stored(linear_in=(4, 24)), f"{_QKV}.adapter.linear_in.weight is [4, 24], expected [8, 24]"),
        (_stored(magnitude=(48,)), f"{_QKV}.adapter.magnitude.weight is not part of a LoRA adapter"),
        (
            _stored() | {"decoder.layers.0.x.weight": torch.empty(1)},
            "decoder.layers.0.x.weight is not part of a LoRA adapter",
        ),
    ],
)
def test_what_does_not_fit_is_named(shape: ModelShape, stored: dict[str, Tensor], problem: str) -> None:
    """A missing tensor, another shape, another rank, a tensor of another kind or of another module."""
    assert problem in " ".join(adapter_problems(stored, [_QKV], 8, shape))


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("decoder.layers.0.mlp.router", "Hugging Face has no layer"),
        ("decoder.layers.0.self_attention.linear_fc1", "Hugging Face has no layer"),
        ("decoder.layers.2.mlp.linear_fc1", "the base has 2 layers"),
        ("decoder.layers.0.mlp.experts.linear_fc1", "the base has 0 experts"),
    ],
)
def test_modules_without_a_counterpart_are_refused(shape: ModelShape, module: str, problem: str) -> None:
    """Nothing is left out silently: an adapter that Hugging Face has no place for is an error."""
    assert problem in " ".join(adapter_problems({}, [module], 8, shape))


def test_short_target_names_are_for_whole_models_only(shape: ModelShape) -> None:
    """PEFT matches short names in every layer, so an adapter of some layers must spell them out."""
    both = [parse_module(f"decoder.layers.{layer}.self_attention.linear_qkv") for layer in range(2)]
    modules = [module for module in both if module is not None]
    assert target_modules(modules, shape) == ("k_proj", "q_proj", "v_proj")
    assert target_modules(modules[1:], shape) == tuple(f"model.layers.1.self_attn.{part}_proj" for part in "kqv")


def test_stacked_layers_and_experts_are_told_apart() -> None:
    """A tensor over all layers becomes one for each layer; one of a single layer, or of experts, keeps its axes."""
    layers = by_layer(
        {
            "decoder.layers.mlp.experts.experts.linear_fc1.adapter.linear_in.weight": torch.arange(6).view(2, 3, 1, 1),
            "decoder.layers.1.self_attention.linear_qkv.adapter.linear_in.weight": torch.zeros(4, 5),
        }
    )
    assert {name: tuple(tensor.shape) for name, tensor in layers.items()} == {
        "decoder.layers.0.mlp.experts.linear_fc1.adapter.linear_in.weight": (3, 1, 1),
        "decoder.layers.1.mlp.experts.linear_fc1.adapter.linear_in.weight": (3, 1, 1),
        "decoder.layers.1.self_attention.linear_qkv.adapter.linear_in.weight": (4, 5),
    }
    second = layers["decoder.layers.1.mlp.experts.linear_fc1.adapter.linear_in.weight"]
    assert second.flatten().tolist() == [3, 4, 5]
