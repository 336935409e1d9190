"""A safetensors file written tensor by tensor, in any order, of which only one is in memory at a time.

safetensors itself (0.8) writes a file of tensors that are all there at once. Names, types and shapes are enough to know
where each belongs, so each goes straight to its place; the bytes are those that `safetensors.torch.save_file` writes.
"""

from __future__ import annotations

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
        self._path, self._declared = path, dict(declared)
        if unknown := sorted({entry.dtype for entry in declared.values()} - _CODES.keys()):
            raise ValueError(f"cannot write {path}: {unknown[0]} is not one of {', '.join(sorted(_CODES))}")
        order = sorted(self._declared, key=lambda name: (_LAYOUT_ORDER[self._declared[name].dtype], name))
        document: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
        starts, end = {}, 0
        for name in order:
            entry = self._declared[name]
            starts[name], end = end, end + entry.num_bytes
            places = [starts[name], end]
            document[name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": places}
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        header = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
        if len(header) > _LARGEST_HEADER:
            raise ValueError(f"cannot write {path}: {len(order):,} tensors are more than one safetensors file can have")
        self._header = len(header).to_bytes(8, "little") + header
        self._starts = {name: len(self._header) + start for name, start in starts.items()}
        self._left = dict.fromkeys(order)

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
            if self._left:
                named = ", ".join(list(self._left)[:_MOST_NAMED])
                raise ValueError(
                    f"{self._path} lacks {len(self._left)} of {len(self._declared)} tensors that were declared: {named}"
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
        if name not in self._left:
            raise ValueError(f"{name} is written to {self._path} for the second time")
        expected = self._declared[name]
        found = Declared(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if found != expected:
            raise ValueError(
                f"{name} is {found.dtype} {list(found.shape)}, and was declared for {self._path} as {expected.dtype}"
                f" {list(expected.shape)}"
            )
        self._file.seek(self._starts[name])
        self._file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        del self._left[name]
