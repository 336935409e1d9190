"""What goes wrong is told by name, before anything is lost: the checkpoints that were there are as they were."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.launch import Ranks, launch, run_training
from tiny import write_chats, write_llama

from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.config.schema import RunConfig
from ckptrain.errors import (
    CkptrainError,
    ConfigError,
    DataError,
    SaveFailed,
    StartRefused,
    TrainingDiverged,
)
from ckptrain.lifecycle.journal import read_journal
from ckptrain.megatron.step import StepResult
from ckptrain.training import directory as directory_module
from ckptrain.training import run as run_module
from ckptrain.training import steps as steps_module
from ckptrain.training.directory import claimed
from ckptrain.training.observers import Observer, StepRecord
from ckptrain.training.start import survey_run


def contents(directory: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a directory."""
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.fixture
def started(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> Path:
    """Return a run directory with a checkpoint of step 2."""
    launch(1, lambda: run_training(tiny_config("train.steps=2"), tmp_path / "run"))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["lora.dim=4"], "lora.dim"),
        (["lora.alpha=64"], "lora.alpha"),
        (["lora.target_modules=[linear_proj]"], "linear_qkv"),
        (["train.global_batch_size=8"], "train.global_batch_size"),
        (["train.start=fresh"], "train.start is fresh"),
    ],
)
def test_a_directory_of_another_run_is_refused_and_left_alone(
    overrides: list[str], expected: str, tiny_config: Callable[..., RunConfig], started: Path
) -> None:
    """Another LoRA shape or order of samples: the difference and the way out are named."""
    before = contents(started / "checkpoints")
    with pytest.raises(StartRefused, match=expected):
        launch(1, lambda: run_training(tiny_config("train.steps=4", *overrides), started))
    assert contents(started / "checkpoints") == before


def test_another_base_is_refused(tiny_config: Callable[..., RunConfig], started: Path, tmp_path: Path) -> None:
    """The same architecture with other weights is another base."""
    other = write_llama(tmp_path / "other", initializer_range=0.03)
    with pytest.raises(StartRefused, match="base"):
        launch(1, lambda: run_training(tiny_config("train.steps=4", pretrained=str(other)), started))


def test_changed_data_is_refused(tiny_config: Callable[..., RunConfig], started: Path, tmp_path: Path) -> None:
    """Other samples under the same settings would silently be another order."""
    path = write_chats(tmp_path / "other.jsonl", 60, seed=9)
    with pytest.raises(StartRefused, match="data"):
        launch(1, lambda: run_training(tiny_config("train.steps=4", f"data.train={path}"), started))


