"""`ckptrain doctor`: what is installed, what there is to compute on, and whether Megatron runs on it."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import Row, facts
from ckptrain.cli.quiet import quiet_libraries
from ckptrain.cli.wording import bytes_text, plural
from ckptrain.errors import EXIT_DONE, EXIT_FAILURE
from ckptrain.training.start import versions


@attrs.frozen(kw_only=True)
class _Check:
    """One thing that was tried."""

    name: str
    works: bool
    detail: str
    required: bool = True


def doctor_answer() -> Answer:
    """Look at everything that a run needs; exit status 1 where one would not work."""
    quiet_libraries()
    checks = [
        _check("torch", _torch),
        _check("devices", _devices),
        _check("Transformer Engine", _transformer_engine, required=False),
        _check("Megatron", _megatron),
        _check("process group", _process_group),
        _check("cache", _cache),
    ]
    works = all(check.works for check in checks if check.required)
    report = {
        "works": works,
        "versions": versions(),
        "system": {
            "platform": platform.platform(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "executable": sys.executable,
        },
        "checks": [attrs.asdict(check) for check in checks],
    }
    return Answer(
        report=report,
        show=functools.partial(_show, report),
        exit_status=EXIT_DONE if works else EXIT_FAILURE,
    )


def _check(name: str, look: Callable[[], str], *, required: bool = True) -> _Check:
    """Try something; whatever it raises is what there is to report."""
    try:
        return _Check(name=name, works=True, detail=look(), required=required)
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        return _Check(name=name, works=False, detail=f"{type(error).__name__}: {first}", required=required)


def _torch() -> str:
    import torch

    built = torch.version.cuda
    return f"{torch.__version__}, {f'built for CUDA {built}' if built else 'built for CPUs only'}"


def _devices() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"no GPU; the CPU with {plural(torch.get_num_threads(), 'thread')}"
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return ", ".join(f"{device.name} ({bytes_text(device.total_memory)})" for device in found)


def _transformer_engine() -> str:
    module = importlib.import_module("transformer_engine.pytorch")
    return str(getattr(importlib.import_module("transformer_engine"), "__version__", module.__name__))


def _megatron() -> str:
    """Enter the platform as a run does, and import what a run takes from Megatron."""
    from ckptrain.megatron.bridge import enter_megatron
    from ckptrain.megatron.platform import choose_backend, enter_platform

    where = enter_platform()
    enter_megatron()
    backend, why = choose_backend("auto", where, "bfloat16")
    return f"runs on {where.device}, with {backend} layers ({why})"


def _process_group() -> str:
    """Open a process group of one and add up a tensor in it."""
    import torch
    import torch.distributed as dist

    from ckptrain.megatron.platform import enter_platform

    where = enter_platform()
    dist.init_process_group(where.process_group_backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        ones = torch.ones(8, device=where.device)
        dist.all_reduce(ones)
        total = float(ones.sum())
    finally:
        dist.destroy_process_group()
    if total != 8.0:
        raise RuntimeError(f"all-reduce over one process gave {total}, expected 8")
    return where.process_group_backend


def _cache() -> str:
    """Write a file where converted models are kept."""
    from ckptrain.config.cache import cache_directory

    directory: Path = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"x")
    return str(directory)


def _show(report: Mapping[str, Any], console: Console) -> None:
    rows: list[Row] = list(report["versions"].items())
    rows += [("system", report["system"]["platform"]), ("cores", str(report["system"]["cores"]))]
    console.print(facts([*rows, ("executable", report["system"]["executable"])]))
    console.print()
    checks: list[Row] = []
    for check in report["checks"]:
        mark, style = ("works", "green") if check["works"] else ("broken", "bold red")
        if not check["works"] and not check["required"]:
            mark, style = "missing", "yellow"
        checks.append((check["name"], Text.assemble((f"{mark:<8}", style), check["detail"])))
    console.print(facts(checks))
