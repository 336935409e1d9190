"""Unsloth as a contestant of bench_gpu.py; its packages are in a folder of their own, in other versions than the rest.

The loop is written by hand, as its documentation's notebooks leave it to a trainer: autocast, the model's own loss
(which is its fused cross-entropy over chunks), and torch's fused AdamW over adapters in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from gpu_shapes import ALPHA, CLIP_GRAD, LR, PROJECTIONS, RANK

if TYPE_CHECKING:
    from torch import Tensor


def build(
    base: str, sequence_length: int, *, checkpointing: Literal["unsloth", False]
) -> tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]:
    """Return a function that makes a step on ids and labels, each [rows, length], and the settings."""
    import unsloth  # before torch's and transformers' first use: it replaces parts of them

    # isort: split
    import torch

    model, _ = unsloth.FastLanguageModel.from_pretrained(
        base,
        max_seq_length=sequence_length,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        use_gradient_checkpointing=checkpointing,
        use_exact_model_name=True,
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0,
        bias="none",
        target_modules=list(PROJECTIONS),
        use_gradient_checkpointing=checkpointing,
        max_seq_length=sequence_length,
    )
    unsloth.FastLanguageModel.for_training(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LR, weight_decay=0.0, fused=True)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, CLIP_GRAD)
        optimizer.step()
        detached: Tensor = loss.detach()
        return detached

    return step, {"version": unsloth.__version__, "checkpointing": checkpointing, "adapters": str(trainable[0].dtype)}
