"""Prepare a CUDA device for Megatron: one GPU a process, and the environment that its kernels expect."""

from __future__ import annotations

import os

import torch


def enter_cuda() -> None:
    """Take this process's GPU (LOCAL_RANK), and order communication before computation as Megatron wants it.

    CUDA_DEVICE_MAX_CONNECTIONS=1 lets tensor and sequence parallel communication overlap with the right products
    (megatron-core requires it for sequence parallelism before Blackwell). It is read when CUDA starts, so it is set
    before the first call that touches the device; a value set by the user is kept. So is CUBLAS_WORKSPACE_CONFIG: with
    workspaces of a fixed size cuBLAS gives the same bits every time (train.deterministic), and is as fast.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
