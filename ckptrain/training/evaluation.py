"""How good is the model now? The validation loss, and an answer to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ckptrain.checkpoint.ranks import gather_to_all
from ckptrain.data.batches import MicroBatch
from ckptrain.data.chat import Prompt
from ckptrain.megatron.step import evaluate, logits_at
from ckptrain.training.observers import SampleAnswer
from ckptrain.training.setup import DataSetup, ModelSetup


def validation_loss(setup: ModelSetup, data: DataSetup) -> float | None:
    """Return the mean loss over the learnt tokens of the validation set, in nats; None without one; collective."""
    if not data.validation_batches:
        return None
    loss: float
    loss, _ = evaluate(setup.model, data.validation_batches)
    return loss


def answer_sample(setup: ModelSetup, data: DataSetup, step: int, max_tokens: int, multiple: int) -> SampleAnswer | None:
    """Let the model answer the sample question greedily; None where no sample was asked for; collective.

    The prompt is computed anew for every token: it keeps no cache, and so it runs under every layout by the schedule
    that training uses. `multiple` is what the length must be a multiple of (sequence parallelism).
    """
    prompt = data.prompt
    if prompt is None:
        return None
    answer = _greedy(setup.model, prompt, max_tokens, multiple)
    text = data.tokenizer.decode(answer, skip_special_tokens=True)
    return SampleAnswer(step=step, prompt=prompt.text, reference=prompt.reference, answer=text.strip())


def _greedy(model: Any, prompt: Prompt, max_tokens: int, multiple: int) -> list[int]:
    tokens = list(prompt.token_ids)
    for _ in range(max_tokens):
        batch = _one_sequence(tokens, multiple)
        logits = logits_at(model, batch, torch.tensor([len(tokens) - 1]))
        mine = None if logits is None else int(logits[0].argmax())
        token = next(choice for choice in gather_to_all(mine) if choice is not None)
        if token == prompt.stop_token_id:
            break
        tokens.append(token)
    return tokens[len(prompt.token_ids) :]


def _one_sequence(tokens: Sequence[int], multiple: int) -> MicroBatch:
    """Lay out one sequence, with padding after it (which it does not see) up to a multiple."""
    length = len(tokens)
    padding = -length % multiple
    boundaries = [0, length, length + padding] if padding else [0, length]
    row = torch.tensor([[*tokens, *[0] * padding]])
    return MicroBatch(
        tokens=row,
        labels=torch.zeros_like(row),
        loss_mask=torch.zeros(row.shape),
        position_ids=torch.tensor([[*range(length), *range(padding)]]),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
        max_seqlen=max(length, padding),
        num_learnt=0,
        sample_ids=(),
    )
