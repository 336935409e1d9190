"""The loggers that a configuration asks for: TensorBoard, Weights & Biases, MLflow.

Each goes on in the same run after a resume, and has each step once: also those that were made again after a kill, and
those that were lost with the process before they were on disk. A start that begins anew is another run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptrain.config.load import flatten
from ckptrain.config.schema import RunConfig
from ckptrain.errors import ConfigError
from ckptrain.training.following import Following, Row
from ckptrain.training.metrics import MetricsFile
from ckptrain.training.observers import Observer
from ckptrain.training.tensorboard import TensorBoard
from ckptrain.training.wandb_files import last_step_in

_METRICS = "metrics.jsonl"
_DEFAULT_PROJECT = "ckptrain"
_WANDB_INIT_S, _WANDB_FINISH_S = 60.0, 15.0
"""Of a server that does not answer, and of one that takes long at the end."""
_RUN_TAG = "ckptrain_run_id"
_MOST_PARAMS, _MOST_PARAM_LENGTH = 100, 6000
"""What MLflow takes in one call: mlflow.utils.validation."""


class WeightsAndBiases(Following):
    """A run of Weights & Biases under the run's own id; its files are in RUN/wandb where no other `dir` is given.

    Online the server says how far it has come; offline (`log.wandb.mode=offline`) the files do. Each start writes a
    directory of its own, `RUN/wandb/offline-run-*-ID`, and `wandb sync RUN/wandb/offline-run-*` sends them, in their
    order, to one run. (Versions of wandb before 0.28 want `--append` for all but the first.) They are to stay until the
    run is over: a start that does not find them sends everything again.
    """

    def __init__(
        self, arguments: dict[str, Any], *, run_id: str, run_dir: Path, config: RunConfig, **options: Any
    ) -> None:
        super().__init__(run_dir / _METRICS, last_step=config.train.steps, **options)
        self._id = str(arguments.get("id", run_id))
        self._directory = Path(arguments.get("dir") or os.environ.get("WANDB_DIR") or run_dir)
        self._arguments = {
            "project": os.environ.get("WANDB_PROJECT", _DEFAULT_PROJECT),
            "name": run_dir.name,
            "resume": "allow",
            "config": parameters(config),
            **arguments,
            "id": self._id,
            "dir": str(self._directory),
        }
        self._recorded = -1

    def connect(self) -> str:
        import wandb

        # It is not to print between our lines, nor to ask for a key, nor to take our stdout for its own log.
        quiet = {"silent": True, "console": "off", "init_timeout": _WANDB_INIT_S, "finish_timeout": _WANDB_FINISH_S}
        wandb.setup(settings=wandb.Settings(silent=True))
        before = last_step_in(self._directory / "wandb", self._id)
        settings = wandb.Settings(**{**quiet, **self._arguments.get("settings", {})})
        self._run = wandb.init(**{**self._arguments, "settings": settings})
        self._recorded = max(before, self._run.starting_step - 1)
        if self._run.offline:
            return f"wandb: offline; `wandb sync {self._directory}/wandb/offline-run-*-{self._id}` sends it"
        return f"wandb: {self._run.url}"

    def send(self, row: Row) -> None:
        if row.step > self._recorded:  # what it has cannot be changed, and is the same
            self._run.log(row.values, step=row.step)
            self._recorded = row.step

    def disconnect(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)

    def abandon(self) -> None:
        import wandb

        # Python's exit would wait for wandb's process, which waits for the server; there is no other way to it.
        with contextlib.suppress(AttributeError):
            connection = wandb.setup()._connection
            connection._cleanup()
            connection._proc._process.kill()


class MLflow(Following):
    """A run of MLflow, tagged with the run's id and found again by it; in RUN/mlruns where no server is given.

    Its parameters are those of the first start, because MLflow does not let them change.
    """

    def __init__(
        self, arguments: dict[str, Any], *, run_id: str, run_dir: Path, config: RunConfig, **options: Any
    ) -> None:
        super().__init__(run_dir / _METRICS, last_step=config.train.steps, **options)
        self._uri = arguments.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or str(run_dir / "mlruns")
        self._experiment = arguments.get("experiment", os.environ.get("MLFLOW_EXPERIMENT_NAME", _DEFAULT_PROJECT))
        self._run_name = arguments.get("run_name", run_dir.name)
        self._tag = run_id
        self._parameters = parameters(config)
        self._recorded: dict[str, int] = {}

    def connect(self) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # Files are all that mlflow-skinny can write without a server; whoever chose them need not choose them twice.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = client = MlflowClient(tracking_uri=self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        known = client.search_runs([experiment_id], f"tags.{_RUN_TAG} = '{self._tag}'", max_results=1)
        run = (
            known[0] if known else client.create_run(experiment_id, run_name=self._run_name, tags={_RUN_TAG: self._tag})
        )
        self._run_id = run.info.run_id
        client.update_run(self._run_id, status="RUNNING")
        # Each for itself: a process may have been killed between two values of one step.
        self._recorded = {
            name: max((point.step for point in client.get_metric_history(self._run_id, name)), default=-1)
            for name in run.data.metrics
        }
        new = {name: value for name, value in self._parameters.items() if name not in run.data.params}
        params = [Param(name, str(value)[:_MOST_PARAM_LENGTH]) for name, value in new.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS])
        return f"mlflow: run {self._run_id} of experiment {self._experiment}"

    def send(self, row: Row) -> None:
        from mlflow.entities import Metric

        values = {name: value for name, value in row.values.items() if row.step > self._recorded.get(name, -1)}
        if values:
            metrics = [Metric(name, value, row.time_ms, row.step) for name, value in values.items()]
            self._client.log_batch(self._run_id, metrics=metrics)
            self._recorded.update(dict.fromkeys(values, row.step))

    def disconnect(self, *, finished: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "KILLED")


def parameters(config: RunConfig) -> dict[str, Any]:
    """Return the configuration by dotted key, without the section on logging: its addresses may hold passwords."""
    return {key: value for key, value in flatten(config).items() if not key.startswith("log.")}


def recorders(
    config: RunConfig, run_dir: Path, *, run_id: str, last_step: int, tell: Callable[[str], object] = lambda _: None
) -> list[Observer]:
    """Return the observers that a configuration asks for.

    `last_step` is the last one of the checkpoint resumed from, and 0 where there is none; `tell` hears where a run is
    to be seen.

    Raises:
        ConfigError: one needs a package that is not installed.
    """
    log = config.log
    # A start from nothing validates before its first step, which one before it may have done here as well.
    kept = last_step or -1
    found: list[Observer] = [MetricsFile(run_dir / _METRICS, last_step=kept, every_steps=log.every_steps)]
    if log.tensorboard:
        found.append(TensorBoard(run_dir / "tensorboard", last_step=kept, every_steps=log.every_steps))
    if log.wandb is not None:
        _check_installed("wandb", "log.wandb")
        found.append(WeightsAndBiases(log.wandb, run_id=run_id, run_dir=run_dir, config=config, tell=tell))
    if log.mlflow is not None:
        _check_installed("mlflow", "log.mlflow")
        found.append(MLflow(log.mlflow, run_id=run_id, run_dir=run_dir, config=config, tell=tell))
    return found


def _check_installed(package: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        problem = f"the package {package} is not installed: uv sync --extra {package}, or {key}=null"
        raise ConfigError(f"{key} is set", [problem])
