"""The forward and backward pass of a dense transformer layer with LoRA, in three pieces around the attention.

    q, k, v = rotate(W_qkv norm(x))        x = x + W_proj attention(q, k, v)        x = x + W_fc2 swiglu(W_fc1 norm(x))

Of each piece backward gets x, which is there anyway, the factor of the norm, the products h = A x of the adapters
(rank values a token), and the output of W_fc1; norms and activations are computed again from those. The gradient of an
A behind a norm needs no normed x either: with x = g * r * z (r a factor of each token, g the norm's weight)

    dA = dh^T x = ((r dh)^T z) g

Frozen weights get no gradient, and where the layer's input needs none (the first layer) none is computed.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ckptrain.megatron.fused.kernels import (
    Heads,
    norm,
    norm_backward,
    rotate,
    rotate_backward,
    swiglu,
    swiglu_backward,
)
from ckptrain.megatron.fused.quantised import QuantisedWeight
from ckptrain.megatron.fused.weight import AdaptedWeight, Side


@attrs.frozen(kw_only=True, eq=False)
class Norm:
    """A frozen RMS norm."""

    weight: Tensor
    eps: float


class _AttentionInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, weight: AdaptedWeight, before: Norm, heads: Heads, *_: Tensor
    ) -> tuple[Tensor, ...]:
        side = weight.input(len(x), x)
        scale = norm(x, before.weight, before.eps, side.values)
        qkv = rotate(weight.forward(side), cos, sin, heads)
        ctx.save_for_backward(x, scale, weight.kept_image(side), cos, sin)
        ctx.parts = weight, before, heads
        return *qkv, x

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, residual_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, h, cos, sin = ctx.saved_tensors
        weight, before, heads = ctx.parts
        side = weight.output(len(x), x)
        rotate_backward((dq, dk, dv), cos, sin, heads, side.values)
        weight.backward_image(side)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = norm_backward(weight.backward(side), x, before.weight, scale, residual_grad, room=weight.rank)
        adapters = _gradients_behind_norm(weight, side, h, x, scale, before)
        return dx, None, None, None, None, None, *adapters


class _AttentionOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attended: Tensor, residual: Tensor, weight: AdaptedWeight, *_: Tensor) -> Tensor:
        side = weight.around(attended)
        out = weight.forward(side, residual)
        ctx.save_for_backward(attended, weight.kept_image(side))
        ctx.weight = weight
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attended, h = ctx.saved_tensors
        weight = ctx.weight
        side = weight.around(grad)
        weight.backward_image(side)
        residual_grad = grad if ctx.needs_input_grad[1] else None
        return weight.backward(side), residual_grad, None, *_gradients(weight, side, h, attended)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: AdaptedWeight, down: AdaptedWeight, before: Norm, recompute: bool, *_: Tensor
    ) -> Tensor:
        gate_up, scale, h_up = _MLP.up(x, up, before)
        side = down.input(len(x), x)
        swiglu(gate_up, side.values)
        out = down.forward(side, residual=x)
        ctx.save_for_backward(x, scale, h_up, down.kept_image(side), *([] if recompute else [gate_up]))
        ctx.parts = up, down, before
        return out

    @staticmethod
    def up(x: Tensor, weight: AdaptedWeight, before: Norm) -> tuple[Tensor, Tensor, Tensor]:
        """Return (gate and up, the norm's factors, h)."""
        side = weight.input(len(x), x)
        scale = norm(x, before.weight, before.eps, side.values)
        return weight.forward(side, room=weight.rank), scale, weight.kept_image(side)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, h_up, h_down, *kept = ctx.saved_tensors
        up, down, before = ctx.parts
        gate_up = kept[0] if kept else _MLP.up(x, up, before)[0]
        side = down.around(grad)
        down.backward_image(side)
        active = down.backward(side)  # the gradient of it, and then itself
        swiglu_backward(active, gate_up)
        increment_version(gate_up)  # it is its own gradient now, and a second backward pass would take it for itself
        up_side = up.around(gate_up)
        up.backward_image(up_side)
        of_down = _gradients(down, side, h_down, active)
        del active, side
        of_up = _gradients_behind_norm(up, up_side, h_up, x, scale, before)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = norm_backward(up.backward(up_side), x, before.weight, scale, grad, room=up.rank)
        return dx, None, None, None, None, *of_up, *of_down


def _gradients(weight: AdaptedWeight, output: Side, h: Tensor, x: Tensor) -> Sequence[Tensor]:
    """Return the gradients of a layer's adapters, from those of its output and of h."""
    if not weight.rank:
        return ()
    return weight.gradients(weight.whole_backward_image(output).t() @ x, output.values.t() @ h)


def _gradients_behind_norm(
    weight: AdaptedWeight, output: Side, h: Tensor, x: Tensor, scale: Tensor, before: Norm
) -> Sequence[Tensor]:
    """Return the same where the layer was given the norm of x (see above)."""
    if not weight.rank:
        return ()
    dh = weight.whole_backward_image(output)
    scaled = torch.mul(dh, scale[:, None], out=torch.empty(dh.shape, dtype=dh.dtype, device=dh.device))
    return weight.gradients((scaled.t() @ x).mul_(before.weight), output.values.t() @ h)


class FusedLayer:
    """In the place of a megatron-core TransformerLayer's `forward`; its modules and their names stay what they are."""

    def __init__(self, layer: Any, *, recompute_mlp: bool, in_8_bits: bool) -> None:
        """Take the weights of a layer that `ckptrain.megatron.fused.choice` found to be one that this computes."""
        attention, mlp, config = layer.self_attention, layer.mlp, layer.config
        hold = QuantisedWeight if in_8_bits else AdaptedWeight
        self.weights = self._qkv, self._proj, self._fc1, self._fc2 = (
            hold(attention.linear_qkv, "column"),
            hold(attention.linear_proj, "row"),
            hold(mlp.linear_fc1, "column"),
            hold(mlp.linear_fc2, "row"),
        )
        self._attention_norm = _norm_of(attention.linear_qkv, layer.input_layernorm, config)
        self._mlp_norm = _norm_of(mlp.linear_fc1, layer.pre_mlp_layernorm, config)
        self._heads = Heads(
            groups=config.num_query_groups // config.tensor_model_parallel_size,
            queries=config.num_attention_heads // config.num_query_groups,
            head_dim=config.kv_channels,
        )
        self._core, self._mask_type = attention.core_attention, attention.attn_mask_type
        self._recompute_mlp = recompute_mlp
        self.is_stale = True

    def __call__(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """Return the layer's output, [tokens, 1, hidden_size], and no context.

        `rotary_pos_emb` are angles by position, or by token: see `angles_of`.
        """
        if self.is_stale:
            for weight in self.weights:
                weight.take_adapters()
            self.is_stale = False
        x = hidden_states.squeeze(1)
        cos, sin = angles_of(rotary_pos_emb, packed_seq_params)
        q, k, v, x = _AttentionInput.apply(x, cos, sin, self._qkv, self._attention_norm, self._heads, *self._qkv.leaves)
        attended = self._attend(q, k, v, packed_seq_params)
        x = _AttentionOutput.apply(attended, x, self._proj, *self._proj.leaves)
        x = _MLP.apply(
            x,
            self._fc1,
            self._fc2,
            self._mlp_norm,
            self._recompute_mlp,
            *self._fc1.leaves,
            *self._fc2.leaves,
        )
        # A pipeline stage frees what it has sent on, and megatron-core does not free a view.
        out = make_viewless_tensor(inp=x.unsqueeze(1), requires_grad=x.requires_grad, keep_graph=True)
        return out, None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Any) -> Tensor:
        """Return [tokens, heads * head_dim]."""
        if packed.qkv_format != "thd":
            q, k, v = (part.unsqueeze(1) for part in (q, k, v))
        elif packed.is_even:
            # Sequences of one length are an ordinary batch, which the kernels do in a tenth less time.
            rows = len(packed.cu_seqlens_q) - 1
            q, k, v = (part.unflatten(0, (rows, -1)) for part in (q, k, v))
            packed = PackedSeqParams(qkv_format="bshd")
        attended: Tensor = self._core(
            q, k, v, attention_mask=None, attn_mask_type=self._mask_type, packed_seq_params=packed
        )
        return attended.reshape(-1, self._proj.in_features)


def _norm_of(linear: nn.Module, separate: nn.Module, config: Any) -> Norm:
    """Return the norm before a projection: Transformer Engine has it in the projection, the local layers beside it."""
    inside = getattr(getattr(linear, "to_wrap", linear), "layer_norm_weight", None)
    weight = separate.weight if inside is None else inside
    return Norm(weight=weight.detach(), eps=config.layernorm_epsilon)


def angles_of(rotary_pos_emb: Tensor, packed: Any) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each token's angles, float32 [tokens, head_dim / 2]; once for all layers.

    Transformer Engine's layers are given the angles of every position, [longest, 1, 1, head_dim], the local ones those
    of every token.
    """
    if (kept := getattr(packed, "angles", None)) is None:
        angles = rotary_pos_emb.flatten(1)[:, : rotary_pos_emb.shape[-1] // 2]
        if packed.qkv_format == "thd":
            angles = angles[packed.position_ids]
        kept = packed.angles = (angles.cos(), angles.sin())
    return kept
