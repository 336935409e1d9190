"""What lies between the matrix products, each in one pass over memory: norm, SwiGLU, rotation, cross-entropy.

Every function writes where it is told, which may be the left columns of a wider matrix (`fused.weight` says why). On a
GPU they are Triton kernels (`triton_kernels`), on the CPU the same formulas in torch.

Shapes: `tokens` rows; a tensor's last axis is contiguous, its rows may lie further apart. All arithmetic is float32.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

# Of float8_e4m3fn; and what a row is taken to be at least, so that one of zeros has a scale.
LARGEST = 448.0
SMALLEST = 1e-12


@attrs.frozen(kw_only=True)
class Heads:
    """How the output features of linear_qkv lie under Megatron: `groups` blocks of `queries` q heads, one k, one v."""

    groups: int
    queries: int
    head_dim: int

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Return [heads, head_dim] of q, k and v."""
        return ((self.groups * self.queries, self.head_dim), *[(self.groups, self.head_dim)] * 2)


def norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """Write x / rms(x) * weight into `out` and return 1 / rms(x), float32 [tokens] (Zhang & Sennrich, 1910.07467).

    `x` and `out` are [tokens, hidden_size].
    """
    if x.is_cuda:
        from ckptrain.megatron.fused import triton_kernels

        return triton_kernels.norm(x, weight, eps, out)
    scale = x.float().pow(2).mean(-1).add(eps).rsqrt()
    out.copy_(rms_norm(x.float(), weight.shape, weight.float(), eps))
    return scale


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, residual_grad: Tensor, *, room: int
) -> Tensor:
    """Return the gradient of x, [tokens, hidden_size], from those of its norm and of the residual beside it.

    `scale` is what `norm` returned; the weight is frozen and has none. Behind each row there is `room` for more values.
    """
    if x.is_cuda:
        from ckptrain.megatron.fused import triton_kernels

        return triton_kernels.norm_backward(grad, x, weight, scale, residual_grad, room=room)
    inner, wide, scale = grad.float() * weight.float(), x.float(), scale[:, None]
    mean = (inner * wide).mean(-1, keepdim=True)
    out = x.new_empty(len(x), x.shape[1] + room)[:, : x.shape[1]]
    return out.copy_(residual_grad.float() + scale * (inner - wide * scale.square() * mean))


def copy_rows(x: Tensor, out: Tensor) -> None:
    """Copy a matrix into one whose rows lie otherwise; torch's own copy takes three times as long on a GPU."""
    if x.is_cuda:
        from ckptrain.megatron.fused import triton_kernels

        triton_kernels.copy_rows(x, out)
        return
    out.copy_(x)


def transposed(x: Tensor) -> Tensor:
    """Return the transpose of a matrix of 8-bit values, contiguous."""
    if x.is_cuda:
        from ckptrain.megatron.fused import triton_kernels

        return triton_kernels.transposed(x)
    return x.view(torch.uint8).t().contiguous().view(x.dtype)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up into `out`, [tokens, ffn]; `gate_up` is [tokens, 2 * ffn] (Shazeer, arXiv:2002.05202)."""
    if gate_up.is_cuda:
        from ckptrain.megatron.fused import triton_kernels

        triton_kernels.swiglu(gate_up, out)
        return
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(silu(gate) * up)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> None:
    """Write the gradient of `gate_up` over it, and silu(gate) * up over `grad`, [tokens, ffn]."""
    if gate_up.is_cuda:
        from ckptrain.megatron.fused import triton_kernels

        triton_kernels.swiglu_backward(grad, gate_up)
        return
    gate, up = gate_up.float().chunk(2, dim=-1)
    given, share = grad.float(), gate.sigmoid()
    active = gate * share * up
    gate_up.copy_(torch.cat((given * up * share * (1 + gate * (1 - share)), given * gate * share), dim=-1))
    grad.copy_(active)


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v, each [tokens, heads, head_dim], with q and k turned (Su et al., arXiv:2104.09864).

    Args:
        qkv: [tokens, groups * (queries + 2) * head_dim].
        cos: of each token's angles, float32 [tokens, head_dim / 2]; the two halves of a head turn together.
        sin: like `cos`.
        heads: how they lie in `qkv`.
    """
    if qkv.is_cuda:
        from ckptrain.megatron.fused import triton_kernels

        return triton_kernels.rotate(qkv, cos, sin, heads)
    blocks = qkv.unflatten(-1, (heads.groups, heads.queries + 2, heads.head_dim))
    parts = blocks.split((heads.queries, 1, 1), dim=2)
    q, k = (_turned(part.float(), cos, sin).to(qkv.dtype) for part in parts[:2])
    return q.flatten(1, 2), k.flatten(1, 2), parts[2].flatten(1, 2).contiguous()


def rotate_backward(grads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, heads: Heads, out: Tensor) -> None:
    """Write the gradient of `rotate`'s qkv into `out`, from those of q, k and v."""
    if out.is_cuda:
        from ckptrain.megatron.fused import triton_kernels

        triton_kernels.rotate_backward(grads, cos, sin, heads, out)
        return
    q, k, v = (grad.unflatten(1, (heads.groups, -1)) for grad in grads)
    turned = (_turned(part.float(), cos, -sin).to(out.dtype) for part in (q, k))
    out.copy_(torch.cat((*turned, v), dim=2).flatten(1))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the heads of [tokens, groups, heads, head_dim] by each token's angles."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def quantise(x: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x, its columns multiplied first, in 8 bits (e4m3, arXiv:2209.05433), and what to multiply each row by.

    Args:
        x: [tokens, features]
        columns: float32 [features], or None.

    Returns:
        float8_e4m3fn [tokens, features] and float32 [tokens, 1]; the largest of a row is the largest of the type.
    """
    if x.is_cuda:
        from ckptrain.megatron.fused import triton_kernels

        return triton_kernels.quantise(x, columns)
    values = x.float() if columns is None else x.float() * columns
    scale = values.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    return (values / scale).to(torch.float8_e4m3fn), scale


def quantised_product(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (x * x_scale) (weight * weight_scale)^T, [tokens, rows].

    Args:
        x: float8_e4m3fn [tokens, features]
        x_scale: float32 [tokens, 1]
        weight: float8_e4m3fn [rows, features], contiguous.
        weight_scale: float32 [rows]
        dtype: of what is returned.
    """
    if x.is_cuda:
        return torch._scaled_mm(
            x, weight.t(), scale_a=x_scale, scale_b=weight_scale[None], out_dtype=dtype, use_fast_accum=True
        )
    return ((x.float() * x_scale) @ (weight.float() * weight_scale[:, None]).t()).to(dtype)


def cross_entropy(logits: Tensor, labels: Tensor, *, with_gradient: bool) -> Tensor:
    """Return -log softmax(logits)[label], float32 [tokens]; the gradient of it takes the logits' place if asked for.

    `logits` are [tokens, vocab_size], `labels` [tokens].
    """
    if logits.is_cuda:
        from ckptrain.megatron.fused import triton_kernels

        return triton_kernels.cross_entropy(logits, labels, with_gradient=with_gradient)
    logs = logits.float().log_softmax(-1)
    where = labels[:, None]
    losses = -logs.gather(1, where).squeeze(1)
    if with_gradient:
        logits.copy_(logs.exp().scatter_add_(1, where, torch.full_like(where, -1, dtype=logs.dtype)))
    return losses
