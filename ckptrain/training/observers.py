"""Who is told what happens: the interface, and the observers that write it down for people and tools.

Observers run on rank 0 only. They are told after the fact and cannot change a run; printing is left to `cli`.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import orjson

from ckptrain.config.schema import RunConfig
from ckptrain.errors import ConfigError


@attrs.frozen(kw_only=True)
class StepRecord:
    """What one optimizer step did."""

    step: int
    loss: float
    """Mean cross-entropy over the learnt tokens of the global batch, in nats."""
    lr: float
    grad_norm: float
    tokens: int
    """Tokens computed in this step, padding included, over all ranks."""
    learnt_tokens: int
    padding_share: float
    """Share of `tokens` that are padding, between 0 and 1."""
    tokens_per_s: float
    seconds: float
    data_s: float
    """Seconds of it in which the step waited for its batches."""
    tflops_per_s: float
    """10^12 FLOPs of the model (`ckptrain.config.flops`) a second, of each process."""
    mfu: float | None = None
    """Those as a share of what the GPU can do in bfloat16; None where that is not known, or not what it computes in."""
    peak_memory_bytes: int | None = None
    """The most that tensors have taken on rank 0's GPU since training began; None on a CPU."""


@attrs.frozen(kw_only=True)
class SampleAnswer:
    """A question of the validation set, the answer it wants, and what the model says."""

    step: int
    prompt: str
    reference: str
    answer: str


class Observer:
    """Told of a run; override what you care for."""

    def on_plan(self, plan: dict[str, Any], facts: dict[str, Any]) -> None:
        """The start is decided."""

    def on_progress(self, text: str) -> None:
        """Something that takes a while is beginning, or a fact is worth a line."""

    def on_tokenising(self, name: str, done: int, total: int | None) -> None:
        """So many rows of a source have become tokens; `total` is None where a file does not say how many it has."""

    def on_warning(self, text: str) -> None:
        """Something does not work as it should, and the run goes on."""

    def on_step(self, record: StepRecord) -> None:
        """An optimizer step is done."""

    def on_validation(self, step: int, val_loss: float) -> None:
        """The validation set was looked at after `step` steps."""

    def on_sample(self, sample: SampleAnswer) -> None:
        """The model answered the sample question."""

    def on_saved(self, step: int, path: Path, num_bytes: int, seconds: float) -> None:
        """A checkpoint is committed."""

    def on_save_failed(self, step: int, message: str) -> None:
        """The checkpoint of a step could not be written; the one before is untouched and training goes on."""

    def on_stop(self, reason: str) -> None:
        """The run was asked to stop; it saves now."""

    def on_end(self) -> None:
        """The run is over, however it ended."""


class MetricsFile(Observer):
    """RUN/metrics.jsonl: one object a line with `step` and what was measured then."""

    def __init__(self, path: Path, *, last_step: int, every_steps: int) -> None:
        """Open the file for a run that has done `last_step` steps, and drop what a lost stretch wrote after them."""
        self._every_steps = every_steps
        if path.exists():
            _drop_lines_after(path, last_step)
        self._file = path.open("ab", buffering=0)
        self._torn = False

    def on_step(self, record: StepRecord) -> None:
        if record.step % self._every_steps == 0:
            self._write(attrs.asdict(record))

    def on_validation(self, step: int, val_loss: float) -> None:
        self._write({"step": step, "val_loss": val_loss})

    def on_end(self) -> None:
        self._file.close()

    def _write(self, values: dict[str, Any]) -> None:
        line = (b"\n" if self._torn else b"") + orjson.dumps(values) + b"\n"
        self._torn = True  # a full disk may take a part of the line; the next then starts on one of its own
        while line:
            line = line[self._file.write(line) :]
        self._torn = False


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`; those after it belong to steps that are made again, and a torn last line to none."""
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if values.get("step", 0) <= step:
            kept.append(line + b"\n")
    replacement = path.with_suffix(".jsonl.new")
    replacement.write_bytes(b"".join(kept))
    replacement.replace(path)


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


class Observers(Observer):
    """Several observers as one; on ranks other than 0 there are none."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        self._recorders: list[Observer] = []
        self._failed: set[int] = set()

    def add_recorders(self, recorders: Iterable[Observer]) -> None:
        """Tell these too from now on; one that fails is reported once, and never ends a run."""
        self._recorders += recorders

    def _tell(self, event: str, *args: object) -> None:
        for observer in self._observers:
            getattr(observer, event)(*args)
        for recorder in self._recorders:
            try:
                getattr(recorder, event)(*args)
            except Exception as error:  # told to the observers; what is recorded is worth less than what is trained
                self._report(recorder, error)

    def _report(self, recorder: Observer, error: Exception) -> None:
        if id(recorder) not in self._failed:
            self._failed.add(id(recorder))
            self.on_warning(f"{type(recorder).__name__} cannot record: {error}; training goes on")

    def on_plan(self, plan: dict[str, Any], facts: dict[str, Any]) -> None:
        self._tell("on_plan", plan, facts)

    def on_progress(self, text: str) -> None:
        self._tell("on_progress", text)

    def on_tokenising(self, name: str, done: int, total: int | None) -> None:
        self._tell("on_tokenising", name, done, total)

    def on_warning(self, text: str) -> None:
        self._tell("on_warning", text)

    def on_step(self, record: StepRecord) -> None:
        self._tell("on_step", record)

    def on_validation(self, step: int, val_loss: float) -> None:
        self._tell("on_validation", step, val_loss)

    def on_sample(self, sample: SampleAnswer) -> None:
        self._tell("on_sample", sample)

    def on_saved(self, step: int, path: Path, num_bytes: int, seconds: float) -> None:
        self._tell("on_saved", step, path, num_bytes, seconds)

    def on_save_failed(self, step: int, message: str) -> None:
        self._tell("on_save_failed", step, message)

    def on_stop(self, reason: str) -> None:
        self._tell("on_stop", reason)

    def on_end(self) -> None:
        self._tell("on_end")
