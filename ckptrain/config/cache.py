"""Where is kept what can be made again?"""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return where converted models and tokenised data are kept: CKPTRAIN_CACHE, or `ckptrain` in the user's cache."""
    if chosen := os.environ.get("CKPTRAIN_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ckptrain"
