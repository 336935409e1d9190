"""TensorBoard, Weights & Biases and MLflow after a run was killed, stopped and killed again: what they hold, read back."""

from __future__ import annotations

import importlib
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
    for name in (
        "wandb.proto.wandb_internal_pb2",
        "mlflow.tracking.client",
        "tensorboard.summary.writer.record_writer",
    ):
        importlib.import_module(name)


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
    """Return the directory of a run of ten steps that was killed at 6, stopped at 7 and killed again at 10."""
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


@pytest.fixture
def wandb_twice(tmp_path: Path, tiny_config: MakeConfig) -> list[list[int]]:
    """Return the steps in wandb's files after a start whose last two steps, though written, are made again."""
    config = tiny_config("log.wandb={mode: offline}", "train.steps=6")
    found = []
    for done, steps in ((-1, range(1, 5)), (2, range(3, 7))):
        told = _observers(config, tmp_path, done)
        for step in steps:
            told.on_step(_record(step))
        told.on_end()
        found.append([step for step, _ in wandb_rows(tmp_path / "wandb")])
    return found


def _observers(config: RunConfig, run_dir: Path, done: int, warned: list[str] | None = None) -> Observers:
    """Return the recorders of a start after `done` steps, as a run tells them."""

    class Warned(Observer):
        def on_warning(self, text: str) -> None:
            if warned is not None:
                warned.append(text)

    told = Observers([Warned()])
    told.add_recorders(recorders(config, run_dir, run_id="abc", last_step=done))
    return told


def _record(step: int) -> StepRecord:
    values = {field: 1.0 / step for field in ("loss", "lr", "grad_norm", "padding_share", "tokens_per_s", "seconds")}
    return StepRecord(step=step, tokens=8, learnt_tokens=4, data_s=0.0, tflops_per_s=0.1, **values)


def test_wandb_keeps_what_it_has_of_steps_that_are_made_again(wandb_twice: list[list[int]]) -> None:
    """A row cannot be taken back there, and exact resume makes the same again."""
    assert wandb_twice == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]


def test_offline_files_that_were_cut_short_are_read_as_far_as_they_are_whole(
    wandb_twice: list[list[int]], tmp_path: Path
) -> None:
    """A process was killed while it wrote: everything before its last row counts."""
    *_, path = sorted((tmp_path / "wandb").glob("offline-run-*/run-abc.wandb"))
    rows = list(history(path))
    whole = path.read_bytes()
    lengths = set()
    for size in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:size])
        found = list(history(path))
        assert found == rows[: len(found)]
        lengths.add(len(found))
    assert lengths == {0, 1, 2}
    assert last_step_in(tmp_path / "wandb", "another") == -1


