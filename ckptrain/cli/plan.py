"""`ckptrain plan`: what a start would do, and what it would take; from shapes and names alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.text import Text

from ckptrain import api
from ckptrain.checkpoint.working_copy import all_as_given, as_given
from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import Row, facts, start_rows
from ckptrain.cli.wording import bytes_text, count_text, plural
from ckptrain.config.estimate import adapter_tensors, checkpoint_bytes, memory_estimate
from ckptrain.config.fusion import AssumedLayers, assumed_layers
from ckptrain.config.load import load_config
from ckptrain.config.schema import RunConfig
from ckptrain.training.start import Start, Survey

_MEMORY_TERMS = {
    "base_weights": "base weights",
    "adapter": "adapter",
    "adapter_copy": "copy of the adapter beside the weights",
    "gradients": "gradients of the adapter",
    "optimizer": "optimizer",
    "activations": "activations kept for the backward pass",
    "logits": "logits and their gradient",
    "layer": "one layer while its gradients are computed",
    "workspaces": "workspaces of cuBLAS and Transformer Engine",
}
_SHORT_FINGERPRINT = 12


def plan_answer(source: Path, overrides: tuple[str, ...], run_dir: Path | None, num_processes: int) -> Answer:
    """Plan the start of a config file or of a run.

    Raises:
        CkptrainError: what `ckptrain run` would refuse.
        click.UsageError: a run and another run directory are given.
    """
    if source.is_dir():
        if run_dir is not None:
            raise click.UsageError(f"{source} is a run itself: leave out --run-dir, or give a config file")
        config, run_dir = load_config(api.config_of_run(source), overrides), source
    else:
        run_dir = run_dir or api.default_run_dir(source)
        config = api.read_config(source, overrides, run_dir)
    survey, start = api.plan(config, run_dir=run_dir, world_size=num_processes)
    report = plan_report(survey, start, run_dir)
    return Answer(report=report, show=functools.partial(_show, report))


def plan_report(survey: Survey, start: Start, run_dir: Path) -> dict[str, Any]:
    """Return everything that is known of a start before it is made, in JSON's types; sizes are in bytes."""
    config, shape = survey.config, survey.shape
    stored = checkpoint_bytes(config, shape, survey.targets)
    memory = memory_estimate(config, shape, survey.layout, survey.targets)
    layers = assumed_layers(config, shape, survey.layout)
    return {
        "run_dir": as_given(run_dir),
        "plan": all_as_given(start.plan.to_dict()),
        "steps": config.train.steps,
        "base": {
            **attrs.asdict(survey.identity),
            "architecture": shape.architecture,
            "parameters": shape.num_parameters,
            "dtype": config.model.dtype,
        },
        "adapters": _adapters(config, survey),
        "layout": {**attrs.asdict(survey.layout), "world_size": survey.layout.world_size},
        "batches": attrs.asdict(survey.batches),
        "checkpoint_bytes": {**attrs.asdict(stored), "total": stored.total},
        "keep_last": config.checkpoint.keep_last,
        "layers": _layers(layers),
        "memory_bytes": {**attrs.asdict(memory), "total": memory.total},
    }


def _adapters(config: RunConfig, survey: Survey) -> dict[str, Any]:
    tensors = adapter_tensors(survey.shape, config.lora, survey.targets)
    return {
        "modules": len(survey.targets.modules),
        "kinds": sorted({name.rpartition(".")[2] for name in survey.targets.modules}),
        "dim": config.lora.dim,
        "alpha": config.lora.alpha,
        "parameters": sum(math.prod(dimensions) for dimensions in tensors.values()),
    }


def _layers(layers: AssumedLayers) -> dict[str, Any]:
    return {
        **attrs.asdict(layers.choice),
        "assumed": "a GPU" if layers.gpu else "no GPU",
        "backend": "transformer_engine" if layers.transformer_engine else "local",
    }


