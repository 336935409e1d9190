"""The functions of `ckptrain.megatron.fused.kernels` for GPUs, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckptrain.megatron.fused.kernels import LARGEST, SMALLEST, Heads

# Columns that one program of an elementwise kernel computes, and that the cross-entropy reads at a time.
_COLUMNS = 1024
_LOGITS = 8192
# Rows and columns of the squares that a matrix of bytes is turned over by.
_TILE = 128


@triton.jit
def _norm(x, weight, out, scale, x_row, out_row, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    by = 1.0 / tl.sqrt(tl.sum(value * value) / width + eps)
    tl.store(scale + row, by)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + columns, (value * by * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    grad, x, weight, scale, residual, out, grad_row, x_row, residual_row, out_row, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    inner = tl.load(grad + row * grad_row + columns, mask=inside, other=0.0).to(tl.float32) * gain
    beside = tl.load(residual + row * residual_row + columns, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(scale + row)
    mean = tl.sum(inner * value) / width
    result = beside + by * (inner - value * by * by * mean)
    tl.store(out + row * out_row + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _copy(x, out, x_row, out_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    tl.store(out + row * out_row + columns, tl.load(x + row * x_row + columns, mask=inside), mask=inside)


@triton.jit
def _transpose(x, out, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside)
    inside = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(out + column[:, None] * rows + row[None, :], tl.trans(tile), mask=inside)


@triton.jit
def _swiglu(gate_up, out, in_row, out_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * in_row + columns, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * in_row + width + columns, mask=inside).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * out_row + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(grad, gate_up, grad_row, in_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * in_row + columns, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * in_row + width + columns, mask=inside).to(tl.float32)
    given = tl.load(grad + row * grad_row + columns, mask=inside).to(tl.float32)
    share = tl.sigmoid(gate)
    active = gate * share
    of_gate = given * up * share * (1.0 + gate * (1.0 - share))
    kind = gate_up.dtype.element_ty
    tl.store(gate_up + row * in_row + columns, of_gate.to(kind), mask=inside)
    tl.store(gate_up + row * in_row + width + columns, (given * active).to(kind), mask=inside)
    tl.store(grad + row * grad_row + columns, (active * up).to(kind), mask=inside)


@triton.jit
def _rotate(
    qkv, q, k, v, cos, sin, qkv_row, groups, queries, HALF: tl.constexpr, HEADS: tl.constexpr, BACKWARD: tl.constexpr
):
    """Move one token's heads between qkv and q, k, v, turning those of q and k; backwards with BACKWARD."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    block, slot = head // (queries + 2), head % (queries + 2)
    is_q = (block < groups) & (slot < queries)
    is_k = (block < groups) & (slot == queries)
    is_v = (block < groups) & (slot == queries + 1)
    packed = token * qkv_row + head * 2 * HALF + channel
    at_q = (token * groups * queries + block * queries + slot) * 2 * HALF + channel
    at_kv = (token * groups + block) * 2 * HALF + channel
    by_cos = tl.load(cos + token * HALF + channel)
    by_sin = tl.load(sin + token * HALF + channel)
    if BACKWARD:
        first = tl.load(q + at_q, mask=is_q, other=0.0).to(tl.float32)
        first += tl.load(k + at_kv, mask=is_k, other=0.0).to(tl.float32)
        first += tl.load(v + at_kv, mask=is_v, other=0.0).to(tl.float32)
        second = tl.load(q + at_q + HALF, mask=is_q, other=0.0).to(tl.float32)
        second += tl.load(k + at_kv + HALF, mask=is_k, other=0.0).to(tl.float32)
        second += tl.load(v + at_kv + HALF, mask=is_v, other=0.0).to(tl.float32)
        by_sin = -by_sin
    else:
        first = tl.load(qkv + packed, mask=block < groups, other=0.0).to(tl.float32)
        second = tl.load(qkv + packed + HALF, mask=block < groups, other=0.0).to(tl.float32)
    kind = qkv.dtype.element_ty
    turned = (tl.where(is_v, first, first * by_cos - second * by_sin)).to(kind)
    other = (tl.where(is_v, second, second * by_cos + first * by_sin)).to(kind)
    if BACKWARD:
        tl.store(qkv + packed, turned, mask=block < groups)
        tl.store(qkv + packed + HALF, other, mask=block < groups)
    else:
        tl.store(q + at_q, turned, mask=is_q)
        tl.store(q + at_q + HALF, other, mask=is_q)
        tl.store(k + at_kv, turned, mask=is_k)
        tl.store(k + at_kv + HALF, other, mask=is_k)
        tl.store(v + at_kv, turned, mask=is_v)
        tl.store(v + at_kv + HALF, other, mask=is_v)


