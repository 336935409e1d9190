"""The base under Megatron computes what Hugging Face computes, family by family, sequences packed together or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launch import launch
from tiny import LLAMA3_ROPE, write_llama, write_tokenizer

from ckptrain.config.schema import RunConfig
from ckptrain.convert.parity import load_huggingface
from ckptrain.data.batches import MicroBatch
from ckptrain.errors import ConfigError, ModelMismatch
from ckptrain.lifecycle.phases import Lifecycle, Phase
from ckptrain.megatron.step import logits_at
from ckptrain.megatron.world import open_process_group
from ckptrain.training.observers import Observer
from ckptrain.training.setup import ModelSetup, model_parallel, set_up_model
from ckptrain.training.start import survey_run

LENGTHS = (5, 40, 1, 27)
VOCAB = 264


def write_model(directory: Path, family: str, **changes: Any) -> Path:
    """Write a tiny random model of a family."""
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    if family == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def packed(lengths: tuple[int, ...]) -> MicroBatch:
    """Return sequences of these lengths, packed."""
    tokens = torch.randint(0, VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(5))
    return MicroBatch(
        tokens=tokens,
        labels=torch.zeros_like(tokens),
        loss_mask=torch.zeros(tokens.shape),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
        num_learnt=0,
        sample_ids=tuple(range(len(lengths))),
    )


def with_model(config: RunConfig, act: Callable[[ModelSetup], Any]) -> Any:
    """Set a model up in a process of its own and return what `act` makes of it."""

    def on_rank() -> Any:
        survey = survey_run(config, 1)
        with open_process_group(), model_parallel(survey):
            lifecycle = Lifecycle()
            lifecycle.advance(Phase.PLANNED)
            return act(set_up_model(survey, lifecycle, Observer()))

    return launch(1, on_rank)[0]


MODELS = {
    "Llama": ("Llama", {}),
    "Llama with llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "Llama with linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "Llama with tied embeddings": ("Llama", {"tie_word_embeddings": True}),
    "Mistral": ("Mistral", {}),
    "Mistral with a window shorter than a sequence": ("Mistral", {"sliding_window": 16}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {}),
    "Qwen3-MoE": ("Qwen3Moe", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_logits_are_those_of_each_sequence_alone_in_hugging_face(
    name: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Four sequences in one row: positions restart and none sees another; the largest difference is rounding."""
    family, changes = MODELS[name]
    directory = write_model(tmp_path / "model", family, **changes)
    batch = packed(LENGTHS)
    config = tiny_config(pretrained=str(directory), verify="always")
    found = with_model(config, lambda setup: logits_at(setup.model, batch, torch.arange(sum(LENGTHS))).numpy())
    reference = load_huggingface(directory, torch.float32, torch.device("cpu")).eval()
    with torch.no_grad():
        expected = torch.cat([reference(input_ids=part).logits[0] for part in batch.tokens.split(LENGTHS, dim=1)])
    assert expected.abs().max() > 0.1
    assert (torch.from_numpy(found) - expected).abs().max() < 2e-6


def test_a_base_that_computes_something_else_is_refused(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Megatron's built-in llama3 constants, which are not this model's, the check after loading stops the run."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from ckptrain.megatron import model

    def built_in(_: Any) -> torch.Tensor:
        plain = 1.0 / (1e4 ** (torch.arange(0, 8, 2, dtype=torch.float) / 8))
        return RotaryEmbedding._apply_scaling(None, plain, factor=8.0)

    monkeypatch.setattr(model, "_rope_frequencies", built_in)
    directory = write_llama(tmp_path / "model")
    with pytest.raises(ModelMismatch, match="does not compute what Hugging Face computes"):
        with_model(tiny_config(pretrained=str(directory), verify="always"), lambda setup: None)


def test_a_model_that_is_not_checked_is_said_to_be_unchecked(tiny_config: Callable[..., RunConfig]) -> None:
    """model.verify=never leaves its mark."""
    parity = with_model(tiny_config(verify="never"), lambda setup: setup.parity)
    assert not parity.checked
    assert "not checked" in parity.reason


def test_a_kind_of_rope_that_is_not_known_is_refused(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Dynamic scaling depends on the length of the text, which no table of frequencies can hold."""
    directory = write_llama(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="rope_type is 'dynamic'"):
        with_model(tiny_config(pretrained=str(directory)), lambda setup: None)
