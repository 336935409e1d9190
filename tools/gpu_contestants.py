"""Who trains in bench_gpu.py: one contestant on one model, in this process, a JSON line for each micro-batch.

    python gpu_contestants.py '{"contestant": "hf", "model": "tiny", ...}' [FILE]     the fields of `Spec`

Hugging Face PEFT, Hugging Face PEFT with Liger's kernels and ckptrain are here; gpu_megatron_loop.py, gpu_bridge.py and
gpu_unsloth.py have the others. All train the same adapters with AdamW, clip the gradient, and read the loss in each
step, as ckptrain does.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from gpu_shapes import (
    ALPHA,
    CLIP_GRAD,
    LR,
    PROJECTIONS,
    RANK,
    SHAPES,
    Shape,
    device,
    dtype,
    matrix_rate,
    memory,
    random_tokens,
    reset_memory,
    write_base,
    write_texts,
)

if TYPE_CHECKING:
    from torch import Tensor

Found = dict[str, Any]
"""What is told of a micro-batch: numbers, or the error that ended it."""
OVERRIDES: dict[str, tuple[str, ...]] = {
    "ckptrain": (),
    "ckptrain-plain": ("lora.fused=never",),
    "ckptrain-recompute": ("train.recompute=full",),
    "ckptrain-fp8": ("model.fp8=rowwise",),
}
"""What each ckptrain contestant says besides the defaults."""
_TEXTS = 64
_FALLS = 0.98
"""Throughput below this share of the best has fallen; what is between is noise."""
_PACKAGES = ("transformers", "peft", "triton", "megatron-core", "megatron-bridge", "transformer-engine", "liger-kernel")


@attrs.frozen(kw_only=True)
class Spec:
    """What a process is asked to measure."""

    contestant: str
    model: str
    micro_batches: tuple[int, ...] = attrs.field(default=(1,), converter=tuple)
    """Tried in this order until memory is out or throughput falls."""
    warm_up_steps: int = 3
    steps: int = 8
    base: str = ""
    """Hugging Face directory of the model."""
    scratch: str = "."
    """Directory for whatever is written."""
    chats: str | None = None
    """File of conversations, for models that train on them."""
    save_every: int | None = None
    """ckptrain trains on with the best micro-batch, without saves and with one every so many steps."""

    @property
    def shape(self) -> Shape:
        """The model's dimensions."""
        return SHAPES[self.model]


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """One step's rows: ids and labels [rows, sequence_length] on the device, labels -100 where nothing is learnt."""

    ids: Tensor
    labels: Tensor
    num_tokens: int
    """Without padding."""


def read_batches(spec: Spec) -> Callable[[int, int], Batch]:
    """Return what gives the batch of (micro-batch, number of the step), on the device."""
    import torch

    if spec.shape.trains_on_chats:
        ids, labels, sizes = packed_chats(spec)
    else:
        ids = random_tokens(spec.shape, _TEXTS)
        labels, sizes = ids, torch.full((len(ids),), spec.shape.sequence_length)
    ids, labels = ids.to(device()), labels.to(device())

    def batch(micro_batch: int, step: int) -> Batch:
        rows = torch.arange(step * micro_batch, (step + 1) * micro_batch) % len(ids)
        where = rows.to(ids.device)
        return Batch(ids=ids[where], labels=labels[where], num_tokens=int(sizes[rows].sum()))

    return batch


