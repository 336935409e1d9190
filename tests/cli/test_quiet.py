"""Which warnings of libraries a person sees: each case in a process of its own, as filters are the process's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

QUIET = "import logging, warnings; from ckptrain.cli.quiet import quiet_libraries; quiet_libraries()\n"


def told(code: str, *options: str, **environment: str) -> str:
    """Run code after `quiet_libraries` and return what it wrote to stderr."""
    command = [sys.executable, *options, "-c", QUIET + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "warnings.warn('tp_group is None', DeprecationWarning)",
        "warnings.warn('torch.foo will be removed', FutureWarning)",
        "warnings.warn('TypedStorage is deprecated. It will be removed')",
        "warnings.warn('Apex is not installed. Falling back to Torch Norm')",
        "warnings.warn('barrier(): using the device under current context. You can')",
        "logging.getLogger('torch.utils.cpp_extension').warning('No CUDA runtime is found, using %s', '/usr')",
    ],
)
def test_what_nobody_can_act_on_is_hidden(code: str) -> None:
    """It is about how libraries are called, or what they do without."""
    assert told(code) == ""


def test_what_a_person_can_act_on_is_shown_on_one_line() -> None:
    """With its kind and where it comes from; also one that no list knows."""
    shown = told("warnings.warn('The disk of /data is nearly full:\\n  2 GB are left')")
    assert shown == "warning: The disk of /data is nearly full: 2 GB are left (UserWarning, <string>:2)\n"


def test_a_setting_of_the_users_own_that_slows_training_down_is_told() -> None:
    """Megatron's advice is void without a GPU, where nothing sets the variable, and worth telling where a person did."""
    code = "warnings.warn('When using async grad allreduce it is recommended to set the environment variable')"
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert "recommended" in told(code, **environment)
    assert told("import os; os.environ.pop('CUDA_DEVICE_MAX_CONNECTIONS', 0); quiet_libraries()\n" + code) == ""


def test_errors_of_loggers_whose_warnings_are_known_are_shown() -> None:
    """So are their other warnings."""
    logger = "log = logging.getLogger('torch.utils.cpp_extension'); "
    assert told(logger + "log.error('No CUDA runtime is found')") != ""
    assert told(logger + "log.warning('the compiler is too old')") != ""


def test_ranks_say_nothing_twice() -> None:
    """What all have in common is said by the first."""
    assert told("warnings.warn('The disk is nearly full')", RANK="1") == ""


def test_whoever_asks_for_warnings_gets_them_all() -> None:
    """As Python writes them."""
    assert "DeprecationWarning: old" in told("warnings.warn('old', DeprecationWarning)", "-W", "always")


def test_a_tokenizer_of_transformers_warns_of_a_text_that_is_too_long() -> None:
    """Its logger speaks as it does by itself: only known messages are taken out."""
    code = """
from transformers.utils import logging as theirs
theirs.get_logger("transformers.tokenization_utils_base").warning("Token indices sequence length is longer than")
theirs.get_logger("transformers.configuration_utils").warning("`torch_dtype` is deprecated! Use `dtype` instead!")
"""
    assert told(code).splitlines() == ["[transformers] Token indices sequence length is longer than"]
