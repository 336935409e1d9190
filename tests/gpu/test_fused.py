"""Fused layers on a GPU: their kernels, the runs they make beside the plain layers', and those in 8 bits.

python3 -m pytest tests/gpu -q
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gpu_runs import run_each, write_run
from support.records import apart, column, phase

pytestmark = pytest.mark.gpu


def computed(device: str, dtype: Any) -> list[Any]:
    """Return what every kernel gives on a device, for the same random numbers."""
    import torch

    from ckptrain.megatron.fused import kernels

    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def wide(rows: int, columns: int) -> torch.Tensor:
        return random(rows, columns + 16)[:, :columns]

    heads = kernels.Heads(groups=4, queries=3, head_dim=64)
    x, out, weight = wide(70, 2048), wide(70, 2048), random(2048)
    scale = kernels.norm(x, weight, 1e-5, out)
    found = [out, scale, kernels.norm_backward(wide(70, 2048), x, weight, scale, wide(70, 2048), room=16)]
    gate_up, active, grad = wide(70, 2 * 3000), wide(70, 3000), random(70, 3000)
    kernels.swiglu(gate_up, active)
    kernels.swiglu_backward(grad, gate_up)
    found += [active, grad, gate_up]
    angles, qkv, back = torch.randn(70, 32, generator=generator).to(device), wide(70, 20 * 64), wide(70, 20 * 64)
    parts = kernels.rotate(qkv, angles.cos(), angles.sin(), heads)
    kernels.rotate_backward(tuple(random(*part.shape) for part in parts), angles.cos(), angles.sin(), heads, back)
    rounded, by = kernels.quantise(x, torch.rand(2048, generator=generator).to(device))
    found += [*parts, back, rounded.float() * by, kernels.transposed(rounded).float()]
    logits, labels = random(9, 128256) * 3, torch.arange(0, 9 * 14000, 14000).to(device)
    found += [kernels.cross_entropy(logits, labels, with_gradient=True), logits]
    return [each.float().cpu() for each in found]


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_kernels_compute_what_the_formulas_in_torch_compute(dtype: str, within: float) -> None:
    """In both types, on rows that lie apart."""
    import torch

    pairs = zip(computed("cuda", getattr(torch, dtype)), computed("cpu", getattr(torch, dtype)), strict=True)
    for number, (found, expected) in enumerate(pairs):
        # A value in 8 bits may fall to either side.
        allowed = within * expected.abs().clamp(min=1) + (expected.abs() / 8 if number in (10, 11) else 0)
        assert ((found - expected).abs() <= allowed).all(), number


def test_a_product_in_8_bits_is_that_of_what_was_rounded() -> None:
    """The product of rows with scales that cuBLAS takes, against the same in float32."""
    import torch

    from ckptrain.megatron.fused.kernels import quantise, quantised_product

    torch.manual_seed(0)
    x, weight = (torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16) for rows in (96, 256))
    (x8, x_scale), (weight8, weight_scale) = quantise(x), quantise(weight)
    found = quantised_product(x8, x_scale, weight8, weight_scale.squeeze(1), torch.bfloat16)
    expected = (x8.float() * x_scale) @ (weight8.float() * weight_scale).t()
    assert (found.float() - expected).abs().max() < 1e-2 * expected.abs().max()
    assert (expected - x.float() @ weight.float().t()).abs().max() < 0.1 * expected.abs().max()


def test_runs_are_those_of_the_plain_layers(tmp_path: Path) -> None:
    """Whatever the adapters are and whatever is computed again; in 8 bits they stay close."""
    config = write_run(tmp_path)
    runs = {
        "plain": ["lora.fused=never"],
        "fused": [],
        "selective": ["train.recompute=selective"],
        "full": ["train.recompute=full"],
        "fp8": ["model.fp8=rowwise"],
        "canonical plain": ["lora.kind=canonical", "lora.fused=never"],
        "canonical": ["lora.kind=canonical"],
    }
    run_each(config, runs, tmp_path)
    assert not phase(tmp_path / "plain", "ADAPTER_ATTACHED")["fused"]
    assert phase(tmp_path / "fused", "ADAPTER_ATTACHED")["fused"]
    losses = {name: column(tmp_path / name, "loss") for name in runs}
    for name in ("fused", "selective", "full"):
        assert apart(losses[name], losses["plain"]) < 2e-2, name
    assert apart(losses["canonical"], losses["canonical plain"]) < 2e-2
    assert 0 < apart(losses["fp8"], losses["plain"]) < 1e-1
    assert losses["fp8"][-1] < 0.9 * losses["fp8"][0]


def test_recorded_steps_are_those_of_the_layers(tmp_path: Path) -> None:
    """Over packed rows of many lengths, and in 8 bits."""
    config = write_run(tmp_path)
    runs = {
        "layers": ["train.cuda_graphs=never"],
        "recorded": ["train.cuda_graphs=always"],
        "layers in 8 bits": ["train.cuda_graphs=never", "model.fp8=rowwise"],
        "recorded in 8 bits": ["train.cuda_graphs=always", "model.fp8=rowwise"],
    }
    run_each(config, runs, tmp_path)
    assert phase(tmp_path / "recorded", "ADAPTER_ATTACHED")["cuda_graphs"]
    for name in ("layers", "layers in 8 bits"):
        recorded = tmp_path / name.replace("layers", "recorded")
        assert apart(column(tmp_path / name, "loss"), column(recorded, "loss")) < 2e-2
