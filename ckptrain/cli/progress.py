"""What a person is told of a run: lines that stay, and on a terminal a panel below them that shows where it is now."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ckptrain.cli.forecast import Forecast, Rhythm
from ckptrain.cli.live import MOST_WIDTH, LiveView
from ckptrain.cli.page import LABEL_COLUMNS, Row, facts, is_screen, start_rows, tell
from ckptrain.cli.wording import bytes_text, count_text, duration_text, plural
from ckptrain.training.observers import Observer, SampleAnswer, StepRecord

_MARKERS = re.compile(r"\s*<\|[^|>]*\|>\s*")
"""Special tokens of chat templates, such as <|im_start|>, with the space around them."""
_MOST_QUESTION = 400
_LINE_EVERY_S = 20.0


class Progress(Observer):
    """Tells of a run on a console; entered before the run, so that there is a sign of life while torch is loaded."""

    def __init__(self, console: Console, rhythm: Rhythm, *, live: bool | None = None, name: str = "") -> None:
        """Take the console, what happens after which step, and the name that the run is shown under.

        `live=False` has a line for each step on a terminal too, as in a file; None has the panel where it can be drawn.
        """
        self._console, self._rhythm = console, rhythm
        self._forecast = Forecast(rhythm)
        self._live = (
            LiveView(console, rhythm, self._forecast) if (is_screen(console) if live is None else live) else None
        )
        if self._live is not None:
            self._live.name = name
        self._told_at = time.monotonic()
        self._resumes = False
        self._first_val_loss: float | None = None
        self._first_sample: SampleAnswer | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_end()

    def on_plan(self, plan: dict[str, Any], facts: dict[str, Any]) -> None:
        """Show what the start means, why, what it takes from where, and what to know about it."""
        rows = [*start_rows(plan), *_run_rows(facts)]
        if is_screen(self._console):
            self._console.print(_plan_panel(rows, Path(facts["run_dir"]).name, self._console.width))
        else:
            self._tell(*rows)
        self._resumes = plan["plan"] == "Resume"
        if self._live is not None and self._resumes:
            self._live.from_checkpoint = Path(plan["checkpoint"]).name
        self._now("preparing")

    def on_progress(self, text: str) -> None:
        """Show a line, under a label of its own where it has one."""
        self._told_at = time.monotonic()
        label, separator, rest = text.partition(": ")
        # "base: logits agree ..." has its own label; "loading NAME (...)" does not.
        if separator and len(label) <= LABEL_COLUMNS and " " not in label:
            self._tell((label, rest))
        else:
            self._tell(("", text))
        if label == "base":
            self._now("validating" if self._rhythm.validates and not self._resumes else "preparing")

    def on_tokenising(self, name: str, done: int, total: int | None) -> None:
        """Move the panel's count, or print a line now and then."""
        if self._live is not None:
            self._live.tokenised(done, total)
            self._now(f"tokenising {name}")
        elif time.monotonic() - self._told_at > _LINE_EVERY_S:
            self._told_at = time.monotonic()
            self._tell(("tokenising", f"{name}: {done:,} rows" + (f" of {total:,}" if total else "")))

    def on_step(self, record: StepRecord) -> None:
        """Show the step in the panel, or print a line every so many steps."""
        self._forecast.add(record.step, record.seconds)
        if self._live is not None:
            self._live.step(record)
        elif self._rhythm.is_printed(record.step):
            numbers = (
                f"loss {record.loss:.4f}  lr {record.lr:.2e}  grad {record.grad_norm:.3g}"
                f"  {count_text(record.tokens_per_s)} tokens/s{_gpu_text(record)}"
            )
            self._tell(("step", f"{record.step}/{self._rhythm.steps}  {numbers}  {duration_text(record.seconds)}"))

    def on_validation(self, step: int, val_loss: float) -> None:
        """Show the loss, beside the first one that was measured."""
        text = f"loss {val_loss:.4f} {_when(step)}"
        if self._first_val_loss is None:
            self._first_val_loss = val_loss
        else:
            text += f", {self._first_val_loss:.4f} at first"
        self._tell(("validation", text))
        self._validated(step)
        if self._live is not None:
            self._live.validation = text
            self._now("training" if 0 < step < self._rhythm.steps else "finishing" if step else "preparing")

    def on_sample(self, sample: SampleAnswer) -> None:
        """Show the first answer with its question, and a later one beside it."""
        self._validated(sample.step)
        self._now("training" if sample.step < self._rhythm.steps else "finishing")
        before = self._first_sample
        if before is None:
            self._first_sample = sample
            self._tell(
                ("sample", _question(sample.prompt)),
                ("wanted", sample.reference),
                ("answer", f"{sample.answer} ({_when(sample.step)})"),
            )
        elif is_screen(self._console):
            self._console.print(_side_by_side(before, sample))
        else:
            self._tell(("wanted", sample.reference), ("before", before.answer), ("after", sample.answer))

    def on_saved(self, step: int, path: Path, num_bytes: int, seconds: float) -> None:
        """Show what was saved, with its size and the time that it took."""
        if self._live is not None:
            self._live.saved(step, path, num_bytes, seconds)
        else:
            self._tell(("saved", f"{path.name}: {bytes_text(num_bytes)} in {duration_text(seconds)}"))

    def on_save_failed(self, step: int, message: str) -> None:
        """Show why a checkpoint is missing."""
        if self._live is not None:
            self._live.save_ended(step)
        self._tell(("not saved", Text(f"step {step}: {message}", style="bold red")))

    def on_warning(self, text: str) -> None:
        """Show what does not work as it should."""
        self._tell(("warning", Text(text, style="yellow")))

    def on_stop(self, reason: str) -> None:
        """Show that the run is about to end."""
        self._now(f"stopping ({reason}), saving")

    def on_end(self) -> None:
        """Take the panel away."""
        if self._live is not None:
            self._live.stop()

    def _now(self, phase: str) -> None:
        if self._live is not None:
            self._live.phase = phase

    def _validated(self, step: int) -> None:
        """Let the forecast know what the validation before the first step took: it began after the last line."""
        now = time.monotonic()
        if step == 0:
            self._forecast.validated(now - self._told_at)
        self._told_at = now

    def _tell(self, *rows: Row) -> None:
        tell(self._console, *rows)


