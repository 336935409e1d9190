"""The output layer and the cross-entropy together, some rows at a time: never are there the logits of all tokens.

With a vocabulary of 128,256 the logits of 16,384 tokens are 4.2 GB, and their gradient as much again. Here a portion's
logits become their gradient where they are, and that becomes the gradient of the hidden states at once (Hsu et al.
2024, Liger Kernel, arXiv:2410.10989, section 3.2), which is all that backward needs: the output layer is frozen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckptrain.megatron.fused.kernels import cross_entropy

# Rows of a portion: enough for full speed of the products, 0.5 GB of logits at 128,256 tokens.
ROWS = 2048


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, with_gradient: bool) -> Tensor:
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if with_gradient else None
        for start in range(0, len(hidden), ROWS):
            rows = slice(start, start + ROWS)
            logits = hidden[rows] @ weight.t()
            losses[rows] = cross_entropy(logits, labels[rows], with_gradient=with_gradient)
            if gradient is not None:
                torch.mm(logits, weight, out=gradient[rows])
            del logits  # before there are those of the next rows
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad[:, None]).to(gradient.dtype), None, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token, float32 [tokens].

    Args:
        hidden: what the output layer is given, [tokens, hidden_size].
        weight: its frozen weight, [vocab_size, hidden_size].
        labels: int64 [tokens].
    """
    wanted = torch.is_grad_enabled() and hidden.requires_grad
    losses: Tensor = _LinearCrossEntropy.apply(hidden, weight.detach(), labels, wanted)
    return losses
