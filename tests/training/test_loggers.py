"""TensorBoard, Weights & Biases and MLflow after a run was killed, stopped and killed again: what they hold, read back."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.launch import Ranks, launch, run_training
from support.processes import children_of

from ckptrain.config.schema import RunConfig
from ckptrain.errors import ConfigError
from ckptrain.training import following
from ckptrain.training.following import Following, Row
from ckptrain.training.loggers import parameters, recorders
from ckptrain.training.metrics import MetricsFile
from ckptrain.training.observers import Observer, Observers, StepRecord
from ckptrain.training.tensorboard import TensorBoard
from ckptrain.training.wandb_files import history, last_step_in

MakeConfig = Callable[..., RunConfig]
STEPS, VALIDATED = list(range(1, 11)), [0, 4, 8, 10]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import what takes seconds once, before anything is forked."""
    import mlflow
    import wandb

    assert mlflow
    assert wandb


class At(Observer):
    """Sends this process a signal when a step has been told."""

    def __init__(self, step: int, number: signal.Signals) -> None:
        self._step, self._signal = step, number

    def on_step(self, record: StepRecord) -> None:
        """Send it."""
        if record.step == self._step:
            time.sleep(0.3)  # services have got what they take before a kill
            os.kill(os.getpid(), self._signal)


def killed(config: RunConfig, run_dir: Path, step: int) -> None:
    """Run until a step is told, and die there with all that wandb has started, as in a job that a scheduler kills."""
    ranks = Ranks(1, lambda: run_training(config, run_dir, [At(step, signal.SIGSTOP)]))
    [process] = ranks.processes
    assert process.pid is not None
    deadline = time.monotonic() + 120
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for child in children_of(process.pid):
        os.kill(child, signal.SIGKILL)
    ranks.kill()


def tensorboard_points(directory: Path) -> dict[str, list[int]]:
    """Return the steps of each curve as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [point.step for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def wandb_rows(directory: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of all offline files, in the order in which `wandb sync` sends them."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for path in sorted(directory.glob("offline-run-*/run-*.wandb")):
        rows += [(step, {name: orjson.loads(value) for name, value in row.items()}) for step, row in history(path)]
    return rows


def mlflow_client(store: Path) -> Any:
    """Return a client of a store of files."""
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return MlflowClient(str(store))


def metrics_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return what metrics.jsonl holds."""
    return [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, chats: tuple[Path, Path]) -> Path:
    """Return the directory of a run of ten steps that was killed at 3, before its first save, and at 7, stopped at 8,
    and killed again at 10."""
    from ckptrain.config.load import load_config

    run_dir = tmp_path_factory.mktemp("runs") / "restarted"
    config = load_config(
        {
            "model": {"pretrained": str(tiny_llama), "dtype": "float32", "verify": "never"},
            "data": {"train": str(chats[0]), "validation": str(chats[1]), "sequence_length": 128},
            "train": {"steps": 10, "global_batch_size": 4, "eval_every_steps": 4},
            "checkpoint": {"every_steps": 4},
            "log": {"wandb": {"mode": "offline"}, "mlflow": {}},
        }
    )
    killed(config, run_dir, 6)  # after the save of step 4
    [stopped] = launch(1, lambda: run_training(config, run_dir, [At(7, signal.SIGTERM)]))
    assert (stopped.status, stopped.step) == ("stopped", 7)
    killed(config, run_dir, 10)  # after the save of step 8
    [done] = launch(1, lambda: run_training(config, run_dir))
    assert (done.status, done.step) == ("finished", 10)
    return run_dir


def test_tensorboard_has_each_step_once(restarted: Path) -> None:
    """Its own reader honours the order to forget, which each start writes; there are four files."""
    points = tensorboard_points(restarted / "tensorboard")
    assert len(list((restarted / "tensorboard").iterdir())) == 4
    assert points.pop("val/loss") == VALIDATED
    assert points.keys() >= {"train/loss", "train/lr", "train/grad_norm", "train/tokens_per_s"}
    assert set(map(tuple, points.values())) == {tuple(STEPS)}


def test_wandb_has_each_step_once_in_one_run(restarted: Path) -> None:
    """Its offline files hold the rows of metrics.jsonl, in their order, though wandb lost those of its last seconds."""
    rows = wandb_rows(restarted / "wandb")
    assert [step for step, _ in rows] == [0, *STEPS]
    assert [step for step, row in rows if "val/loss" in row] == VALIDATED
    names = {path.name.rpartition("-")[2] for path in (restarted / "wandb").glob("offline-run-*")}
    assert len(names) == 1
    for line in metrics_lines(restarted):
        [row] = [row for step, row in rows if step == line["step"]]
        measured = ("loss", "lr", "grad_norm") if "loss" in line else ()
        assert [row[f"train/{name}"] for name in measured] == [line[name] for name in measured]


def test_mlflow_has_each_step_once_in_one_run(restarted: Path) -> None:
    """With the configuration as parameters, and finished."""
    client = mlflow_client(restarted / "mlruns")
    experiment = client.get_experiment_by_name("ckptrain")
    [run] = client.search_runs([experiment.experiment_id])
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert [point.step for point in history.pop("val/loss")] == VALIDATED
    assert {tuple(point.step for point in points) for points in history.values()} == {tuple(STEPS)}
    losses = [line["loss"] for line in metrics_lines(restarted) if "loss" in line]
    assert [point.value for point in history["train/loss"]] == losses
    assert (run.info.status, run.info.run_name, run.data.params["train.steps"]) == ("FINISHED", "restarted", "10")


def test_nothing_of_wandb_runs_on(restarted: Path) -> None:
    """Neither after an end nor after a kill."""
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _is_of(path, str(restarted))]
    assert left == []


def _is_of(cmdline: Path, run_dir: str) -> bool:
    try:
        words = cmdline.read_bytes() + (cmdline.parent / "cwd").readlink().as_posix().encode()
    except OSError:  # it has just ended, or is not ours
        return False
    return b"wandb" in words and run_dir.encode() in words
