"""The base's weights arrive whole, in every layout, or the run does not begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import LENGTHS, assert_alike, logits_of_each, packed, packed_logits, with_model
from tiny import write_llama, write_tokenizer

from ckptrain.config.schema import RunConfig
from ckptrain.errors import ModelMismatch

MakeConfig = Callable[..., RunConfig]


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Write the weights of a model anew after `change` has had them."""
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_every_process_gets_its_part(layout: str, tied: bool, tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Two of them; tied embeddings are the output layer of another stage too."""
    directory = write_llama(tmp_path / "model", tie_word_embeddings=tied)
    batch = packed(LENGTHS)
    config = tiny_config(f"parallel.{layout}=2", pretrained=str(directory))
    found = with_model(config, partial(packed_logits, batch), 2)
    assert_alike(found[-1], logits_of_each(directory, batch))


def test_a_model_in_several_files_is_read_from_all_of_them_each_opened_once(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """As a large one comes; a file with thousands of experts has a header of megabytes."""
    from transformers import AutoModelForCausalLM

    directory = write_llama(tmp_path / "one")
    several = tmp_path / "several"
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(several, max_shard_size="200KB")
    write_tokenizer(several)
    batch = packed(LENGTHS)

    def on_rank(setup: Any) -> Any:
        return packed_logits(batch, setup), opened

    from ckptrain.megatron import base_weights

    opened: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        safe_open = base_weights.safe_open
        patch.setattr(base_weights, "safe_open", lambda path, **how: (opened.append(path), safe_open(path, **how))[1])
        [(found, opened)] = with_model(tiny_config(pretrained=str(several)), on_rank)
    assert_alike(found, logits_of_each(directory, batch))
    assert sorted(path.name for path in opened) == sorted(path.name for path in several.glob("*.safetensors"))
    assert len(opened) > 2


@pytest.mark.parametrize(
    ("hf_name", "name"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "decoder.layers.1.self_attention.linear_qkv.weight"),
        ("model.norm.weight", "decoder.final_layernorm.weight"),
        ("lm_head.weight", "output_layer.weight"),
    ],
)
def test_a_weight_that_is_not_in_the_file_is_named(
    hf_name: str, name: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """By the parameter that it should have filled; a weight that one of three parts lacks has none."""
    directory = write_llama(tmp_path / "model")
    change_weights(directory, lambda weights: weights.pop(hf_name))
    with pytest.raises(ModelMismatch, match=f"for 1 parameters under Megatron: {name.replace('.', '[.]')}$"):
        with_model(tiny_config(pretrained=str(directory)), lambda setup: None)


@pytest.mark.parametrize("value", [float("nan"), float("-nan")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_single_nan_is_found(value: float, dtype: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Among numbers that are larger, infinity too."""
    directory = write_llama(tmp_path / "model")

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.2.mlp.down_proj.weight"][3, :3] = torch.tensor([float("inf"), value, 1e30])

    change_weights(directory, spoil)
    with pytest.raises(ModelMismatch, match=r"NaN among them, for 1 .*decoder\.layers\.2\.mlp\.linear_fc2\.weight"):
        with_model(tiny_config(pretrained=str(directory), dtype=dtype), lambda setup: None)


def test_infinities_are_no_nan(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Of both signs: what a model that someone made has is theirs."""
    directory = write_llama(tmp_path / "model")

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.2.mlp.down_proj.weight"][3, :2] = torch.tensor([float("inf"), float("-inf")])

    change_weights(directory, spoil)
    with_model(tiny_config(pretrained=str(directory)), lambda setup: None)


def test_weights_of_another_model_than_the_config_says_are_refused(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """With both shapes."""
    directory = write_llama(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(ModelMismatch, match=r"linear_fc1\.weight under Megatron is \[192, 64\].*\[320, 64\]"):
        with_model(tiny_config(pretrained=str(directory)), lambda setup: None)
