"""What a callback knows goes on with the run: in the manifest of its checkpoint, and back after a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.launch import launch

from ckptrain import Callback, Control, EarlyStopping, State, Trainer
from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.config.schema import RunConfig
from ckptrain.errors import CkptrainError, ConfigError
from ckptrain.training.callbacks import Callbacks
from ckptrain.training.observers import Observer

Make = Callable[..., RunConfig]
LOOKS = ("train.steps=6", "train.eval_every_steps=1", "log.sample_tokens=0")


def stopping() -> EarlyStopping:
    """Return one that no look can satisfy but the first."""
    return EarlyStopping(patience=4, min_delta=100.0)


@pytest.mark.parametrize("world", [1, 2])
def test_early_stopping_stops_at_the_same_step_in_pieces_and_in_one_go(
    world: int, tiny_config: Make, tmp_path: Path
) -> None:
    """Two looks before the stop of a start and two after it are four; the count is in the manifest."""
    config = tiny_config(*LOOKS)

    def in_pieces() -> list[tuple[str, int, str | None]]:
        with Trainer(config, run_dir=tmp_path / "pieces", callbacks=[stopping()]) as first:
            first.run_until(2)
        with Trainer(config, run_dir=tmp_path / "pieces", callbacks=[stopping()]) as second:
            pieces = second.run()
        with Trainer(config, run_dir=tmp_path / "straight", callbacks=[stopping()]) as third:
            straight = third.run()
        return [(each.status, each.step, each.stop_reason) for each in (pieces, straight)]

    for pieces, straight in launch(world, in_pieces):
        assert pieces[:2] == straight[:2] == ("stopped", 4)
        assert pieces[2] == straight[2]
    manifest = open_checkpoint(tmp_path / "pieces/checkpoints/step-00000002").manifest
    assert manifest.callbacks["EarlyStopping"]["num_flat"] == 2
    assert manifest.callbacks["EarlyStopping"]["best"] > 0


class Counts(Callback):
    """Counts steps over all starts."""

    def __init__(self) -> None:
        self.steps = 0
        self.at_restore: int | None = None

    def on_step_end(self, state: State, control: Control) -> None:
        """Count."""
        self.steps += 1

    def on_restore(self, state: State, control: Control) -> None:
        """Remember what was known by then."""
        self.at_restore = self.steps

    def state_dict(self) -> dict[str, Any]:
        """Give the count."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it."""
        self.steps = state["steps"]


def test_two_of_a_class_are_told_apart_and_one_that_is_gone_is_told(tiny_config: Make, tmp_path: Path) -> None:
    """Each has its own state; a start without one of them goes on, and says whose state it has no use for."""

    class Warnings(Observer):
        def __init__(self) -> None:
            self.told: list[str] = []

        def on_warning(self, message: str) -> None:
            self.told.append(message)

    def twice() -> tuple[list[int | None], list[str]]:
        config = tiny_config("data.validation=null")
        first, second, warnings = Counts(), Counts(), Warnings()
        second.steps = 10
        with Trainer(config, run_dir=tmp_path, callbacks=[first, second, EarlyStopping()]) as trainer:
            trainer.run_until(2)
        counts = [Counts(), Counts()]
        with Trainer(config, run_dir=tmp_path, callbacks=counts, observers=[warnings]) as trainer:
            trainer.run()
        return [count.at_restore for count in counts], warnings.told

    [(at_restore, told)] = launch(1, twice)
    assert at_restore == [2, 12]
    assert "the checkpoint has what EarlyStopping knew, and this start has no such callback" in told


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"best": float("inf")}, "state_dict is not JSON"),
        ({"path": Path("x")}, "state_dict is not JSON"),
        ({"seen": "x" * 70_000}, "bytes as JSON, expected at most 65536"),
        ({"big": 2**70}, "it has the number 11805"),
        (["list"], "state_dict returned list, expected a dict"),
    ],
)
def test_what_a_manifest_cannot_hold_is_refused_at_the_save(state: Any, said: str) -> None:
    """By the name of the callback, before anything is written."""

    class Odd(Callback):
        def state_dict(self) -> Any:
            return state

    callbacks = Callbacks([Odd()])
    callbacks.open()
    with pytest.raises(ConfigError, match=f"the state of the callback .*Odd cannot be saved\n.*{said}"):
        callbacks.states()


def test_a_state_that_cannot_be_taken_ends_the_run_on_all_ranks(tiny_config: Make, tmp_path: Path) -> None:
    """As any error of a callback does; the checkpoint is untouched."""

    class Renamed(Counts):
        __qualname__ = "Counts"

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise KeyError("other")

    config = tiny_config("data.validation=null")

    def resume() -> str:
        with Trainer(config, run_dir=tmp_path, callbacks=[Counts()]) as trainer:
            trainer.run_until(2)
        try:
            with Trainer(config, run_dir=tmp_path, callbacks=[Renamed()]) as trainer:
                trainer.run()
        except CkptrainError as error:
            return str(error)
        return ""

    assert launch(2, resume) == ["rank 0: KeyError: 'other'"] * 2
    assert open_checkpoint(tmp_path / "checkpoints/step-00000002").manifest.callbacks == {"Counts": {"steps": 2}}
