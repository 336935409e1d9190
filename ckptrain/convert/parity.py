"""Does the model under Megatron compute what Hugging Face computes? Logits of a short probe, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from ckptrain.checkpoint.ranks import gather_to_all, on_rank0
from ckptrain.config.shape import ModelShape
from ckptrain.convert.gate import AUTO_PARAMETERS
from ckptrain.data.batches import MicroBatch
from ckptrain.errors import ModelMismatch
from ckptrain.megatron.step import logits_at

_PROBE_TOKENS = 48
# Largest difference of two logits as a share of the largest logit. In float32 the two differ by rounding alone (4e-7
# was the most in our families); in bfloat16 every layer rounds to 3 digits. A wrong rope scaling shows as 1e-3 or more,
# so bfloat16 cannot show it here; the frequencies themselves are copied from Hugging Face for that reason.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2}


@attrs.frozen(kw_only=True)
class BaseParity:
    """The outcome of comparing the base under Megatron with Hugging Face's."""

    checked: bool
    reason: str
    max_difference: float | None = None
    """Largest absolute difference of two logits."""
    max_logit: float | None = None


def _within(difference: float) -> str:
    return f"within {difference:.2g}" if difference else "exactly"


def probe_batch(vocab_size: int, num_tokens: int = _PROBE_TOKENS) -> MicroBatch:
    """Return one sequence of pseudo-random token ids below `vocab_size`, the same on every machine."""
    generator = torch.Generator().manual_seed(20_261_130)
    tokens = torch.randint(0, vocab_size, (1, num_tokens), generator=generator)
    return MicroBatch(
        tokens=tokens,
        labels=torch.zeros_like(tokens),
        loss_mask=torch.zeros(1, num_tokens),
        position_ids=torch.arange(num_tokens)[None],
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        max_seqlen=num_tokens,
        num_learnt=0,
        sample_ids=(),
    )


def megatron_logits(model: Any, batch: MicroBatch, vocab_size: int) -> Tensor:
    """Return the logits of a batch of one sequence, [tokens, vocab] float32 on the CPU; collective."""
    logits = logits_at(model, batch, torch.arange(batch.tokens.shape[1]))
    mine = None if logits is None else logits[:, :vocab_size].cpu()
    # The last pipeline stage has them; every data parallel rank computed the same.
    return next(theirs for theirs in gather_to_all(mine) if theirs is not None)


@torch.no_grad()
def huggingface_logits(model: Any, batch: MicroBatch) -> Tensor:
    """Return the logits of a Hugging Face model for a batch of one sequence, [tokens, vocab] float32 on the CPU."""
    logits: Tensor = model.eval()(input_ids=batch.tokens.to(model.device)).logits[0]
    return logits.float().cpu()


def load_huggingface(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a causal language model from a Hugging Face directory, quietly."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    # Gemma 2 caps attention scores, which transformers' default attention passes over without a word.
    capped = getattr(AutoConfig.from_pretrained(directory), "attn_logit_softcapping", None)
    attention = {"attn_implementation": "eager"} if capped else {}
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **attention).to(device)
    finally:
        logging.enable_progress_bar()


def check_base(
    model: Any, directory: Path, shape: ModelShape, *, verify: str, dtype: torch.dtype, device: torch.device
) -> BaseParity:
    """Compare the freshly loaded base with Hugging Face's, or say that it was not compared; collective.

    Raises:
        ModelMismatch: the logits differ by more than rounding.
    """
    if verify == "never":
        return BaseParity(checked=False, reason="not checked: model.verify is never")
    if verify == "auto" and shape.num_parameters > AUTO_PARAMETERS:
        return BaseParity(
            checked=False,
            reason=f"not checked: the base has {shape.num_parameters / 1e9:.1f} billion parameters, model.verify=auto"
            f" compares up to {AUTO_PARAMETERS / 1e9:.1f}; model.verify=always does it on rank 0",
        )
    batch = probe_batch(shape.vocab_size)
    ours = megatron_logits(model, batch, shape.vocab_size)

    def compare() -> BaseParity:
        theirs = huggingface_logits(load_huggingface(directory, dtype, device), batch)
        difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
        name = str(dtype).removeprefix("torch.")
        allowed = _TOLERANCE[name] * max(largest, 1.0)
        if not difference <= allowed:  # a NaN is a mismatch too
            raise ModelMismatch(
                f"the base under Megatron does not compute what Hugging Face computes from {directory}: logits of a"
                f" probe of {batch.tokens.shape[1]} tokens differ by {difference:.3g}, expected at most {allowed:.3g}"
                f" ({name}); this model must not be trained on this way, please report it"
            )
        return BaseParity(
            checked=True,
            reason=f"logits agree with Hugging Face {_within(difference)} (largest logit {largest:.3g}, {name})",
            max_difference=difference,
            max_logit=largest,
        )

    return on_rank0(compare)
