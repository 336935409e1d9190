"""What is a training record, and how is one told that is malformed?

Standard library only: a plan must name a data file and its fingerprint without waiting for torch.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ckptrain.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_PROBLEMS = 20


@attrs.frozen(kw_only=True)
class Message:
    """One turn of a conversation.

    `extra` has what a chat template may use besides: tool_calls, tool_call_id, name, reasoning_content, thinking; never
    null. The arguments of a tool call are an object, also where the file has them as JSON text.
    """

    role: str
    content: str
    extra: Mapping[str, Any] = attrs.field(factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the turn as chat templates take it."""
        return {"role": self.role, "content": self.content, **self.extra}


@attrs.frozen(kw_only=True)
class Conversation:
    """Turns, which the chat template renders; at least one of those after the prompt is the assistant's.

    `tools` are the functions that the model may call, as JSON schemas. The first `num_prompt_messages` turns are given,
    and never learnt, whoever speaks.
    """

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    num_prompt_messages: int = 0


@attrs.frozen(kw_only=True)
class PromptCompletion:
    """A record of the format `prompt_completion`: plain text, which no chat template touches."""

    where: str
    prompt: str
    completion: str


Record = Conversation | PromptCompletion


class Malformed(Exception):  # noqa: N818  # never leaves this room
    """What is wrong with one row."""


class DamagedFile(Exception):  # noqa: N818  # never leaves this room
    """Why the rest of a file cannot be read."""


@attrs.frozen(kw_only=True)
class Problem:
    """A row that is no record, and why; rows are read to the end, so that all of them are told at once."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


_DIGESTS: dict[tuple[int, ...], str] = {}
_SETTLED_NS = 2_000_000_000
"""A file may be written twice within a tick of the file system's clock: younger ones are always read again."""


def data_fingerprint(path: Path) -> str:
    """Return the SHA-256 of the file's bytes as hexadecimal digits: the identity of a file across starts.

    A file that has not been written to since it was read here is not read again: a start asks more than once.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            if state in _DIGESTS:
                return _DIGESTS[state]
            is_settled = time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > _SETTLED_NS
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error
    if is_settled:
        _DIGESTS[state] = digest
    return digest


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a file that the operating system does not let us read."""
    reason = error.strerror or str(error)
    return DataError(f"cannot read the data file {path}", [f"{reason}; paths are relative to the config file"])


def shorten(problems: Sequence[str]) -> list[str]:
    """Keep the first 20 problems and count the others: a file in the wrong format is wrong on every line."""
    shown = list(problems[:MAX_PROBLEMS])
    if len(problems) > MAX_PROBLEMS:
        shown.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return shown


def keys_of(row: Mapping[str, Any]) -> str:
    """Name the keys of an object, as messages show them."""
    return "the keys " + ", ".join(map(repr, row)) if row else "an empty object"


def kind_of(value: object) -> str:
    """Name the JSON type of a value, as messages show it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: object) -> str:
    """Show a value that should be one of a few texts."""
    return repr(value) if isinstance(value, str) else kind_of(value)
