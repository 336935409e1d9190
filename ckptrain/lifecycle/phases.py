"""The state machine of a run: one enum, one table, one object that holds the phase."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from ckptrain.errors import PhaseError


class Phase(enum.Enum):
    """Where a run is; a run starts as NEW and ends in one of TERMINAL.

    ::

        NEW > PLANNED > BASE_LOADED > ADAPTER_ATTACHED > OPTIMIZER_BUILT > RESTORED
                 |                                              |              |
                 |                                              | (fresh)      | (resume)
                 |                                              v              v
                 |             SAVING <--> TRAINING <-----------+--------------+
                 |         EVALUATING <-->    |  |              |              |
                 |              ^             |  |              |              |
                 |              +-------------|--|--(before the first step)----+
                 v                            |  |
             FINISHED <-----------------------+  +--> DRAINING > STOPPED

        every phase that is not terminal > FAILED

    PLANNED > FINISHED is a run whose checkpoint is at the target step already. SAVING is what a save stops the training
    for: the copy to host memory, or all of it where it is waited for. SAVING and EVALUATING come back to TRAINING
    always, after the last step as well, so there is one way to finish. DRAINING is the save of a run that was asked to
    stop: nothing follows it but STOPPED.
    """

    NEW = "NEW"
    PLANNED = "PLANNED"
    BASE_LOADED = "BASE_LOADED"
    ADAPTER_ATTACHED = "ADAPTER_ATTACHED"
    OPTIMIZER_BUILT = "OPTIMIZER_BUILT"
    RESTORED = "RESTORED"
    TRAINING = "TRAINING"
    SAVING = "SAVING"
    EVALUATING = "EVALUATING"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    FINISHED = "FINISHED"
    FAILED = "FAILED"


TERMINAL = frozenset({Phase.STOPPED, Phase.FINISHED, Phase.FAILED})

TRANSITIONS: Mapping[Phase, tuple[Phase, ...]] = {
    Phase.NEW: (Phase.PLANNED, Phase.FAILED),
    Phase.PLANNED: (Phase.BASE_LOADED, Phase.FINISHED, Phase.FAILED),
    Phase.BASE_LOADED: (Phase.ADAPTER_ATTACHED, Phase.FAILED),
    Phase.ADAPTER_ATTACHED: (Phase.OPTIMIZER_BUILT, Phase.FAILED),
    Phase.OPTIMIZER_BUILT: (Phase.RESTORED, Phase.EVALUATING, Phase.TRAINING, Phase.FAILED),
    Phase.RESTORED: (Phase.EVALUATING, Phase.TRAINING, Phase.FAILED),
    Phase.TRAINING: (Phase.SAVING, Phase.EVALUATING, Phase.DRAINING, Phase.FINISHED, Phase.FAILED),
    Phase.SAVING: (Phase.TRAINING, Phase.FAILED),
    Phase.EVALUATING: (Phase.TRAINING, Phase.FAILED),
    Phase.DRAINING: (Phase.STOPPED, Phase.FAILED),
    Phase.STOPPED: (),
    Phase.FINISHED: (),
    Phase.FAILED: (),
}

Listener = Callable[..., object]
"""Called as `listener("phase", **{"from": ..., "to": ...}, **facts)`; `Journal.record` is one."""


def _hear_nothing(_event: str, **_facts: object) -> None:
    """Stand for a run that nobody listens to, such as every rank but 0."""


class Lifecycle:
    """The phase of one run; every change of it goes through `advance`."""

    def __init__(self, listener: Listener = _hear_nothing) -> None:
        self._phase = Phase.NEW
        self._listener = listener

    @property
    def phase(self) -> Phase:
        """The phase the run is in now."""
        return self._phase

    @property
    def ended(self) -> bool:
        """Whether the run is over, well or not."""
        return self._phase in TERMINAL

    def advance(self, to: Phase, **facts: object) -> None:
        """Enter phase `to` and tell the listener, with whatever facts belong to the change.

        The phase changes before the listener hears of it: a run that fails because its journal cannot be written can
        still be moved to FAILED.

        Raises:
            PhaseError: the table has no such transition.
        """
        allowed = TRANSITIONS[self._phase]
        if to not in allowed:
            choice = ", ".join(phase.name for phase in allowed) or "nothing: the run has ended"
            raise PhaseError(
                f"a run cannot go from {self._phase.name} to {to.name}; from {self._phase.name} it may go to {choice}."
                " This is a fault in ckptrain, not in the configuration"
            )
        origin, self._phase = self._phase, to
        self._listener("phase", **{"from": origin.value, "to": to.value}, **facts)
