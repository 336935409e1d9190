"""Start the ranks of a run as forks of this process, which has imported Megatron already: an import takes 8 seconds.

The process that forks opens no process group and runs no backward pass: a fork inherits neither their threads nor their
ends, and would wait for them for ever. Whatever does so in a test or a tool runs on a rank.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("fork")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank_main(rank: int, world_size: int, port: int, act: Callable[[], Any], out: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    torch.set_num_threads(1)
    try:
        outcome: tuple[str, Any] = ("result", act())
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        outcome = ("error", error)
    out.write_bytes(pickle.dumps(outcome))


class Ranks:
    """The processes of one launch."""

    def __init__(self, world_size: int, act: Callable[[], Any]) -> None:
        import ckptrain.megatron.entered
        import ckptrain.training.run  # noqa: F401  # imported here, before the fork, and so once

        self._outcomes = Path(tempfile.mkdtemp(prefix="ckptrain-ranks-"))
        port = _free_port()
        self.processes = [
            _CONTEXT.Process(
                target=_rank_main, args=(rank, world_size, port, act, self._outcomes / f"{rank}.pickle"), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def kill(self) -> None:
        """Kill every rank with SIGKILL; nothing is left of the launch but exit codes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        shutil.rmtree(self._outcomes, ignore_errors=True)

    def wait(self, timeout_s: float = 240) -> list[Any]:
        """Return what every rank returned, in their order; raise what the first that failed raised."""
        for process in self.processes:
            process.join(timeout_s)
        hung = [process for process in self.processes if process.is_alive()]
        paths = [self._outcomes / f"{rank}.pickle" for rank in range(len(self.processes))]
        outcomes = [path.read_bytes() if path.exists() else None for path in paths]
        self.kill()
        if hung:
            raise TimeoutError(f"{len(hung)} of {len(self.processes)} ranks did not end within {timeout_s} s")
        results = []
        for rank, (process, outcome) in enumerate(zip(self.processes, outcomes, strict=True)):
            if outcome is None:
                raise RuntimeError(f"rank {rank} died with exit code {process.exitcode}")
            kind, value = pickle.loads(outcome)
            if kind == "error":
                raise value
            results.append(value)
        return results


def launch(world_size: int, act: Callable[[], Any], timeout_s: float = 240) -> list[Any]:
    """Run `act` on every rank of a launch of its own and return their results."""
    return Ranks(world_size, act).wait(timeout_s)
