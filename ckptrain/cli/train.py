"""`ckptrain run` and `ckptrain resume`: in this process, as one of a launch, or as the launcher of several."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click
import orjson

from ckptrain import api
from ckptrain.checkpoint.working_copy import all_as_given, as_given
from ckptrain.cli.error_log import keep_logs_in
from ckptrain.cli.launch import launch
from ckptrain.cli.launched import is_launched
from ckptrain.cli.outcome import Answer
from ckptrain.cli.quiet import quiet_libraries
from ckptrain.cli.slurm import step_environment
from ckptrain.cli.torchrun import stay_stopped
from ckptrain.config.load import load_config
from ckptrain.config.schema import RunConfig
from ckptrain.installed import MEGATRON, require

if TYPE_CHECKING:
    from ckptrain.training.run import RunResult


def run_config(
    config: Path, overrides: tuple[str, ...], run_dir: Path | None, num_processes: int, *, as_json: bool, quiet: bool
) -> Answer:
    """Start the run that a config file describes, or go on with it.

    Raises:
        CkptrainError: one of its kinds for whatever is refused or fails.
        click.UsageError: `config` is a directory.
    """
    if config.is_dir():
        raise click.UsageError(f"{config} is a directory; to go on with a run: ckptrain resume {config}")
    run_dir = run_dir or api.default_run_dir(config)
    arguments = ["run", *_flags(as_json=as_json, quiet=quiet), f"--run-dir={run_dir}", "--", str(config), *overrides]
    from ckptrain.training.result import refusals_told

    with refusals_told(run_dir):
        loaded = api.read_config(config, overrides, run_dir)
    return _train(loaded, run_dir, arguments, num_processes, as_json=as_json, quiet=quiet)


def resume_run(run_dir: Path, overrides: tuple[str, ...], num_processes: int, *, as_json: bool, quiet: bool) -> Answer:
    """Go on with a run as it was last asked to be.

    Raises:
        CheckpointNotFound: there is no run.
        CkptrainError: one of its kinds for whatever is refused or fails.
    """
    arguments = ["resume", *_flags(as_json=as_json, quiet=quiet), "--", str(run_dir), *overrides]
    config = load_config(api.config_of_run(run_dir), overrides)
    return _train(config, run_dir, arguments, num_processes, as_json=as_json, quiet=quiet)


def _flags(*, as_json: bool, quiet: bool) -> list[str]:
    return [*(["--json"] if as_json else []), *(["--quiet"] if quiet else [])]


def _train(
    config: RunConfig, run_dir: Path, arguments: Sequence[str], num_processes: int, *, as_json: bool, quiet: bool
) -> Answer:
    keep_logs_in(run_dir)
    os.environ.update(step_environment(os.environ))
    quiet_libraries()
    if num_processes > 1 and not is_launched(os.environ):
        # What is refused is refused here, once, before any process loads torch.
        from ckptrain.training.result import refusals_told

        with refusals_told(run_dir):
            api.plan(config, run_dir=run_dir, world_size=num_processes)
        require(MEGATRON, "training")
        return _launch(arguments, num_processes, as_json=as_json)
    return _train_here(config, run_dir, num_processes=int(os.environ.get("WORLD_SIZE", "1")), quiet=quiet)


def _launch(arguments: Sequence[str], num_processes: int, *, as_json: bool) -> Answer:
    # With -m Python looks for modules in the working directory first; -P keeps it from that where this process did so.
    safe = [] if {"", str(Path.cwd())} & set(sys.path) else ["-P"]
    command = [sys.executable, *safe, "-m", "ckptrain.cli", *arguments]
    launched = launch(command, num_processes, capture_stdout=as_json)
    report: dict[str, Any] = {}
    if as_json:
        try:
            report = orjson.loads(launched.stdout)
        except orjson.JSONDecodeError:
            message = "the process of rank 0 ended without an answer; see stderr"
            report = {"error": {"kind": "ProcessEnded", "message": message, "problems": []}}
    return Answer(report=report, exit_status=launched.exit_status)


def _train_here(config: RunConfig, run_dir: Path, num_processes: int, *, quiet: bool) -> Answer:
    """Train in this process; it talks on rank 0 only."""
    from ckptrain.training.startup import StartClock

    clock = StartClock.of_command()
    if os.environ.get("RANK", "0") != "0":
        result = api.run(config, run_dir=run_dir, clock=clock)
        stay_stopped(result, os.environ)
        return Answer(report={}, exit_status=result.exit_status)
    from ckptrain.cli.ending import show_end
    from ckptrain.cli.forecast import Rhythm
    from ckptrain.cli.page import open_console
    from ckptrain.cli.progress import Progress, Quiet

    if quiet:
        result = api.run(config, run_dir=run_dir, observers=[Quiet(open_console())], clock=clock)
    else:
        with Progress(open_console(), Rhythm.of(config), name=run_dir.name) as told:
            result = api.run(config, run_dir=run_dir, observers=[told], clock=clock)
    stay_stopped(result, os.environ)
    report = result_report(result, config.train.steps)
    # The run directory as it was given is what people recognise and can type.
    report["run_dir"] = as_given(run_dir)
    return Answer(
        report=report,
        show=functools.partial(show_end, report, num_processes),
        exit_status=result.exit_status,
    )


def result_report(result: RunResult, steps: int) -> dict[str, Any]:
    """Return how a run ended, in JSON's types."""
    report = {
        "status": result.status,
        "run_dir": str(result.run_dir),
        "plan": result.plan.to_dict(),
        "step": result.step,
        "steps": steps,
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        "loss": result.loss,
        "val_loss_before": result.val_loss_before,
        "val_loss_after": result.val_loss_after,
        "samples": [attrs.asdict(sample) for sample in result.samples],
        "stop_reason": result.stop_reason,
    }
    return all_as_given(report)
