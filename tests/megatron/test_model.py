"""The base under Megatron computes what Hugging Face computes, family by family, sequences packed together or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write_family
from support.models import (
    EVERYTHING_BUT_EXPERTS,
    LENGTHS,
    ROUNDING,
    assert_alike,
    logits_of_each,
    packed,
    packed_logits,
    with_model,
)
from tiny import VOCAB_SIZE, write_llama

from ckptrain.config.schema import RunConfig
from ckptrain.errors import ConfigError, ModelMismatch
from ckptrain.megatron.rope import FULL, Rope, constant_frequencies, read_ropes
from ckptrain.training.start import survey_run


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_logits_are_those_of_each_sequence_alone_in_hugging_face(
    name: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Four sequences in one row: positions restart and none sees another; the largest difference is rounding."""
    directory = write_family(tmp_path / "model", name)
    batch = packed(LENGTHS)
    config = tiny_config(EVERYTHING_BUT_EXPERTS, pretrained=str(directory))
    [found] = with_model(config, partial(packed_logits, batch))
    assert_alike(found, logits_of_each(directory, batch))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "rope" in name])
def test_a_scaled_rope_is_not_the_plain_one(name: str, tmp_path: Path) -> None:
    """The comparison above could not fail if the probe did not show the scaling; dynamic begins behind it."""
    directory = write_family(tmp_path / "model", name)
    batch = packed(LENGTHS)
    scaled = logits_of_each(directory, batch)
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    (directory / "config.json").write_text(json.dumps(config))
    difference = (logits_of_each(directory, batch) - scaled).abs().max() / scaled.abs().max()
    if "dynamic" in name:
        assert difference == 0.0
    else:
        assert difference > 100 * ROUNDING


def test_a_vocabulary_that_is_not_cut_evenly_is_padded(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Two tensor parallel processes, an odd number of tokens."""
    directory = write_family(tmp_path / "model", "Qwen2", vocab_size=VOCAB_SIZE + 1)
    batch = packed(LENGTHS)
    config = tiny_config("parallel.tensor=2", pretrained=str(directory))
    for found in with_model(config, partial(packed_logits, batch), 2):
        assert_alike(found, logits_of_each(directory, batch)[:, :VOCAB_SIZE])


def test_a_base_that_computes_something_else_is_refused(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Megatron's built-in llama3 constants, which are not this model's, the check after loading stops the run."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from ckptrain.megatron import model

    def built_in(_: Any) -> dict[str, Rope]:
        plain = 1.0 / (1e4 ** (torch.arange(0, 8, 2, dtype=torch.float) / 8))
        scaled = RotaryEmbedding._apply_scaling(None, plain, factor=8.0)
        return {FULL: Rope(frequencies=scaled, attention_factor=1.0)}

    monkeypatch.setattr(model, "read_ropes", built_in)
    directory = write_llama(tmp_path / "model")
    with pytest.raises(ModelMismatch, match="does not compute what Hugging Face computes"):
        with_model(tiny_config(pretrained=str(directory), verify="always"), lambda setup: None)


def test_a_weight_that_the_base_lacks_is_named(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Or has only in part: NaN are looked for, too."""
    from safetensors.torch import load_file, save_file

    directory = write_llama(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"].fill_(torch.nan)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelMismatch, match=r"decoder\.layers\.1\.input_layernorm\.weight"):
        with_model(tiny_config(pretrained=str(directory)), lambda setup: None)


def test_a_model_that_is_not_checked_is_said_to_be_unchecked(tiny_config: Callable[..., RunConfig]) -> None:
    """model.verify=never leaves its mark."""
    [parity] = with_model(tiny_config(verify="never"), lambda setup: setup.parity)
    assert not parity.checked
    assert "not checked" in parity.reason


def test_a_sequence_behind_dynamic_scaling_is_refused(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Its frequencies depend on the length of the text there, and before, in Hugging Face, on what was computed."""
    directory = write_family(tmp_path / "model", "Llama, dynamic rope")
    config = tiny_config("data.sequence_length=512", pretrained=str(directory))
    with pytest.raises(ConfigError, match="is more than the 256 positions"):
        survey_run(config, 1)


def test_one_table_of_frequencies_does_not_do_for_every_model(tmp_path: Path) -> None:
    """Transformer Engine's layers take one: not for local layers besides others, nor for texts of any length."""
    from transformers import AutoConfig

    ropes = {name: read_ropes(AutoConfig.from_pretrained(write_family(tmp_path / name, name))) for name in FAMILIES}
    assert constant_frequencies(ropes["Llama, yarn rope"], 256).shape == (4,)
    assert constant_frequencies(ropes["Llama, longrope"], 32).shape == (4,)
    for name, longest in (("Llama, longrope", 33), ("Gemma 3", 8)):
        with pytest.raises(ConfigError, match=r"set model\.backend=local"):
            constant_frequencies(ropes[name], longest)