def _show(report: Mapping[str, Any], console: Console) -> None:
    console.print(facts([*start_rows(report["plan"]), ("run", _run_text(report)), *_model_rows(report)]))
    console.print()
    console.print(facts([*_step_rows(report), ("checkpoint", _checkpoint_text(report)), *_memory_rows(report)]))


def _run_text(report: Mapping[str, Any]) -> str:
    first, steps = report["plan"]["first_step"], report["steps"]
    left = "no step is left" if first is None else f"steps {first:,} to {steps:,}"
    return f"{report['run_dir']}, {left}"


def _model_rows(report: Mapping[str, Any]) -> list[Row]:
    base, adapters = report["base"], report["adapters"]
    share = adapters["parameters"] / base["parameters"]
    revision = f" at {base['revision'][:_SHORT_FINGERPRINT]}" if base["revision"] else ""
    return [
        ("base", f"{base['name']}{revision}"),
        (
            "",
            (
                f"{base['architecture']}, {count_text(base['parameters'])} parameters in {base['dtype']}, fingerprint"
                f" {base['fingerprint'][:_SHORT_FINGERPRINT]}"
            ),
        ),
        (
            "adapters",
            (
                f"{plural(adapters['modules'], 'module')} ({', '.join(adapters['kinds'])}), rank {adapters['dim']},"
                f" alpha {adapters['alpha']}: {count_text(adapters['parameters'])} parameters, {share:.2%} of the base"
            ),
        ),
    ]


def _step_rows(report: Mapping[str, Any]) -> list[Row]:
    layout, batches = report["layout"], report["batches"]
    sizes = " x ".join(f"{name} {layout[name]}" for name in ("tensor", "pipeline", "context", "data"))
    expert = f", expert {layout['expert']}" if layout["expert"] > 1 else ""
    rows: list[Row] = [
        ("layout", f"{_processes(layout['world_size'])} = {sizes}{expert}"),
        (
            "one step",
            (
                f"{plural(batches['rows_per_step'], 'row')} = {layout['data']} data parallel x"
                f" {plural(batches['micro_batches_per_rank'], 'micro-batch')} of"
                f" {plural(batches['rows_per_micro_batch'], 'row')}; at most"
                f" {plural(batches['tokens_per_step_max'], 'token')}"
            ),
        ),
    ]
    if batches["pipeline_bubble"]:
        rows.append(
            ("", f"{batches['pipeline_bubble']:.0%} of a step is waiting in the pipeline; more micro-batches wait less")
        )
    return rows


def _processes(count: int) -> str:
    return plural(count, "process")


def _checkpoint_text(report: Mapping[str, Any]) -> str:
    stored = report["checkpoint_bytes"]
    return (
        f"{bytes_text(stored['total'])} (adapter {bytes_text(stored['adapter'])}, optimizer"
        f" {bytes_text(stored['optimizer'])}); the newest {report['keep_last']} are kept"
    )


def _layers_text(report: Mapping[str, Any]) -> str:
    layers = report["layers"]
    kind = "fused" if layers["fused"] else "plain"
    whose = "Transformer Engine's" if layers["backend"] == "transformer_engine" else "megatron-core's own"
    return f"{kind} ({layers['reason']}); {layers['assumed']} and {whose} modules are assumed"


def _memory_rows(report: Mapping[str, Any]) -> list[Row]:
    memory = report["memory_bytes"]
    terms = [(label, bytes_text(memory[name])) for name, label in _MEMORY_TERMS.items() if memory[name]]
    width = max(len(size) for _, size in terms)
    where = "in the loss" if memory["logits"] else "in the last layer"
    total = Text(
        f"{bytes_text(memory['total'])} estimated on the process that holds most, at its peak {where}", style="bold"
    )
    return [
        ("layers", _layers_text(report)),
        ("memory", total),
        *(("", f"{size:>{width}}  {label}") for label, size in terms),
    ]
