"""What does a GGUF file say about itself? Its metadata and tensor list, read without the weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. All little-endian: magic `GGUF`, version (uint32),
tensor count and key count (uint64), then the keys, each a name, a type and a value, then for each tensor its name,
dimensions (innermost first), type and offset. The `gguf` package reads the same, but builds an array object for each
of a vocabulary's hundred thousand strings, which takes seconds; here arrays are stepped over.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from pathlib import Path
from typing import Any

import attrs

from ckptrain.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Type number -> struct format; the numbers are the format's own.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_LONGEST_NAME = 65535  # bytes; a key or tensor name beyond this means that the file is not what it claims
_MOST_ENTRIES = 1 << 20


@attrs.frozen(kw_only=True)
class GgufHeader:
    """A GGUF file's metadata, each array as its length, and each tensor's shape, outermost dimension first."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    tokenizer_sha256: str


class _Cursor:
    """A position in the file; reading past its end is an error of struct or of the bounds checked here."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def scalar(self, layout: str) -> Any:
        """Read one number."""
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def string(self, longest: int | None = None) -> str:
        """Read a length (uint64) and so many bytes of UTF-8."""
        length = self.scalar("<Q")
        if self.at + length > len(self.data) or (longest is not None and length > longest):
            raise ValueError(f"a string of {length} bytes at byte {self.at}")
        text = self.data[self.at : self.at + length].decode("utf-8", errors="replace")
        self.at += length
        return text

    def value(self, type_number: int) -> Any:
        """Read a value; of an array only its length, but step over all of it."""
        if type_number == _STRING:
            return self.string()
        if type_number == _ARRAY:
            return self.array()
        if type_number not in _SCALARS:
            raise ValueError(f"unknown value type {type_number} at byte {self.at}")
        return self.scalar(_SCALARS[type_number])

    def array(self) -> int:
        """Step over an array and return its length."""
        item_type, length = self.scalar("<I"), self.scalar("<Q")
        if item_type in _SCALARS:
            self.at += length * struct.calcsize(_SCALARS[item_type])
        elif item_type == _STRING:
            self.skip_strings(length)
        else:
            raise ValueError(f"an array of type {item_type} at byte {self.at}")
        if self.at > len(self.data):
            raise ValueError(f"an array of {length} items, longer than the file")
        return int(length)

    def skip_strings(self, count: int) -> None:
        """Step over `count` strings; the loop that decides how fast a header is read."""
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self.at = at


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        ConfigError: it cannot be read, is not GGUF, of another version, or cut off.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(data)
    except OSError as error:
        raise ConfigError(f"cannot read {path}", [str(error.strerror)]) from error
    except (struct.error, ValueError, MemoryError) as error:
        raise ConfigError(f"cannot read {path} as a GGUF file", [f"{error}: it is damaged or not GGUF"]) from error


def _read(data: mmap.mmap) -> GgufHeader:
    if data[:4] != _MAGIC:
        raise ValueError(f"it starts with {data[:4]!r}, expected {_MAGIC!r}")
    cursor = _Cursor(data, 4)
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, expected one of {_VERSIONS}")
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    if max(num_tensors, num_keys) > _MOST_ENTRIES:
        raise ValueError(f"it claims {num_tensors} tensors and {num_keys} keys")
    metadata: dict[str, Any] = {}
    tokenizer = hashlib.sha256()
    for _ in range(num_keys):
        start = cursor.at
        key = cursor.string(_LONGEST_NAME)
        metadata[key] = cursor.value(cursor.scalar("<I"))
        if key.startswith("tokenizer."):
            tokenizer.update(data[start : cursor.at])
    tensors = dict(_tensor(cursor) for _ in range(num_tensors))
    return GgufHeader(metadata=metadata, tensors=tensors, tokenizer_sha256=tokenizer.hexdigest())


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...]]:
    name = cursor.string(_LONGEST_NAME)
    num_dimensions = cursor.scalar("<I")
    if num_dimensions > 4:
        raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
    dimensions = [cursor.scalar("<Q") for _ in range(num_dimensions)]
    cursor.at += 12  # its type (uint32) and offset (uint64)
    return name, tuple(reversed(dimensions))
