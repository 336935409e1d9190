"""Are the processes of a launch the same program, asked for the same? Compared once, before anything heavy is loaded.

Hosts differ: an environment that was updated on one, a checkout that was edited, a file system that shows another file.
Each process would do its own share of another computation, and nothing else would notice.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ckptrain.checkpoint.ranks import gather_to_all
from ckptrain.config.load import flatten
from ckptrain.errors import StartRefused
from ckptrain.lifecycle.drift import is_by_fingerprint
from ckptrain.megatron.platform import enter_platform
from ckptrain.training.start import Survey, versions

_SHOWN_PROBLEMS = 20


@attrs.frozen(kw_only=True)
class Process:
    """What a process is, as far as numbers may depend on it, and what it was asked for."""

    rank: int
    host: str
    facts: Mapping[str, Any]
    """By a name that a message can have: versions, code, fingerprints, config keys."""
    gpu: str | None

    def who(self) -> str:
        """Name it."""
        return f"rank {self.rank} on {self.host}"


def check_agreement(survey: Survey, rank: int, warn: Callable[[str], object]) -> None:
    """Refuse a launch whose processes differ; warn where only their speed does; collective.

    Raises:
        StartRefused: on every rank; says which differ from rank 0, and in what.
    """
    first, *others = gather_to_all(_this_process(survey, rank))
    problems = [problem for other in others for problem in _differences(first, other)]
    if problems:
        more = [f"and {len(problems) - _SHOWN_PROBLEMS} more"] if len(problems) > _SHOWN_PROBLEMS else []
        raise StartRefused("the processes of this launch are not the same", [*problems[:_SHOWN_PROBLEMS], *more])
    if text := _other_gpus([first, *others]):
        warn(text)


def _this_process(survey: Survey, rank: int) -> Process:
    # Paths may be others on each host: what they lead to is compared.
    asked = {key: value for key, value in flatten(survey.config).items() if not is_by_fingerprint(key)}
    return Process(
        rank=rank,
        host=socket.gethostname(),
        facts={
            **{f"version of {package}": version for package, version in versions().items()},
            "code of ckptrain": _digest_of_code(),
            "machine": platform.machine(),
            "fingerprint of the base": survey.identity.fingerprint,
            "fingerprint of the tokenizer": survey.tokenizer_fingerprint,
            "program": attrs.asdict(survey.program.parts),
            **asked,
        },
        gpu=_gpu_name(),
    )


def _gpu_name() -> str | None:
    if not enter_platform().is_cuda:
        return None
    import torch

    name: str = torch.cuda.get_device_name()
    return name


def _digest_of_code() -> str:
    """Return the SHA-256 of ckptrain's modules: two checkouts may say that they are the same version."""
    package = Path(__file__).parents[1]
    sha256 = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sha256.update(os.fsencode(path.relative_to(package)) + b"\0" + path.read_bytes())
    return sha256.hexdigest()


def _differences(first: Process, other: Process) -> list[str]:
    return [
        f"{name} is {_shown(other.facts.get(name))} for {other.who()}, {_shown(first.facts.get(name))} for"
        f" {first.who()}: {_cure(name)}"
        for name in {**first.facts, **other.facts}
        if first.facts.get(name) != other.facts.get(name)
    ]


def _cure(name: str) -> str:
    if name.startswith("version of ") or name == "code of ckptrain":
        return "install the same on all hosts"
    if name.startswith("fingerprint of "):
        return "let all hosts see the same files"
    return "start all with the same configuration"


def _shown(value: object) -> str:
    text = "not there" if value is None else str(value)
    return text if len(text) < 32 else f"{text[:12]}..."


def _other_gpus(processes: Sequence[Process]) -> str | None:
    if len({process.gpu for process in processes}) == 1:
        return None
    there = "; ".join(f"{process.who()}: {process.gpu or 'no GPU'}" for process in processes)
    return f"the GPUs of this launch differ, and all wait for the slowest: {there}"