class Quiet(Observer):
    """Tells of a run only what does not work as it should."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_save_failed(self, step: int, message: str) -> None:
        """Show why a checkpoint is missing."""
        tell(self._console, ("not saved", Text(f"step {step}: {message}", style="bold red")))

    def on_warning(self, text: str) -> None:
        """Show what does not work as it should."""
        tell(self._console, ("warning", Text(text, style="yellow")))


def _run_rows(run: dict[str, Any]) -> list[Row]:
    rows: list[Row] = [("run", str(run["run_dir"]))]
    if "base" in run:
        rows.insert(0, ("base", f"{run['base']}, {run['adapters']}, {plural(run['processes'], 'process')}"))
    return rows


def _plan_panel(rows: list[Row], title: str, width: int) -> Panel:
    body = facts(rows, label_columns=LABEL_COLUMNS - 2)
    return Panel(
        body,
        title=Text(title, style="bold"),
        title_align="left",
        border_style="cyan",
        width=min(width, MOST_WIDTH),
    )


def _gpu_text(record: StepRecord) -> str:
    """Say what a GPU does and holds; nothing where there is none."""
    if record.peak_memory_bytes is None:
        return ""
    mfu = "" if record.mfu is None else f" (MFU {record.mfu:.1%})"
    return f"  {record.tflops_per_s:.0f} TFLOP/s{mfu}  {bytes_text(record.peak_memory_bytes)}"


def _when(step: int) -> str:
    return f"after step {step}" if step else "before training"


def _question(prompt: str) -> str:
    """Return a prompt without the template's markers, which are for the model; the end of a long one."""
    text = _MARKERS.sub("\n", prompt).strip()
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[-1].strip() == "assistant":
        lines = lines[:-1]
    text = "\n".join(lines)
    return text if len(text) <= _MOST_QUESTION else f"...{text[-_MOST_QUESTION:]}"


def _side_by_side(before: SampleAnswer, after: SampleAnswer) -> Table:
    table = Table(box=box.ROUNDED, border_style="dim", title=None, pad_edge=True)
    for name, style in (("wanted", ""), (_when(before.step), "dim"), (_when(after.step), "bold")):
        table.add_column(name, style=style, overflow="fold", ratio=1)
    answer = Text(after.answer, style="green" if after.answer == after.reference else "")
    table.add_row(Text(after.reference), Text(before.answer), answer)
    return table
