"""`ckptrain doctor`: what is installed, what a run would use of it, how fast the disk is, and whether a run works.

The report is made to be pasted into a bug report: no names of users, hosts and directories, no values of the
environment. What an error of a library says is cleaned of them.
"""

from __future__ import annotations

import functools
import getpass
import os
import platform
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

import ckptrain
from ckptrain.cli.disk import Disk, measure_disk
from ckptrain.cli.machine import (
    Finding,
    broken,
    look_at_bytecode,
    look_at_cache,
    look_at_driver,
    look_at_extras,
    look_at_gpu,
    look_at_megatron,
    look_at_nccl,
    look_at_torch,
    look_at_transformer_engine,
    system,
)
from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import Row, facts
from ckptrain.cli.quiet import quiet_libraries
from ckptrain.cli.wording import bytes_text, duration_text, plural
from ckptrain.errors import EXIT_DONE, EXIT_FAILURE
from ckptrain.installed import TESTED, untested, version_of

_LOOKS: Mapping[str, tuple[Callable[[], Finding], bool]] = {
    "torch": (look_at_torch, True),
    "GPU": (look_at_gpu, False),
    "driver": (look_at_driver, False),
    "NCCL": (look_at_nccl, False),
    "Transformer Engine": (look_at_transformer_engine, False),
    "Megatron": (look_at_megatron, True),
    "cache": (look_at_cache, True),
}
"""How each thing is looked at, and whether every run needs it."""
_STYLES = {"works": "green", "missing": "yellow", "broken": "bold red", "note": ""}
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 6
_SLOW_COMMIT_S = 0.5


def doctor_answer(run_dir: Path | None, *, self_test: bool) -> Answer:
    """Look at everything that a run needs; exit status 1 where one would not work."""
    quiet_libraries()
    findings = [_look(name, look, required=required) for name, (look, required) in _LOOKS.items()]
    disk: list[Disk] = []
    findings.append(_look("disk", functools.partial(_look_at_disk, run_dir, disk), required=True))
    findings += [look_at_extras(), *filter(None, [look_at_bytecode()])]
    tested: list[Any] = []
    if not self_test:
        findings.append(Finding(name="self-test", state="note", text="left out (--no-self-test)"))
    elif any(finding.state == "broken" for finding in findings):
        findings.append(Finding(name="self-test", state="note", text="left out: something that it needs is broken"))
    else:
        findings.append(_look("self-test", functools.partial(_try_a_run, tested), required=True))
    works = not any(finding.state == "broken" and finding.required for finding in findings)
    report = {
        "works": works,
        "versions": {
            "ckptrain": ckptrain.__version__,
            "python": platform.python_version(),
            **{package: version_of(package) for package in TESTED},
        },
        "untested": {package: {"is": there, "tested": TESTED[package]} for package, there in untested().items()},
        "system": system(),
        "checks": [attrs.asdict(finding) for finding in findings],
        "disk": attrs.asdict(disk[0]) if disk else None,
        "self_test": attrs.asdict(tested[0]) if tested else None,
    }
    return Answer(
        report=report,
        show=functools.partial(_show, report),
        exit_status=EXIT_DONE if works else EXIT_FAILURE,
    )


def _look(name: str, look: Callable[[], Finding], *, required: bool) -> Finding:
    """Look at one thing; whatever is raised is what there is to report, without what is private in it."""
    try:
        return look()
    except Exception as error:  # of any library, which may be broken in any way
        found = broken(name, error, required=required)
        return attrs.evolve(found, text=without_names(found.text, os.environ))


def _look_at_disk(run_dir: Path | None, found: list[Disk]) -> Finding:
    disk = measure_disk(run_dir or Path.cwd())
    found.append(disk)
    where = "of the run directory" if run_dir else "of the working directory"
    speed = f"writes {bytes_text(disk.write_bytes_per_s)}/s, commits a file in {1000 * disk.commit_s:.1f} ms"
    kind = f" ({disk.file_system})" if disk.file_system else ""
    slow = "; that is slow, and every save waits for it" if disk.commit_s > _SLOW_COMMIT_S else ""
    text = f"{where}{kind}: {bytes_text(disk.free_bytes)} free, {speed}{slow}"
    return Finding(name="disk", state="works", text=text, required=True)


def _try_a_run(found: list[Any]) -> Finding:
    import torch

    from ckptrain.cli.self_test import run_self_test

    test = run_self_test(has_gpu=torch.cuda.is_available())
    found.append(test)
    did = "2 steps, a save, kill -9, a resume, 2 steps"
    if test.differing:
        text = f"{did}: the resumed run wrote other bits than one that was not killed ({', '.join(test.differing)})"
        return Finding(name="self-test", state="broken", text=text, required=True)
    text = f"{did}: {plural(test.tensors, 'tensor')}, bit for bit those of a run that was not killed"
    return Finding(name="self-test", state="works", text=f"{text} ({duration_text(test.seconds)})", required=True)


def without_names(text: str, environment: Mapping[str, str]) -> str:
    """Take what is private out of a text: directories, the user's and the host's name, secrets of the environment."""
    for private, stands_for in _private(environment):
        text = re.sub(rf"(?<![\w-]){re.escape(private)}(?![\w-])", stands_for, text)
    return text


def _private(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
            yield value, f"(value of {name})"
    homes = {environment.get("HOME", ""), str(Path("~").expanduser())} - {"", "/", "~"}
    yield from ((home, "~") for home in sorted(homes, key=len, reverse=True))
    yield str(Path.cwd()), "."
    yield socket.gethostname(), "(host)"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no entry
        return
    if user != "root":  # everybody's, and a word of its own
        yield user, "(user)"


def _show(report: Mapping[str, Any], console: Console) -> None:
    machine, versions = report["system"], report["versions"]
    memory = f", {bytes_text(machine['memory_bytes'])} of memory" if machine["memory_bytes"] else ""
    stack = [f"{package} {versions[package]}" for package in TESTED if versions[package] and package != "torch"]
    rows: list[Row] = [
        (
            "ckptrain",
            f"{versions['ckptrain']}, Python {versions['python']}, {plural(machine['cores'], 'core')}{memory}",
        ),
        ("system", machine["platform"]),
        ("packages", ", ".join(stack)),
    ]
    if report["untested"]:
        others = [
            f"{package} {found['is']} (tested: {found['tested']})" for package, found in report["untested"].items()
        ]
        rows.append(("untested", Text(", ".join(others), style="yellow")))
    for check in report["checks"]:
        style = _STYLES[check["state"]]
        mark = f"{check['state']}: " if check["state"] == "broken" else ""
        rows.append((check["name"], Text.assemble((f"{mark}{check['text']}", style))))
    console.print(facts(rows))
    if report["works"]:
        console.print(Text("Everything that a run needs works here.", style="bold green"))
    else:
        console.print(Text("A run would not work here: see what is broken above.", style="bold red"))
