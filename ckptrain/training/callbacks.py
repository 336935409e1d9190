"""What a program can say in a run: callbacks that are shown how it stands, and ask for a stop, a save or a look.

Observers (`ckptrain.training.observers`) record and cannot change a run; callbacks can. They are called on rank 0 only,
and what they ask for is agreed between all ranks after a step and after a validation, so no rank goes its own way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from ckptrain.checkpoint.manifest import value_problem
from ckptrain.checkpoint.ranks import gather_to_all, on_rank0, rank
from ckptrain.checkpoint.strict_json import encode
from ckptrain.errors import ConfigError
from ckptrain.training.observers import StepRecord

_MOST_STATE_BYTES = 64 * 1024
"""Of one callback: it lies in every manifest, which is read whole by each start."""


@attrs.frozen(kw_only=True)
class State:
    """How a run stands at one moment; it does not change afterwards."""

    phase: str
    """One of `ckptrain.lifecycle.phases.Phase`."""
    step: int
    """Optimizer steps done, those of earlier starts included."""
    steps: int
    """At which the run is finished."""
    loss: float | None = None
    """Of the last step of this start."""
    val_loss: float | None = None
    """Of the last look at the validation set in this start."""
    record: StepRecord | None = None
    """What the last step did."""
    last_checkpoint: Path | None = None
    plan: str | None = None
    """What this start is: FreshStart, WarmStart, Resume or AlreadyDone."""
    stop_reason: str | None = None
    error: str | None = None


class Control:
    """What callbacks ask of a run."""

    def __init__(self) -> None:
        self._stop: str | None = None
        self._save = self._evaluate = False

    def stop(self, reason: str = "a callback asked for it") -> None:
        """Save and stop after this step; the next start goes on."""
        self._stop = self._stop or reason

    def save(self) -> None:
        """Save after this step."""
        self._save = True

    def evaluate(self) -> None:
        """Look at the validation set after this step."""
        self._evaluate = True

    def take(self) -> Wishes:
        """Return what has been asked for since the last time."""
        wishes = Wishes(stop=self._stop, save=self._save, evaluate=self._evaluate)
        self._stop, self._save, self._evaluate = None, False, False
        return wishes


@attrs.frozen(kw_only=True)
class Wishes:
    """What was asked for, as all ranks know it."""

    stop: str | None = None
    save: bool = False
    evaluate: bool = False

    def __or__(self, more: Wishes) -> Wishes:
        """Return both; a second look at the validation set would be the same, and is left out."""
        return Wishes(stop=self.stop or more.stop, save=self.save or more.save)


class Callback:
    """Shown a run at its events; override what you care for. An error in one ends the run, as an error of yours.

    What one must know again after a resume it gives as `state_dict`, small and of JSON's types. It lies in the manifest
    of each checkpoint under the name of its class; a second callback of the class has `#2` behind it.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return what is to be known again after a resume from a checkpoint of now."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned when the checkpoint was saved; called on a resume, before `on_restore`."""

    def on_plan(self, state: State, control: Control) -> None:
        """The start is decided, and nothing heavy is loaded yet."""

    def on_restore(self, state: State, control: Control) -> None:
        """A checkpoint is in memory and proven; not told on a fresh start."""

    def on_step_end(self, state: State, control: Control) -> None:
        """An optimizer step is done."""

    def on_evaluate(self, state: State, control: Control) -> None:
        """The validation set was looked at: `state.val_loss`."""

    def on_save(self, state: State, control: Control) -> None:
        """A checkpoint is committed: `state.last_checkpoint`. It may be of an earlier step than `state.step`."""

    def on_stop(self, state: State, control: Control) -> None:
        """The run saves now and stops: `state.stop_reason`."""

    def on_error(self, state: State, control: Control) -> None:
        """The run has failed: `state.error`."""


_EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))

type StepFunction = Callable[[State, Control], object]
"""A plain function as a callback: it is called as `on_step_end`."""


