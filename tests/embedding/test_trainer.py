"""A trainer does what a run does, bit for bit, and its callbacks are heard on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file
from support.files import data_files
from support.launch import launch, run_training
from torch.nn.functional import cross_entropy

from ckptrain import Callback, Control, EarlyStopping, Loss, Samples, State, Trainer, export
from ckptrain.config.schema import RunConfig
from ckptrain.errors import CkptrainError, ConfigError

Make = Callable[..., RunConfig]
DROPOUT = "lora.dropout=0.1"


def result_of(run_dir: Path) -> dict[str, Any]:
    """Return RUN/result.json."""
    found: dict[str, Any] = orjson.loads((run_dir / "result.json").read_bytes())
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_pieces_are_the_whole_bit_for_bit(world: int, tiny_config: Make, tmp_path: Path) -> None:
    """`run_until(1)`, `run_until(3)`, an export and `run()` leave the checkpoint, files and losses of a plain run."""
    config = tiny_config(DROPOUT)

    def in_pieces() -> tuple[list[str], float | None, float | None]:
        with Trainer(config, run_dir=tmp_path / "pieces") as trainer:
            statuses = [trainer.run_until(1).status, trainer.run_until(3).status]
            trainer.export(tmp_path / "adapter")
            last = trainer.run()
            return [*statuses, last.status], last.loss, last.val_loss_after

    [(statuses, loss, val_loss), *_] = launch(world, in_pieces)
    [straight, *_] = launch(world, lambda: run_training(config, tmp_path / "straight"))
    assert statuses == ["paused", "paused", "finished"]
    assert (loss, val_loss) == (straight.loss, straight.val_loss_after)
    checkpoints = [tmp_path / name / "checkpoints/step-00000004" for name in ("pieces", "straight")]
    assert data_files(checkpoints[0]) == data_files(checkpoints[1])


@pytest.mark.parametrize("brings", [False, True], ids=["of files", "with all that a program can bring"])
def test_closing_saves_and_the_next_trainer_goes_on(brings: bool, tiny_config: Make, tmp_path: Path) -> None:
    """Several trainers one after another in one process: the state of the first goes on in the second, exactly.

    Nothing of a model is left in memory, whatever a program has brought and still holds.
    """
    config = tiny_config(DROPOUT)

    def one_after_another() -> list[Any]:
        rows = [{"prompt": f"{n} ", "completion": "ok"} for n in range(4)]
        brought: dict[str, Any] = {}
        if brings:
            brought = {
                "loss": Loss(partial(cross_entropy, reduction="none"), name="plain"),
                "samples": Samples(lambda _: rows, name="rows"),
                "validation": rows,
                "callbacks": [EarlyStopping(patience=9)],
            }
        with Trainer(config, run_dir=tmp_path / "run", **brought) as first:
            first.run_until(3)
        stopped = result_of(tmp_path / "run")
        with Trainer(config, run_dir=tmp_path / "run", **brought) as second:
            planned = second.plan().plan.kind
            result = second.run()
        with Trainer(config, run_dir=tmp_path / "other", **brought) as third:
            straight = third.run()
        with Trainer(config, run_dir=tmp_path / "run", **brought) as fourth:
            again = fourth.run()
        assert not torch.distributed.is_initialized()
        gc.collect()
        left = [each for each in gc.get_objects() if type(each).__name__ == "GPTModel"]
        return [stopped, planned, result.loss, straight.loss, again.status, len(left)]

    [[stopped, planned, loss, straight, again, num_left]] = launch(1, one_after_another)
    assert (stopped["status"], stopped["step"], stopped["exit_status"]) == ("stopped", 3, 75)
    assert planned == "Resume"
    assert loss == straight
    assert again == "already_done"
    assert num_left == 0, "a model is still in memory although its trainer is closed"
    found = result_of(tmp_path / "run")
    assert (found["status"], found["step"], found["loss"]) == ("finished", 4, loss)
    assert data_files(tmp_path / "run/checkpoints/step-00000004") == data_files(
        tmp_path / "other/checkpoints/step-00000004"
    )


class Asks(Callback):
    """Writes down what it is told, asks for a save and a look after step 1 and for a stop after step 2."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_plan(self, state: State, control: Control) -> None:
        """Write it down."""
        self.events.append(("plan", state.step))

    def on_step_end(self, state: State, control: Control) -> None:
        """Ask."""
        self.events.append(("step", state.step))
        if state.step == 1:
            control.save()
            control.evaluate()
        if state.step == 2:
            control.stop("seen enough")

    def on_evaluate(self, state: State, control: Control) -> None:
        """Write it down."""
        self.events.append(("evaluate", state.step))

    def on_save(self, state: State, control: Control) -> None:
        """Write it down, by the step of the checkpoint."""
        assert state.last_checkpoint is not None
        self.events.append(("save", int(state.last_checkpoint.name[5:])))

    def on_stop(self, state: State, control: Control) -> None:
        """Write it down."""
        assert state.stop_reason == "seen enough"
        self.events.append(("stop", state.step))


