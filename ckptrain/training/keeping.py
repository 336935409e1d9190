"""When is a state safe, and who is told? Saves begun, waited for and tried again; their ends journalled and told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.writer import NotSaved, Outcome, Saved
from ckptrain.lifecycle.journal import Journal, NullJournal
from ckptrain.training.observers import Observers
from ckptrain.training.saving import Position, Saver


class Keeper:
    """Saves a run at its positions, and remembers what is safe."""

    def __init__(
        self,
        saver: Saver,
        journal: Journal | NullJournal,
        told: Observers,
        last_saved: CommittedCheckpoint | None,
        when_saved: Callable[[Path], object],
    ) -> None:
        self._saver = saver
        self.journal, self.told, self.when_saved = journal, told, when_saved
        self.last_saved = last_saved
        self.longest_save_s = 0.0

    def poll(self) -> None:
        """Tell how the last save ended, if it has."""
        self.tell_outcome(self._saver.ended())

    def wait(self) -> None:
        """Come back when no save is under way."""
        self.tell_outcome(self._saver.wait())

    def begin(self, position: Position, loss: float | None, val_loss: float | None) -> float:
        """Begin to save; returns for how many seconds that stopped the training."""
        metrics = {name: value for name, value in (("loss", loss), ("val_loss", val_loss)) if value is not None}
        begun = self._saver.begin(position, metrics)
        self.tell_outcome(begun.before)
        if begun.waited_s:
            self.journal.record("save_waited", step=position.step, seconds=round(begun.waited_s, 3))
            self.told.on_warning(
                f"training waited {begun.waited_s:.1f} s before the save of step {position.step}, until the one before"
                " it was on disk: raise checkpoint.every_steps, or put the run directory on a faster disk"
            )
        return begun.waited_s + begun.stall_s

    def secure(self, position: Position, loss: float | None, val_loss: float | None) -> float:
        """Come back when the state of this position is committed; returns the seconds.

        It gets a second try, because no save follows it.

        Raises:
            SaveFailed: the second try failed too; the checkpoint before is untouched.
        """
        started = time.monotonic()
        for _ in range(2):
            self.begin(position, loss, val_loss)
            outcome = self._saver.wait()
            self.tell_outcome(outcome)
            if not isinstance(outcome, NotSaved):
                return time.monotonic() - started
        assert isinstance(outcome, NotSaved)
        raise outcome.error

    def tell_outcome(self, outcome: Outcome | None) -> None:
        """Journal and tell how a save ended; None is one that has not."""
        if isinstance(outcome, NotSaved):
            self.journal.record("save_failed", step=outcome.step, message=str(outcome.error))
            self.told.on_save_failed(outcome.step, str(outcome.error))
        if not isinstance(outcome, Saved):
            return
        self.last_saved = outcome.checkpoint
        self.longest_save_s = max(self.longest_save_s, outcome.seconds)
        path, step = outcome.checkpoint.path, outcome.checkpoint.step
        facts: dict[str, Any] = {"num_bytes": outcome.num_bytes, "seconds": round(outcome.seconds, 3)}
        self.journal.record("saved", step=step, checkpoint=path.name, **facts)
        self.told.on_saved(step, path, outcome.num_bytes, outcome.seconds)
        if outcome.removed:
            self.journal.record("pruned", removed=[path.name for path in outcome.removed])
        if outcome.prune_problem is not None:
            self.told.on_warning(outcome.prune_problem)
        self.when_saved(path)
