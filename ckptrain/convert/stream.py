"""A safetensors file written tensor by tensor, in any order, of which only one is in memory at a time.

safetensors itself (0.8) writes a file of tensors that are all there at once. Names, types and shapes are enough to know
where each belongs, so each goes straight to its place; the bytes are those that `safetensors.torch.save_file` writes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import attrs
import torch
from torch import Tensor

from ckptrain.checkpoint.manifest import ITEM_SIZES

_CODES = {
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""What safetensors calls the types of a checkpoint's tensors, in the order in which it lays them out."""
_LAYOUT_ORDER = {dtype: position for position, dtype in enumerate(_CODES)}
_ALIGNMENT = 8
_LARGEST_HEADER = 100_000_000
"""What safetensors reads; some 700,000 tensors."""
_MOST_NAMED = 10
_PYTORCH = MappingProxyType({"format": "pt"})


@attrs.frozen
class Declared:
    """A tensor that is going to be written."""

    dtype: str
    """As torch names it without its prefix."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its numbers."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class SafetensorsStream:
    """Writes the tensors of one file, each once; the header comes last, so a file that is cut short does not load."""

    def __init__(self, path: Path, declared: Mapping[str, Declared], metadata: Mapping[str, str] = _PYTORCH) -> None:
        """Plan where everything lies; the disk is touched by entering the context.

        Args:
            path: the file to make.
            declared: all its tensors, by name.
            metadata: what the header says besides.

        Raises:
            ValueError: a type is none that safetensors has, or there are too many tensors for one file.
        """
        if unknown := sorted({entry.dtype for entry in declared.values()} - _CODES.keys()):
            raise ValueError(f"cannot write {path}: {unknown[0]} is not one of {', '.join(sorted(_CODES))}")
        self._path, self._declared = path, dict(declared)
        self._starts: dict[str, int] = {}
        """Of those that are left to write, counted from the end of the header."""
        header, end = bytearray(f'{{"__metadata__":{_json(dict(sorted(metadata.items())))}'.encode()), 0
        # Entry by entry: of a hundred thousand, objects for all of them would be more than anything else in memory.
        for name in sorted(declared, key=lambda name: (_LAYOUT_ORDER[declared[name].dtype], name)):
            entry = declared[name]
            self._starts[name], end = end, end + entry.num_bytes
            places = {"dtype": _CODES[entry.dtype], "shape": entry.shape, "data_offsets": [self._starts[name], end]}
            header += f",{_json(name)}:{_json(places)}".encode()
        header += b"}"
        header += b" " * (-len(header) % _ALIGNMENT)
        if len(header) > _LARGEST_HEADER:
            raise ValueError(
                f"cannot write {path}: {len(declared):,} tensors are more than one safetensors file can have"
            )
        self._header = len(header).to_bytes(8, "little") + header

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the header, unless something has gone wrong.

        Raises:
            ValueError: a declared tensor was not written; the file then does not load.
        """
        with self._file:
            if error is not None:
                return
            if self._starts:
                named = ", ".join(itertools.islice(self._starts, _MOST_NAMED))
                raise ValueError(
                    f"{self._path} lacks {len(self._starts)} of the {len(self._declared)} tensors declared: {named}"
                )
            self._file.seek(0)
            self._file.write(self._header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor to its place; of its memory a copy is made only where it is not contiguous on the host.

        Raises:
            ValueError: it was not declared so, or was written before.
        """
        if name not in self._declared:
            raise ValueError(f"{name} was not declared for {self._path}")
        if name not in self._starts:
            raise ValueError(f"{name} is written to {self._path} for the second time")
        expected = self._declared[name]
        found = Declared(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if found != expected:
            raise ValueError(
                f"{name} is {found.dtype} {list(found.shape)}, and was declared for {self._path} as {expected.dtype}"
                f" {list(expected.shape)}"
            )
        self._file.seek(len(self._header) + self._starts[name])
        self._file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        del self._starts[name]


def _json(value: object) -> str:
    """Return JSON as safetensors writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
