"""How far has a run of Weights & Biases come that was recorded offline? Read from the files that wandb leaves.

`offline-run-*-ID/run-ID.wandb` is a log as LevelDB has it (https://github.com/google/leveldb, doc/log_format.md) with a
header of 7 bytes, whose records are wandb's own protocol buffers. wandb writes it every few seconds, so a kill loses
the last of them: only the file says what it holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER_BYTES = 7
_BLOCK_BYTES = 32_768
_RECORD = struct.Struct("<IHB")
"""Checksum, length, and whether it is a whole record, or the first, a middle or the last part of one."""
_WHOLE, _LAST = 1, 4


def last_step_in(directory: Path, run_id: str) -> int:
    """Return the highest step that the offline files of a run hold; -1 where there is none."""
    files = directory.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    return max((step for path in files for step, _ in history(path)), default=-1)


def history(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a file, as far as it is whole: the step, and each value as JSON."""
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records(path.read_bytes()):
        record: Any = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            yield int(items["_step"]), items


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log up to the first that was cut short."""
    at, parts = _HEADER_BYTES, b""
    while at + _RECORD.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _RECORD.size:  # the end of a block that has no room for another record
            at += left
            continue
        _, length, kind = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        part = data[at : at + length]
        if not kind or len(part) < length:
            return
        at += length
        parts += part
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
