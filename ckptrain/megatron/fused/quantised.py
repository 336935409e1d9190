"""A frozen weight in 8 bits, and its adapter beside it.

The weight has a scale for each output feature, what goes into it one for each token, and their product is taken in 8
bits and scaled where it is summed: half the time of bfloat16, and half the memory. Backwards the weight's scales go
into the gradient before that is rounded, so the same 8-bit values serve, turned over for the one product. Adapters are
computed in their own type.

Formats and the reason for e4m3: Micikevicius et al. 2022, arXiv:2209.05433; scales for rows and columns: cuBLAS calls
them outer vector scaling.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
from typing import Any

import torch
from torch import Tensor

from ckptrain.megatron.fused.kernels import quantise, quantised_product, transposed
from ckptrain.megatron.fused.weight import AdaptedWeight, Side


class QuantisedWeight(AdaptedWeight):
    """The weight of one layer in 8 bits with what adapters it has; the layer's own is given up."""

    def around(self, values: Tensor) -> Side:
        """Return a side with x or dy in it as it is, and a place for h or dh elsewhere."""
        image = values.new_empty(len(values), self.rank)
        return Side(whole=values, values=values, image=image)

    def _hold(self, linear: Any) -> None:
        weight = linear.weight.data
        self._weight, scale = quantise(weight)
        self._scale = scale.squeeze(1)
        self.lora_a = weight.new_zeros(self.rank, self.in_features)
        self.lora_b = weight.new_zeros(self.out_features, self.rank)
        linear.weight.data = weight.new_empty(0)
        # Backwards the scales are in the gradient already.
        self._ones = torch.ones(self.in_features, dtype=torch.float32, device=weight.device)

    def _product(self, side: Side, added: Tensor | None, room: int) -> Tensor:  # noqa: ARG002  # no image beside it
        rounded, scale = quantise(side.values)
        out = quantised_product(rounded, scale, self._weight, self._scale, side.values.dtype)
        if self.rank:
            out.addmm_(side.image, self.lora_b.t())
        return out if added is None else out.add_(added)

    def _backward_product(self, side: Side) -> Tensor:
        rounded, scale = quantise(side.values, self._scale)
        turned = transposed(self._weight)
        out = quantised_product(rounded, scale, turned, self._ones, side.values.dtype)
        return out.addmm_(side.image, self.lora_a) if self.rank else out
