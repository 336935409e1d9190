"""`ckptrain report`: what is read, where it is written, and what is said of it; a run directory is only read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ckptrain import api
from ckptrain.checkpoint.working_copy import store_url, to_look_at
from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import facts
from ckptrain.cli.report.page import page_of
from ckptrain.cli.report.run import ReportedRun, read_run
from ckptrain.cli.status import status_answer
from ckptrain.cli.wording import bytes_text
from ckptrain.config.load import flatten
from ckptrain.errors import CkptrainError

PAGE = "report.html"


def report_answer(run_dirs: Sequence[Path], out: Path | None, png: Path | None) -> Answer:
    """Write a report on one run, or on several compared.

    Args:
        run_dirs: the run directories.
        out: the HTML file; None for `report.html`, in the run directory of a single run, and here of several.
        png: a picture of the curves as well.

    Raises:
        CheckpointNotFound: a directory is not that of a run.
        click.UsageError: a file to be written is named as if it were something else.
        CkptrainError: a file cannot be written, or a picture is wanted and matplotlib is not installed.
    """
    for path, ending in ((out, ".html"), (png, ".png")):
        if path is not None and path.suffix != ending:
            raise click.UsageError(f"{path} is to be overwritten: expected a name that ends in {ending}")
    if png is not None:
        from ckptrain.cli.report.picture import need_matplotlib

        need_matplotlib()
    runs = [_read(run_dir) for run_dir in run_dirs]
    is_here = len(run_dirs) == 1 and store_url(run_dirs[0]) is None
    target = out or (run_dirs[0] / PAGE if is_here else Path(PAGE))
    page = page_of(runs).encode("utf-8", "backslashreplace")
    _write(target, lambda path: path.write_bytes(page))
    if png is not None:
        from ckptrain.cli.report.picture import draw_picture

        _write(png, lambda path: draw_picture(runs, path))
    report = {
        "html": str(target),
        "html_bytes": len(page),
        "png": None if png is None else str(png),
        "runs": [run.to_dict() for run in runs],
    }
    return Answer(report=report, show=functools.partial(_show, report))


def _read(run_dir: Path) -> ReportedRun:
    run_dir = to_look_at(run_dir)
    state = status_answer(run_dir).report
    try:
        config: Mapping[str, Any] | None = flatten(api.config_of_run(run_dir, check_inputs=False))
    except CkptrainError:
        config = None
    return read_run(run_dir, state, config)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that is whole whenever it is there: someone may be looking at the one before."""
    replacement = path.with_name(f".{path.name}.new")
    try:
        write(replacement)
        replacement.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # there may be no such directory
            replacement.unlink(missing_ok=True)
        raise CkptrainError(
            f"cannot write {path}: {error.strerror}; choose another place with --out or --png"
        ) from error


def _show(report: Mapping[str, Any], console: Console) -> None:
    styles = {"good": "green", "warn": "yellow", "bad": "red"}
    for run in report["runs"]:
        rows: list[tuple[str, str | Text]] = [("run", run["run_dir"])]
        remarks = [*run["health"], *({"level": r["level"], "text": _resume_text(r)} for r in run["resumes"])]
        rows += [("" if i else "health", Text(r["text"], style=styles[r["level"]])) for i, r in enumerate(remarks)]
        console.print(facts(rows))
        console.print()
    written = [("report", f"{report['html']} ({bytes_text(report['html_bytes'])})")]
    written += [("picture", report["png"])] if report["png"] else []
    console.print(facts(written))


def _resume_text(resume: Mapping[str, Any]) -> str:
    return f"start {resume['start']} from step {resume['step']:,}: {resume['checks'][-1]['text']}"
