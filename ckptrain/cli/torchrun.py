"""Under torchrun: a run that has stopped as it was asked to stays stopped.

torchrun knows of a process only whether it ended with 0, and starts it again where it did not (`--max-restarts`). After
a failure, or a stop because a host left or came, that is right: the next start goes on. A run that stopped for a reason
of its own (a time limit, the stop file, a callback) would be started again at once, as often as torchrun may.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptrain.training.run import RunResult


def stay_stopped(result: RunResult, environment: Mapping[str, str]) -> None:
    """Where torchrun would start again what has stopped for good, ask it to end once this process has said all."""
    from ckptrain.training.stopping import is_signal

    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts > 0 and result.status == "stopped" and not is_signal(result.stop_reason):
        atexit.register(_end, os.getppid())


def _end(agent: int) -> None:
    if os.getppid() == agent:  # or it has ended already, and its number may be another's
        os.kill(agent, signal.SIGTERM)
