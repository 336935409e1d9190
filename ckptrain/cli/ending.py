"""How a run ended, and what can be done next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptrain.cli.page import Row, is_screen, tell


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
    if is_screen(console):
        console.print()
    tell(console, *rows)


def _ending(report: Mapping[str, Any]) -> Text:
    step, steps = report["step"], report["steps"]
    if report["status"] == "finished":
        return Text(f"step {step} of {steps}", style="bold green")
    if report["status"] == "already_done":
        return Text(report["plan"]["reason"], style="green")
    saved = "saved" if report["checkpoint"] else "there was nothing to save"
    return Text(f"after step {step} of {steps}: {report['stop_reason']}; {saved}", style="yellow")