def packed_chats(spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and labels of the rows that ckptrain trains on, [rows, length], and how many tokens each row has.

    Rows are padded at their end. What a model of transformers sees of earlier samples in a row is not masked: sdpa has
    no mask then, which is the faster way.
    """
    import torch

    from ckptrain.config.base import locate_base
    from ckptrain.config.load import load_config
    from ckptrain.data.dataset import build_datasets
    from ckptrain.training.tokens import tokenisation

    config = load_config(run_config(spec, 1, 1))
    how = tokenisation(locate_base(config.model), config.data)
    data = build_datasets(config.data, how, seed=config.train.seed).train
    length = spec.shape.sequence_length
    ids = torch.zeros(len(data.rows), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    sizes = torch.zeros(len(data.rows), dtype=torch.long)
    for number, row in enumerate(data.rows):
        begin = 0
        for sample in (data.samples[index] for index in row):
            end = begin + sample.num_tokens
            ids[number, begin:end] = torch.tensor(sample.token_ids)
            learnt = torch.tensor(sample.learnt)
            labels[number, begin:end][learnt] = ids[number, begin:end][learnt]
            begin = end
        sizes[number] = begin
    return ids, labels, sizes


def measure(spec: Spec, step: Callable[[Batch], Tensor], settings: dict[str, Any]) -> Iterator[Found]:
    """Train with each micro-batch in turn, with one model for all; yields what was found of each."""
    batches = read_batches(spec)
    best = 0.0
    for micro_batch in spec.micro_batches:
        rates, seconds, loss = [], [], 0.0
        try:
            for number in range(spec.warm_up_steps + spec.steps):
                if number < 2:  # the first step compiles and tunes, which takes memory that no other step does
                    reset_memory()
                batch = batches(micro_batch, number)
                started = time.perf_counter()
                loss = float(step(batch))
                took = time.perf_counter() - started
                if number >= spec.warm_up_steps:
                    seconds.append(took)
                    rates.append(batch.num_tokens / took)
        except RuntimeError as error:
            yield out_of_memory(micro_batch, error)
            return
        found = {"micro_batch": micro_batch, "tokens_per_s": statistics.median(rates), "step_s": seconds, "loss": loss}
        yield {**found, **memory(), "settings": settings}
        if found["tokens_per_s"] < _FALLS * best:
            return
        best = max(best, found["tokens_per_s"])


def out_of_memory(micro_batch: int, error: RuntimeError) -> Found:
    """Return what is told of a micro-batch that does not fit; any other error is raised again."""
    if "out of memory" not in str(error).lower():
        raise error
    return {"micro_batch": micro_batch, "error": "out of memory", "message": str(error).splitlines()[0][:300]}


def hugging_face(spec: Spec) -> Iterator[Found]:
    """Be Hugging Face PEFT as its users run it: bfloat16 base, float32 adapters, autocast, sdpa, fused AdamW."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings: dict[str, Any] = {"attention": "sdpa", "adapters": "float32 under autocast"}
    if spec.contestant == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()  # rope, norms, SwiGLU and fused linear cross-entropy are its defaults
        settings["kernels"] = "liger"
    on, name = device(), dtype()
    base = AutoModelForCausalLM.from_pretrained(
        spec.base, dtype=getattr(torch, name), attn_implementation="sdpa", device_map={"": 0 if on == "cuda" else on}
    )
    adapters = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    model = get_peft_model(base, adapters)
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LR, weight_decay=0.0, fused=on == "cuda")

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(on, dtype=torch.bfloat16, enabled=name == "bfloat16"):
            loss = model(input_ids=batch.ids, labels=batch.labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, CLIP_GRAD)
        optimizer.step()
        detached: Tensor = loss.detach()
        return detached

    yield from measure(spec, step, settings)


def megatron(spec: Spec) -> Iterator[Found]:
    """Be a bare loop over megatron-core."""
    import gpu_megatron_loop

    step, settings = gpu_megatron_loop.build(spec.shape)
    yield from measure(spec, lambda batch: step(batch.ids), settings)


def unsloth(spec: Spec) -> Iterator[Found]:
    """Be Unsloth, with or without its gradient checkpointing."""
    import gpu_unsloth

    step, settings = gpu_unsloth.build(
        spec.base, spec.shape.sequence_length, checkpointing="unsloth" if spec.contestant == "unsloth-ckpt" else False
    )
    yield from measure(spec, lambda batch: step(batch.ids, batch.labels), settings)


def bridge(spec: Spec) -> Iterator[Found]:
    """Be Megatron-Bridge's own training; its state is global, so one process tries one micro-batch."""
    import gpu_bridge

    (micro_batch,) = spec.micro_batches
    rate = spec.shape.sequence_length * micro_batch
    found = gpu_bridge.run(spec.shape, spec.base, Path(spec.scratch), micro_batch, spec.warm_up_steps, spec.steps)
    yield {"micro_batch": micro_batch, "tokens_per_s": rate / statistics.median(found["step_s"]), **found}


def run_config(spec: Spec, micro_batch: int, steps: int, *, save_every: int | None = None) -> dict[str, Any]:
    """Return the configuration of a run of ckptrain; what it leaves out has its default."""
    shape = spec.shape
    if shape.trains_on_chats:
        data: dict[str, Any] = {"train": spec.chats, "on_too_long": "drop"}
    else:
        data = {"train": str(Path(spec.scratch) / "texts.jsonl"), "on_too_long": "truncate", "loss_on": "all"}
    return {
        "model": {"pretrained": spec.base, "dtype": dtype(), "verify": "never"},
        "lora": {"dim": RANK, "alpha": ALPHA},
        "data": {**data, "sequence_length": shape.sequence_length},
        "optimizer": {"lr": LR, "schedule": "constant", "clip_grad": CLIP_GRAD},
        "train": {"steps": steps, "micro_batch_size": micro_batch, "global_batch_size": micro_batch},
        "checkpoint": {"every_steps": save_every or 1_000_000, "keep_last": 1},
        "log": {"tensorboard": False},
    }


