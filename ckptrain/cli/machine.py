"""What is there to compute with, what of it would a run use, and what does that mean? One finding a question.

Each function looks at one thing and says it in plain words, for whoever has never heard of it. What it raises is a
finding too: `ckptrain.cli.doctor` makes one of it.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from ckptrain.cli.wording import bytes_text, plural
from ckptrain.errors import PackageMissing
from ckptrain.installed import MEGATRON, TORCH, install_command, is_installed, require, version_of

State = Literal["works", "missing", "broken", "note"]

_DRIVER = Path("/proc/driver/nvidia/version")


@attrs.frozen(kw_only=True)
class Finding:
    """What was found of one thing."""

    name: str
    state: State
    text: str
    required: bool = False
    """Whether no run works while this is broken."""


def system() -> Mapping[str, Any]:
    """Return what the machine is, without its name."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {"platform": platform.platform(), "cores": cores, "memory_bytes": memory}


def look_at_torch() -> Finding:
    """See whether torch is there and loads."""
    require(TORCH, "everything but plan, status and the like")
    import torch

    built = torch.version.cuda
    text = f"{torch.__version__}, {f'built for CUDA {built}' if built else 'built for CPUs only'}"
    return Finding(name="torch", state="works", text=text, required=True)


def look_at_gpu() -> Finding:
    """See what torch can compute on."""
    import torch

    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        kinds = dict.fromkeys(f"{device.name} with {bytes_text(device.total_memory)}" for device in found)
        count = plural(len(found), "GPU")
        several = f"; --nproc-per-node {len(found)} uses all" if len(found) > 1 else ""
        return Finding(name="GPU", state="works", text=f"{count}: {', '.join(kinds)}{several}")
    if _DRIVER.exists():
        why = "torch is built for CPUs only" if torch.version.cuda is None else "the driver may be too old for it"
        text = f"there is a driver, but torch {torch.__version__} sees no GPU ({why}, or the container was given none)"
        return Finding(name="GPU", state="missing", text=text)
    return Finding(
        name="GPU",
        state="missing",
        text="none: runs train on the CPU, exactly as they would on a GPU, but slowly; good for models of up to about a"
        " billion parameters and for trying things out",
    )


def look_at_driver() -> Finding:
    """See which driver of NVIDIA's there is."""
    if not _DRIVER.exists():
        return Finding(name="driver", state="missing", text="no NVIDIA driver; without a GPU none is needed")
    words = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text())
    text = f"NVIDIA {words[0] if words else 'of an unknown version'}"
    return Finding(name="driver", state="works", text=text)


def look_at_nccl() -> Finding:
    """See what processes would talk over."""
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return Finding(name="NCCL", state="missing", text="torch has none: processes talk over gloo, on CPUs only")
    version = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "of an unknown version"
    if torch.cuda.is_available():
        return Finding(name="NCCL", state="works", text=f"{version}, which processes on several GPUs talk over")
    return Finding(name="NCCL", state="note", text=f"{version}, unused: without GPUs processes talk over gloo")


def look_at_transformer_engine() -> Finding:
    """See whether Transformer Engine is there, and load it where a run would."""
    import torch

    name = "Transformer Engine"
    if is_installed("transformer-engine"):
        if not torch.cuda.is_available():
            text = f"{version_of('transformer-engine')}, unused: it needs a GPU, so megatron-core's own layers compute"
            return Finding(name=name, state="note", text=text)
        importlib.import_module("transformer_engine.pytorch")
        return Finding(name=name, state="works", text=f"{version_of('transformer-engine')}, whose layers compute")
    if not torch.cuda.is_available():
        text = "not installed: megatron-core's own layers compute instead; without a GPU it would not be used anyway"
        return Finding(name=name, state="missing", text=text)
    text = (
        "not installed: megatron-core's own layers compute instead, and ckptrain's fused ones where they can, which"
        f" need it not; other models are slower without: {install_command('transformer-engine[pytorch]')}"
    )
    return Finding(name=name, state="missing", text=text)


def look_at_megatron() -> Finding:
    """Enter the platform as a run does, and import what a run takes from Megatron."""
    require(MEGATRON, "training")
    import torch

    from ckptrain.training.startup import without_collection

    with without_collection(for_good=True):
        from ckptrain.megatron.bridge import enter_megatron
        from ckptrain.megatron.platform import choose_backend, enter_platform

        where = enter_platform()
        enter_megatron()
    backend, why = choose_backend("auto", where, "bfloat16")
    layers = {"local": "megatron-core's own layers", "transformer_engine": "Transformer Engine's layers"}[backend]
    on = torch.cuda.get_device_name() if where.is_cuda else plural(torch.get_num_threads(), "CPU thread")
    return Finding(name="Megatron", state="works", text=f"computes on {on} in {layers}, because {why}", required=True)


def look_at_cache() -> Finding:
    """See whether converted models and tokenised data can be kept."""
    from ckptrain.cli.disk import measure_disk
    from ckptrain.config.cache import cache_directory

    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    free = bytes_text(measure_disk(directory).free_bytes)
    which = "of CKPTRAIN_CACHE" if "CKPTRAIN_CACHE" in os.environ else "in the home directory"
    return Finding(
        name="cache",
        state="works",
        text=f"{which}, writable, {free} free",
        required=True,
    )


def look_at_extras() -> Finding:
    """See which optional packages there are."""
    extras = {"gguf": "bases in GGUF", "peft": "export --verify", "wandb": "log.wandb", "mlflow": "log.mlflow"}
    lacking = [f"{package} ({what})" for package, what in extras.items() if not is_installed(package)]
    there = ", ".join(package for package in extras if is_installed(package)) or "none"
    text = f"{there}; not installed: {', '.join(lacking)}" if lacking else there
    return Finding(name="optional", state="note", text=text)


def look_at_bytecode() -> Finding | None:
    """Say so where Python forgets what it has compiled: every start compiles Megatron again then."""
    if not sys.dont_write_bytecode:
        return None
    text = "PYTHONDONTWRITEBYTECODE is set, so each start compiles its imports again: some 10 s more"
    return Finding(name="imports", state="note", text=text)


def broken(name: str, error: Exception, *, required: bool) -> Finding:
    """Make a finding of what a look has raised."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return Finding(name=name, state="note", text="not known without torch")
    if isinstance(error, PackageMissing):
        return Finding(
            name=name, state="broken" if required else "missing", text="; ".join(error.problems[:-1]), required=required
        )
    first = (str(error).strip().splitlines() or ["no details"])[0]
    return Finding(name=name, state="broken", text=f"{type(error).__name__}: {first}", required=required)
