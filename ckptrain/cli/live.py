"""A run on a terminal, as it is now: a panel that is drawn over and over below the lines that stay."""

from __future__ import annotations

import itertools
import math
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.segment import ControlType
from rich.text import Text

from ckptrain.cli.chart import Curve, chart_lines
from ckptrain.cli.forecast import Forecast, Left, Rhythm
from ckptrain.cli.page import LABEL_COLUMNS, Row
from ckptrain.cli.wording import bytes_text, count_text, duration_text
from ckptrain.training.observers import StepRecord

_A_SECOND = 2
"""How often the panel is drawn; a drawing takes two milliseconds or so."""
_WIDE, _TALL = 120, 30
"""From so many columns and rows on there is room for a chart beside the numbers."""
_CHART_ROWS, _NUMBER_COLUMNS = 9, 8
_BAR_COLUMNS = 60
_WIDEST_COLUMN = 3
_ECHO_COLUMNS = 4
"""Room beside the panel for the ^C that a terminal shows: where it began a line, the panel would not be found again."""
MOST_WIDTH = 160
"""Columns of a panel; longer lines are hard to read."""


class LiveView:
    """What is known of a run now, and the panel that shows it."""

    def __init__(self, console: Console, rhythm: Rhythm, forecast: Forecast) -> None:
        """Take the console, which must be a terminal, and what the steps are compared with."""
        self._console, self._rhythm, self._forecast = console, rhythm, forecast
        self._signs = "-\\|/" if console.options.ascii_only else "⠋⠙⠸⠴⠦⠇"
        self._began_s = time.monotonic()
        self.name = ""
        self.phase = "starting"
        self.losses = Curve()
        self.record: StepRecord | None = None
        self.first_step: int | None = None
        self.saving: int | None = None
        """The step whose save is under way."""
        self.validation = ""
        self.from_checkpoint: str | None = None
        self._saved: tuple[str, float] | None = None
        self._tokenised: tuple[int, int | None] | None = None
        self._live = _Redrawn(self.panel, console)

    def start(self) -> None:
        """Begin to draw."""
        self._live.start(refresh=True)
        # A process that is killed leaves the terminal as it is: with its cursor.
        self._console.show_cursor(show=True)

    def stop(self) -> None:
        """Take the panel away."""
        self._live.stop()

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        if self.first_step is None:
            self.first_step = record.step
        self.record = record
        self.losses.add(record.loss)
        self._tokenised = None
        validates, saves = self._rhythm.is_validated(record.step), self._rhythm.is_saved(record.step)
        self.phase = "validating" if validates else "training"
        if saves:
            self.saving = record.step

    def tokenised(self, done: int, total: int | None) -> None:
        """Show how far the data is."""
        self._tokenised = (done, total)

    def saved(self, step: int, path: Path, num_bytes: int, seconds: float) -> None:
        """Show the last save."""
        self._saved = f"{path.name}, {bytes_text(num_bytes)} in {duration_text(seconds)}", time.monotonic()
        self.save_ended(step)

    def save_ended(self, step: int) -> None:
        """Show that the save of a step is not under way any more."""
        if self.saving == step:
            self.saving = None

    def panel(self) -> RenderableType:
        """Return the panel as it is to be drawn now."""
        width = min(MOST_WIDTH, self._console.width - _ECHO_COLUMNS)
        has_chart = self.record is not None and width >= _WIDE and self._console.height >= _TALL
        inside = width - 4
        left = inside // 2 if has_chart else inside
        lines = [_line(row, left) for row in self._rows(left, has_chart=has_chart)]
        if has_chart:
            lines = _beside(lines, self._chart(inside - left - 2), left)
        sign = self._signs[int(time.monotonic() * _A_SECOND) % len(self._signs)]
        title = Text(f"{sign} {self._phase()}", style="bold")
        return Panel(
            Text("\n", no_wrap=True).join(lines),
            title=title,
            title_align="left",
            subtitle=Text(", ".join(filter(None, (self.name, self._elapsed()))), style="dim"),
            subtitle_align="right",
            box=box.ASCII if self._console.options.ascii_only else box.ROUNDED,
            border_style="dim",
            width=width,
        )

    def _phase(self) -> str:
        saving = self.saving if self.phase == "training" else None
        return self.phase + (f", saving step {saving}" if saving is not None else "")

    def _elapsed(self) -> str:
        return f"{duration_text(time.monotonic() - self._began_s)} since the start"

    def _rows(self, width: int, *, has_chart: bool) -> list[Row]:
        record, room = self.record, width - LABEL_COLUMNS - 2
        memory = ("memory", _memory_text(record))
        if record is None:
            if self._tokenised is None:
                return [memory]
            done, total = self._tokenised
            return [("rows", f"{done:,}" + (f" of {total:,}" if total else "")), memory]
        rows: list[Row] = [
            ("step", self._step_text(record, room)),
            ("left", _left_text(self._forecast.until_end(), record.step == self._rhythm.steps)),
            ("loss", self._loss_text(record, 0 if has_chart else room)),
            ("rate", f"lr {record.lr:.2e}  grad {record.grad_norm:.3g}"),
            ("speed", _speed_text(record)),
            memory,
        ]
        if self.validation:
            rows.append(("validation", self.validation))
        return [*rows, ("saved", self._saved_text()), ("next save", self._next_save_text(record))]

    def _step_text(self, record: StepRecord, room: int) -> Text:
        steps = self._rhythm.steps
        numbers, share = f"{record.step:,}/{steps:,} ", f" {record.step / steps:.0%}"
        width = max(4, min(_BAR_COLUMNS, room - len(numbers) - len(share)))
        done, (sign, rest) = width * record.step // steps, "=-" if self._console.options.ascii_only else "━┈"
        return Text.assemble((numbers, "bold"), (done * sign, "green"), ((width - done) * rest, "bright_black"), share)

    def _loss_text(self, record: StepRecord, room: int) -> Text:
        text = Text(f"{record.loss:.4f}", style="bold")
        if room > 0:
            columns = self.losses.columns(min(_BAR_COLUMNS, room - len(text) - 2))
            [line] = chart_lines(columns, 1, is_ascii=self._console.options.ascii_only)
            text.append(f"  {line}", style="cyan not bold")
        return text

    def _saved_text(self) -> str:
        if self._saved is None:
            return f"{self.from_checkpoint}, from which this start goes on" if self.from_checkpoint else "nothing yet"
        text, at_s = self._saved
        return f"{text}, {duration_text(time.monotonic() - at_s)} ago"

    def _next_save_text(self, record: StepRecord) -> str:
        if record.step >= self._rhythm.steps:
            return "that of the last step"
        step = self._rhythm.next_save(record.step)
        left = self._forecast.until(step)
        return f"after step {step:,}" + (f", in {_left_text(left, False)}" if left is not None else "")

    def _chart(self, width: int) -> list[Text]:
        """Draw the losses with the largest and the least at their side."""
        room = width - _NUMBER_COLUMNS - 1
        columns = self.losses.columns(room)
        wide = min(_WIDEST_COLUMN, room // max(1, len(columns)))
        columns = [value for value in columns for _ in range(wide)]
        drawn = chart_lines(columns, _CHART_ROWS, is_ascii=self._console.options.ascii_only)
        high, low = (f"{max(columns):.4f}", f"{min(columns):.4f}") if columns else ("", "")
        names = [high, *[""] * (len(drawn) - 2), low]
        lines = [
            Text.assemble((f"{name:>{_NUMBER_COLUMNS}} ", "dim"), (line, "cyan"))
            for name, line in zip(names, drawn, strict=True)
        ]
        last = self.record.step if self.record is not None else 0
        return [*lines, Text(f"{'':{_NUMBER_COLUMNS}} loss, steps {self.first_step:,} to {last:,}", style="dim")]


def _line(row: Row, width: int) -> Text:
    """Write a row on one line; what is too long for it ends in an ellipsis."""
    label, text = row
    line = Text.assemble((f"{label:<{LABEL_COLUMNS}}  ", "dim"), text)
    line.truncate(width, overflow="ellipsis")
    return line


def _beside(lines: Sequence[Text], others: Sequence[Text], width: int) -> list[Text]:
    """Put lines beside others; the first have so many columns."""
    both = []
    for line, other in itertools.zip_longest(lines, others, fillvalue=Text()):
        left = line.copy()
        left.truncate(width, pad=True)
        both.append(Text.assemble(left, "  ", other))
    return both


class _Redrawn(Live):
    """Rich's live display, which also finds its own lines again after the terminal has another width."""

    def __init__(self, draw: object, console: Console) -> None:
        super().__init__(
            console=console,
            get_renderable=draw,  # type: ignore[arg-type]
            transient=True,
            refresh_per_second=_A_SECOND,
            vertical_overflow="crop",
        )
        self._columns = console.width

    def refresh(self) -> None:
        """Draw; terminals fold lines that have become too long, so that more of them are to be wiped."""
        with self._lock:
            columns, shape = self.console.width, self._live_render._shape
            if columns != self._columns and shape is not None and self.console.is_terminal:
                width, height = shape
                rows = height * math.ceil(width / columns)
                wiping = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * (rows - 1)
                self.console.control(Control(ControlType.CARRIAGE_RETURN, *wiping, (ControlType.ERASE_IN_LINE, 2)))
                self._live_render._shape = None
            self._columns = columns
            super().refresh()


def _left_text(left: Left | None, is_last: bool) -> str:
    if is_last:
        return "the end: the last validation and save" if left is None or left.is_whole else "the end"
    if left is None:
        return "known after a step"
    return duration_text(left.seconds) + ("" if left.is_whole else " and a validation")


def _speed_text(record: StepRecord) -> str:
    gpu = ""
    if record.peak_memory_bytes is not None:
        mfu = "" if record.mfu is None else f", MFU {record.mfu:.1%}"
        gpu = f", {record.tflops_per_s:.0f} TFLOP/s{mfu}"
    return f"{count_text(record.tokens_per_s)} tokens/s, {duration_text(record.seconds)} a step{gpu}"


def _memory_text(record: StepRecord | None) -> str:
    """Say what the GPU of rank 0 has held at most, and without one what this process has."""
    if record is not None and record.peak_memory_bytes is not None:
        return f"{bytes_text(record.peak_memory_bytes)} on the GPU at most"
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    return f"{bytes_text(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)} of this process at most"
