"""A run as a person watches it: a bar with the numbers on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from ckptrain.cli.page import Row, facts, start_rows
from ckptrain.cli.wording import bytes_text, count_text, duration_text
from ckptrain.training.observers import Observer, SampleAnswer, StepRecord

_LABEL_COLUMNS = 11
_MARKERS = re.compile(r"\s*<\|[^|>]*\|>\s*")
"""Special tokens of chat templates, such as <|im_start|>, with the space around them."""
_MOST_QUESTION = 400
_LINE_EVERY_S = 20.0


class Progress(Observer):
    """Tells of a run on a console; entered before the run, so that there is a sign of life while torch is loaded."""

    def __init__(self, console: Console, *, steps: int, every_steps: int, bar: bool | None = None) -> None:
        """Take the console, the run's last step, and how often a step gets a line of its own.

        `bar=False` has such lines on a terminal too: a recorded session would hold every state of a bar.
        """
        self._has_bar = console.is_terminal if bar is None else bar
        self._console = console
        self._steps = steps
        self._every_steps = every_steps
        self._told_at = time.monotonic()
        self._counts_steps = False
        self._first_val_loss: float | None = None
        self._first_sample: SampleAnswer | None = None
        self._bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("[dim]left[/]"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self._has_bar,
        )
        self._task = self._bar.add_task("starting", total=None, numbers="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_plan(self, plan: dict[str, Any], facts: dict[str, Any]) -> None:
        """Show what the start means, why, and what to know about it."""
        self._tell(*start_rows(plan), ("run", str(facts["run_dir"])))
        self._bar.update(self._task, description="preparing")

    def on_progress(self, text: str) -> None:
        """Show a line, under a label of its own where it has one."""
        label, separator, rest = text.partition(": ")
        # "base: logits agree ..." has its own label; "loading NAME (...)" does not.
        if separator and len(label) <= _LABEL_COLUMNS and " " not in label:
            self._tell((label, rest))
        else:
            self._tell(("", text))

    def on_tokenising(self, name: str, done: int, total: int | None) -> None:
        """Move the bar, or print a line now and then."""
        text = f"{name}: {done:,} rows" + (f" of {total:,}" if total else "")
        if self._has_bar:
            self._bar.update(self._task, description="tokenising", numbers=text, completed=done, total=total)
        elif time.monotonic() - self._told_at > _LINE_EVERY_S:
            self._told_at = time.monotonic()
            self._tell(("tokenising", text))

    def on_step(self, record: StepRecord) -> None:
        """Move the bar, or print a line every so many steps."""
        numbers = (
            f"loss {record.loss:.4f}  lr {record.lr:.2e}  grad {record.grad_norm:.3g}"
            f"  {count_text(record.tokens_per_s)} tokens/s{_gpu_text(record)}"
        )
        if not self._has_bar:
            if record.step % self._every_steps == 0 or record.step == self._steps:
                self._tell(("step", f"{record.step}/{self._steps}  {numbers}  {duration_text(record.seconds)}"))
            return
        if not self._counts_steps:
            self._counts_steps = True
            # Starts the clock here, and leaves the steps of earlier starts out of the speed.
            self._bar.reset(self._task, total=self._steps, completed=record.step - 1)
        self._bar.update(
            self._task,
            description=f"step {record.step}/{self._steps}",
            numbers=numbers,
            completed=record.step,
        )

    def on_validation(self, step: int, val_loss: float) -> None:
        """Show the loss, beside the first one that was measured."""
        if self._first_val_loss is None:
            self._first_val_loss = val_loss
            text = f"loss {val_loss:.4f} {_when(step)}"
        else:
            text = f"loss {val_loss:.4f} {_when(step)}, {self._first_val_loss:.4f} at first"
        self._tell(("validation", text))

    def on_sample(self, sample: SampleAnswer) -> None:
        """Show the first answer with its question, and a later one beside it."""
        if self._first_sample is None:
            self._first_sample = sample
            self._tell(
                ("sample", _question(sample.prompt)),
                ("wanted", sample.reference),
                ("answer", f"{sample.answer} ({_when(sample.step)})"),
            )
            return
        before = self._first_sample
        if not self._console.is_terminal:
            self._tell(
                ("wanted", sample.reference),
                ("before", before.answer),
                ("after", sample.answer),
            )
            return
        self._console.print(_side_by_side(before, sample))

    def on_saved(self, step: int, path: Path, num_bytes: int, seconds: float) -> None:  # noqa: ARG002
        """Show what was saved, with its size and the time that it took."""
        self._tell(("saved", f"{path.name}: {bytes_text(num_bytes)} in {duration_text(seconds)}"))

    def on_save_failed(self, step: int, message: str) -> None:
        """Show why a checkpoint is missing."""
        self._tell(("not saved", Text(f"step {step}: {message}", style="bold red")))

    def on_warning(self, text: str) -> None:
        """Show what does not work as it should."""
        self._tell(("warning", Text(text, style="yellow")))

    def on_end(self) -> None:
        """Take the bar away."""
        self._bar.stop()

    def _tell(self, *rows: Row) -> None:
        _tell(self._console, *rows)


def show_end(report: Mapping[str, Any], num_processes: int, console: Console) -> None:
    """Show how a run ended, and what can be done next; `report` is that of `result_report`."""
    step, steps = report["step"], report["steps"]
    rows: list[Row] = [(report["status"].replace("already_done", "done"), _ending(report))]
    before, after = report["val_loss_before"], report["val_loss_after"]
    if before is not None and after is not None:
        rows.append(("validation", f"loss {before:.4f} -> {after:.4f}"))
    if report["checkpoint"] is not None:
        rows.append(("checkpoint", report["checkpoint"]))
    run = shlex.quote(report["run_dir"])
    processes = f" --nproc-per-node {num_processes}" if num_processes > 1 else ""
    if report["status"] == "stopped":
        rows.append(("go on", Text(f"ckptrain resume {run}{processes}", style="cyan")))
    else:
        rows.append(("export", Text(f"ckptrain export {run} ADAPTER-DIRECTORY", style="cyan")))
        longer = f"ckptrain resume {run} train.steps={max(2 * steps, step + 1)}{processes}"
        rows.append(("train on", Text(longer, style="cyan")))
    if console.is_terminal:
        console.print()
    _tell(console, *rows)


def _tell(console: Console, *rows: Row) -> None:
    """Print rows: wrapped under their labels on a terminal, a line each in a file, where lines are searched."""
    if console.is_terminal:
        grid = facts(rows)
        grid.columns[0].min_width = _LABEL_COLUMNS
        console.print(grid)
        return
    for label, text in rows:
        one_line = " ".join(str(text).split("\n"))
        console.print(f"{label:<{_LABEL_COLUMNS}}  {one_line}", markup=False, soft_wrap=True)


def _ending(report: Mapping[str, Any]) -> Text:
    step, steps = report["step"], report["steps"]
    if report["status"] == "finished":
        return Text(f"step {step} of {steps}", style="bold green")
    if report["status"] == "already_done":
        return Text(report["plan"]["reason"], style="green")
    saved = "saved" if report["checkpoint"] else "there was nothing to save"
    return Text(f"after step {step} of {steps}: {report['stop_reason']}; {saved}", style="yellow")


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
