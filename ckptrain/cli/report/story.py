"""What happened in a run? Its starts, and in each the phases, the saves and how it ended, read from the journal.

A journal may be of another version, or torn: what an entry does not say is left open, and nothing here raises for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs

from ckptrain.lifecycle.drift import Kind, differences
from ckptrain.lifecycle.phases import TERMINAL, Phase

Entry = Mapping[str, Any]

STARTING = "STARTING"
"""Every phase before the first step, as one."""
_BEFORE_TRAINING = frozenset(
    phase.value
    for phase in (Phase.PLANNED, Phase.BASE_LOADED, Phase.ADAPTER_ATTACHED, Phase.OPTIMIZER_BUILT, Phase.RESTORED)
)
_BEFORE_PLAN = ("quarantined", "cleaned")
"""What a start does to the run directory before it writes its plan."""
_OF_OTHERS = ("exported",)
"""What other commands write, at any time: no part of a start, nor of how long it took."""


@attrs.frozen(kw_only=True)
class Span:
    """A stretch of time in one phase, in seconds since the start's plan."""

    phase: str
    begin_s: float
    end_s: float
    step: int | None


@attrs.frozen(kw_only=True)
class Save:
    """One save; times in seconds since the start's plan."""

    step: int
    outcome: str
    """committed, failed, or unfinished: nothing more was heard of it."""
    begin_s: float
    end_s: float | None
    stall_s: float | None
    """For which the training stood still."""
    waited_s: float
    """Of waiting for the save before this one, which is no part of the stall."""
    seconds: float | None
    num_bytes: int | None
    message: str | None


@attrs.frozen(kw_only=True)
class Start:
    """One start of the run."""

    number: int
    """From 1."""
    plan: str
    reason: str
    notes: tuple[str, ...]
    step: int
    """Steps done before it."""
    source: str | None
    """The checkpoint or the adapter it came from."""
    world_size: int
    host: str
    pid: int | None
    began: str
    lasted_s: float
    end: str
    """finished, stopped, failed, died, or running."""
    end_reason: str | None
    spans: tuple[Span, ...]
    saves: tuple[Save, ...]
    receipt: Entry | None
    startup: Mapping[str, float]
    samples: tuple[Entry, ...]
    config: Entry | None
    """As it was asked for, flattened; None where an older version wrote the journal."""
    changes: tuple[Entry, ...]
    """Config keys that the start before it had otherwise."""
    damage: tuple[Entry, ...]
    """Checkpoints that it moved to the quarantine."""

    @property
    def trains(self) -> bool:
        """Whether it was to make steps."""
        return self.plan != "AlreadyDone"


def read_story(journal: Sequence[Entry], *, alive: bool, now: datetime | None = None) -> list[Start]:
    """Return the starts in a journal, oldest first; `alive` says whether the last one is at work still."""
    groups = _by_start(journal)
    starts: list[Start] = []
    for number, entries in enumerate(groups, 1):
        running = alive and number == len(groups)
        starts.append(_start(number, entries, starts, running=running, now=now or datetime.now(UTC)))
    return starts


def text_of(value: object) -> str:
    """Return a value of the journal as text."""
    return "" if value is None else str(value)


