"""Keep what libraries say among themselves from between the lines that people read."""

from __future__ import annotations

import logging
import os
import sys
import warnings

_LIBRARIES = r"(megatron|torch|transformers|peft)(\.|$)"


def quiet_libraries() -> None:
    """Hide warnings of libraries: optional packages that they do without, names that they will drop.

    Whoever asks Python for warnings (-W, PYTHONWARNINGS) sees them all.
    """
    if sys.warnoptions:
        return
    warnings.filterwarnings("ignore", module=_LIBRARIES)
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # told by the first compilation of a library's file
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported
