"""One run that is open: its parts, the phases in their order, its steps, and what is asked of it between them."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from ckptrain.checkpoint.ranks import broadcast_from_rank0, on_rank0, rank
from ckptrain.checkpoint.working_copy import all_as_given
from ckptrain.config.load import flatten
from ckptrain.convert.live import LiveSource, whole_tensors
from ckptrain.data.prefetch import Prefetcher
from ckptrain.errors import CkptrainError, ClaimLost
from ckptrain.lifecycle.facts import LoraSpec
from ckptrain.lifecycle.journal import Journal
from ckptrain.lifecycle.phases import Lifecycle, Phase
from ckptrain.lifecycle.start_plan import AlreadyDone, Resume, StartPlan
from ckptrain.megatron.fused.choice import release_graphs
from ckptrain.training.callbacks import Callbacks, State, Wishes
from ckptrain.training.evaluation import answer_sample, validation_loss
from ckptrain.training.keeping import Keeper
from ckptrain.training.loggers import recorders
from ckptrain.training.observers import Observers, SampleAnswer, StepRecord
from ckptrain.training.opening import check_data, start_facts, take_state, tell_data
from ckptrain.training.profiling import StepProfiler
from ckptrain.training.result import RunResult, write_failure, write_result
from ckptrain.training.saving import Position, Saver
from ckptrain.training.setup import model_parallel, set_up_data, set_up_model
from ckptrain.training.start import Start, Survey
from ckptrain.training.startup import StartClock, StartReport
from ckptrain.training.steps import Steps
from ckptrain.training.stopping import StopRequests
from ckptrain.training.watchdog import Watchdog

if TYPE_CHECKING:
    from ckptrain.convert.to_peft import Export

_STEPS_AHEAD = 2


class Session:
    """A run from its plan to its end; every method that acts is collective over the processes of the launch."""

    def __init__(
        self,
        survey: Survey,
        start: Start,
        run_dir: Path,
        journal: Journal,
        told: Observers,
        callbacks: Callbacks,
        clock: StartClock,
        watchdog: Watchdog,
    ) -> None:
        self.survey, self.start, self.run_dir = survey, start, run_dir
        self.config = survey.config
        self.journal, self.told, self.callbacks, self.clock = journal, told, callbacks, clock
        self._watchdog = watchdog
        self.lifecycle = Lifecycle(journal.record)
        self.run_id = broadcast_from_rank0(start.run_id or uuid.uuid4().hex)
        self.samples: list[SampleAnswer] = []
        self.longest_step_s = 0.0
        self.last_checkpoint: Path | None = (
            start.checkpoint.path if isinstance(start.plan, Resume | AlreadyDone) and start.checkpoint else None
        )
        self.position = Position(step=0, consumed_samples=0, consumed_tokens=0)
        self.record: StepRecord | None = None
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.before: float | None = None
        self.exported: Path | None = None
        self._step_of_save = -1
        self._is_running = False
        watchdog.follow(lambda: self.activity, self.failed, lambda: self.lifecycle.ended)
        self._stop_reason: str | None = None
        self._error: BaseException | None = None
        self._result: RunResult | None = None

    @property
    def state(self) -> State:
        """How the run stands."""
        return State(
            phase=self.lifecycle.phase.value,
            step=self.position.step,
            steps=self.config.train.steps,
            loss=self.loss,
            val_loss=self.val_loss,
            record=self.record,
            last_checkpoint=self.last_checkpoint,
            plan=self.start.plan.kind,
            stop_reason=self._stop_reason,
            error=None if self._error is None else f"{type(self._error).__name__}: {self._error}",
        )

    @property
    def activity(self) -> tuple[str, bool]:
        """What is being done, for others that wait for this process, and whether it is a step."""
        if self._is_running and self.lifecycle.phase is Phase.TRAINING:
            return f"making step {self.position.step + 1}", True
        return f"{self.lifecycle.phase.value.lower()} after step {self.position.step}", False

    def _tell(self, event: str) -> None:
        self.callbacks.tell(event, self.state)

    def open(self, stack: contextlib.ExitStack, may_commit: Callable[[], object]) -> None:
        """Act out the plan, up to the first step; `may_commit` raises where the run directory was lost to another run.

        What is opened is closed with `stack`.
        """
        plan = self.start.plan
        self.callbacks.open()
        self.journal.record(
            "plan",
            **all_as_given(plan.to_dict()),
            run_id=self.run_id,
            world_size=self.survey.layout.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        # run.yaml has what was asked last: what changed from start to start is known from here.
        self.journal.record("config", values=flatten(self.config))
        self.told.on_plan(all_as_given(plan.to_dict()), all_as_given(start_facts(self.survey, self.run_dir)))
        self.lifecycle.advance(Phase.PLANNED, plan=plan.kind)
        self._tell("on_plan")
        if isinstance(plan, AlreadyDone):
            self.lifecycle.advance(Phase.FINISHED, step=plan.step)
            self.position = attrs.evolve(self.position, step=plan.step)
            self.last_checkpoint = plan.checkpoint
            self._finish(self._result_of("already_done"))
            return
        done = plan.step if isinstance(plan, Resume) else 0
        self.position = Position(
            step=done,
            consumed_samples=done * self.config.train.global_batch_size,
            consumed_tokens=plan.consumed_tokens if isinstance(plan, Resume) else 0,
        )
        if rank() == 0:
            self.told.add_recorders(
                recorders(self.config, self.run_dir, run_id=self.run_id, last_step=done, tell=self.told.on_progress)
            )
        self.clock.mark("recorders")
        self._stop = stack.enter_context(StopRequests(self.run_dir, self.config.train.max_minutes))
        stack.enter_context(model_parallel(self.survey))
        self.clock.mark("process groups")
        self._data = set_up_data(self.survey, self.told)
        tell_data(self._data, self.journal, self.told)
        check_data(self._data, self.start, self.run_dir)
        self.clock.mark("data")
        self._setup = set_up_model(self.survey, self.lifecycle, self.told, self.clock)
        take_state(self.start, self.survey, self._setup, self.lifecycle, self.journal, self.told)
        if isinstance(plan, Resume):
            self._restore_callbacks()
        self.clock.mark("restore")
        self.journal.stop_waiting(lambda failure: self.told.on_warning(str(failure)))
        self._open_training(stack, plan, may_commit)

    def _open_training(self, stack: contextlib.ExitStack, plan: StartPlan, may_commit: Callable[[], object]) -> None:
        data, setup, done = self._data, self._setup, self.position.step
        saver = stack.enter_context(
            Saver(self.survey, data, setup, self.run_dir, self.run_id, may_commit, self.callbacks.states)
        )
        last_saved = self.start.checkpoint if isinstance(plan, Resume) else None
        self._keeper = Keeper(saver, self.journal, self.told, last_saved, self._on_saved)
        workers = self.config.data.workers
        ahead = _STEPS_AHEAD if workers is None else workers
        if data.train is None:  # samples of a step may depend on the one before
            ahead = 0
        batches = stack.enter_context(Prefetcher(data.source, first_step=done, ahead=ahead))
        stack.callback(release_graphs, setup.model)
        self.before = None if isinstance(plan, Resume) else self._evaluate(with_sample=True)
        if self.lifecycle.phase is not Phase.TRAINING:
            self.lifecycle.advance(Phase.TRAINING, step=done)
        self.clock.mark("validation")
        self._report = StartReport(self.clock, self.journal, self.told)
        profile = self.config.train.profile if rank() == 0 else None
        self._profiler = StepProfiler(self.run_dir, done, profile, self.journal, self.told)
        self._steps = Steps(self.survey, setup, data.source, batches, self.journal, self.told)
        self._obey(self.callbacks.agree())

    def _restore_callbacks(self) -> None:
        assert self.start.checkpoint is not None
        gone = self.callbacks.restore(self.start.checkpoint.manifest.callbacks)
        if gone:
            self.told.on_warning(f"the checkpoint has what {', '.join(gone)} knew, and this start has no such callback")
        self._tell("on_restore")

    def _evaluate(self, *, with_sample: bool) -> float | None:
        setup, data, step = self._setup, self._data, self.position.step
        if not data.validation_batches:
            return None
        self.lifecycle.advance(Phase.EVALUATING, step=step)
        loss = validation_loss(setup, data)
        assert loss is not None
        self.val_loss = loss
        self.told.on_validation(step, loss)
        if with_sample:
            multiple = self.survey.layout.tensor if self.config.parallel.sequence else 1
            sample = answer_sample(setup, data, step, self.config.log.sample_tokens, multiple)
            if sample is not None:
                self.samples.append(sample)
                self.journal.record("sample", **attrs.asdict(sample))
                self.told.on_sample(sample)
        self.lifecycle.advance(Phase.TRAINING, step=step, val_loss=loss)
        self._tell("on_evaluate")
        return loss

    def run_until(self, step: int | None = None) -> RunResult:
        """Train until `step` steps are done, or to the end; a run that has ended gives its result again."""
        if self._result is not None:
            return self._result
        last = self.config.train.steps
        until = last if step is None else min(step, last)
        with self._running(), self._failing():
            while self.position.step < until:
                if (reason := self._reason_to_stop()) is not None:
                    return self._drain(reason)
                self._make_step()
            if self.position.step == last:
                self.lifecycle.advance(Phase.FINISHED, step=last)
                return self._finish(self._result_of("finished"))
            if self._stop_reason is not None:
                return self._drain(self._stop_reason)
        return self._result_of("paused")

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _reason_to_stop(self) -> str | None:
        if self._stop_reason is not None:
            return self._stop_reason
        return self._stop.reason(self.longest_step_s and self.longest_step_s + self._keeper.longest_save_s)

    def _make_step(self) -> None:
        train, step = self.config.train, self.position.step + 1
        last = step == train.steps
        safe = self._keeper.last_saved
        with self._profiler.around(step):
            record = self._steps.make(step, safe.path if safe else None)
        self._report.add(record.seconds)
        self.longest_step_s = max(self.longest_step_s, record.seconds)
        self.told.on_step(record)
        self._profiler.ended(step, is_last=last)
        self.record, self.loss = record, record.loss
        self._keeper.poll()
        self.position = Position(
            step=step,
            consumed_samples=self.position.consumed_samples + train.global_batch_size,
            consumed_tokens=self.position.consumed_tokens + record.tokens,
        )
        self._tell("on_step_end")
        wishes = self.callbacks.agree()
        val_loss = None
        due = train.eval_every_steps and step % train.eval_every_steps == 0
        if last or due or wishes.evaluate:
            val_loss = self._evaluate(with_sample=last)
            # What is asked for on seeing the validation loss is of this step too, but another look would be the same.
            wishes |= self.callbacks.agree()
        self._obey(wishes)
        if last or step % self.config.checkpoint.every_steps == 0 or wishes.save:
            self._keep(val_loss, secure=last)

    def _obey(self, wishes: Wishes) -> None:
        self._stop_reason = self._stop_reason or wishes.stop

    def _keep(self, val_loss: float | None, *, secure: bool) -> None:
        step = self.position.step
        self.lifecycle.advance(Phase.SAVING, step=step)
        keep = self._keeper.secure if secure else self._keeper.begin
        stall_s = keep(self.position, self.loss, val_loss)
        self._step_of_save = step
        self.lifecycle.advance(Phase.TRAINING, step=step, stall_s=round(stall_s, 4))

    def save(self) -> Path | None:
        """Come back when the state of now is committed; returns the checkpoint, None before the first step."""
        if self._result is None and self.position.step > 0:
            with self._failing():
                self._keeper.wait()
                if not self._is_safe():
                    self._keep(None, secure=True)
        return self.last_checkpoint

    def _is_safe(self) -> bool:
        safe = self._keeper.last_saved
        return safe is not None and safe.step == self.position.step

    def _on_saved(self, path: Path) -> None:
        self.last_checkpoint = path
        self._tell("on_save")

    def export(self, out: Path, *, dtype: str, overwrite: bool, layout: str) -> Export | None:
        """Write the adapter as it is now as a PEFT directory; rank 0 has what was written, the others None."""
        from ckptrain.convert.to_peft import export_source

        with self._failing():
            tensors = whole_tensors(self._setup.store)
            source = LiveSource(
                path=self.run_dir / "live",
                run_id=self.run_id,
                step=self.position.step,
                shape=self.survey.shape,
                identity=self.survey.identity,
                pretrained=self.config.model.pretrained,
                lora=LoraSpec(settings=self.config.lora, modules=self.survey.targets.modules),
                tensors=tensors,
            )
            written = on_rank0(lambda: export_source(source, out, dtype=dtype, overwrite=overwrite, layout=layout))
        self.exported = written.path
        return written if rank() == 0 else None

    def close(self) -> None:
        """Save what is not saved, and end; nothing where the run has ended."""
        if self._result is None and self._error is None:
            with self._failing():
                self._drain("the program closed the run")

    def let_go(self) -> None:
        """Forget the model and its optimizer, so that their memory is free although a program keeps its trainer."""
        for name in ("_setup", "_data", "_steps", "_keeper", "_report", "_profiler"):
            vars(self).pop(name, None)

    def _drain(self, reason: str) -> RunResult:
        """Save what has been done since the last checkpoint, and stop."""
        step = self.position.step
        self._stop_reason = reason
        self._profiler.ended(step, is_last=True)
        self.journal.record("stop_requested", reason=reason, step=step)
        self.told.on_stop(reason)
        self._tell("on_stop")
        self.lifecycle.advance(Phase.DRAINING, step=step, reason=reason)
        self._keeper.wait()
        if step > 0 and not self._is_safe():
            self._keeper.secure(self.position, self.loss, None)
        on_rank0(self._stop.forget)
        self.lifecycle.advance(Phase.STOPPED, step=step)
        return self._finish(self._result_of("stopped"))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Let an error end the run, whoever catches it."""
        if self._error is not None:
            raise self._error
        try:
            with self._watchdog.explaining():
                yield
        except BaseException as error:
            if isinstance(error, Exception):
                # The save that was under way counts, and is told, before the error that ends the run.
                with contextlib.suppress(Exception):
                    self._keeper.wait()
            self.failed(error)
            raise

    def failed(self, error: BaseException) -> None:
        """Write down, once, that the run has failed."""
        if self._error is not None:
            return
        self._error = error
        self._tell("on_error")
        if isinstance(error, ClaimLost):
            return  # the journal is that of another run now
        with contextlib.suppress(CkptrainError):  # the error that is on its way says more than a full disk here
            self.journal.record("error", kind=type(error).__name__, message=str(error))
            if not self.lifecycle.ended:
                self.lifecycle.advance(Phase.FAILED)
        if rank() == 0:
            with contextlib.suppress(OSError, CkptrainError):
                write_failure(self.run_dir, self.position.step, self.start.plan.kind, error)

    def _finish(self, result: RunResult) -> RunResult:
        self._result = result
        self.write_result()
        return result

    def write_result(self) -> None:
        """Write RUN/result.json of a run that has ended; a full disk is told, and does not undo what was trained."""
        if self._result is None or rank() != 0:
            return
        try:
            write_result(self._result, self.config.checkpoint, self.exported)
        except (OSError, CkptrainError) as error:
            self.told.on_warning(f"result.json was not written: {error}")

    def _result_of(self, status: Literal["finished", "stopped", "already_done", "paused"]) -> RunResult:
        return RunResult(
            status=status,
            run_dir=self.run_dir,
            plan=self.start.plan,
            step=self.position.step,
            checkpoint=self.last_checkpoint,
            loss=self.loss,
            val_loss_before=self.before,
            val_loss_after=self.val_loss if status == "finished" else None,
            samples=tuple(self.samples),
            stop_reason=self._stop_reason if status == "stopped" else None,
        )
