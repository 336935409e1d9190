"""python3 tools/step_gpu.py 1b fused:4 fused:4:train.recompute=full plain:4:lora.fused=never [--profile] [--json OUT]

A training step alone, in several variants in one process: milliseconds, tokens/s, peak memory, and where it went.

A variant is NAME:MICRO_BATCH[:OVERRIDE,...]. The model has random weights in the shape of a known one, which are never
read from a disk, and every row is one sequence of full length of which all tokens are learnt. Rank 16 on all linear
layers. For versions of the code beside each other; what a run is worth beside others is for bench_gpu.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from gpu_shapes import ALPHA, RANK, SHAPES, Shape, device, dtype, memory, random_tokens, reset_memory
from tiny import write_tokenizer

if TYPE_CHECKING:
    from ckptrain.config.schema import RunConfig
    from ckptrain.data.batches import MicroBatch

WARM_UP_STEPS = 3
_MOST_NAMES = 25


@attrs.frozen(kw_only=True)
class Variant:
    """What is to be measured."""

    name: str
    micro_batch: int
    overrides: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Variant:
        """Read it from the command line."""
        name, micro_batch, *overrides = text.split(":", 2)
        return cls(
            name=name, micro_batch=int(micro_batch), overrides=tuple("".join(overrides).split(",") if overrides else ())
        )


def config_of(shape: Shape, variant: Variant, directory: Path) -> RunConfig:
    """Write what a configuration needs to be accepted, and return it; the weights that it names are not there."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from ckptrain.config.load import load_config

    base = LlamaConfig(**shape.config, architectures=["LlamaForCausalLM"], dtype=dtype())
    base.save_pretrained(directory)
    save_file({"model.norm.weight": torch.zeros(1)}, directory / "model.safetensors")
    write_tokenizer(directory)
    (directory / "none.jsonl").write_text("")
    (directory / "run.yaml").write_text(
        f"""
model: {{pretrained: {directory}, dtype: {dtype()}}}
lora: {{kind: lora, dim: {RANK}, alpha: {ALPHA}}}
data: {{train: none.jsonl, sequence_length: {shape.sequence_length}}}
optimizer: {{schedule: constant}}
"""
    )
    return load_config(directory / "run.yaml", variant.overrides)


def build(config: RunConfig) -> tuple[Any, Any, dict[str, Any]]:
    """Return (model, optimizer, how its layers are computed), as a run makes them, of random weights."""
    import torch

    from ckptrain.config.base import locate_base
    from ckptrain.config.layout import layout_of
    from ckptrain.config.shape import read_shape
    from ckptrain.config.targets import resolve_targets
    from ckptrain.megatron.adapters import adapter_parameters, attach_adapters, initialise_adapters
    from ckptrain.megatron.fused.choice import apply_choice, choose_layers
    from ckptrain.megatron.model import build_model, open_bridge, torch_dtype
    from ckptrain.megatron.optimizer import build_optimizer, wrap_for_training
    from ckptrain.megatron.platform import choose_backend, enter_platform

    base = locate_base(config.model)
    shape = read_shape(base)
    layout = layout_of(config, shape, 1)
    backend, _ = choose_backend(config.model.backend, enter_platform(), config.model.dtype)
    model = build_model(open_bridge(Path(config.model.pretrained), shape.architecture), config, layout, backend)
    torch.manual_seed(0)  # the same weights for every variant
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
    model.requires_grad_(requires_grad=False)
    attach_adapters(model, config.lora, resolve_targets(config.lora, shape))
    initialise_adapters(model, adapter_parameters(model), config.lora, config.train.seed)
    choice = choose_layers(model, config, shape, layout, enter_platform())
    apply_choice(choice, model, config)
    wrapped = wrap_for_training(model, deterministic=config.train.deterministic)
    optimizer = build_optimizer(wrapped, config.optimizer, torch_dtype(config.model.dtype))
    return wrapped, optimizer, {"backend": backend, "fused": choice.fused, "fused_reason": choice.reason}


