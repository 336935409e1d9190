"""Who exports in bench_convert.py, each in a process of its own: this project, and Megatron-Bridge.

Bridge's `AutoBridge.export_adapter_ckpt` builds the whole model with the base's weights in float32, reads the adapter
from a checkpoint of megatron-core into it, and calls `save_hf_adapter`. Where what it imports is not installed, those
steps are taken here one by one, with the same functions of Bridge and megatron-core.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from convert_shapes import Case, write_base

OURS, THEIRS = "ours", "theirs"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_SAVED = "bridge-checkpoint"
_COMPARED = ("r", "lora_alpha", "target_modules")


@attrs.frozen(kw_only=True)
class Measured:
    """One export, as the process that made it saw it."""

    imports_s: float
    export_s: float
    """After the imports."""
    parts_s: dict[str, float]
    """What the export spent its time on, where that is known."""
    imported_bytes: int
    """Memory, after the imports."""
    peak_bytes: int
    """The most memory that the process has had (ru_maxrss)."""
    num_bytes: int
    """Size of the weights file."""


def peak_bytes() -> int:
    """Return the most memory that this process has had so far; Linux counts in kilobytes, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def export_ours(checkpoint: Path, directory: Path) -> Measured:
    """Export with this project, to directory/ours."""
    started = time.perf_counter()
    from ckptrain.convert.to_peft import export_adapter

    imports_s, imported_bytes = time.perf_counter() - started, peak_bytes()
    export_adapter(checkpoint, directory / OURS, verify=False)
    return Measured(
        imports_s=imports_s,
        export_s=time.perf_counter() - started - imports_s,
        parts_s={},
        imported_bytes=imported_bytes,
        peak_bytes=peak_bytes(),
        num_bytes=(directory / OURS / WEIGHTS).stat().st_size,
    )


def missing_for_bridge() -> str | None:
    """Say what Bridge's `export_adapter_ckpt` imports that is not there; None where it can run."""
    import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

    try:
        importlib.import_module("megatron.bridge.training.checkpointing")
    except ImportError as error:
        return str(error)
    return None


def prepare_bridge(case: Case, checkpoint: Path, directory: Path) -> None:
    """Write what Bridge reads: a base with random weights, and the adapter of our checkpoint by megatron-core."""
    write_base(directory)
    with _adapted_model(case, checkpoint, directory) as (_, model, _):
        from megatron.core import dist_checkpointing

        from ckptrain.checkpoint.dcp_metadata import ADAPTER_DIRECTORY
        from ckptrain.checkpoint.sharded import load_tensors
        from ckptrain.megatron.adapters import adapter_parameters
        from ckptrain.megatron.state import AdapterStore

        view = AdapterStore(adapter_parameters(model), case.shape.num_layers).adapters()
        buffers = view.to_load()
        load_tensors(buffers, checkpoint / ADAPTER_DIRECTORY)
        view.take(buffers)
        (directory / _SAVED).mkdir()
        dist_checkpointing.save({"model": _sharded_adapters(model)}, str(directory / _SAVED))


def export_by_bridge(case: Case, checkpoint: Path, directory: Path) -> Measured:
    """Export what `prepare_bridge` has written, step by step as `export_adapter_ckpt` does, to directory/theirs.

    Of our checkpoint only the configuration is read.
    """
    started = time.perf_counter()
    import ckptrain.megatron.entered  # before the first import of megatron
    import ckptrain.megatron.model  # noqa: F401

    imports_s, imported_bytes = time.perf_counter() - started, peak_bytes()
    marks = [time.perf_counter()]
    with _adapted_model(case, checkpoint, directory, with_weights=True) as (bridge, model, peft):
        from megatron.core import dist_checkpointing

        marks.append(time.perf_counter())
        loaded = dist_checkpointing.load({"model": _sharded_adapters(model)}, str(directory / _SAVED))
        model.load_state_dict(loaded["model"], strict=False)
        marks.append(time.perf_counter())
        bridge.save_hf_adapter([model], directory / THEIRS, peft_config=peft, show_progress=False)
        marks.append(time.perf_counter())
    steps = ("model with the base's weights", "reading the adapter", "save_hf_adapter")
    return Measured(
        imports_s=imports_s,
        export_s=marks[-1] - marks[0],
        parts_s={step: end - start for step, start, end in zip(steps, marks, marks[1:], strict=False)},
        imported_bytes=imported_bytes,
        peak_bytes=peak_bytes(),
        num_bytes=(directory / THEIRS / WEIGHTS).stat().st_size,
    )


@contextmanager
def _adapted_model(
    case: Case, checkpoint: Path, base: Path, *, with_weights: bool = False
) -> Iterator[tuple[Any, Any, Any]]:
    """Build the model in float32, as `export_adapter_ckpt` does, with adapters that hold anything.

    Gives Bridge's converter, the model and Bridge's LoRA.
    """
    from ckptrain.checkpoint.integrity import open_checkpoint
    from ckptrain.config.load import load_config, unflatten
    from ckptrain.config.targets import Targets
    from ckptrain.megatron.adapters import attach_adapters
    from ckptrain.megatron.model import build_model, load_base_weights, open_bridge
    from ckptrain.megatron.world import close_model_parallel, open_model_parallel, open_process_group

    manifest = open_checkpoint(checkpoint).manifest
    config = load_config(unflatten(manifest.config), check_inputs=False)
    config = attrs.evolve(config, model=attrs.evolve(config.model, dtype="float32"))
    layout = attrs.evolve(manifest.layout, tensor=1, pipeline=1)
    with open_process_group():
        open_model_parallel(layout, seed=1)
        try:
            bridge = open_bridge(base, case.shape.architecture)
            model = build_model(bridge, config, layout, "local")
            if with_weights:
                load_base_weights(bridge, model)
            yield bridge, model, attach_adapters(model, config.lora, Targets(modules=manifest.lora.modules))
        finally:
            close_model_parallel()


def _sharded_adapters(model: Any) -> dict[str, Any]:
    """Return what `export_adapter_ckpt` reads: of the model's sharded state what belongs to adapters."""
    return {name: entry for name, entry in model.sharded_state_dict().items() if ".adapter." in name}


def differences(directory: Path) -> list[str]:
    """Return where the two exports differ: names, bits, and what their configurations say of rank, alpha, targets."""
    import torch
    from safetensors import safe_open

    ours, theirs = directory / OURS, directory / THEIRS
    found: list[str] = []
    with safe_open(ours / WEIGHTS, "pt") as left, safe_open(theirs / WEIGHTS, "pt") as right:
        names, other = set(left.keys()), set(right.keys())
        found += [f"{name} is in one of them" for name in sorted(names ^ other)]
        for name in sorted(names & other):
            a, b = left.get_tensor(name), right.get_tensor(name)
            if (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                found.append(f"{name} differs")
    configs = [json.loads((path / CONFIG).read_text()) for path in (ours, theirs)]
    for key in _COMPARED:
        a, b = (sorted(value) if isinstance(value := config[key], list) else value for config in configs)
        if a != b:
            found.append(f"{CONFIG}: {key} is {a} and {b}")
    return found
