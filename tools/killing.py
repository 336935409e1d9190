"""Kill one run again and again until it is done, and look after every kill: what chaos.py does in each of its modes."""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from signal import SIGKILL
from typing import Any

import attrs
from forked import Ranks
from promises import (
    BrokenPromiseError,
    CheckpointHarmedError,
    CheckpointLostError,
    End,
    check_end,
    check_plan,
    leftovers,
    look,
    read_end,
)

from ckptrain import api
from ckptrain.checkpoint.store import JOURNAL
from ckptrain.config.schema import RunConfig
from ckptrain.lifecycle.journal import read_journal

IN_START_UP = 0.2  # share of the kills that are to come before training; the others come anywhere in it
END_STEPS = 0.5  # what the end of a run takes, in steps
SLOW_STEP = 1.5  # how much longer a step may take than those of the run that nobody kills
MOST_OFFSET_S = 0.2  # between the kills of two ranks
TIMEOUT_S = 120.0


@attrs.frozen(kw_only=True)
class Mode:
    """How checkpoints are saved, and by how many ranks."""

    name: str
    world_size: int
    config: RunConfig
    """It saves after every step."""


@attrs.define(kw_only=True)
class Tally:
    """What has been counted in one mode."""

    mode: str
    kills: int = 0
    in_start_up: int = 0
    in_training: int = 0
    in_save: int = 0
    """A save of the killed start was under way: its hidden directory was there."""
    restarts: int = 0
    lost: int = 0
    damaged: int = 0
    cleaned: int = 0
    """Hidden directories of saves and removals cut short that a later start took away."""
    equal_ends: int = 0
    """Runs that ended, each with the bytes and the losses of the run that nobody killed."""
    seconds: float = 0.0


@attrs.frozen(kw_only=True)
class Moment:
    """When and how one start is killed."""

    in_start_up: bool
    share: float
    """How far into the start-up, or into the steps that are left."""
    order: tuple[int, ...]
    """The ranks, in the order in which they are killed."""
    offset_s: float
    """Between one rank and the next."""


def draw_moment(draw: random.Random, world_size: int) -> Moment:
    """Return a random moment; equal states of `draw` give equal ones."""
    return Moment(
        in_start_up=draw.random() < IN_START_UP,
        share=draw.random(),
        order=tuple(draw.sample(range(world_size), world_size)),
        offset_s=draw.choice([0.0, draw.uniform(0, MOST_OFFSET_S)]),
    )