def full_rows(shape: Shape, rows: int) -> MicroBatch:
    """Return rows of one sequence each, every token of which is learnt."""
    import torch

    from ckptrain.data.batches import MicroBatch

    tokens = random_tokens(shape, rows).reshape(1, -1)
    length = shape.sequence_length
    return MicroBatch(
        tokens=tokens,
        labels=tokens.roll(-1),
        loss_mask=torch.ones(tokens.shape),
        position_ids=torch.arange(length).repeat(rows)[None],
        cu_seqlens=torch.arange(0, rows * length + 1, length).int(),
        max_seqlen=length,
        num_learnt=rows * length,
        sample_ids=tuple(range(rows)),
    )


def measure(shape: Shape, variant: Variant, steps: int, *, with_profile: bool) -> dict[str, Any]:
    """Build a variant and train it for some steps."""
    import torch

    from ckptrain.megatron.step import train_step

    with tempfile.TemporaryDirectory() as directory:
        model, optimizer, how = build(config_of(shape, variant, Path(directory)))
    batch = full_rows(shape, variant.micro_batch)
    seconds = []
    for number in range(WARM_UP_STEPS + steps):
        if number == 1:
            reset_memory()
        started = time.perf_counter()
        result = train_step(model, optimizer, [batch])  # it reads the loss, so the device is done
        seconds.append(time.perf_counter() - started)
    step_s = statistics.median(seconds[WARM_UP_STEPS:])
    found = {
        **attrs.asdict(variant),
        **how,
        "step_ms": step_s * 1e3,
        "first_step_s": seconds[0],
        "tokens_per_s": batch.tokens.numel() / step_s,
        **memory(),
        "loss": result.loss,
    }
    if with_profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if device() == "cuda" else []
        with torch.profiler.profile(activities=activities) as profile:
            train_step(model, optimizer, [batch])
        found["kernels"] = list(kernels(profile))
    return found


def kernels(profile: Any) -> Iterator[dict[str, Any]]:
    """Yield what took longest of a step: on the device, or without one on the CPU."""
    on_device = device() == "cuda"
    spent = "self_device_time_total" if on_device else "self_cpu_time_total"
    events = [event for event in profile.key_averages() if str(event.device_type).endswith("CUDA") == on_device]
    for event in sorted(events, key=lambda event: -getattr(event, spent))[:_MOST_NAMES]:
        yield {"name": event.key, "count": event.count, "ms": getattr(event, spent) / 1e3}


def show(found: dict[str, Any]) -> None:
    """Print a variant."""
    peak = "" if found["peak_bytes"] is None else f", peak {found['peak_bytes'] / 2**30:.2f} GiB"
    what = " ".join((found["name"], f"micro-batch {found['micro_batch']}", *found["overrides"]))
    layers = "fused" if found["fused"] else f"plain ({found['fused_reason']})"
    speed = f"{found['step_ms']:.1f} ms, {found['tokens_per_s']:,.0f} tokens/s{peak}"
    print(f"{what}: {speed}, loss {found['loss']:.4f}; {found['backend']}, {layers}", flush=True)
    for kernel in found.get("kernels", ()):
        print(f"  {kernel['ms']:9.2f} ms {kernel['count']:5d} {kernel['name'][:110]}")


def main() -> None:
    """Measure every variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("variants", nargs="+", type=Variant.of)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="list the kernels of one step more")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    asked = parser.parse_args()

    from ckptrain.config.layout import Layout
    from ckptrain.megatron.world import close_model_parallel, open_model_parallel, open_process_group

    rows = []
    alone = Layout(**{field.name: 1 for field in attrs.fields(Layout)})
    with open_process_group():
        open_model_parallel(alone, 1)
        for variant in asked.variants:
            rows.append(measure(SHAPES[asked.shape], variant, asked.steps, with_profile=asked.profile))
            show(rows[-1])
            gc.collect()
        close_model_parallel()
    if asked.json:
        asked.json.write_text(json.dumps({"shape": asked.shape, "variants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
