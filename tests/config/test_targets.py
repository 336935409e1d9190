"""Which modules a list of names means."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptrain.config.schema import LoraConfig
from ckptrain.config.shape import ModelShape
from ckptrain.config.targets import _wildcard, adaptable_modules, resolve_targets
from ckptrain.errors import ConfigError


def chosen(shape: ModelShape, *names: str, exclude: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the modules that these names choose."""
    return resolve_targets(LoraConfig(target_modules=names, exclude_modules=exclude), shape).modules


def of(shape: ModelShape, *shorts: str) -> tuple[str, ...]:
    """Return all modules with these short names."""
    return tuple(name for name in adaptable_modules(shape) if name.rpartition(".")[2] in shorts)


def test_a_dense_model_has_four_linear_layers_a_layer(dense: ModelShape) -> None:
    """Under Megatron's names, with the layer's global number."""
    names = adaptable_modules(dense)
    assert len(names) == 16
    assert names[4:8] == (
        "decoder.layers.1.self_attention.linear_qkv",
        "decoder.layers.1.self_attention.linear_proj",
        "decoder.layers.1.mlp.linear_fc1",
        "decoder.layers.1.mlp.linear_fc2",
    )


@pytest.mark.parametrize(
    ("names", "shorts"),
    [
        (["linear_qkv"], ["linear_qkv"]),
        (["linear_proj", "linear_fc2"], ["linear_proj", "linear_fc2"]),
        (["q_proj", "k_proj", "v_proj"], ["linear_qkv"]),
        (["o_proj"], ["linear_proj"]),
        (["gate_proj", "up_proj", "down_proj"], ["linear_fc1", "linear_fc2"]),
        (["self_attn.o_proj"], ["linear_proj"]),
        (["model.layers.*.mlp.down_proj"], ["linear_fc2"]),
        (["*.mlp.*"], ["linear_fc1", "linear_fc2"]),
        (["all-linear"], ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]),
        (["all-linear", "linear_qkv"], ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]),
        ([], ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]),
    ],
)
def test_names_of_either_kind_choose_the_same_modules(dense: ModelShape, names: list[str], shorts: list[str]) -> None:
    """Whole fused layers, so nothing is to be noted."""
    targets = resolve_targets(LoraConfig(target_modules=tuple(names)), dense)
    assert targets.modules == of(dense, *shorts)
    assert targets.notes == ()


def test_a_layer_number_is_global_and_exact(dense: ModelShape) -> None:
    """Layer 1 is not layer 10, on whichever pipeline stage it lies."""
    assert chosen(dense, "*.layers.1.*.linear_qkv") == ("decoder.layers.1.self_attention.linear_qkv",)
    assert chosen(dense, "decoder.layers.2.mlp.linear_fc1") == ("decoder.layers.2.mlp.linear_fc1",)
    assert chosen(dense, "model.layers.3.self_attn.o_proj") == ("decoder.layers.3.self_attention.linear_proj",)
    assert chosen(dense, "layers.3.self_attn.o_proj") == ("decoder.layers.3.self_attention.linear_proj",)


def test_part_of_a_fused_layer_takes_the_rest_along_and_says_so(dense: ModelShape) -> None:
    """Megatron has no q_proj to adapt alone."""
    targets = resolve_targets(LoraConfig(target_modules=("q_proj", "v_proj", "*.0.mlp.up_proj")), dense)
    alone = "; lora.kind=canonical gives each an adapter of its own"
    assert targets.notes == (
        f"lora.target_modules: q_proj, v_proj: Megatron fuses q, k and v in linear_qkv, so k_proj is adapted too{alone}",
        "lora.target_modules: *.0.mlp.up_proj: Megatron fuses gate and up in linear_fc1, so gate_proj is adapted too"
        + alone,
    )
    assert len(targets.modules) == dense.num_layers + 1


