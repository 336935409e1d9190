"""How do the optimizer and the learning rate schedule of megatron-core, as others write them, read as ours?"""

from __future__ import annotations

from typing import Any

from ckptrain.config.foreign import Foreign
from ckptrain.config.imported import Imported


def megatron_optimizer(foreign: Foreign, found: Imported, place: str, clip_grad: Any = None) -> None:
    """Take megatron-core's optimizer settings."""
    name = foreign.take(f"{place}.optimizer", "adam")
    if name != "adam":
        found.note("optimizer.lr", f"{place}.optimizer is {name}; here it is AdamW, which needs another learning rate")
    for ours, theirs in (("lr", "lr"), ("min_lr", "min_lr"), ("weight_decay", "weight_decay"), ("eps", "adam_eps")):
        found.set(f"optimizer.{ours}", foreign.take(f"{place}.{theirs}"), f"{place}.{theirs}")
    betas = [foreign.take(f"{place}.adam_beta{number}") for number in (1, 2)]
    if None not in betas:
        found.set("optimizer.betas", betas, f"{place}.adam_beta1, adam_beta2")
    clip = foreign.take(f"{place}.clip_grad", clip_grad)
    found.set("optimizer.clip_grad", clip, f"{place}.clip_grad")
    found.leave(foreign, place, "types, distribution and offloading of its states are ckptrain's matter")


def megatron_schedule(foreign: Foreign, found: Imported, place: str, steps: Any) -> None:
    """Take Megatron's learning rate schedule, whose lengths are in steps or in samples."""
    style = foreign.take(f"{place}.lr_decay_style", "linear")
    found.set("optimizer.schedule", "constant" if style == "constant" else "cosine", f"{place}.lr_decay_style")
    if style not in ("constant", "cosine"):
        found.note("optimizer.schedule", f"it was {style}, which is not here; cosine ends at the same min_lr")
    batch = found.settings.get("train.global_batch_size") or 1
    samples = {key: foreign.take(f"{place}.{key}_samples") for key in ("lr_decay", "lr_warmup")}
    decay = foreign.take(f"{place}.lr_decay_iters") or (samples["lr_decay"] or 0) // batch or steps
    if style != "constant" and decay not in (None, steps):
        found.note("optimizer.schedule", f"it went down over {decay} steps; here it does over train.steps ({steps})")
    warmup = foreign.take(f"{place}.lr_warmup_iters") or (samples["lr_warmup"] or 0) // batch
    fraction = foreign.take(f"{place}.lr_warmup_fraction")
    if fraction and isinstance(decay, int):
        warmup = round(fraction * decay)
    found.set("optimizer.warmup_steps", warmup or None, f"{place}.lr_warmup_*")
    if initial := foreign.take(f"{place}.lr_warmup_init"):
        found.note("optimizer.warmup_steps", f"the warm-up began at a rate of {initial:g}; here it does at 0")
    start, end = (foreign.take(f"{place}.{side}_weight_decay") for side in ("start", "end"))
    if start != end:
        found.note("optimizer.weight_decay", f"it went from {start} to {end}; here it stays what it is")
    found.leave(foreign, place, "of the learning rate, what is above; the weight decay stays what it is")
