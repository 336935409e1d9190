"""The state machine of a run."""

import itertools
from typing import Any

import pytest

from ckptrain.errors import PhaseError
from ckptrain.lifecycle.phases import TERMINAL, TRANSITIONS, Lifecycle, Phase

# Written out by hand, apart from the table, so that a change of the table has to be made twice.
ALLOWED = {
    "NEW PLANNED",
    "PLANNED BASE_LOADED",
    "PLANNED FINISHED",
    "BASE_LOADED ADAPTER_ATTACHED",
    "ADAPTER_ATTACHED OPTIMIZER_BUILT",
    "OPTIMIZER_BUILT RESTORED",
    "OPTIMIZER_BUILT TRAINING",
    "OPTIMIZER_BUILT EVALUATING",
    "RESTORED TRAINING",
    "RESTORED EVALUATING",
    "TRAINING SAVING",
    "TRAINING EVALUATING",
    "TRAINING DRAINING",
    "TRAINING FINISHED",
    "SAVING TRAINING",
    "EVALUATING TRAINING",
    "DRAINING STOPPED",
} | {f"{phase.name} FAILED" for phase in Phase if phase.name not in {"STOPPED", "FINISHED", "FAILED"}}

PATHS = {
    Phase.NEW: "",
    Phase.PLANNED: "PLANNED",
    Phase.BASE_LOADED: "PLANNED BASE_LOADED",
    Phase.ADAPTER_ATTACHED: "PLANNED BASE_LOADED ADAPTER_ATTACHED",
    Phase.OPTIMIZER_BUILT: "PLANNED BASE_LOADED ADAPTER_ATTACHED OPTIMIZER_BUILT",
    Phase.RESTORED: "PLANNED BASE_LOADED ADAPTER_ATTACHED OPTIMIZER_BUILT RESTORED",
    Phase.TRAINING: "PLANNED BASE_LOADED ADAPTER_ATTACHED OPTIMIZER_BUILT TRAINING",
    Phase.SAVING: "PLANNED BASE_LOADED ADAPTER_ATTACHED OPTIMIZER_BUILT TRAINING SAVING",
    Phase.EVALUATING: "PLANNED BASE_LOADED ADAPTER_ATTACHED OPTIMIZER_BUILT EVALUATING",
    Phase.DRAINING: "PLANNED BASE_LOADED ADAPTER_ATTACHED OPTIMIZER_BUILT TRAINING DRAINING",
    Phase.STOPPED: "PLANNED BASE_LOADED ADAPTER_ATTACHED OPTIMIZER_BUILT TRAINING DRAINING STOPPED",
    Phase.FINISHED: "PLANNED FINISHED",
    Phase.FAILED: "FAILED",
}


def lifecycle_in(phase: Phase) -> Lifecycle:
    """Bring a new run to `phase` by allowed transitions."""
    lifecycle = Lifecycle()
    for name in PATHS[phase].split():
        lifecycle.advance(Phase[name])
    return lifecycle


@pytest.mark.parametrize(("origin", "to"), list(itertools.product(Phase, Phase)), ids=lambda phase: phase.name)
def test_every_pair_of_phases_is_allowed_or_refused_as_listed(origin: Phase, to: Phase) -> None:
    """All 169 pairs; a refused one leaves the phase as it was."""
    lifecycle = lifecycle_in(origin)
    if f"{origin.name} {to.name}" in ALLOWED:
        lifecycle.advance(to)
        assert lifecycle.phase is to
    else:
        with pytest.raises(PhaseError):
            lifecycle.advance(to)
        assert lifecycle.phase is origin


def test_a_refused_transition_names_both_phases_and_what_is_allowed() -> None:
    """The message is enough to find the wrong call."""
    with pytest.raises(PhaseError, match=r"from NEW to TRAINING; from NEW it may go to PLANNED, FAILED"):
        Lifecycle().advance(Phase.TRAINING)
    with pytest.raises(PhaseError, match="the run has ended"):
        lifecycle_in(Phase.STOPPED).advance(Phase.TRAINING)


def test_the_listener_hears_each_transition_with_its_facts_and_no_refused_one() -> None:
    """What the journal writes is what happened."""
    heard: list[tuple[str, dict[str, Any]]] = []
    lifecycle = Lifecycle(lambda event, **facts: heard.append((event, facts)))
    lifecycle.advance(Phase.PLANNED, plan="FreshStart")
    with pytest.raises(PhaseError):
        lifecycle.advance(Phase.SAVING)
    lifecycle.advance(Phase.FAILED, error="no such file")
    assert heard == [
        ("phase", {"from": "NEW", "to": "PLANNED", "plan": "FreshStart"}),
        ("phase", {"from": "PLANNED", "to": "FAILED", "error": "no such file"}),
    ]


def test_a_run_whose_listener_fails_can_still_fail() -> None:
    """A full disk stops the journal; the phase must not be stuck before the transition."""

    def full_disk(event: str, **facts: object) -> None:
        raise OSError(event, facts)

    lifecycle = Lifecycle(full_disk)
    with pytest.raises(OSError, match="phase"):
        lifecycle.advance(Phase.PLANNED)
    assert lifecycle.phase is Phase.PLANNED


def test_only_the_terminal_phases_end_a_run() -> None:
    """`ended` is what the command line goes by."""
    assert {phase for phase in Phase if lifecycle_in(phase).ended} == TERMINAL
    assert {phase for phase, following in TRANSITIONS.items() if not following} == TERMINAL
