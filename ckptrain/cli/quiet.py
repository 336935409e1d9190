"""Which warnings of libraries does a person see? Those that they can do something about, each on a line.

What is hidden is listed here: what libraries say to the people who write programs, and single messages about what
ckptrain does with them. Everything else is passed on, errors always; what libraries in C write to stderr themselves,
such as NCCL, is not touched.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import click

_TO_PROGRAMMERS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, SyntaxWarning)
"""Names that will be dropped, and what is told by the first compilation of a library's file."""
_MESSAGES = (
    # torch, about how Megatron, Transformer Engine and safetensors call it
    r"TypedStorage is deprecated",
    r"barrier\(\): using the device under current context",
    r"torch\.distributed is (disabled, )?unavailable or uninitialized, assuming the intent",
    r"The given (NumPy array|buffer) is not writable",
    r"The AccumulateGrad node's stream does not match",
    r"Attempting to run cuBLAS, but there was no current CUDA context",
    # megatron-core and Megatron-Bridge, about packages that are not needed and arguments that a config cannot give
    r"(Transformer Engine and )?Apex (is|are) not installed",
    r"MLP requires ffn_hidden_size",
    r"moe_ffn_hidden_size is ",
)
_WITHOUT_GPU = r"When using (async grad allreduce|sequence parallelism) it is recommended to set"
"""Of CUDA_DEVICE_MAX_CONNECTIONS, which is set on a GPU; where it is set to something else, a person has done so."""
_LOG_MESSAGES: Mapping[str, tuple[str, ...]] = {
    "torch.utils.cpp_extension": ("No CUDA runtime is found",),
    "transformers.configuration_utils": ("`torch_dtype` is deprecated",),
    "transformers.modeling_utils": ("`torch_dtype` is deprecated",),
    "transformers.tokenization_utils_tokenizers": ("Ignoring clean_up_tokenization_spaces",),
    "urllib3.connectionpool": ("Retrying (",),
}
"""By logger: how messages begin that are about how Megatron-Bridge and tokenizer files call a library, or that we tell
ourselves once, as that a server of a logger does not answer."""


def quiet_libraries() -> None:
    """Hide what nobody can act on, and show the rest on one line each; on ranks other than 0 hide that as well.

    All ranks warn alike, and may share a terminal. Whoever asks Python for warnings (-W, PYTHONWARNINGS) sees them all.
    """
    if sys.warnoptions:
        return
    for category in _TO_PROGRAMMERS:
        warnings.filterwarnings("ignore", category=category)
    for message in (*_MESSAGES, *(() if "CUDA_DEVICE_MAX_CONNECTIONS" in os.environ else (_WITHOUT_GPU,))):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", message=r".* is deprecated", module="megatron")  # its own arguments, as above
    for logger, beginnings in _LOG_MESSAGES.items():
        logging.getLogger(logger).addFilter(_Without(beginnings))
    if os.environ.get("RANK", "0") != "0":
        warnings.simplefilter("ignore")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported
    warnings.showwarning = _show


class _Without(logging.Filter):
    """Drops warnings that begin with one of some texts."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is to be passed on."""
        return record.levelno > logging.WARNING or not record.getMessage().startswith(self._beginnings)


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,  # noqa: ARG001  Python's interface
    line: str | None = None,  # noqa: ARG001
) -> None:
    """Print a warning as one line on stderr, with where it comes from."""
    text = " ".join(str(message).split())
    where = "/".join(Path(filename).parts[-3:])
    click.secho("warning: ", fg="yellow", bold=True, nl=False, err=True)
    click.echo(f"{text} ({category.__name__}, {where}:{lineno})", err=True)
