"""ckptrain: checkpoint-centric, resumable LoRA fine-tuning under Megatron.

The verbs below are all that a larger program needs. They are imported when first used, so `import ckptrain` costs
nothing and loads neither torch nor megatron.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptrain.api import describe_data, export, export_megatron, import_adapter, merge, plan, resume, run
    from ckptrain.trainer import Trainer
    from ckptrain.training.callbacks import Callback, Control, EarlyStopping, State
    from ckptrain.training.program import Loss, Samples
    from ckptrain.training.result import RunResult

IMPORTED_S = time.monotonic()
"""When a program met ckptrain: where the kernel does not tell when it was started, its start is counted from here."""

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Control",
    "EarlyStopping",
    "Loss",
    "RunResult",
    "Samples",
    "State",
    "Trainer",
    "describe_data",
    "export",
    "export_megatron",
    "import_adapter",
    "merge",
    "plan",
    "resume",
    "run",
]

_ELSEWHERE = {
    "Callback": "ckptrain.training.callbacks",
    "Control": "ckptrain.training.callbacks",
    "EarlyStopping": "ckptrain.training.callbacks",
    "Loss": "ckptrain.training.program",
    "RunResult": "ckptrain.training.result",
    "Samples": "ckptrain.training.program",
    "State": "ckptrain.training.callbacks",
    "Trainer": "ckptrain.trainer",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_ELSEWHERE.get(name, "ckptrain.api")), name)
    raise AttributeError(f"module 'ckptrain' has no attribute {name!r}")