class EarlyStopping(Callback):
    """Stops a run whose validation loss has not fallen by more than `min_delta` in `patience` looks.

    A run that is resumed goes on counting where its checkpoint was.
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0) -> None:
        if patience < 1:
            raise ConfigError("EarlyStopping cannot be made", [f"patience is {patience}, expected 1 or more"])
        self.patience, self.min_delta = patience, min_delta
        self.best = float("inf")
        self.num_flat = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the count; the best is null before the first look, since JSON has no infinity."""
        return {"best": None if self.best == float("inf") else self.best, "num_flat": self.num_flat}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.best = float("inf") if state["best"] is None else state["best"]
        self.num_flat = state["num_flat"]

    def on_evaluate(self, state: State, control: Control) -> None:
        """Count, and ask for the stop."""
        assert state.val_loss is not None
        self.num_flat = 0 if state.val_loss < self.best - self.min_delta else self.num_flat + 1
        self.best = min(self.best, state.val_loss)
        if self.num_flat >= self.patience:
            control.stop(f"val_loss has not fallen in {self.num_flat} looks (best {self.best:.4f})")


class Callbacks:
    """The callbacks of a run as one; on ranks other than 0 none is called."""

    def __init__(self, callbacks: Iterable[Callback | StepFunction] = ()) -> None:
        self._callbacks = [_as_callback(each) for each in callbacks]
        self._control = Control()
        self._failure: Exception | None = None
        self._agrees = False

    def open(self) -> None:
        """Learn whether any rank has callbacks; collective."""
        self._agrees = any(gather_to_all(bool(self._callbacks)))

    def tell(self, event: str, state: State) -> None:
        """Call every callback; an error is kept until the ranks next agree, where it becomes that of all."""
        if rank() != 0 or self._failure is not None:
            return
        try:
            for callback in self._callbacks:
                getattr(callback, event)(state, self._control)
        except Exception as error:  # raised by `agree`, on all ranks
            self._failure = error

    def states(self) -> Mapping[str, Any]:
        """Return what callbacks want to know again, by their names; collective.

        Raises:
            ConfigError: one gives what a manifest cannot hold; on every rank.
        """
        return on_rank0(self._states) if self._agrees else {}

    def restore(self, states: Mapping[str, Any]) -> list[str]:
        """Give callbacks what they gave; returns the names of those that are not here. An error is kept as in `tell`.

        A callback without a state there begins anew: it was not in the run before.
        """
        if rank() != 0:
            return []
        named = dict(self._named())
        try:
            for name in named.keys() & states.keys():
                named[name].load_state_dict(states[name])
        except Exception as error:  # raised by `agree`, on all ranks
            self._failure = error
        return sorted(states.keys() - named.keys())

    def _named(self) -> Iterator[tuple[str, Callback]]:
        seen: dict[str, int] = {}
        for callback in self._callbacks:
            name = type(callback).__qualname__
            seen[name] = number = seen.get(name, 0) + 1
            yield name if number == 1 else f"{name}#{number}", callback

    def _states(self) -> dict[str, Any]:
        found = {name: state for name, callback in self._named() if (state := callback.state_dict())}
        for name, state in found.items():
            if problem := _state_problem(name, state):
                raise ConfigError(f"the state of the callback {name} cannot be saved", [problem])
        return found

    def agree(self) -> Wishes:
        """Return what was asked for since the last time, the same on every rank; collective.

        Raises:
            Exception: what a callback raised; on a launch of several processes RankFailed, which names it.
        """
        return on_rank0(self._take) if self._agrees else Wishes()

    def _take(self) -> Wishes:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._control.take()


class _OfFunction(Callback):
    def __init__(self, function: StepFunction) -> None:
        self._function = function

    def on_step_end(self, state: State, control: Control) -> None:
        self._function(state, control)


def _state_problem(name: str, state: object) -> str | None:
    if not isinstance(state, dict):
        return f"state_dict returned {type(state).__name__}, expected a dict"
    try:
        num_bytes = len(encode(state))
    except (TypeError, ValueError, RecursionError) as error:
        return f"state_dict is not JSON: {error}"
    if num_bytes > _MOST_STATE_BYTES:
        return f"state_dict has {num_bytes} bytes as JSON, expected at most {_MOST_STATE_BYTES}: keep it in a file"
    return value_problem({"callbacks": {name: state}})


def _as_callback(given: Any) -> Callback:
    if isinstance(given, Callback):
        if unknown := [name for name in dir(given) if name.startswith("on_") and name not in _EVENTS]:
            raise ConfigError(
                f"{type(given).__name__} is no callback",
                [f"it has {', '.join(unknown)}, which nothing calls; the events are {', '.join(_EVENTS)}"],
            )
        return given
    if inspect.isclass(given) or not callable(given):
        raise ConfigError(
            "this is no callback", [f"{given!r}: expected a function of (state, control), or an object of a Callback"]
        )
    return _OfFunction(given)
