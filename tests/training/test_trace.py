"""Where a step went, from traces written by hand: every microsecond of them is known."""

from __future__ import annotations

from typing import Any

import pytest

from ckptrain.training.trace import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    HOST,
    IDLE,
    MATRIX,
    OPTIMIZER,
    OTHER,
    STEP_MARK,
    kind_of_kernel,
    profile_of,
)


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    """Return an event of Chrome's format; microseconds."""
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


def step(ts: float, dur: float) -> dict[str, Any]:
    """Return the range of one step."""
    return event(STEP_MARK, ts, dur, "user_annotation")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNN", MATRIX),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", MATRIX),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", MATRIX),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>", MATRIX),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", ATTENTION),
        ("void fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention)", ATTENTION),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("triton_red_fused_native_layer_norm_0", ELEMENTWISE),
        ("_swiglu_backward", ELEMENTWISE),
        ("_rotate", ELEMENTWISE),
        ("_transpose", COPIES),
        ("void transformer_engine::gated_act<__nv_bfloat16>", ELEMENTWISE),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", ELEMENTWISE),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", OPTIMIZER),
        ("Memcpy HtoD (Pinned -> Device)", COPIES),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", COPIES),
        ("something new", OTHER),
    ],
)
def test_kernels_are_told_apart_by_their_names(name: str, kind: str) -> None:
    """Names as they stand in traces of H100s and H200s."""
    assert kind_of_kernel(name) == kind


def test_every_moment_of_a_step_on_a_gpu_belongs_to_one_kind() -> None:
    """Communication counts where nothing hides it, idle is what no kernel ran in; two steps are averaged."""
    kernels = [
        event("nvjet_hsh_x", 110, 40, "kernel", tid=7),
        event("ncclDevKernel_AllReduce", 130, 60, "kernel", tid=20),  # 20 of it beside the product
        event("triton_poi_fused_0", 200, 30, "kernel", tid=7),
        event("Memcpy DtoH", 310, 10, "gpu_memcpy", tid=7),
        event("nvjet_hsh_x", 50, 20, "kernel", tid=7),  # before the first step
    ]
    waiting = event("cudaStreamSynchronize", 250, 50, "cuda_runtime")
    found = profile_of([step(100, 200), step(300, 100), waiting, *kernels], first_step=3)
    assert (found.device, found.first_step, found.num_steps) == ("cuda", 3, 2)
    assert found.step_s == pytest.approx(150e-6)
    microseconds = {kind: seconds * 2e6 for kind, seconds in found.kinds.items()}
    wanted = {MATRIX: 40, COMMUNICATION: 40, ELEMENTWISE: 30, COPIES: 10, IDLE: 180, ATTENTION: 0, OPTIMIZER: 0}
    assert {kind: microseconds[kind] for kind in wanted} == pytest.approx(wanted)
    assert sum(microseconds.values()) == pytest.approx(300)
    assert found.hidden_communication_s == pytest.approx(10e-6)
    assert found.host_busy_s == pytest.approx(125e-6)
    assert "communication hidden" in found.table()


def test_a_step_on_a_cpu_is_the_time_of_its_operators_without_those_that_they_called() -> None:
    """What attention and the optimizer call is theirs; what no operator ran in is Python's; other threads are left out."""
    operators = [
        event("aten::linear", 0, 50),
        event("aten::addmm", 5, 40),
        event("aten::scaled_dot_product_attention", 60, 100),
        event("aten::bmm", 70, 80),
        event("MulBackward0", 170, 20),
        event("aten::mul", 175, 10),
        event("Optimizer.step#AdamW.step", 200, 40, "user_annotation"),
        event("aten::add_", 210, 20),
        event("aten::copy_", 245, 5),
        event("aten::mm", 0, 250, tid=9),
    ]
    found = profile_of([step(0, 300), *operators], first_step=1)
    assert found.device == "cpu"
    microseconds = {kind: seconds * 1e6 for kind, seconds in found.kinds.items()}
    wanted = {MATRIX: 50, ATTENTION: 100, ELEMENTWISE: 10, OPTIMIZER: 40, COPIES: 5, COMMUNICATION: 0, HOST: 95}
    assert microseconds == pytest.approx(wanted)
    assert ("aten::bmm", ATTENTION, 1, pytest.approx(80e-6)) in found.names


def test_a_trace_without_a_step_is_an_error() -> None:
    """It cannot be divided by the number of steps."""
    with pytest.raises(ValueError, match=STEP_MARK):
        profile_of([event("aten::mm", 0, 1)], first_step=1)