def number_of(value: object) -> float | None:
    """Return a number, or None for whatever else stands where one should."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def time_of(entry: Entry) -> datetime | None:
    """Return when an entry was written."""
    try:
        time = datetime.fromisoformat(text_of(entry.get("time")))
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _by_start(journal: Sequence[Entry]) -> list[list[Entry]]:
    """Cut a journal into its starts; each begins with its plan, and what was done just before that follows it."""
    groups: list[list[Entry]] = []
    ahead: list[Entry] = []
    for entry in journal:
        event = entry.get("event")
        if event == "plan":
            groups.append([entry, *ahead])
            ahead = []
        elif event in _BEFORE_PLAN:
            ahead.append(entry)
        elif groups and event not in _OF_OTHERS:
            groups[-1].append(entry)
    return groups


def _start(number: int, entries: Sequence[Entry], before: Sequence[Start], *, running: bool, now: datetime) -> Start:
    plan = entries[0]
    began = time_of(plan) or now
    seconds = [max(0.0, ((time_of(entry) or began) - began).total_seconds()) for entry in entries]
    lasted_s = max(0.0, (now - began).total_seconds()) if running else max(seconds)
    end, end_reason = _end(entries, running=running)
    config = next((entry["values"] for entry in entries if isinstance(entry.get("values"), Mapping)), None)
    earlier = next((start.config for start in reversed(before) if start.config is not None), None)
    notes = plan.get("notes")
    return Start(
        number=number,
        plan=text_of(plan.get("plan")),
        reason=text_of(plan.get("reason")),
        notes=tuple(map(text_of, notes)) if isinstance(notes, list) else (),
        step=_whole(plan.get("step")),
        source=plan.get("checkpoint") or plan.get("adapter"),
        world_size=_whole(plan.get("world_size"), 1),
        host=text_of(plan.get("host")),
        pid=plan.get("pid"),
        began=began.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        lasted_s=lasted_s,
        end=end,
        end_reason=end_reason,
        spans=tuple(_spans(entries, seconds, lasted_s)),
        saves=tuple(_saves(entries, seconds)),
        receipt=next((entry for entry in entries if entry.get("event") == "receipt"), None),
        startup=_parts(entries),
        samples=tuple(entry for entry in entries if entry.get("event") == "sample"),
        config=config,
        changes=tuple(_changes(earlier, config)) if earlier is not None and config is not None else (),
        damage=tuple(entry for entry in entries if entry.get("event") == "quarantined"),
    )


def _whole(value: object, otherwise: int = 0) -> int:
    number = number_of(value)
    return otherwise if number is None else int(number)


def _end(entries: Sequence[Entry], *, running: bool) -> tuple[str, str | None]:
    said = {"STOPPED": ("stop_requested", "reason"), "FAILED": ("error", "message")}
    phases = [text_of(entry.get("to")) for entry in entries if entry.get("event") == "phase"]
    if phases and phases[-1] in {phase.value for phase in TERMINAL}:
        event, key = said.get(phases[-1], ("", ""))
        return phases[-1].lower(), next(
            (text_of(entry.get(key)) for entry in reversed(entries) if entry.get("event") == event), None
        )
    return ("running" if running else "died"), None


def _spans(entries: Sequence[Entry], seconds: Sequence[float], lasted_s: float) -> list[Span]:
    changes = [
        (at, text_of(entry.get("to")), entry.get("step"))
        for entry, at in zip(entries, seconds, strict=True)
        if entry.get("event") == "phase"
    ]
    spans: list[Span] = []
    for index, (begin_s, phase, step) in enumerate(changes):
        end_s = changes[index + 1][0] if index + 1 < len(changes) else lasted_s
        kind = STARTING if phase in _BEFORE_TRAINING else phase
        if spans and spans[-1].phase == kind:
            spans[-1] = attrs.evolve(spans[-1], end_s=end_s)
        elif phase not in {ended.value for ended in TERMINAL}:
            spans.append(Span(phase=kind, begin_s=begin_s, end_s=end_s, step=step))
    return spans


def _saves(entries: Sequence[Entry], seconds: Sequence[float]) -> list[Save]:
    """Put together what the journal says of each save: the phase that it stops training for, and how it ended."""
    saves: list[Save] = []
    for entry, at_s in zip(entries, seconds, strict=True):
        event, step = entry.get("event"), _whole(entry.get("step"))
        unfinished = next((i for i, s in enumerate(saves) if s.step == step and s.outcome == "unfinished"), None)
        if event == "phase" and entry.get("to") == Phase.SAVING.value:
            saves.append(_begun(step, at_s))
        elif event == "phase" and entry.get("from") == Phase.SAVING.value:
            saves = [attrs.evolve(s, stall_s=number_of(entry.get("stall_s"))) if s.step == step else s for s in saves]
        elif event == "save_waited" and unfinished is not None:
            saves[unfinished] = attrs.evolve(saves[unfinished], waited_s=number_of(entry.get("seconds")) or 0.0)
        elif event in ("saved", "save_failed"):
            took_s = number_of(entry.get("seconds"))
            if unfinished is None:  # one that no phase was entered for: the last one of a run that was asked to stop
                saves.append(_begun(step, at_s - (took_s or 0.0)))
                unfinished = len(saves) - 1
            saves[unfinished] = _ended(saves[unfinished], entry, at_s, took_s)
    return saves


def _begun(step: int, at_s: float) -> Save:
    return Save(
        step=step,
        outcome="unfinished",
        begin_s=max(0.0, at_s),
        end_s=None,
        stall_s=None,
        waited_s=0.0,
        seconds=None,
        num_bytes=None,
        message=None,
    )


def _ended(save: Save, entry: Entry, told_s: float, took_s: float | None) -> Save:
    """Say when a save ended: it is told after the step that was being made then, so not at the time of the entry."""
    return attrs.evolve(
        save,
        outcome="committed" if entry.get("event") == "saved" else "failed",
        end_s=told_s if took_s is None else min(told_s, save.begin_s + save.waited_s + took_s),
        seconds=took_s,
        num_bytes=_whole(entry.get("num_bytes")) or None,
        message=text_of(entry.get("message")) or None,
    )


def _parts(entries: Sequence[Entry]) -> dict[str, float]:
    parts = next((entry.get("seconds") for entry in entries if entry.get("event") == "startup"), None)
    if not isinstance(parts, Mapping):
        return {}
    return {str(part): took for part, value in parts.items() if (took := number_of(value)) is not None}


def _changes(old: Entry, new: Entry) -> list[Entry]:
    return [
        {
            "key": change.key,
            "old": change.old,
            "new": change.new,
            "noted": change.rule.kind is not Kind.FREE,
            "effect": change.rule.effect,
        }
        for change in differences(old, new)
    ]
