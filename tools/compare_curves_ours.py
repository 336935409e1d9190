"""How does ckptrain train a case? Through what a program that embeds it may use, and nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from compare_curves_case import Case, Curve, apart

import ckptrain
from ckptrain.training.observers import Observer, StepRecord


class Recorder(Observer):
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.validation: dict[int, float] = {}

    def on_step(self, record: StepRecord) -> None:
        """Keep a step."""
        self.steps.append(record)

    def on_validation(self, step: int, val_loss: float) -> None:
        """Keep a look at the validation file."""
        self.validation[step] = val_loss


def config_of(case: Case, adapter: Path | None) -> dict[str, Any]:
    """Write a case as a configuration; without an adapter it starts from one of its own."""
    return {
        "model": {
            "pretrained": str(case.base),
            "adapter": None if adapter is None else str(adapter),
            "dtype": case.dtype,
            "verify": "never",
        },
        "lora": {
            "kind": case.kind,
            "dim": case.rank,
            "alpha": case.alpha,
            "dropout": case.dropout,
            "dropout_position": case.dropout_position,
            "target_modules": list(case.targets),
        },
        "data": {
            "train": str(case.train),
            "validation": str(case.validation),
            "sequence_length": case.longest_tokens,
            "packing": False,  # a step has as many samples as rows
            "loss_on": "last_assistant",
        },
        "optimizer": {
            "lr": case.lr,
            "schedule": case.schedule,
            "warmup_steps": case.warmup_steps,
            "weight_decay": case.weight_decay,
            "betas": list(case.betas),
            "eps": case.eps,
            "clip_grad": case.clip_grad,
        },
        "train": {
            "steps": case.steps,
            "seed": case.seed,
            # Half of a step's samples at a time where that goes: the mean is over all of them.
            "micro_batch_size": max(1, case.samples_per_step // 2),
            "global_batch_size": case.samples_per_step,
            "eval_every_steps": case.eval_every_steps,
        },
        "checkpoint": {"every_steps": case.steps},
        "log": {"tensorboard": False},
    }


def sample_order(case: Case) -> list[int]:
    """Return which lines of the training file, counted from 0, the samples of all steps are.

    Raises:
        ValueError: a sample is too long, or there are fewer than the steps need: a second epoch is not told.
    """
    needed = case.steps * case.samples_per_step
    known = ckptrain.describe_data(config_of(case, None), num_shown=needed)["train"]
    shown = known["shown"]
    if known["would_refuse"]:
        raise ValueError(f"{case.train}: {known['would_refuse']}")
    if len(shown) < needed:
        raise ValueError(f"{case.train} has {len(shown)} samples and {needed} are needed: fewer steps, or more data")
    return [int(sample["where"].rpartition(":")[2]) - 1 for sample in shown]


def train_ours(
    case: Case, adapter: Path | None, run_dir: Path, lora: Mapping[str, Any] | None = None, out: Path | None = None
) -> Curve:
    """Train in a process of its own; `lora` is what the configuration says besides, `out` gets the adapter for PEFT."""
    return apart(case, training(case, adapter, run_dir, lora, out))


def training(
    case: Case, adapter: Path | None, run_dir: Path, lora: Mapping[str, Any] | None = None, out: Path | None = None
) -> Callable[[], Curve]:
    """Return what trains, for `apart`; as `train_ours`."""
    config = config_of(case, adapter)
    config["lora"] |= lora or {}
    return partial(_run, config, run_dir, out)


def _run(config: dict[str, Any], run_dir: Path, out: Path | None) -> Curve:
    recorder = Recorder()
    ckptrain.run(config, run_dir=run_dir, observers=[recorder])
    if out is not None:
        ckptrain.export(run_dir, out, verify=False)
    return Curve(
        losses=[step.loss for step in recorder.steps],
        grad_norms=[step.grad_norm for step in recorder.steps],
        learning_rates=[step.lr for step in recorder.steps],
        learnt_tokens=[step.learnt_tokens for step in recorder.steps],
        validation=recorder.validation,
    )
