"""Which of these tests can run here.

They need the GPUs that their mark says: `gpu` one, `gpu(2)` two. Continuous integration has none, and no stand-in for a
GPU would show what these show, so there they are skipped, and said to be; `python3 -m pytest tests/gpu` runs them by
hand where there are some.
"""

from __future__ import annotations

from pathlib import Path

import pytest

NUM_GPUS = len(list(Path("/dev").glob("nvidia[0-9]")))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are."""
    needed = max((mark.args[0] if mark.args else 1 for mark in item.iter_markers("gpu")), default=0)
    if needed > NUM_GPUS:
        pytest.skip(f"needs {needed} CUDA devices, there are {NUM_GPUS}")
