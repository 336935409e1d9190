"""A model under Megatron in processes of its own, and what Hugging Face computes of the same sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from forked import launch
from tiny import VOCAB_SIZE
from torch import Tensor

from ckptrain.data.batches import MicroBatch

if TYPE_CHECKING:
    from ckptrain.config.schema import RunConfig
    from ckptrain.training.setup import ModelSetup

LENGTHS = (5, 40, 1, 27)
ROUNDING = 1e-5
"""Largest difference of two logits as a share of the largest, float32."""
EVERYTHING_BUT_EXPERTS = "lora.target_modules=[linear_qkv, linear_proj]"


def packed(lengths: tuple[int, ...]) -> MicroBatch:
    """Return sequences of these lengths, packed; every token but the first of each is learnt."""
    tokens = torch.randint(0, VOCAB_SIZE, (1, sum(lengths)), generator=torch.Generator().manual_seed(5))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return MicroBatch(
        tokens=tokens,
        labels=tokens.roll(1),
        loss_mask=(positions > 0).float(),
        position_ids=positions,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
        num_learnt=int((positions > 0).sum()),
        sample_ids=tuple(range(len(lengths))),
    )


def with_model(config: RunConfig, act: Callable[[ModelSetup], Any], num_ranks: int = 1) -> list[Any]:
    """Set a model up in processes of its own and return what `act` makes of it on each."""
    from ckptrain.lifecycle.phases import Lifecycle, Phase
    from ckptrain.megatron.world import open_process_group
    from ckptrain.training.observers import Observer
    from ckptrain.training.setup import model_parallel, set_up_model
    from ckptrain.training.start import survey_run

    def on_rank() -> Any:
        survey = survey_run(config, num_ranks)
        with open_process_group(), model_parallel(survey):
            lifecycle = Lifecycle()
            lifecycle.advance(Phase.PLANNED)
            return act(set_up_model(survey, lifecycle, Observer()))

    return launch(num_ranks, on_rank)


def packed_logits(batch: MicroBatch, setup: ModelSetup) -> Any:
    """Return the logits of all positions, on the last pipeline stage; None on the others."""
    from ckptrain.megatron.step import logits_at

    logits = logits_at(setup.model, batch, torch.arange(batch.tokens.shape[1]))
    return None if logits is None else logits[:, :VOCAB_SIZE].numpy()


@torch.no_grad()
def logits_of_each(directory: Path, batch: MicroBatch, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return Hugging Face's logits of each sequence alone, by the attention that leaves nothing out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    lengths = batch.cu_seqlens.diff().tolist()
    return torch.cat([model(input_ids=part).logits[0].float() for part in batch.tokens.split(lengths, dim=1)])


def assert_alike(found: Any, expected: Tensor, within: float = ROUNDING) -> None:
    """Compare logits: [positions, vocab]."""
    assert expected.abs().max() > 0.1
    difference = (torch.from_numpy(found) - expected).abs().max().item()
    assert difference <= within * expected.abs().max().item()
