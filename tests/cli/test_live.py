"""The panel of a run, as a terminal shows it: pyte is that terminal."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pyte
import pytest
from rich.console import Console, ConsoleDimensions

from ckptrain.cli.chart import Curve, chart_lines
from ckptrain.cli.forecast import Rhythm
from ckptrain.cli.progress import Progress
from ckptrain.training.observers import StepRecord

RECORD = StepRecord(
    step=1,
    loss=2.0,
    lr=1e-4,
    grad_norm=0.5,
    tokens=1000,
    learnt_tokens=300,
    padding_share=0.0,
    tokens_per_s=1234.0,
    seconds=0.8,
    data_s=0.0,
    tflops_per_s=0.012,
)
RHYTHM = Rhythm(steps=40, printed_every=1, saved_every=10, validated_every=20)


class Terminal:
    """A console on a terminal of a size, and its screen."""

    def __init__(self, columns: int, rows: int, **options: Any) -> None:
        self.file = io.StringIO()
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self.screen)
        self.console = Console(
            file=self.file, force_terminal=True, highlight=False, width=columns, height=rows, **options
        )

    def resize(self, columns: int, rows: int) -> None:
        """Have another size, and fold the lines that are too long for it, as terminals do."""
        lines = [line for line in self.lines() if line]
        folded = [line[at : at + columns] for line in lines for at in range(0, len(line), columns)]
        self.screen.resize(rows, columns)
        self.screen.reset()
        self._stream.feed("\r\n".join(folded))
        self.console.size = ConsoleDimensions(columns, rows)

    def lines(self) -> list[str]:
        """Return what stands on the screen."""
        self._stream.feed(self.file.getvalue().replace("\n", "\r\n"))
        self.file.seek(0)
        self.file.truncate()
        return [line.rstrip() for line in self.screen.display]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Terminal]:
    """Return a maker of terminals."""
    for name in ("NO_COLOR", "FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal


def trained(told: Progress, steps: range = range(1, 13), **changes: Any) -> None:
    """Tell of steps whose loss falls."""
    for step in steps:
        told.on_step(attrs.evolve(RECORD, step=step, loss=2.0 / step, **changes))


def shown(terminal: Terminal, act: Callable[[Progress], object]) -> list[str]:
    """Return the panel once something has happened, from its upper to its lower border."""
    with Progress(terminal.console, RHYTHM, name="tickets") as told:
        act(told)
        assert told._live is not None
        told._live._live.refresh()
        lines = terminal.lines()
    first = next(number for number, line in enumerate(lines) if line.startswith("╭"))
    last = next(number for number, line in enumerate(lines) if line.startswith("╰"))
    return lines[first : last + 1]


def rows(panel: list[str]) -> dict[str, str]:
    """Return its rows by label."""
    return {line[2:13].strip(): line[15:].strip(" │") for line in panel[1:-1]}


def test_a_small_terminal_shows_all_that_matters(terminal: Callable[..., Terminal]) -> None:
    """In 80 columns and 24 rows: no row is folded, and there is room for lines above."""
    panel = shown(
        terminal(80, 24), lambda told: (trained(told), told.on_saved(10, Path("step-00000010"), 24_400_000, 0.4))
    )
    assert len(panel) == 10
    assert all(len(line) == 76 for line in panel)
    found = rows(panel)
    assert found["step"].startswith("12/40 ━")
    assert found["step"].endswith(" 30%")
    assert found["loss"].startswith("0.1667  █▄▃▂")
    assert found["rate"] == "lr 1.00e-04  grad 0.5"
    assert found["speed"] == "1.23k tokens/s, 0.8 s a step"
    assert found["saved"] == "step-00000010, 24.4 MB in 0.4 s, 0 s ago"
    assert found["next save"].startswith("after step 20, in 6")
    assert found["memory"].endswith("of this process at most")
    assert "tickets, 0" in panel[-1]
    assert "training" in panel[0]


def test_a_large_terminal_has_a_chart_beside_the_numbers(terminal: Callable[..., Terminal]) -> None:
    """With the largest and the least loss at its side."""
    panel = shown(terminal(200, 50), trained)
    assert any("2.0000 ███" in line for line in panel)
    assert any("0.1667 █" in line for line in panel)
    assert any("loss, steps 1 to 12" in line for line in panel)
    assert {len(line) for line in panel} == {160}


def test_a_gpu_is_shown_with_what_it_does_and_holds(terminal: Callable[..., Terminal]) -> None:
    """And not the memory of the process."""
    gpu = {"peak_memory_bytes": 19_200_000_000, "mfu": 0.416, "tflops_per_s": 411.7}
    found = rows(shown(terminal(100, 24), lambda told: trained(told, **gpu)))
    assert found["speed"] == "1.23k tokens/s, 0.8 s a step, 412 TFLOP/s, MFU 41.6%"
    assert found["memory"] == "19.2 GB on the GPU at most"


def test_a_save_and_a_validation_are_shown_while_they_last(terminal: Callable[..., Terminal]) -> None:
    """A save goes on behind the steps, a validation holds them up."""
    saving = shown(terminal(80, 24), lambda told: trained(told, range(1, 12)))
    assert "training, saving step 10" in saving[0]
    validating = shown(terminal(80, 24), lambda told: trained(told, range(1, 21)))
    assert "validating" in validating[0]
    done = shown(terminal(80, 24), lambda told: (trained(told, range(1, 21)), told.on_validation(20, 0.5)))
    assert "training, saving step 20" in done[0]
    assert rows(done)["validation"] == "loss 0.5000 after step 20"


def test_lines_stay_above_the_panel(terminal: Callable[..., Terminal]) -> None:
    """Also what others print: it goes through the console that draws."""
    screen = terminal(80, 24)
    with Progress(screen.console, RHYTHM) as told:
        trained(told)
        told.on_warning("the disk is slow")
        told.on_progress("base: agrees")
        assert told._live is not None
        told._live._live.refresh()
        lines = screen.lines()
    assert lines[:2] == ["warning      the disk is slow", "base         agrees"]
    assert lines[2].startswith("╭")
    assert sum(line.startswith("╭") for line in lines) == 1


def test_the_panel_is_gone_at_the_end(terminal: Callable[..., Terminal]) -> None:
    """And the cursor stands where it began."""
    screen = terminal(80, 24)
    with Progress(screen.console, RHYTHM) as told:
        trained(told)
    assert not any(screen.lines())
    assert (screen.screen.cursor.x, screen.screen.cursor.y, screen.screen.cursor.hidden) == (0, 0, False)


@pytest.mark.parametrize(("columns", "rows"), [(50, 24), (120, 40), (200, 50)])
def test_a_resize_leaves_one_panel(terminal: Callable[..., Terminal], columns: int, rows: int) -> None:
    """Of the new width; a terminal folds what has become too long, as this one is made to."""
    screen = terminal(80, 24)
    with Progress(screen.console, RHYTHM) as told:
        trained(told)
        assert told._live is not None
        told._live._live.refresh()
        screen.resize(columns, rows)
        told._live._live.refresh()
        lines = screen.lines()
    assert sum(line.startswith("╭") for line in lines) == 1
    assert lines[0].startswith("╭")
    assert len(lines[0]) == min(160, columns - 4)


def test_a_dumb_terminal_and_ci_get_lines(terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be drawn again there."""
    monkeypatch.setenv("TERM", "dumb")
    screen = terminal(80, 24)
    with Progress(screen.console, RHYTHM) as told:
        trained(told, range(1, 3))
    assert "\x1b" not in screen.file.getvalue()
    assert screen.lines()[0].startswith("step         1/40  loss 2.0000")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("CI", "true")
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as file, Progress(Console(file=file), RHYTHM) as told:
        assert told._live is None
    os.close(master)


