"""uv run python tools/record_run.py [--run-dir DIR] [--out docs/run.svg] [--live docs/pictures/live.svg]

Run the quickstart, for real and from the start, and draw what it printed as an SVG: the pictures in the README.

The run talks to the same observer as on the command line, on a console that records. In the first picture a step has a
line of its own, as in a file, because a panel that is drawn over and over would leave no trace. The second is a
terminal shortly before the end, with that panel. Paths are shown from the working directory on, so that the pictures
tell nothing of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.color import parse_rgb_hex
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from ckptrain import api
from ckptrain.cli.ending import show_end
from ckptrain.cli.forecast import Rhythm
from ckptrain.cli.progress import Progress
from ckptrain.cli.quiet import quiet_libraries
from ckptrain.cli.train import result_report
from ckptrain.config.load import load_config
from ckptrain.training.observers import StepRecord

ROOT = Path(__file__).resolve().parent.parent
CONFIG = Path("examples/quickstart.yaml")
SHOWN_RUN_DIR = "runs/quickstart"
WIDTH, LIVE_WIDTH, LIVE_HEIGHT = 110, 124, 40
LIVE_STEP = 13
"""When the second picture is taken: a save has been made, and some losses can be drawn."""
MOST_BYTES = 200_000

# Rich's own picture loads its font from a server; the fonts of the machine that shows the picture do as well.
SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
)
COLOURS = (
    "3c4048 e06c75 7ec887 e5c07b 61afef c678dd 56b6c2 d4d8de"  # black, red, green, yellow, blue, magenta, cyan, white
)
THEME = TerminalTheme((24, 27, 33), (212, 216, 222), [parse_rgb_hex(colour) for colour in COLOURS.split()])


class Recorded(Progress):
    """The command line's progress, with the run directory under the name that it has in the README."""

    def __init__(self, console: Console, run_dir: Path, rhythm: Rhythm, *, live: bool) -> None:
        super().__init__(console, rhythm, live=live, name=Path(SHOWN_RUN_DIR).name)
        self._run_dir = str(run_dir)

    def __enter__(self) -> Self:
        """Draw nothing by itself: what moves cannot be recorded."""
        return self

    def on_plan(self, plan: dict[str, Any], facts: dict[str, Any]) -> None:
        """Show the plan as a user sees it who starts in the checkout."""
        shown = {**plan, "reason": plan["reason"].replace(self._run_dir, SHOWN_RUN_DIR)}
        super().on_plan(shown, {**facts, "run_dir": SHOWN_RUN_DIR})


class Screen(Recorded):
    """What a terminal shows after `LIVE_STEP`, as a picture."""

    picture = ""

    def on_step(self, record: StepRecord) -> None:
        """Take the picture when it is time."""
        super().on_step(record)
        if record.step == LIVE_STEP:
            assert self._live is not None
            self._console.print(self._live.panel())
            self.picture = drawn(self._console, "live")


def recording(width: int, height: int | None = None) -> Console:
    """Return a console that records what it prints, and begins with the command."""
    size = {"width": width, "height": height}
    colours = {"force_terminal": True, "color_system": "truecolor", "no_color": False}
    console = Console(file=io.StringIO(), record=True, highlight=False, **size, **colours)
    console.print(f"[bold green]$[/] uv run ckptrain run {CONFIG}")
    return console


def drawn(console: Console, unique_id: str) -> str:
    """Return what a console has recorded as an SVG."""
    return console.export_svg(title="ckptrain", theme=THEME, code_format=SVG, unique_id=unique_id)


def record(run_dir: Path) -> tuple[str, str]:
    """Make the run in `run_dir`, which must hold none, and return its pictures."""
    quiet_libraries()
    console = recording(WIDTH)
    config = load_config(CONFIG)
    rhythm = Rhythm.of(config)
    told = Recorded(console, run_dir, rhythm, live=False)
    screen = Screen(recording(LIVE_WIDTH, LIVE_HEIGHT), run_dir, rhythm, live=True)
    result = api.run(config, run_dir=run_dir, observers=[told, screen])
    report = result_report(result, config.train.steps)
    report["run_dir"] = SHOWN_RUN_DIR
    report["checkpoint"] = str(report["checkpoint"]).replace(str(run_dir), SHOWN_RUN_DIR)
    show_end(report, 1, console)
    return drawn(console, "run"), screen.picture


@contextlib.contextmanager
def empty_directory(chosen: Path | None) -> Iterator[Path]:
    """Give the directory that was asked for, or one that is gone afterwards."""
    if chosen is not None:
        yield chosen.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ckptrain-") as directory:
        yield Path(directory).resolve() / "quickstart"


def main() -> None:
    """Record, check that the pictures are small and tell no paths, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, help="where the run lives; a temporary directory if left out")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/run.svg", help="the picture of the lines")
    parser.add_argument("--live", type=Path, default=ROOT / "docs/pictures/live.svg", help="the picture of the panel")
    asked = parser.parse_args()
    paths = [asked.out.resolve(), asked.live.resolve()]
    with empty_directory(asked.run_dir) as run_dir:
        if run_dir.exists() and any(run_dir.iterdir()):
            sys.exit(f"{run_dir} is not empty; the pictures are of a first start, so give an empty --run-dir")
        os.chdir(ROOT)
        pictures = record(run_dir)
        private = {str(run_dir), str(ROOT), str(Path.home())} - {"/"}
    for path, picture in zip(paths, pictures, strict=True):
        if told := [name for name in private if name in picture]:
            sys.exit(f"{path.name} would show {', '.join(told)}; it was not written")
        if len(picture.encode()) > MOST_BYTES:
            sys.exit(f"{path.name} has {len(picture.encode())} bytes, more than {MOST_BYTES}; it was not written")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(picture, encoding="utf-8")
        print(f"{path}: {len(picture.encode())} bytes")


if __name__ == "__main__":
    main()
