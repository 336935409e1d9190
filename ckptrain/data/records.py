"""Read training records from JSONL, and say which lines are malformed.

Standard library only: a plan must name a data file and its fingerprint without waiting for torch. `json` rather than
orjson because orjson silently keeps the last of duplicate keys, which in a data file is a lost turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from ckptrain.errors import DataError

RecordFormat = Literal["auto", "messages", "prompt_completion"]

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_PROBLEMS = 20


@attrs.frozen(kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@attrs.frozen(kw_only=True)
class Conversation:
    """A record of the format `messages`; it has at least one assistant turn."""

    where: str
    messages: tuple[Message, ...]


@attrs.frozen(kw_only=True)
class PromptCompletion:
    """A record of the format `prompt_completion`: plain text, which no chat template touches."""

    where: str
    prompt: str
    completion: str


Record = Conversation | PromptCompletion


class _Malformed(Exception):  # noqa: N818  # never leaves this module
    """What is wrong with one line."""


def read_records(path: Path, record_format: RecordFormat = "auto") -> list[Record]:
    """Read every record of a JSONL file; blank lines are skipped, other keys of a record are left alone.

    Raises:
        DataError: the file cannot be read, holds no record, or has malformed lines; the first 20 are named.
    """
    records: list[Record] = []
    problems: list[str] = []
    parse = None if record_format == "auto" else _PARSERS[record_format]
    for where, raw in _lines(path):
        try:
            row = _parse_object(raw)
            if parse is None:
                parse = _PARSERS[_format_of(row)]
            records.append(parse(where, row))
        except _Malformed as found:
            problems.append(f"{where}: {found}")
    if problems:
        raise DataError(f"{path} has {len(problems)} malformed line(s)", shorten(problems))
    if not records:
        raise DataError(f"{path} has no records", ["expected one JSON object a line, found none; check data.train"])
    return records


def data_fingerprint(path: Path) -> str:
    """Return the SHA-256 of the file's bytes as hexadecimal digits: the identity of a dataset across starts.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def shorten(problems: Sequence[str]) -> list[str]:
    """Keep the first 20 problems and count the others: a file in the wrong format is wrong on every line."""
    shown = list(problems[:MAX_PROBLEMS])
    if len(problems) > MAX_PROBLEMS:
        shown.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return shown


def _unreadable(path: Path, error: OSError) -> DataError:
    reason = error.strerror or str(error)
    return DataError(f"cannot read the data file {path}", [f"{reason}; paths are relative to the config file"])


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (file:line, bytes) of each line that is not blank."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield f"{path}:{number}", raw
    except OSError as error:
        raise _unreadable(path, error) from error


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise _Malformed(f"not UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise _Malformed(f"not JSON: {error.msg} at column {error.colno}; expected one object a line") from error
    except RecursionError as error:
        raise _Malformed("not a record: nested too deeply") from error
    if not isinstance(row, dict):
        raise _Malformed(f"expected a JSON object, found {_kind(row)}")
    return row


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise _Malformed(f"{', '.join(map(repr, twice))} appears twice in one object; keep one of them")
    return row


def _format_of(row: dict[str, Any]) -> Literal["messages", "prompt_completion"]:
    """Decide what `auto` means by the first record; the others must be alike."""
    if "messages" in row:
        return "messages"
    if "prompt" in row or "completion" in row:
        return "prompt_completion"
    raise _Malformed(f"expected `messages`, or `prompt` and `completion`; found {_keys(row)}")


def _conversation(where: str, row: dict[str, Any]) -> Record:
    if "messages" not in row:
        raise _Malformed(f"expected `messages`, found {_keys(row)}")
    turns = row["messages"]
    if not isinstance(turns, list):
        raise _Malformed(f"messages: expected a list of {{role, content}}, found {_kind(turns)}")
    if not turns:
        raise _Malformed("messages: the list is empty")
    messages = tuple(_message(f"messages[{index}]", turn) for index, turn in enumerate(turns))
    if all(message.role != "assistant" for message in messages):
        raise _Malformed("messages: no assistant turn, so there is nothing to learn from")
    return Conversation(where=where, messages=messages)


def _message(name: str, turn: object) -> Message:
    if not isinstance(turn, dict):
        raise _Malformed(f"{name}: expected {{role, content}}, found {_kind(turn)}")
    missing = [key for key in ("role", "content") if key not in turn]
    if missing:
        raise _Malformed(f"{name}: {' and '.join(missing)} missing, found {_keys(turn)}")
    # A key that is set and not used (tool_calls, say) would train something else than the file says.
    unused = sorted(key for key, value in turn.items() if key not in {"role", "content"} and value is not None)
    if unused:
        raise _Malformed(f"{name}: only role and content are supported, found {', '.join(map(repr, unused))} as well")
    role = turn["role"]
    if role not in ROLES:
        raise _Malformed(f"{name}.role: expected one of {', '.join(ROLES)}; found {_shown(role)}")
    content = _text(f"{name}.content", turn["content"], may_be_empty=role != "assistant")
    return Message(role=role, content=content)


def _prompt_completion(where: str, row: dict[str, Any]) -> Record:
    missing = [key for key in ("prompt", "completion") if key not in row]
    if missing:
        raise _Malformed(f"{' and '.join(missing)} missing, found {_keys(row)}")
    for key in ("prompt", "completion"):
        if isinstance(row[key], list):
            raise _Malformed(f"{key}: expected a string, found a list; for turns write {{messages: [...]}} instead")
    prompt = _text("prompt", row["prompt"], may_be_empty=False)
    return PromptCompletion(where=where, prompt=prompt, completion=_text("completion", row["completion"]))


def _text(name: str, value: object, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _Malformed(f"{name}: expected a string, found {_kind(value)}")
    if not value and not may_be_empty:
        raise _Malformed(f"{name}: the text is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair; tokenizers crash on it
        raise _Malformed(f"{name}: half a surrogate pair at character {error.start} is not text") from error
    return value


def _keys(row: dict[str, Any]) -> str:
    return "the keys " + ", ".join(map(repr, row)) if row else "an empty object"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else _kind(value)


_PARSERS: dict[str, Callable[[str, dict[str, Any]], Record]] = {
    "messages": _conversation,
    "prompt_completion": _prompt_completion,
}