class Start:
    """One start of a run: its processes, and what it writes to the journal."""

    def __init__(self, run_dir: Path, mode: Mode) -> None:
        """Start; what the processes print goes to a file beside the run directory."""
        run_dir.parent.mkdir(exist_ok=True)
        self._run_dir, self._printed = run_dir, run_dir.with_name("printed.txt")
        self._entries_before = len(read_journal(run_dir / JOURNAL))

        def act() -> None:
            printed = os.open(self._printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (sys.__stdout__, sys.__stderr__):
                assert stream is not None
                os.dup2(printed, stream.fileno())
            api.run(mode.config, run_dir=run_dir)

        self._ranks = Ranks(mode.world_size, act)

    def entries(self) -> list[dict[str, Any]]:
        """Return what this start has written to the journal."""
        return read_journal(self._run_dir / JOURNAL)[self._entries_before :]

    def has_reached(self, step: int) -> bool:
        """Whether the journal says that this start trains, and has done `step` steps."""
        return any(
            entry["step"] >= step
            for entry in self.entries()
            if entry.get("to") == "TRAINING" or entry["event"] == "saved"
        )

    def lives_for(self, seconds: float) -> bool:
        """Return whether all ranks are alive after a while; at once where one is not."""
        return not wait([process.sentinel for process in self._ranks.processes], timeout=seconds)

    def reaches(self, step: int) -> bool:
        """Wait until it has reached `step` and return True, or False where it ends before.

        Raises:
            BrokenPromiseError: it does neither.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while self.lives_for(0.005):
            if self.has_reached(step):
                return True
            if time.monotonic() > deadline:
                self._ranks.kill()
                raise BrokenPromiseError(f"a start in {self._run_dir} neither goes on nor ends, see {self._printed}")
        return False

    def end(self) -> None:
        """Wait until it ends by itself.

        Raises:
            BrokenPromiseError: it fails, or has no end.
        """
        try:
            self._ranks.wait(TIMEOUT_S)
        except Exception as error:
            raise BrokenPromiseError(f"a start in {self._run_dir} failed, see {self._printed}: {error}") from error

    def kill(self, moment: Moment) -> bool:
        """Kill every rank now; return whether that killed any, and they had not all just ended."""
        for number in moment.order[:-1]:
            self._ranks.processes[number].kill()
            time.sleep(moment.offset_s)
        self._ranks.kill()
        return any(process.exitcode == -SIGKILL for process in self._ranks.processes)


@attrs.frozen(kw_only=True)
class Straight:
    """The run that nobody kills."""

    end: End
    start_up_s: float
    """Until its first step."""
    step_s: float
    """A step and its save."""


def run_straight(run_dir: Path, mode: Mode) -> Straight:
    """Make the run that nobody kills."""
    start = Start(run_dir, mode)
    begun = time.monotonic()
    start.reaches(0)
    trains = time.monotonic()
    start.end()
    ended = time.monotonic()
    steps = mode.config.train.steps
    return Straight(end=read_end(run_dir, steps), start_up_s=trains - begun, step_s=(ended - trains) / steps)


class Trial:
    """The runs of one mode that are killed, one after the other."""

    def __init__(self, mode: Mode, directory: Path, disturb: Callable[[Path], object] = lambda _: None) -> None:
        """Make the run that nobody kills.

        Args:
            mode: how all of them save.
            directory: where they are made.
            disturb: what else befalls a run directory after a kill, where this test is itself tested.
        """
        self._mode, self._directory, self._disturb = mode, directory, disturb
        self._straight = run_straight(directory / f"{mode.name}-straight" / "run", mode)
        self.tally = Tally(mode=mode.name)

    def kill(self, kills: int, seed: int) -> None:
        """Kill runs until there have been so many kills; the last run is then left to end.

        Raises:
            BrokenPromiseError: one did not do what it promises; its directory is left as it is.
        """
        begun, number = time.monotonic(), 0
        try:
            while self.tally.kills < kills:
                number += 1
                run_dir = self._directory / f"{self._mode.name}-{number}" / "run"
                draw = random.Random(f"{seed}, {self._mode.name}, {number}")
                begun_after = self._kill_until_done(run_dir, draw, kills - self.tally.kills)
                shutil.rmtree(run_dir.parent)
                print(f"{self._mode.name}: run {number} began after steps {begun_after} and ended equal", flush=True)
        except CheckpointLostError:
            self.tally.lost += 1
            raise
        except CheckpointHarmedError:
            self.tally.damaged += 1
            raise
        finally:
            self.tally.seconds += time.monotonic() - begun

    def _kill_until_done(self, run_dir: Path, draw: random.Random, most_kills: int) -> list[int]:
        """Start a run until it is done; return the steps after which its starts began."""
        config, known = self._mode.config, frozenset[int]()
        begun_after: list[int] = []
        while True:
            newest, left_before = max(known, default=0), set(leftovers(run_dir))
            moment = draw_moment(draw, self._mode.world_size) if len(begun_after) < most_kills else None
            begun_after.append(newest)
            start = Start(run_dir, self._mode)
            killed = self._kill_at(moment, start, newest)
            self._check_start(start.entries(), newest, killed=killed)
            if not killed:
                check_end(run_dir, config.train.steps, self._straight.end)
                self.tally.equal_ends += 1
                return begun_after
            self._count_kill(start, in_save=not left_before.issuperset(leftovers(run_dir)))
            self._disturb(run_dir)
            known = look(run_dir, known, config.checkpoint.keep_last)

    def _kill_at(self, moment: Moment | None, start: Start, newest: int) -> bool:
        """Let a start live until a moment, or to its end; return whether it was killed."""
        if moment is not None and self._lives_until(moment, start, newest):
            return start.kill(moment)
        start.end()
        return False

    def _lives_until(self, moment: Moment, start: Start, newest: int) -> bool:
        if moment.in_start_up:
            return start.lives_for(moment.share * self._straight.start_up_s)
        steps_left = self._mode.config.train.steps - newest
        share_of_step, step = math.modf(newest + moment.share * (steps_left + END_STEPS))
        return start.reaches(int(step)) and start.lives_for(share_of_step * SLOW_STEP * self._straight.step_s)

    def _check_start(self, entries: Sequence[Mapping[str, Any]], newest: int, *, killed: bool) -> None:
        for entry in entries:
            if entry["event"] == "plan":
                check_plan(entry, newest, self._mode.config.train.steps)
            elif entry["event"] == "cleaned":
                self.tally.cleaned += len(entry["removed"])
            elif entry["event"] == "save_failed" and not killed:  # a rank that is killed fails the save of another
                raise BrokenPromiseError(f"a save failed though nobody was killed: {entry['message']}")

    def _count_kill(self, start: Start, *, in_save: bool) -> None:
        tally = self.tally
        tally.kills += 1
        tally.restarts += 1  # one follows every kill
        if not start.has_reached(0):
            tally.in_start_up += 1
        elif in_save:
            tally.in_save += 1
        else:
            tally.in_training += 1
