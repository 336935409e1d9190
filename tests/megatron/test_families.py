"""What is particular to a family: layouts, a step of training, 16 bits, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from support.models import (
    EVERYTHING_BUT_EXPERTS,
    LENGTHS,
    assert_alike,
    logits_of_each,
    packed,
    packed_logits,
    with_model,
)

from ckptrain.config.schema import RunConfig
from ckptrain.data.batches import MicroBatch
from ckptrain.errors import ConfigError
from ckptrain.megatron.families import family_settings
from ckptrain.megatron.step import train_step
from ckptrain.training.setup import ModelSetup
from ckptrain.training.start import survey_run

DENSE = ("Gemma 2", "Gemma 3", "Llama, yarn rope")
EXPERTS = ("Qwen3-MoE", "OLMoE", "GPT-OSS")
LAYOUTS = {"TP=2": ["parallel.tensor=2"], "PP=2": ["parallel.pipeline=2"]}
# In bfloat16 every layer rounds to three digits, and the two do not round at the same places.
ROUNDING_16 = 6e-2


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in DENSE for layout in LAYOUTS] + [(name, "PP=2") for name in EXPERTS],
)
def test_every_layout_computes_what_hugging_face_computes(
    name: str, layout: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Heads and stages are cut; layers keep the number that their window and rope go by."""
    directory = write_family(tmp_path / "model", name)
    batch = packed(LENGTHS)
    config = tiny_config(EVERYTHING_BUT_EXPERTS, *LAYOUTS[layout], pretrained=str(directory))
    found = [logits for logits in with_model(config, partial(packed_logits, batch), 2) if logits is not None]
    assert found
    for logits in found:
        assert_alike(logits, logits_of_each(directory, batch))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Qwen3-MoE", "with experts needs sequence parallelism"),
        ("GPT-OSS", "with experts needs sequence parallelism"),
        ("OLMoE", "norms of q and k are over all"),
    ],
)
def test_experts_under_tensor_parallelism_alone_are_refused(
    name: str, why: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Megatron wants sequence parallelism for it, and OLMoE's norms are of no use to a process that has half the heads."""
    attention = "lora.target_modules=[linear_qkv,linear_proj]"
    config = tiny_config(attention, "parallel.tensor=2", pretrained=str(write_family(tmp_path / "model", name)))
    with pytest.raises(ConfigError, match=why):
        survey_run(config, 2)


def gradients(batch: MicroBatch, setup: ModelSetup) -> tuple[float, dict[str, float]]:
    """Take a step; returns its loss, and the norm of the gradient of every adapter weight, by global name."""
    result = train_step(setup.model, setup.optimizer, [batch])
    return result.loss, {each.name: each.parameter.main_grad.norm().item() for each in setup.adapters}


@pytest.mark.parametrize("name", (*DENSE, *EXPERTS))
def test_a_step_reaches_every_adapter(name: str, tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """A finite loss, near that of guessing, and a gradient for every weight of every adapted layer."""
    directory = write_family(tmp_path / "model", name)
    targets = [EVERYTHING_BUT_EXPERTS] if name == "GPT-OSS" else []
    config = tiny_config("lora.lora_B_init_method=xavier", *targets, pretrained=str(directory))
    [(loss, norms)] = with_model(config, partial(gradients, packed(LENGTHS)))
    assert math.isfinite(loss)
    assert 3.0 < loss < 10.0
    assert len(norms) >= 4 * 2 * 2
    assert {name: norm for name, norm in norms.items() if not (math.isfinite(norm) and norm > 0)} == {}


@pytest.mark.parametrize("name", ["Gemma 2", "Gemma 3", "OLMoE", "GPT-OSS"])
def test_16_bits_round_where_hugging_face_rounds(
    name: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The embedding's scale, norms around 1 + weight, sinks: none is off by more than the type's rounding."""
    directory = write_family(tmp_path / "model", name)
    batch = packed(LENGTHS)
    config = tiny_config(EVERYTHING_BUT_EXPERTS, pretrained=str(directory), dtype="bfloat16")
    [found] = with_model(config, partial(packed_logits, batch))
    assert_alike(found, logits_of_each(directory, batch, torch.bfloat16), ROUNDING_16)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("OLMoE", {"norm_topk_prob": True}),
        ("Qwen3-MoE", {"norm_topk_prob": False}),
        ("GPT-OSS", {"intermediate_size": 48}),
        ("Gemma 2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("Gemma 3", {"final_logit_softcapping": 2.0, "tie_word_embeddings": False}),
        ("Gemma 3", {"rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
        }}),
        ("Qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
                                       "original_max_position_embeddings": 32, "attention_factor": 1.5}}),
    ],
)  # fmt: skip
def test_what_a_config_can_say_otherwise_is_heard(
    name: str, changes: dict[str, Any], tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Settings that are particular to a family, each as it is not by default."""
    directory = write_family(tmp_path / "model", name, **changes)
    batch = packed(LENGTHS)
    config = tiny_config(EVERYTHING_BUT_EXPERTS, pretrained=str(directory))
    [found] = with_model(config, partial(packed_logits, batch))
    assert_alike(found, logits_of_each(directory, batch))


def test_a_config_as_transformers_4_wrote_it_is_heard(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Gemma 3 as it lies on the hub: a pattern for the layers, two bases of rope, a scaling, and no word of tying."""
    directory = write_family(tmp_path / "model", "Gemma 3", layer_types=None)
    config = json.loads((directory / "config.json").read_text())
    for key in ("layer_types", "rope_parameters", "tie_word_embeddings"):
        del config[key]
    config |= {"sliding_window_pattern": 2, "rope_theta": 1e5, "rope_local_base_freq": 1e3}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    (directory / "config.json").write_text(json.dumps(config))
    batch = packed(LENGTHS)
    [found] = with_model(tiny_config(pretrained=str(directory)), partial(packed_logits, batch))
    assert_alike(found, logits_of_each(directory, batch))


def test_experts_that_peft_would_pass_over_are_not_trained(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """GPT-OSS keeps its experts in one tensor, interleaved."""
    directory = write_family(tmp_path / "model", "GPT-OSS")
    for targets in ("['*.experts.*']", "[all-linear]"):
        config = tiny_config(f"lora.target_modules={targets}", pretrained=str(directory))
        with pytest.raises(ConfigError, match="PEFT passes over adapters of single ones"):
            survey_run(config, 1)


@pytest.mark.parametrize(
    "architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM"]
)
def test_layers_that_were_never_compared_are_refused(architecture: str) -> None:
    """Megatron-Bridge has layers of these for Transformer Engine, which put LoRA before a norm, or cut one wrongly."""
    with pytest.raises(ConfigError, match=r"set model\.backend=local"):
        family_settings(None, architecture, "transformer_engine")