@triton.jit
def _quantise(x, columns, out, scale, x_row, width, largest, smallest, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(columns + column, mask=inside, other=0.0)
    by = tl.maximum(tl.max(tl.abs(value)), smallest) / largest
    tl.store(scale + row, by)
    tl.store(out + row * width + column, (value / by).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _cross_entropy(
    logits, labels, losses, row_stride, WIDTH: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum exponentials as the maximum is found (Milakov & Gimelshein, arXiv:1805.02867), then write the gradient."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    label = tl.load(labels + row)
    at_label = tl.load(start + label).to(tl.float32)
    largest = float("-inf")
    total = 0.0
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        value = tl.load(start + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(value))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(value - larger))
        largest = larger
    logarithm = largest + tl.log(total)
    tl.store(losses + row, logarithm - at_label)
    if WITH_GRADIENT:
        tl.debug_barrier()  # the label's logit has been read by every thread before any is written
        for begin in range(0, WIDTH, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            value = tl.load(start + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
            share = tl.exp(value - logarithm) - tl.where(columns == label, 1.0, 0.0)
            tl.store(start + columns, share.to(logits.dtype.element_ty), mask=columns < WIDTH)


def _warps(block: int) -> int:
    """Return how many warps share a row: eight values a thread, within what a program may have."""
    return min(max(block // 256, 1), 16)


def norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """See `kernels.norm`."""
    tokens, width = x.shape
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm[(tokens,)](
        x, weight, out, scale, x.stride(0), out.stride(0), width, eps, BLOCK=block, num_warps=_warps(block)
    )
    return scale


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, residual_grad: Tensor, *, room: int
) -> Tensor:
    """See `kernels.norm_backward`."""
    tokens, width = x.shape
    out = torch.empty(tokens, width + room, dtype=x.dtype, device=x.device)[:, :width]
    block = triton.next_power_of_2(width)
    strides = grad.stride(0), x.stride(0), residual_grad.stride(0), out.stride(0)
    _norm_backward[(tokens,)](
        grad, x, weight, scale, residual_grad, out, *strides, width, BLOCK=block, num_warps=_warps(block)
    )
    return out


def copy_rows(x: Tensor, out: Tensor) -> None:
    """See `kernels.copy_rows`."""
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    _copy[(tokens,)](x, out, x.stride(0), out.stride(0), width, BLOCK=block, num_warps=_warps(block))


def transposed(x: Tensor) -> Tensor:
    """See `kernels.transposed`."""
    rows, columns = x.shape
    out = torch.empty(columns, rows, dtype=torch.uint8, device=x.device)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    _transpose[grid](x.view(torch.uint8), out, rows, columns, TILE=_TILE, num_warps=8)
    return out.view(x.dtype)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """See `kernels.swiglu`."""
    tokens, width = out.shape
    grid = (tokens, triton.cdiv(width, _COLUMNS))
    _swiglu[grid](gate_up, out, gate_up.stride(0), out.stride(0), width, BLOCK=_COLUMNS, num_warps=4)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> None:
    """See `kernels.swiglu_backward`."""
    tokens, width = grad.shape
    grid = (tokens, triton.cdiv(width, _COLUMNS))
    _swiglu_backward[grid](grad, gate_up, grad.stride(0), gate_up.stride(0), width, BLOCK=_COLUMNS, num_warps=4)


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.rotate`."""
    q, k, v = (torch.empty(len(qkv), *shape, dtype=qkv.dtype, device=qkv.device) for shape in heads.shapes)
    _move_heads(qkv, (q, k, v), cos, sin, heads, backward=False)
    return q, k, v


def rotate_backward(grads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, heads: Heads, out: Tensor) -> None:
    """See `kernels.rotate_backward`."""
    q, k, v = (grad.contiguous() for grad in grads)
    _move_heads(out, (q, k, v), cos, sin, heads, backward=True)


def _move_heads(
    qkv: Tensor, parts: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, heads: Heads, *, backward: bool
) -> None:
    count = triton.next_power_of_2(heads.groups * (heads.queries + 2))
    sizes = {"HALF": heads.head_dim // 2, "HEADS": count, "BACKWARD": backward}
    _rotate[(len(qkv),)](
        qkv, *parts, cos, sin, qkv.stride(0), heads.groups, heads.queries, **sizes, num_warps=4 if count > 16 else 2
    )


def quantise(x: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `kernels.quantise`."""
    tokens, width = x.shape
    out = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    sizes = {"SCALED": columns is not None, "BLOCK": block}
    _quantise[(tokens,)](
        x, columns, out, scale, x.stride(0), width, LARGEST, SMALLEST, **sizes, num_warps=_warps(block)
    )
    return out, scale


def cross_entropy(logits: Tensor, labels: Tensor, *, with_gradient: bool) -> Tensor:
    """See `kernels.cross_entropy`."""
    tokens, width = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    sizes = {"WIDTH": width, "WITH_GRADIENT": with_gradient, "BLOCK": _LOGITS}
    _cross_entropy[(tokens,)](logits, labels, losses, logits.stride(0), **sizes, num_warps=16)
    return losses