def test_without_colours_it_is_drawn_all_the_same(
    terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NO_COLOR leaves bold and dim."""
    monkeypatch.setenv("NO_COLOR", "1")
    screen = terminal(80, 24, color_system="truecolor")
    with Progress(screen.console, RHYTHM) as told:
        trained(told)
        assert told._live is not None
        told._live._live.refresh()
        text = screen.file.getvalue()
    assert re.search(r"12/40 (\x1b\[[0-9;]*m)*━+(\x1b\[[0-9;]*m)*┈+", text)
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38;|9[0-7])[0-9;]*m", text)


def test_steps_draw_nothing_themselves(terminal: Callable[..., Terminal]) -> None:
    """However fast they are: the panel is drawn so often a second, by its own thread."""
    screen = terminal(80, 24)
    with Progress(screen.console, RHYTHM) as told:
        assert told._live is not None
        told._live._live._refresh_thread.stop()
        told._live._live._refresh_thread.join()
        screen.lines()
        trained(told, range(1, 500))
        assert screen.file.getvalue() == ""


def test_a_long_curve_keeps_its_shape_in_bounded_memory() -> None:
    """Each two become their mean, and NaN is passed over."""
    curve = Curve()
    for number in range(100_000):
        curve.add(float(number))
        curve.add(float("nan"))
    columns = curve.columns(10)
    assert len(curve.values) < 2048
    assert columns == sorted(columns)
    assert columns[0] == pytest.approx(5_000, rel=0.05)
    assert columns[-1] == pytest.approx(95_000, rel=0.05)


def test_a_chart_spans_its_rows() -> None:
    """The least is an eighth high, the largest fills them; without UTF-8 other signs do."""
    assert chart_lines([0.0, 1.0], 1, is_ascii=False) == ["▁█"]
    assert chart_lines([0.0, 1.0], 2, is_ascii=False) == [" █", "▁█"]
    assert chart_lines([1.0, 1.0], 1, is_ascii=False) == ["▄▄"]
    assert chart_lines([], 1, is_ascii=True) == [""]
    assert chart_lines([0.0, 1.0], 1, is_ascii=True) == [".%"]
