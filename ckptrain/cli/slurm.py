"""Under srun: the environment that torchrun would give, from Slurm's."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FIRST_PORT = 15000
_NUM_PORTS = 10000
_FIRST_HOST = re.compile(r"(?P<prefix>[^,\[]+)(\[(?P<number>\d+))?")


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and so on for a task of a Slurm step, or nothing where this is none or they are set.

    A batch script is no step of several tasks, so that it can launch processes itself. The variables are documented at
    https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES. All tasks work out the same port from the
    job's number; MASTER_ADDR and MASTER_PORT that are set already are kept.
    """
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    found = {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": _first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _NUM_PORTS),
    }
    return {name: environment.get(name, value) for name, value in found.items()}


def _first_host(node_list: str) -> str:
    """Return the first host of a list such as `gpu[003-006,9],login1`: where rank 0 is."""
    match = _FIRST_HOST.match(node_list)
    assert match is not None
    return match["prefix"] + (match["number"] or "")
