"""uv run python tools/record_run.py [--run-dir DIR] [--out docs/run.svg]

Run the quickstart, for real and from the start, and draw what it printed as an SVG: the picture in the README.

The run talks to the same observer as on the command line, on a console that records; a step has a line of its own, as
in a file, because a bar would leave no trace. Paths are shown from the working directory on, so that the picture tells
nothing of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.color import parse_rgb_hex
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from ckptrain import api
from ckptrain.cli.progress import Progress, show_end
from ckptrain.cli.quiet import quiet_libraries
from ckptrain.cli.train import result_report
from ckptrain.config.load import load_config

ROOT = Path(__file__).resolve().parent.parent
CONFIG = Path("examples/quickstart.yaml")
SHOWN_RUN_DIR = "runs/quickstart"
WIDTH = 110
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

    def __init__(self, console: Console, run_dir: Path, **options: Any) -> None:
        super().__init__(console, bar=False, **options)
        self._run_dir = str(run_dir)

    def on_plan(self, plan: dict[str, Any], facts: dict[str, Any]) -> None:
        """Show the plan as a user sees it who starts in the checkout."""
        shown = {**plan, "reason": plan["reason"].replace(self._run_dir, SHOWN_RUN_DIR)}
        super().on_plan(shown, {**facts, "run_dir": SHOWN_RUN_DIR})


def record(run_dir: Path) -> str:
    """Make the run in `run_dir`, which must hold none, and return its picture."""
    quiet_libraries()
    console = Console(
        record=True, force_terminal=True, color_system="truecolor", no_color=False, width=WIDTH, highlight=False
    )
    config = load_config(CONFIG)
    console.print(f"[bold green]$[/] uv run ckptrain run {CONFIG}")
    with Recorded(console, run_dir, steps=config.train.steps, every_steps=config.log.every_steps) as told:
        result = api.run(config, run_dir=run_dir, observers=[told])
    report = result_report(result, config.train.steps)
    report["run_dir"] = SHOWN_RUN_DIR
    report["checkpoint"] = str(report["checkpoint"]).replace(str(run_dir), SHOWN_RUN_DIR)
    show_end(report, 1, console)
    return console.export_svg(title="ckptrain", theme=THEME, code_format=SVG, unique_id="run")


@contextlib.contextmanager
def empty_directory(chosen: Path | None) -> Iterator[Path]:
    """Give the directory that was asked for, or one that is gone afterwards."""
    if chosen is not None:
        yield chosen.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ckptrain-") as directory:
        yield Path(directory).resolve() / "quickstart"


def main() -> None:
    """Record, check that the picture is small and tells no paths, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, help="where the run lives; a temporary directory if left out")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/run.svg", help="the picture")
    asked = parser.parse_args()
    out = asked.out.resolve()
    with empty_directory(asked.run_dir) as run_dir:
        if run_dir.exists() and any(run_dir.iterdir()):
            sys.exit(f"{run_dir} is not empty; the picture is of a first start, so give an empty --run-dir")
        os.chdir(ROOT)
        picture = record(run_dir)
        told = [path for path in {str(run_dir), str(ROOT), str(Path.home())} - {"/"} if path in picture]
    if told:
        sys.exit(f"the picture would show {', '.join(told)}; nothing was written")
    if len(picture.encode()) > MOST_BYTES:
        sys.exit(f"the picture has {len(picture.encode())} bytes, more than {MOST_BYTES}; nothing was written")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(picture, encoding="utf-8")
    print(f"{out}: {len(picture.encode())} bytes")


if __name__ == "__main__":
    main()
