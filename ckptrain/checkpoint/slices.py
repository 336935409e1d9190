"""One layer of a stacked tensor at a time: only its bytes are read, out of whatever pieces a layout has written.

DCP reads a piece whole before it takes a part of it. Here the numbers are read from where they lie in their archives,
straight into the result, so that memory goes with what is asked for and not with what is stored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs
import torch
from torch import Tensor

from ckptrain.checkpoint.dcp_metadata import DcpChunk, DcpTensor, read_dcp_metadata
from ckptrain.checkpoint.manifest import printable
from ckptrain.checkpoint.tensor_record import NumbersPlace, find_numbers
from ckptrain.errors import CheckpointDamaged

_MOST_OPEN_FILES = 128
"""A layout can write more files than a process may have open; that read longest ago is closed then."""


@attrs.frozen(kw_only=True)
class _Part:
    """The part of a piece that is asked for."""

    first: int
    """Which of the piece's numbers comes first."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """How many of the piece's numbers lie from the first to the last, both included."""
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Tell whether its numbers lie one after the other, in order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


class SliceReader:
    """The tensors of one DCP directory, read whole or a layer at a time; files stay open until it is closed."""

    def __init__(self, directory: Path, tensors: Mapping[str, DcpTensor] | None = None) -> None:
        """Read what the directory says that it holds, and none of the numbers.

        Args:
            directory: where the files are.
            tensors: what is in it, where that has been read already, as that of another program has to be.

        Raises:
            CheckpointDamaged: it is not as ckptrain writes it.
        """
        self._directory = directory
        self.tensors: Mapping[str, DcpTensor] = read_dcp_metadata(directory).tensors if tensors is None else tensors
        """By stored name: shape, type, and the pieces."""
        self._files: dict[str, FileIO] = {}
        self._places: dict[tuple[str, int], NumbersPlace] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor, or what lies at `index` along its first axis.

        Besides the result, memory holds no more than the part of one piece.

        Args:
            name: as in `tensors`.
            index: from 0; None for the whole.

        Returns:
            Contiguous, in host memory, of the shape [...] or [...][1:].

        Raises:
            KeyError: there is no such tensor.
            IndexError: it has no such index.
            CheckpointDamaged: a file cannot be read, or holds something else than the tensor.
        """
        stored = self.tensors[name]
        if index is not None and not 0 <= index < (stored.shape[0] if stored.shape else 0):
            raise IndexError(f"{name} has the shape {list(stored.shape)}, and {index} is not on its first axis")
        skipped = 0 if index is None else 1
        result = torch.empty(stored.shape[skipped:], dtype=getattr(torch, stored.dtype))
        for chunk in stored.chunks:
            if 0 in chunk.shape or (index is not None and not 0 <= index - chunk.offset[0] < chunk.shape[0]):
                continue
            with self._damage(name, chunk):
                place = self._place(chunk, stored.dtype)
                first = 0 if index is None else (index - chunk.offset[0]) * place.strides[0]
                part = _Part(first=first, shape=chunk.shape[skipped:], strides=place.strides[skipped:])
                target = result
                for axis, start in enumerate(chunk.offset[skipped:]):
                    target = target.narrow(axis, start, part.shape[axis])
                self._read_part(chunk, place, part, target)
        return result

    def _read_part(self, chunk: DcpChunk, place: NumbersPlace, part: _Part, target: Tensor) -> None:
        """Fill a part of the result from a part of a piece."""
        position = chunk.start + place.start + part.first * target.itemsize
        if part.is_contiguous and target.is_contiguous():
            self._read_bytes(chunk.file, position, _bytes_of(target))
            return
        span = torch.empty(part.span, dtype=target.dtype)
        self._read_bytes(chunk.file, position, _bytes_of(span))
        target.copy_(span.as_strided(part.shape, part.strides))

    def _read_bytes(self, name: str, position: int, buffer: memoryview) -> None:
        """Fill a buffer from a file; the system may give less than it is asked for at a time."""
        file = self._file(name)
        file.seek(position)
        while buffer:
            count = file.readinto(buffer)
            if not count:
                raise ValueError(f"ends before byte {position + len(buffer)} of the file")
            buffer, position = buffer[count:], position + count

    def _place(self, chunk: DcpChunk, dtype: str) -> NumbersPlace:
        """Return where the numbers of a piece are, looked up once."""
        key = (chunk.file, chunk.start)
        if key not in self._places:
            found = find_numbers(self._file(chunk.file), chunk.start, chunk.num_bytes, chunk.shape, dtype)
            if isinstance(found, str):
                raise ValueError(found)
            self._places[key] = found
        return self._places[key]

    def _file(self, name: str) -> FileIO:
        """Return a file, open and unbuffered: a buffer would read more than is asked for."""
        file = self._files.pop(name, None)
        if file is None:
            while len(self._files) >= _MOST_OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            file = (self._directory / name).open("rb", buffering=0)
        self._files[name] = file  # last, since it is the one read last
        return file

    @contextlib.contextmanager
    def _damage(self, name: str, chunk: DcpChunk) -> Iterator[None]:
        """Tell what goes wrong with a piece as damage of the checkpoint."""
        try:
            yield
        except OSError as error:
            problem = f"cannot be read: {os.strerror(error.errno) if error.errno else error}"
        except ValueError as error:
            problem = str(error)
        else:
            return
        problem = printable(f"{name}, stored in {chunk.file} at byte {chunk.start}, {problem}")
        raise CheckpointDamaged(f"could not read {self._directory}", [problem]) from None


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of any type."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
