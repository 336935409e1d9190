"""Is a process alive that has left its number behind? Only where that number still means it can one know."""

from __future__ import annotations

import os
from pathlib import Path


def pid_space() -> str:
    """Return where this process's number means this process: a boot of a kernel, and a PID namespace of it.

    Empty where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def born(pid: int) -> int:
    """Return when a process began, in ticks since boot, 0 if unknown: its number is given to another in time."""
    _, when = _seen(pid) or ("", 0)
    return when


def is_alive(pid: int, space: str, began: int) -> bool | None:
    """Tell whether the process that began then is alive; None where this process cannot see it."""
    if not space or space != pid_space():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is there, and somebody else's
    seen = _seen(pid)
    if seen is None:
        return None
    state, when = seen
    return when == began and state not in "ZX"


def _seen(pid: int) -> tuple[str, int] | None:
    """Return a process's state letter and when it began; None where that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])
