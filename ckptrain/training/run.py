"""One run, from the plan to the end: the phases in their order, the steps, and what is told of them."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import attrs

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.ranks import broadcast_from_rank0, on_rank0, rank, together, world_size
from ckptrain.checkpoint.reading import reading
from ckptrain.checkpoint.store import JOURNAL
from ckptrain.checkpoint.writer import NotSaved, Outcome, Saved
from ckptrain.config.load import flatten
from ckptrain.convert.sources import open_source
from ckptrain.data.prefetch import Prefetcher
from ckptrain.errors import (
    EXIT_DONE,
    EXIT_STOPPED_EARLY,
    CkptrainError,
    ClaimLost,
    ConfigError,
    StartRefused,
)
from ckptrain.lifecycle.fit import data_problems
from ckptrain.lifecycle.journal import Journal, NullJournal
from ckptrain.lifecycle.phases import Lifecycle, Phase
from ckptrain.lifecycle.start_plan import AlreadyDone, FreshStart, Resume, StartPlan, WarmStart
from ckptrain.megatron.fused.choice import release_graphs
from ckptrain.megatron.world import open_process_group
from ckptrain.training.directory import check_shared, claimed, prepare
from ckptrain.training.evaluation import answer_sample, validation_loss
from ckptrain.training.loggers import recorders
from ckptrain.training.observers import Observer, Observers, SampleAnswer
from ckptrain.training.profiling import StepProfiler
from ckptrain.training.restore import restore_run, warm_start
from ckptrain.training.saving import Position, Saver
from ckptrain.training.setup import DataSetup, ModelSetup, model_parallel, set_up_data, set_up_model
from ckptrain.training.start import Start, Survey, decide_start
from ckptrain.training.startup import StartClock, StartReport
from ckptrain.training.steps import Steps
from ckptrain.training.stopping import StopRequests

_STEPS_AHEAD = 2


@attrs.frozen(kw_only=True)
class RunResult:
    """How a run ended."""

    status: Literal["finished", "stopped", "already_done"]
    run_dir: Path
    plan: StartPlan
    step: int
    """Optimizer steps done, those of earlier starts included."""
    checkpoint: Path | None
    loss: float | None
    """Of the last step; None where none was made."""
    val_loss_before: float | None
    """When this start began; None on a resume or without a validation set."""
    val_loss_after: float | None
    samples: tuple[SampleAnswer, ...]
    stop_reason: str | None

    @property
    def exit_status(self) -> int:
        """Return the command line's exit status for this end."""
        return EXIT_STOPPED_EARLY if self.status == "stopped" else EXIT_DONE


def run_training(
    survey: Survey, run_dir: Path, observers: Iterable[Observer] = (), clock: StartClock | None = None
) -> RunResult:
    """Start or go on with a run in `run_dir`, and train to `train.steps`; collective over the processes of this launch.

    `clock` has counted what came before; without it the start is told from here.

    Raises:
        CkptrainError: one of its kinds for whatever is refused or fails; what was committed before is untouched.
    """
    if survey.layout.world_size != world_size():
        raise ConfigError(
            "cannot start", [f"there are {world_size()} processes, and WORLD_SIZE said {survey.layout.world_size}"]
        )
    clock = clock or StartClock()
    with open_process_group(), contextlib.ExitStack() as stack:
        clock.mark("process groups")
        told = Observers(observers if rank() == 0 else ())
        claim = on_rank0(lambda: stack.enter_context(claimed(run_dir, tell=told.on_progress)))
        together(lambda: check_shared(claim))
        start = on_rank0(lambda: decide_start(survey, run_dir, read_contents=True))
        on_rank0(lambda: prepare(survey, start, run_dir))
        clock.mark("plan")
        journal = Journal(run_dir / JOURNAL) if rank() == 0 else NullJournal()
        lifecycle = Lifecycle(journal.record)
        try:
            run = _Run(survey, start, run_dir, journal, lifecycle, told, clock)
            return run.go(may_commit=claim.check)
        except BaseException as error:
            _record_failure(journal, lifecycle, error)
            raise
        finally:
            told.on_end()