def test_a_sample_longer_than_the_sequence_is_named(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """The file, the line, its tokens and the three ways out."""
    with pytest.raises(DataError, match=r"train.jsonl:\d+: \d+ tokens"):
        launch(1, lambda: run_training(tiny_config("data.sequence_length=24"), tmp_path))


@pytest.mark.parametrize(
    ("world_size", "overrides", "expected"),
    [
        (3, ["parallel.tensor=2"], "3 processes cannot be laid out as tensor=2"),
        (3, ["parallel.tensor=3"], "parallel.tensor=3"),
        (2, ["train.global_batch_size=3"], "train.global_batch_size"),
        (3, ["parallel.pipeline=3"], "parallel.pipeline"),
        (2, ["parallel.tensor=2", "parallel.sequence=true"], "parallel.sequence=true"),
        (2, ["parallel.context=2"], "parallel.context=2"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_on_every_rank(
    world_size: int, overrides: list[str], expected: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """No rank waits for the others in a barrier."""
    with pytest.raises(ConfigError, match=expected):
        launch(world_size, lambda: run_training(tiny_config(*overrides), tmp_path), timeout_s=60)
    assert not (tmp_path / "checkpoints").exists()


def test_a_full_disk_fails_the_save_and_harms_no_checkpoint(
    tiny_config: Callable[..., RunConfig], started: Path
) -> None:
    """With files limited to 20 kB the kernel refuses a write in the middle of a save."""
    before = contents(started / "checkpoints")

    def on_rank() -> Any:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        return run_training(tiny_config("train.steps=4"), started)

    with pytest.raises(SaveFailed, match=r"File too large"):
        launch(1, on_rank)
    assert contents(started / "checkpoints") == before
    assert read_journal(started / "journal.jsonl")[-1]["to"] == "FAILED"


def test_a_directory_that_cannot_be_made_is_refused(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """A file is in the way of the run directory."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CkptrainError, match="cannot use the run directory"):
        launch(1, lambda: run_training(tiny_config(), tmp_path / "file" / "run"))


def test_a_second_run_in_the_same_directory_is_refused(tiny_config: Callable[..., RunConfig], started: Path) -> None:
    """It would remove the first one's half-written save."""
    expected = rf"another run is at work in it\n.*process {os.getpid()} on .*, started 0:0\d:\d\d ago"
    with claimed(started), pytest.raises(StartRefused, match=expected):
        launch(1, lambda: run_training(tiny_config("train.steps=4"), started))


def test_ranks_that_do_not_share_a_disk_are_refused_at_the_start(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has a run directory of the same name on a disk of its own: nothing is loaded, and both hear why."""
    monkeypatch.setattr(directory_module, "_LATE_S", 0.2)

    def on_rank() -> Any:
        # The path is the same string on both, and leads somewhere else in each process.
        home = tmp_path / os.environ["RANK"]
        home.mkdir()
        os.chdir(home)
        return run_module.run_training(survey_run(tiny_config(), 2), Path("run"))

    with pytest.raises(ConfigError, match="must be on a disk that all hosts share"):
        launch(2, on_rank, timeout_s=60)
    assert not (tmp_path / "1/run").exists()


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(
    tiny_config: Callable[..., RunConfig], started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 4 of a resumed run gives NaN: the checkpoint of step 2 stays the newest, and its place is named."""

    def poisoned(model: Any, optimizer: Any, batches: Any, *loss: Any) -> StepResult:
        result = train_step(model, optimizer, batches, *loss)
        calls.append(result)
        return result if len(calls) < 2 else StepResult(loss=float("nan"), learnt_tokens=1, grad_norm=1.0)

    calls: list[StepResult] = []
    train_step = steps_module.train_step
    monkeypatch.setattr(steps_module, "train_step", poisoned)
    config = tiny_config("train.steps=8", "checkpoint.every_steps=9")
    with pytest.raises(TrainingDiverged, match=r"loss of step 4 is nan.*step-00000002"):
        launch(1, lambda: run_training(config, started))
    newest = CheckpointStore(started).newest()
    assert newest is not None
    assert newest.step == 2


class SignalAfterStep(Observer):
    """Sends this process a signal, or makes the stop file, after a step."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def on_step(self, record: StepRecord) -> None:
        """Act once."""
        if record.step == self.step:
            self.act()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGUSR1", "stop file"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(
    how: str, world_size: int, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Only rank 0 hears of it; all stop after the same step, with exit status 75, and the next start resumes."""
    act = (tmp_path / "stop").touch if how == "stop file" else lambda: os.kill(os.getpid(), getattr(signal, how))
    config = tiny_config("train.steps=4", "checkpoint.every_steps=9")
    results = launch(world_size, lambda: run_training(config, tmp_path, [SignalAfterStep(2, act)]))
    assert [(result.status, result.step, result.exit_status) for result in results] == [("stopped", 2, 75)] * world_size
    results = launch(world_size, lambda: run_training(config, tmp_path))
    assert [(result.plan.kind, result.status) for result in results] == [("Resume", "finished")] * world_size


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """One bit flipped in the newest: it goes to quarantine with the reason, and the run goes on from step 2."""
    launch(1, lambda: run_training(tiny_config("train.steps=4", "optimizer.schedule=constant"), tmp_path))
    victim = tmp_path / "checkpoints/step-00000004/optimizer/__0_0.distcp"
    damaged = bytearray(victim.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    victim.write_bytes(damaged)
    config = tiny_config("train.steps=5", "optimizer.schedule=constant")
    [result] = launch(1, lambda: run_training(config, tmp_path))
    assert (result.plan.kind, result.plan.step) == ("Resume", 2)
    problems = orjson.loads((tmp_path / "quarantine/step-00000004/problems.json").read_bytes())["problems"]
    assert any("__0_0.distcp" in problem for problem in problems)


def test_a_warm_start_takes_the_adapter_and_nothing_else(
    tiny_config: Callable[..., RunConfig], started: Path, tmp_path: Path
) -> None:
    """Another run's adapter, step 1, fresh moments: the first loss is that of the other run's end, not of the base."""
    new = tmp_path / "new"
    config = tiny_config("train.steps=1", "optimizer.lr=1e-30", adapter=str(started))
    [result] = launch(1, lambda: run_training(config, new))
    assert (result.plan.kind, result.plan.finetune) == ("WarmStart", True)
    [other] = [
        line["val_loss"] for line in map(orjson.loads, (started / "metrics.jsonl").open("rb")) if "val_loss" in line
    ][1:]
    assert result.val_loss_before == pytest.approx(other, abs=1e-6)
    [again] = launch(1, lambda: run_training(config, new))
    assert again.status == "already_done", "a checkpoint of its own beats the adapter"


def test_a_rank_that_dies_takes_no_checkpoint_with_it(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Rank 1 is killed while rank 0 trains on: what was committed is whole."""
    config = tiny_config("train.steps=400", "checkpoint.every_steps=1")
    ranks = Ranks(2, lambda: run_training(config, tmp_path))
    while not list(tmp_path.glob("checkpoints/step-*/manifest.json")):
        assert ranks.processes[1].is_alive()
    ranks.processes[1].kill()
    ranks.processes[0].join(60)
    ranks.kill()
    assert CheckpointStore(tmp_path).damaged() == []
    assert CheckpointStore(tmp_path).newest() is not None


def test_bfloat16_keeps_float32_masters(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """A resumed bfloat16 run is exact too, and its masters are in the checkpoint with more digits than the adapter."""
    config = tiny_config("train.steps=4", dtype="bfloat16")
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    launch(1, lambda: run_training(config, straight))
    stop = SignalAfterStep(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    launch(1, lambda: run_training(config, halved, [stop]))
    launch(1, lambda: run_training(config, halved))
    name = "checkpoints/step-00000004"
    for directory in ("adapter", "optimizer"):
        assert {Path(path).name: data for path, data in contents(halved / name / directory).items()} == {
            Path(path).name: data for path, data in contents(straight / name / directory).items()
        }
    newest = CheckpointStore(straight).newest()
    assert newest is not None
    dtypes = {(entry.group, entry.dtype) for entry in newest.manifest.tensors.values()}
    assert dtypes == {("adapter", "bfloat16"), ("optimizer", "float32"), ("rng", "uint8")}
    masters = [name for name in newest.manifest.tensors if ".fp32_param." in name]
    assert len(masters) == 8
