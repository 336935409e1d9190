"""Is a conversion let through? Whether it is compared with what was trained, by what numbers, with which base.

The comparison itself, which needs Megatron, is in `compare`; nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from ckptrain.config.base import locate_base
from ckptrain.config.identity import base_identity
from ckptrain.config.schema import ModelConfig
from ckptrain.convert.pretrained import local_directory
from ckptrain.convert.source import AdapterSource
from ckptrain.errors import ConfigError
from ckptrain.installed import MEGATRON, is_installed, require

_PACKAGES = (*MEGATRON, "peft")
AUTO_PARAMETERS = 1_500_000_000
"""Above this, a second copy of the base beside the first is no longer a small thing to ask for."""


@attrs.frozen(kw_only=True)
class Gate:
    """The three numbers that an adapter is let through by; all are of logits of the same probe, in float32."""

    difference: float
    """Largest between Megatron with the adapter and Hugging Face with what was written."""
    allowed: float
    """How large that may be."""
    effect: float
    """Largest between Hugging Face with what was written and the base alone."""
    tokens: int
    """Length of the probe."""


def pass_gate(verify: bool | None, source: AdapterSource, check: Callable[[Path], Gate]) -> tuple[Gate | None, str]:
    """Run a check with the base that an adapter was made for, where that is wanted; returns its result and why.

    Args:
        verify: None checks where the base is on this machine and of a size for two copies of it in float32.
        source: what is to be compared.
        check: what to do with the base's Hugging Face directory.

    Raises:
        ConfigError: it is wanted, and the base is not here.
        PackageMissing: it is wanted, and what computes the logits is not installed.
        AdapterMismatch: what the check raises.
    """
    if verify is False:
        return None, "not asked for"
    if verify:
        require(_PACKAGES, "--verify")
    elif missing := [package for package in _PACKAGES if not is_installed(package)]:
        return None, f"{', '.join(missing)} would be needed, and is not installed"
    try:
        base = base_of(source)
    except ConfigError as error:
        if verify:
            raise
        return None, error.problems[0] if error.problems else str(error)
    billions = source.shape.num_parameters / 1e9
    if verify is None and source.shape.num_parameters > AUTO_PARAMETERS:
        return None, f"the base has {billions:.1f} billion parameters; --verify compares it all the same"
    return check(base), "logits of a probe were compared"


def base_of(source: AdapterSource) -> Path:
    """Return the base that an adapter was made for, as a Hugging Face directory on this machine.

    Raises:
        ConfigError: it is not here, or what is here under its name is another.
    """
    expected = source.base
    base = locate_base(ModelConfig(pretrained=expected.pretrained, revision=expected.revision))
    if base.path is None:
        raise ConfigError("the base is needed", [f"{expected.name} is not on this machine"])
    if expected.fingerprint is not None and (found := base_identity(base).fingerprint) != expected.fingerprint:
        raise ConfigError(
            "the base is needed",
            [
                f"{base.path} is another model than {source.path} was trained on (fingerprint {found[:12]}...,"
                f" expected {expected.fingerprint[:12]}...)"
            ],
        )
    return local_directory(base)


def gate_record(gate: Gate | None, reason: str) -> dict[str, Any]:
    """Return what is written beside an export about its gate."""
    return {"checked": False, "reason": reason} if gate is None else {"checked": True, **attrs.asdict(gate)}