def _record_failure(journal: Journal, lifecycle: Lifecycle, error: BaseException) -> None:
    if isinstance(error, ClaimLost):
        return  # the journal is that of another run now
    with contextlib.suppress(CkptrainError):  # the error that is on its way says more than a full disk here
        journal.record("error", kind=type(error).__name__, message=str(error))
        if not lifecycle.ended:
            lifecycle.advance(Phase.FAILED)


class _Run:
    """The parts of one run and the order in which they act."""

    def __init__(
        self,
        survey: Survey,
        start: Start,
        run_dir: Path,
        journal: Journal,
        lifecycle: Lifecycle,
        told: Observers,
        clock: StartClock,
    ) -> None:
        self.survey, self.start, self.run_dir = survey, start, run_dir
        self.config = survey.config
        self.journal, self.lifecycle, self.told, self.clock = journal, lifecycle, told, clock
        self.run_id = broadcast_from_rank0(start.run_id or uuid.uuid4().hex)
        self.samples: list[SampleAnswer] = []
        self.longest_step_s = self.longest_save_s = 0.0
        self.last_saved: CommittedCheckpoint | None = start.checkpoint if isinstance(start.plan, Resume) else None

    def go(self, may_commit: Callable[[], object]) -> RunResult:
        """Act out the plan; `may_commit` raises where the run directory has been lost to another run."""
        plan = self.start.plan
        self.journal.record(
            "plan",
            **plan.to_dict(),
            run_id=self.run_id,
            world_size=self.survey.layout.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        # run.yaml has what was asked last: what changed from start to start is known from here.
        self.journal.record("config", values=flatten(self.config))
        self.told.on_plan(plan.to_dict(), self._facts())
        self.lifecycle.advance(Phase.PLANNED, plan=plan.kind)
        if isinstance(plan, AlreadyDone):
            self.lifecycle.advance(Phase.FINISHED, step=plan.step)
            return self._result("already_done", plan.step, checkpoint=plan.checkpoint)
        done = plan.step if isinstance(plan, Resume) else 0
        if rank() == 0:
            self.told.add_recorders(
                recorders(self.config, self.run_dir, run_id=self.run_id, last_step=done, tell=self.told.on_progress)
            )
        self.clock.mark("recorders")
        with StopRequests(self.run_dir, self.config.train.max_minutes) as stop, model_parallel(self.survey):
            self.clock.mark("process groups")
            data = set_up_data(self.survey, self.told)
            self._tell_data(data)
            self._check_order(data)
            self.clock.mark("data")
            setup = set_up_model(self.survey, self.lifecycle, self.told, self.clock)
            self._restore(plan, setup)
            self.clock.mark("restore")
            self.journal.stop_waiting(lambda failure: self.told.on_warning(str(failure)))
            workers = self.config.data.workers
            with (
                Saver(self.survey, data, setup, self.run_dir, self.run_id, may_commit) as saver,
                Prefetcher(data.source, first_step=done, ahead=_STEPS_AHEAD if workers is None else workers) as batches,
            ):
                try:
                    return self._train(plan, done, data, setup, batches, saver, stop)
                except Exception:
                    # The save that was under way counts, and is told, before the error that ends the run.
                    with contextlib.suppress(Exception):
                        self._tell_outcome(saver.wait())
                    raise
                finally:
                    release_graphs(setup.model)

    def _facts(self) -> dict[str, Any]:
        """Return what a person wants to know of a start besides its plan."""
        lora = self.config.lora
        return {
            "run_dir": str(self.run_dir),
            "steps": self.config.train.steps,
            "base": self.survey.base.name,
            "adapters": f"{lora.kind} of rank {lora.dim}, alpha {lora.alpha:g}",
            "processes": self.survey.layout.world_size,
        }

    def _tell_data(self, data: DataSetup) -> None:
        self.journal.record("data", train=attrs.asdict(data.train.summary))
        self.told.on_progress(f"training data: {data.train.summary.describe()}")
        if data.validation is not None:
            self.journal.record("data", validation=attrs.asdict(data.validation.summary))
            self.told.on_progress(f"validation data: {data.validation.summary.describe()}")

    def _check_order(self, data: DataSetup) -> None:
        """Refuse a resume whose samples or rows are not as many as they were: their order would be another.

        Raises:
            StartRefused: another version of ckptrain or of a library makes other samples of the same files.
        """
        saved = self.start.checkpoint.manifest.data if self.start.checkpoint is not None else None
        if saved is not None and (problems := data_problems(data.identity, saved)):
            raise StartRefused(f"cannot go on with the run in {self.run_dir}", problems)

    def _restore(self, plan: StartPlan, setup: ModelSetup) -> None:
        if isinstance(plan, FreshStart):
            return
        if isinstance(plan, WarmStart):
            self._warm_start(plan, setup)
            return
        checkpoint = self.start.checkpoint
        assert checkpoint is not None
        assert isinstance(plan, Resume)
        with reading(checkpoint):
            receipt = restore_run(plan, checkpoint, setup, self.config)
        self.journal.record("receipt", **receipt.to_dict())
        self.lifecycle.advance(Phase.RESTORED, step=plan.step)
        self.told.on_progress(
            f"restored {receipt.checkpoint}: {receipt.tensors_per_rank[0][0]} of {receipt.tensors_per_rank[0][1]}"
            f" tensors, optimizer step {receipt.optimizer_step}, learning rate {receipt.next_learning_rate:.3g} next,"
            f" random generators {receipt.rng}, next row {receipt.next_row}"
        )

    def _warm_start(self, plan: WarmStart, setup: ModelSetup) -> None:
        source = together(lambda: open_source(plan.adapter, shape=self.survey.shape, kind=self.config.lora.kind))
        with source.held():  # another run may prune it
            tensors = warm_start(source, setup)
        form = source.facts.form
        self.journal.record("warm_start", adapter=str(source.path), form=form, tensors=tensors)
        self.told.on_progress(f"adapter from {source.path}, a {form} ({tensors} tensors)")

    def _train(
        self,
        plan: StartPlan,
        done: int,
        data: DataSetup,
        setup: ModelSetup,
        batches: Prefetcher,
        saver: Saver,
        stop: StopRequests,
    ) -> RunResult:
        train = self.config.train
        before = None if isinstance(plan, Resume) else self._evaluate(setup, data, done, with_sample=True)
        if self.lifecycle.phase is not Phase.TRAINING:
            self.lifecycle.advance(Phase.TRAINING, step=done)
        position = Position(
            step=done,
            consumed_samples=done * train.global_batch_size,
            consumed_tokens=plan.consumed_tokens if isinstance(plan, Resume) else 0,
        )
        self.clock.mark("validation")
        report = StartReport(self.clock, self.journal, self.told)
        profiler = StepProfiler(self.run_dir, done, train.profile if rank() == 0 else None, self.journal, self.told)
        steps = Steps(self.survey, setup, data.source, batches)
        loss = val_loss = None
        while position.step < train.steps:
            needed_s = self.longest_step_s and self.longest_step_s + self.longest_save_s
            if (reason := stop.reason(needed_s)) is not None:
                profiler.ended(position.step, is_last=True)
                return self._drain(position, saver, stop, reason, loss, before)
            step = position.step + 1
            with profiler.around(step):
                record = steps.make(step, self.last_saved.path if self.last_saved else None)
            report.add(record.seconds)
            self.longest_step_s = max(self.longest_step_s, record.seconds)
            self.told.on_step(record)
            profiler.ended(step, is_last=step == train.steps)
            loss = record.loss
            self._tell_outcome(saver.ended())
            position = Position(
                step=step,
                consumed_samples=position.consumed_samples + train.global_batch_size,
                consumed_tokens=position.consumed_tokens + record.tokens,
            )
            last = step == train.steps
            val_loss = None
            if last or (train.eval_every_steps and step % train.eval_every_steps == 0):
                val_loss = self._evaluate(setup, data, step, with_sample=last)
            if last or step % self.config.checkpoint.every_steps == 0:
                self.lifecycle.advance(Phase.SAVING, step=step)
                save = self._secure if last else self._begin_save
                stall_s = save(position, saver, loss, val_loss)
                self.lifecycle.advance(Phase.TRAINING, step=step, stall_s=round(stall_s, 4))
        self.lifecycle.advance(Phase.FINISHED, step=position.step)
        return self._result("finished", position.step, loss=loss, before=before, after=val_loss)

    def _evaluate(self, setup: ModelSetup, data: DataSetup, step: int, *, with_sample: bool) -> float | None:
        if not data.validation_batches:
            return None
        self.lifecycle.advance(Phase.EVALUATING, step=step)
        loss = validation_loss(setup, data)
        assert loss is not None
        self.told.on_validation(step, loss)
        if with_sample:
            multiple = self.survey.layout.tensor if self.config.parallel.sequence else 1
            sample = answer_sample(setup, data, step, self.config.log.sample_tokens, multiple)
            if sample is not None:
                self.samples.append(sample)
                self.journal.record("sample", **attrs.asdict(sample))
                self.told.on_sample(sample)
        self.lifecycle.advance(Phase.TRAINING, step=step, val_loss=loss)
        return loss

    def _begin_save(self, position: Position, saver: Saver, loss: float | None, val_loss: float | None) -> float:
        """Begin to save; returns for how many seconds that stopped the training."""
        metrics = {name: value for name, value in (("loss", loss), ("val_loss", val_loss)) if value is not None}
        begun = saver.begin(position, metrics)
        self._tell_outcome(begun.before)
        if begun.waited_s:
            self.journal.record("save_waited", step=position.step, seconds=round(begun.waited_s, 3))
            self.told.on_warning(
                f"training waited {begun.waited_s:.1f} s before the save of step {position.step}, until the one before"
                " it was on disk: raise checkpoint.every_steps, or put the run directory on a faster disk"
            )
        return begun.waited_s + begun.stall_s

    def _secure(self, position: Position, saver: Saver, loss: float | None, val_loss: float | None) -> float:
        """Come back when the state of this position is committed; returns the seconds.

        It gets a second try, because no save follows it.

        Raises:
            SaveFailed: the second try failed too; the checkpoint before is untouched.
        """
        started = time.monotonic()
        for _ in range(2):
            self._begin_save(position, saver, loss, val_loss)
            outcome = saver.wait()
            self._tell_outcome(outcome)
            if not isinstance(outcome, NotSaved):
                return time.monotonic() - started
        assert isinstance(outcome, NotSaved)
        raise outcome.error

    def _tell_outcome(self, outcome: Outcome | None) -> None:
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

    def _drain(
        self,
        position: Position,
        saver: Saver,
        stop: StopRequests,
        reason: str,
        loss: float | None,
        before: float | None,
    ) -> RunResult:
        """Save what has been done since the last checkpoint, and stop."""
        self.journal.record("stop_requested", reason=reason, step=position.step)
        self.told.on_stop(reason)
        self.lifecycle.advance(Phase.DRAINING, step=position.step, reason=reason)
        self._tell_outcome(saver.wait())
        already = self.last_saved is not None and self.last_saved.step == position.step
        if position.step > 0 and not already:
            self._secure(position, saver, loss, None)
        on_rank0(stop.forget)
        self.lifecycle.advance(Phase.STOPPED, step=position.step)
        return self._result("stopped", position.step, loss=loss, before=before, stop_reason=reason)

    def _result(
        self,
        status: Literal["finished", "stopped", "already_done"],
        step: int,
        *,
        checkpoint: Path | None = None,
        loss: float | None = None,
        before: float | None = None,
        after: float | None = None,
        stop_reason: str | None = None,
    ) -> RunResult:
        saved = self.last_saved.path if self.last_saved is not None else None
        return RunResult(
            status=status,
            run_dir=self.run_dir,
            plan=self.start.plan,
            step=step,
            checkpoint=checkpoint or saved,
            loss=loss,
            val_loss_before=before,
            val_loss_after=after,
            samples=tuple(self.samples),
            stop_reason=stop_reason,
        )