def test_what_callbacks_ask_for_is_done_on_all_ranks(tiny_config: Make, tmp_path: Path) -> None:
    """Two ranks save, look and stop when the callback of rank 0 asks."""

    def ask() -> tuple[list[tuple[str, int]], str, str | None]:
        asks = Asks()
        with Trainer(tiny_config("checkpoint.every_steps=100"), run_dir=tmp_path, callbacks=[asks]) as trainer:
            result = trainer.run()
        return asks.events, result.status, result.stop_reason

    [(events, status, reason), (elsewhere, status_elsewhere, _)] = launch(2, ask)
    assert (status, status_elsewhere, reason) == ("stopped", "stopped", "seen enough")
    assert elsewhere == []
    assert [event for event in events if event[0] != "save"] == [
        ("plan", 0),
        ("evaluate", 0),
        ("step", 1),
        ("evaluate", 1),
        ("step", 2),
        ("stop", 2),
    ]
    assert [event for event in events if event[0] == "save"] == [("save", 1), ("save", 2)]
    assert result_of(tmp_path)["stop_reason"] == "seen enough"


def test_an_error_of_a_callback_ends_the_run_on_all_ranks(tiny_config: Make, tmp_path: Path) -> None:
    """The other rank does not wait for ever, result.json names the error, and on_error is told once."""

    def fail() -> tuple[str, list[str | None]]:
        told: list[str | None] = []

        class Tells(Callback):
            def on_error(self, state: State, control: Control) -> None:
                told.append(state.error)

        def breaks(state: State, control: Control) -> None:
            raise ValueError(f"no more after {state.step}")

        try:
            with Trainer(tiny_config(), run_dir=tmp_path, callbacks=[breaks, Tells()]) as trainer:
                trainer.run()
        except CkptrainError as error:
            return str(error), told
        return "", told

    [(first, told), (second, _)] = launch(2, fail)
    assert first == second == "rank 0: ValueError: no more after 1"
    assert told == ["RankFailed: rank 0: ValueError: no more after 1"]
    assert (result_of(tmp_path)["status"], result_of(tmp_path)["exit_status"]) == ("failed", 1)


@pytest.mark.parametrize("world", [1, 2])
def test_the_live_adapter_is_that_of_the_checkpoint(world: int, tiny_config: Make, tmp_path: Path) -> None:
    """An export without a checkpoint holds the same matrices, put together of tensor parallel ranks or not."""
    config = tiny_config(f"parallel.tensor={world}", "checkpoint.every_steps=100")

    def stream() -> None:
        with Trainer(config, run_dir=tmp_path / "run") as trainer:
            trainer.run_until(2)
            assert trainer.state.last_checkpoint is None
            trainer.export(tmp_path / "live")
            checkpoint = trainer.save()
            assert checkpoint is not None
            assert trainer.save() == checkpoint

    launch(world, stream)
    launch(1, lambda: export(tmp_path / "run", tmp_path / "saved", verify=False))
    live, saved = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("live", "saved"))
    assert live.keys() == saved.keys()
    assert all(torch.equal(live[name], saved[name]) for name in live)
    configs = [(tmp_path / name / "adapter_config.json").read_bytes() for name in ("live", "saved")]
    assert configs[0] == configs[1]
    assert result_of(tmp_path / "run")["export"] == str(tmp_path / "live")


def test_early_stopping_counts_looks_without_progress() -> None:
    """It asks for a stop at the look that makes `patience`, and a better one starts the count anew."""
    stopping, control = EarlyStopping(patience=2), Control()
    for step, val_loss in enumerate((3.0, 3.1, 2.9, 2.9)):
        stopping.on_evaluate(State(phase="EVALUATING", step=step, steps=9, val_loss=val_loss), control)
    assert control.take().stop is None
    stopping.on_evaluate(State(phase="EVALUATING", step=4, steps=9, val_loss=2.95), control)
    assert control.take().stop == "val_loss has not fallen in 2 looks (best 2.9000)"


def test_mistakes_are_named(tiny_config: Make, tmp_path: Path) -> None:
    """A misspelt event, a second open trainer, a closed one."""
    from ckptrain.training.callbacks import Callbacks

    class Misspelt(Callback):
        def on_step(self, state: State, control: Control) -> None:
            pass

    with pytest.raises(ConfigError, match="it has on_step, which nothing calls"):
        Callbacks([Misspelt()])

    def two() -> list[str]:
        messages = []
        with Trainer(tiny_config(), run_dir=tmp_path / "one") as one:
            one.run_until(1)
            try:
                Trainer(tiny_config(), run_dir=tmp_path / "two").run()
            except CkptrainError as error:
                messages.append(str(error))
        try:
            one.run()
        except CkptrainError as error:
            messages.append(str(error))
        return messages

    [[second, closed]] = launch(1, two)
    assert "Megatron has room for one" in second
    assert "this trainer is closed" in closed