def test_a_start_from_nothing_forgets_one_before_it_that_saved_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Killed before its first save: its validation before the first step is forgotten as well."""
    config = tiny_config("log.tensorboard=true")
    for _ in range(2):
        told = _observers(config, tmp_path, 0)
        told.on_validation(0, 2.5)
        told.on_step(_record(1))
    assert tensorboard_points(tmp_path / "tensorboard")["val/loss"] == [0]
    assert [line["step"] for line in metrics_lines(tmp_path)] == [0, 1]


def test_tensorboard_writes_on_in_another_file_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is lost and told once; a reader stops at an event that was cut short, and finds those that follow."""
    board = TensorBoard(tmp_path, last_step=-1, every_steps=1)
    board.on_step(_record(1))
    with monkeypatch.context() as patch:
        patch.setattr(board._writer, "flush", lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            board.on_step(_record(2))
    board.on_step(_record(3))
    board.on_end()
    assert len(list(tmp_path.iterdir())) == 2
    assert tensorboard_points(tmp_path)["train/loss"][-1] == 3


class Service(Following):
    """A service in memory that fails, or hangs, as often as a test wants."""

    def __init__(self, run_dir: Path, failing: Counter[str], hangs_s: float = 0.0, **options: Any) -> None:
        super().__init__(run_dir / "metrics.jsonl", last_step=3, tell=lambda _: None, **options)
        self.failing, self.hangs_s = failing, hangs_s
        self.rows: list[Row] = []
        self.ended: bool | None = None

    def _fail(self, what: str) -> None:
        time.sleep(self.hangs_s)
        if self.failing[what]:
            self.failing[what] -= 1
            raise ConnectionError(f"no {what}")

    def connect(self) -> str:
        """Fail, or connect."""
        self._fail("connect")
        return "here"

    def send(self, row: Row) -> None:
        """Fail, or keep the row."""
        self._fail("send")
        self.rows.append(row)

    def disconnect(self, *, finished: bool) -> None:
        """Fail, or end."""
        self._fail("disconnect")
        self.ended = finished


@pytest.fixture
def tell_three_steps(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that tells a service of three steps and the end, and returns the warnings of it."""

    def tell(service: Service, between_s: float = 0.05) -> list[str]:
        warned: list[str] = []

        class Warned(Observer):
            def on_warning(self, text: str) -> None:
                warned.append(text)

        told = Observers([Warned()])
        told.add_recorders([MetricsFile(tmp_path / "metrics.jsonl", last_step=-1, every_steps=1), service])
        for step in (1, 2, 3):
            told.on_step(_record(step))
            time.sleep(between_s)
        told.on_validation(3, 0.5)
        told.on_end()
        return warned

    return tell


@pytest.mark.parametrize("what", ["connect", "send", "disconnect"])
def test_a_service_that_fails_for_a_while_gets_every_step_afterwards(
    what: str, tmp_path: Path, tell_three_steps: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each and in order, and it is told once that it failed, by its name."""
    monkeypatch.setattr(following, "_PAUSE_S", 0.01)
    monkeypatch.setattr(following, "_POLL_S", 0.01)
    service = Service(tmp_path, Counter({what: 1 if what == "disconnect" else 2}))
    warned = tell_three_steps(service)
    rows = [(row.step, "val/loss" in row.values) for row in service.rows]
    assert rows == [(1, False), (2, False), (3, True)]
    consequence = "" if what == "disconnect" else "; training goes on"
    assert warned == [f"Service cannot record: no {what}{consequence}"]


def test_a_service_that_hangs_holds_nothing_up(
    tmp_path: Path, tell_three_steps: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the steps nor, for longer than is said, the end."""
    monkeypatch.setattr(following, "_END_S", 0.2)
    monkeypatch.setattr(following, "_QUIET_END_S", 0.1)
    service = Service(tmp_path, Counter(), hangs_s=5.0)
    began = time.monotonic()
    [warning] = tell_three_steps(service)
    assert time.monotonic() - began < 1.5
    assert "Service" in warning
    assert "has not taken everything" in warning


def test_a_run_that_ends_early_is_not_told_to_be_finished(
    tmp_path: Path, tell_three_steps: Callable[..., list[str]]
) -> None:
    """A service shows it as ended, and it goes on in the same run."""
    service = Service(tmp_path, Counter())
    service._last_step = 9
    assert tell_three_steps(service) == []
    assert service.ended is False


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_server_that_never_answers_costs_a_run_nothing(
    name: str, tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_server: str
) -> None:
    """It takes connections and says nothing; the run ends as it does without it, and warns once."""
    monkeypatch.setattr(following, "_END_S", 0.4)
    monkeypatch.setattr(following, "_QUIET_END_S", 0.1)
    monkeypatch.setenv("WANDB_BASE_URL", silent_server)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    given = "{}" if name == "wandb" else f"{{tracking_uri: '{silent_server}'}}"
    warned: list[str] = []
    told = _observers(tiny_config(f"log.{name}={given}"), tmp_path, 0, warned)
    began = time.monotonic()
    for step in (1, 2):
        told.on_step(_record(step))
    assert time.monotonic() - began < 0.2
    told.on_end()
    assert time.monotonic() - began < 3
    [warning] = warned
    assert warning.startswith(f"{'WeightsAndBiases' if name == 'wandb' else 'MLflow'} cannot record: ")
    assert len(metrics_lines(tmp_path)) == 2


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Return the address of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_logger_that_is_not_installed_is_refused_before_anything_is_computed(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="uv sync --extra wandb"):
        recorders(tiny_config("log.wandb={mode: offline}"), tmp_path, run_id="a", last_step=0)


def test_addresses_of_loggers_are_not_among_the_parameters(tiny_config: MakeConfig) -> None:
    """They may hold a password."""
    config = tiny_config("log.mlflow={tracking_uri: 'https://user:password@host'}")
    assert "password" not in str(parameters(config))
    assert parameters(config)["lora.dim"] == 8