def whole_runs(spec: Spec) -> Iterator[Found]:
    """Be ckptrain: whole runs, as `ckptrain.run` makes them, each with one micro-batch."""
    if not spec.shape.trains_on_chats:
        write_texts(spec.shape, _TEXTS, Path(spec.scratch) / "texts.jsonl")
    best, best_micro_batch = 0.0, None
    for micro_batch in spec.micro_batches:
        try:
            found = train(spec, micro_batch, spec.warm_up_steps + spec.steps)
        except RuntimeError as error:
            yield out_of_memory(micro_batch, error)
            break
        yield found
        if found["tokens_per_s"] < _FALLS * best:
            break
        if found["tokens_per_s"] > best:
            best, best_micro_batch = found["tokens_per_s"], micro_batch
    if spec.save_every and best_micro_batch is not None:
        yield from savings(spec, best_micro_batch, spec.save_every)


def savings(spec: Spec, micro_batch: int, every: int) -> Iterator[Found]:
    """Yield the throughput without saves and with one every so many steps, from the end of a step to that of another.

    The time of a step alone would leave out what a save stops the training for.
    """
    steps = spec.warm_up_steps + max(spec.steps, 4 * every)
    without = train(spec, micro_batch, steps)
    saving = train(spec, micro_batch, steps, save_every=every)
    yield {
        "micro_batch": micro_batch,
        "save_every": every,
        "steps": steps - spec.warm_up_steps,
        "tokens_per_s_without": without["tokens_per_s_between"],
        "tokens_per_s_with": saving["tokens_per_s_between"],
    }


def train(spec: Spec, micro_batch: int, steps: int, *, save_every: int | None = None) -> Found:
    """Make one run of ckptrain from its start to its end."""
    import ckptrain
    from ckptrain.training.observers import Observer, StepRecord

    class Watch(Observer):
        """Notes the steps, and counts memory from the second on: a base is loaded only once in a run."""

        def __init__(self) -> None:
            self.records: list[StepRecord] = []
            self.ended: list[float] = []
            self.loading: dict[str, int | None] = {}

        def on_step(self, record: StepRecord) -> None:
            """Note it."""
            if not self.records:
                self.loading = memory()
                reset_memory()
            self.records.append(record)
            self.ended.append(time.perf_counter())

    gc.collect()
    reset_memory()
    held = memory()["peak_bytes"]
    watch, overrides = Watch(), OVERRIDES[spec.contestant]
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=spec.scratch)) / "run"
    ckptrain.run(
        run_config(spec, micro_batch, steps, save_every=save_every), overrides, run_dir=run_dir, observers=[watch]
    )
    first = spec.warm_up_steps
    timed = watch.records[first:]
    tokens = [record.tokens * (1 - record.padding_share) for record in timed]
    rates = [count / record.seconds for count, record in zip(tokens, timed, strict=True)]
    return {
        "micro_batch": micro_batch,
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_between": sum(tokens) / (watch.ended[-1] - watch.ended[first - 1]),
        "step_s": [record.seconds for record in timed],
        "loss": timed[-1].loss,
        **memory(),
        "first_step_peak_bytes": watch.loading["peak_bytes"],
        "held_bytes": held,
        "settings": {"overrides": list(overrides)},
    }


def look_at_machine(_: Spec) -> Iterator[Found]:
    """Yield what this machine is, and its matrix rate."""
    yield matrix_rate()


def make_base(spec: Spec) -> Iterator[Found]:
    """Write the Hugging Face directory that contestants load; half of one is never at its place."""
    started, part = time.perf_counter(), Path(spec.base + ".part")
    write_base(spec.shape, part, device=device(), dtype=dtype())
    num_bytes = sum(file.stat().st_size for file in part.iterdir())
    part.rename(spec.base)
    yield {"num_bytes": num_bytes, "seconds": time.perf_counter() - started}


CONTESTANTS: dict[str, Callable[[Spec], Iterator[Found]]] = {
    "hf": hugging_face,
    "liger": hugging_face,
    "unsloth": unsloth,
    "unsloth-ckpt": unsloth,
    "megatron": megatron,
    "bridge": bridge,
    **dict.fromkeys(OVERRIDES, whole_runs),
}
ERRANDS: dict[str, Callable[[Spec], Iterator[Found]]] = {"matrix-rate": look_at_machine, "make-base": make_base}
"""What is done in a process of its own besides."""


def versions() -> dict[str, str]:
    """Return the versions of what this process can import, used or not."""
    found = {}
    for name in (*_PACKAGES, "unsloth"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> None:
    """Do what the first argument asks for; what is found goes to the file that a second one names, or to stdout."""
    spec = Spec(**json.loads(sys.argv[1]))
    with open(sys.argv[2], "a") if len(sys.argv) > 2 else nullcontext(sys.stdout) as answers:  # noqa: PTH123
        for found in {**CONTESTANTS, **ERRANDS}[spec.contestant](spec):
            answers.write(json.dumps({**found, "versions": versions()}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