def canonical(shape: ModelShape, *names: str, exclude: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return what is adapted where every part has an adapter of its own, of layer 0 and without the layer."""
    lora = LoraConfig(kind="canonical", target_modules=names, exclude_modules=exclude)
    prefix = "decoder.layers.0."
    found = resolve_targets(lora, shape)
    assert found.notes == ()
    return tuple(name.removeprefix(prefix) for name in found.modules if name.startswith(prefix))


def test_canonical_lora_adapts_the_parts_that_were_asked_for(dense: ModelShape) -> None:
    """By either name; a fused layer's own name means all of its parts, and its wildcard does."""
    attention = tuple(f"self_attention.linear_{part}" for part in "qkv")
    assert canonical(dense, "q_proj", "linear_v") == (attention[0], attention[2])
    assert canonical(dense, "linear_qkv") == canonical(dense, "*.layers.0.*.linear_qkv") == attention
    assert canonical(dense, "up_proj", "o_proj") == ("self_attention.linear_proj", "mlp.linear_fc1_up")
    assert canonical(dense, exclude=("k_proj", "linear_fc1", "linear_fc2")) == (
        attention[0],
        attention[2],
        "self_attention.linear_proj",
    )


def test_a_fused_layer_is_adapted_in_the_parts_that_were_chosen(dense: ModelShape) -> None:
    """The model asks by its own name of the layer."""
    lora = LoraConfig(kind="canonical", target_modules=("q_proj", "v_proj", "down_proj"))
    targets = resolve_targets(lora, dense)
    assert targets.adapted("module.decoder.layers.1.self_attention.linear_qkv") == ("linear_q", "linear_v")
    assert targets.adapted("decoder.layers.1.mlp.linear_fc2") == ("linear_fc2",)
    assert targets.adapted("decoder.layers.1.mlp.linear_fc1") == ()


def test_a_megatron_name_beside_a_part_leaves_nothing_to_note(dense: ModelShape) -> None:
    """The whole layer was asked for."""
    assert resolve_targets(LoraConfig(target_modules=("q_proj", "linear_qkv")), dense).notes == ()


def test_excluding_leaves_the_rest(dense: ModelShape) -> None:
    """Needs an empty target_modules; part of a fused layer excludes it whole."""
    assert chosen(dense, exclude=("linear_fc1", "down_proj")) == of(dense, "linear_qkv", "linear_proj")
    assert len(chosen(dense, exclude=("*.layers.0.*",))) == 12
    targets = resolve_targets(LoraConfig(target_modules=(), exclude_modules=("k_proj",)), dense)
    assert targets.modules == of(dense, "linear_proj", "linear_fc1", "linear_fc2")
    assert "so q_proj and v_proj are left out too" in targets.notes[0]
    with pytest.raises(ConfigError, match="leaves no module to adapt"):
        chosen(dense, exclude=("all-linear",))


def test_every_name_that_matches_nothing_is_told_with_what_there_is(dense: ModelShape) -> None:
    """A silent mismatch would train fewer adapters than asked for."""
    with pytest.raises(ConfigError) as caught:
        chosen(dense, "linear_qkv", "*.layers.9.*", "lin_proj", "decoder.layers.0.mlp.linear_fc3")
    assert caught.value.problems[0] == "lora.target_modules: *.layers.9.* matches nothing"
    assert "did you mean linear_proj?" in caught.value.problems[1]
    assert "did you mean linear_fc" in caught.value.problems[2]
    assert "in layers 0 to 3" in caught.value.problems[3]


def test_experts_are_adapted_all_or_none(moe: ModelShape) -> None:
    """Their modules are named once a layer, and recognised with a number and without."""
    targets = resolve_targets(LoraConfig(target_modules=("gate_proj", "up_proj")), moe)
    assert targets.modules == tuple(f"decoder.layers.{layer}.mlp.experts.linear_fc1" for layer in range(4))
    assert targets.selects("decoder.layers.2.mlp.experts.linear_fc1")
    assert targets.selects("decoder.layers.2.mlp.experts.local_experts.7.linear_fc1")
    assert not targets.selects("decoder.layers.2.mlp.experts.local_experts.7.linear_fc2")
    assert not targets.selects("decoder.layers.2.mlp.router")
    for pattern in ("*.local_experts.*.linear_fc1", "model.layers.*.mlp.experts.*.gate_proj", "*.experts.linear_fc1"):
        assert chosen(moe, pattern) == targets.modules
    for pattern in ("*.local_experts.3.linear_fc1", "model.layers.0.mlp.experts.5.gate_proj"):
        with pytest.raises(ConfigError, match="names one expert, but all of a layer are adapted or none"):
            chosen(moe, pattern)


def test_selects_looks_through_wrappers_and_at_whole_names(dense: ModelShape) -> None:
    """Data parallelism and mixed precision each put `module.` before a name."""
    targets = resolve_targets(LoraConfig(target_modules=("*.layers.1.*.linear_qkv",)), dense)
    assert targets.selects("module.module.decoder.layers.1.self_attention.linear_qkv")
    assert not targets.selects("decoder.layers.11.self_attention.linear_qkv")
    assert not targets.selects("decoder.layers.1.self_attention")


@functools.cache
def bridge_wildcard_match() -> Callable[[str, str], bool]:
    """Take the function out of the installed Megatron-Bridge, whose import takes many seconds."""
    spec = importlib.util.find_spec("megatron")
    locations = spec.submodule_search_locations if spec else None
    # `megatron` is a namespace: a directory of that name elsewhere on the path is a part of it too.
    [source] = [path for place in locations or () if (path := Path(place) / "bridge/peft/utils.py").is_file()]
    functions = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    tree = ast.Module([node for node in functions if node.name == "wildcard_match"], [])
    scope: dict[str, object] = {"re": re, "Optional": type("Optional", (), {"__class_getitem__": lambda item: item})}
    exec(compile(tree, str(source), "exec"), scope)
    return scope["wildcard_match"]  # type: ignore[return-value]


NAME = st.lists(st.sampled_from(["decoder", "layers", "1", "10", "mlp", "linear_fc1"]), min_size=1).map(".".join)


@given(NAME, st.lists(NAME | st.just("*"), min_size=1).map(".".join))
def test_wildcards_match_as_in_megatron_bridge(name: str, pattern: str) -> None:
    """So that recipes mean the same here, but that a dot is a dot: Bridge's `*.1` also means layer 11."""
    with_dots = pattern.replace(".", r"\.")
    assert bool(_wildcard(pattern)(name)) == bridge_wildcard_match()(with_dots, name)
    assert bridge_wildcard_match()("*.1", "layers.11")
    assert not _wildcard("*.1")("layers.11")
