"""The loggers that a configuration asks for: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any

import attrs

from ckptrain.config.schema import RunConfig
from ckptrain.errors import ConfigError
from ckptrain.training.metrics import MetricsFile
from ckptrain.training.observers import Observer, StepRecord


class _Scalars(Observer, abc.ABC):
    """An observer that passes numbers on by name, every so many steps."""

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps

    def on_step(self, record: StepRecord) -> None:
        if record.step % self._every_steps == 0:
            values = attrs.asdict(record)
            step = values.pop("step")
            self.put({f"train/{name}": value for name, value in values.items() if value is not None}, step)

    def on_validation(self, step: int, val_loss: float) -> None:
        self.put({"val/loss": val_loss}, step)

    @abc.abstractmethod
    def put(self, values: dict[str, float], step: int) -> None:
        """Write the values of a step."""


class TensorBoard(_Scalars):
    """RUN/tensorboard, purged of what a lost stretch wrote."""

    def __init__(self, directory: Path, *, last_step: int, every_steps: int) -> None:
        super().__init__(every_steps)
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=last_step + 1 if last_step else None)

    def put(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def on_end(self) -> None:
        self._writer.close()


class WeightsAndBiases(_Scalars):
    """A wandb run, resumed under the run's own id."""

    def __init__(self, arguments: dict[str, Any], *, run_id: str, every_steps: int) -> None:
        super().__init__(every_steps)
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "log.wandb is set", ["the package wandb is not installed: uv sync --extra wandb, or log.wandb=null"]
            ) from error
        self._run = wandb.init(**{"id": run_id, "resume": "allow", **arguments})

    def put(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def on_end(self) -> None:
        self._run.finish()


class MLflow(_Scalars):
    """An MLflow run, tagged with the run's id and found again by it."""

    def __init__(self, arguments: dict[str, Any], *, run_id: str, every_steps: int) -> None:
        super().__init__(every_steps)
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise ConfigError(
                "log.mlflow is set", ["the package mlflow is not installed: uv sync --extra mlflow, or log.mlflow=null"]
            ) from error
        self._client = MlflowClient(tracking_uri=arguments.get("tracking_uri"))
        name = arguments.get("experiment", "ckptrain")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([experiment_id], f"tags.ckptrain_run_id = '{run_id}'", max_results=1)
        run = (
            known[0]
            if known
            else self._client.create_run(
                experiment_id, run_name=arguments.get("run_name"), tags={"ckptrain_run_id": run_id}
            )
        )
        self._run_id = run.info.run_id

    def put(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def on_end(self) -> None:
        self._client.set_terminated(self._run_id)


def recorders(config: RunConfig, run_dir: Path, *, run_id: str, last_step: int) -> list[Observer]:
    """Return the observers that a configuration asks for; `last_step` is the last one of the checkpoint resumed from.

    Raises:
        ConfigError: one needs a package that is not installed.
    """
    log = config.log
    found: list[Observer] = [
        MetricsFile(run_dir / "metrics.jsonl", last_step=last_step, every_steps=log.every_steps),
    ]
    if log.tensorboard:
        found.append(TensorBoard(run_dir / "tensorboard", last_step=last_step, every_steps=log.every_steps))
    if log.wandb is not None:
        found.append(WeightsAndBiases(log.wandb, run_id=run_id, every_steps=log.every_steps))
    if log.mlflow is not None:
        found.append(MLflow(log.mlflow, run_id=run_id, every_steps=log.every_steps))
    return found
