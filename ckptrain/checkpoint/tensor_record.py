"""One tensor as torch.save wrote it: a zip archive with a pickle that describes it and a member with its numbers.

torch.load with weights_only runs none of it, and still would unpack what is compressed and believe what is claimed.
So before it gets to see one, the archive is compared with what torch writes for the tensor that it is said to be.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from typing import BinaryIO

import attrs

from ckptrain.checkpoint.inert_pickle import Made, Name, Reference, read_pickle
from ckptrain.checkpoint.manifest import ITEM_SIZES
from ckptrain.checkpoint.strict_json import shown

_DESCRIPTION, _NUMBERS, _BYTE_ORDER = "data.pkl", "data/0", "byteorder"
_REQUIRED = {_DESCRIPTION, _NUMBERS, _BYTE_ORDER, "version"}
_ALLOWED_MEMBERS = _REQUIRED | {".format_version", ".storage_alignment", ".data/serialization_id"}
_LARGEST_READ = 64 * 1024
"""Of an archive's directory or a member but the numbers; torch's have a few hundred bytes."""
_ENCRYPTED = 1
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a member, before its name: signature, and the lengths of the name and of what pads up to the contents."""
_LOCAL_SIGNATURE = b"PK\x03\x04"

_TENSOR = Name("torch._utils", "_rebuild_tensor_v2")
_NO_HOOKS = Name("collections", "OrderedDict")
_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "bfloat16": "BFloat16Storage",
    "float16": "HalfStorage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}
_ALLOWED_NAMES = frozenset({_TENSOR, _NO_HOOKS, *(Name("torch", storage) for storage in _STORAGES.values())})


@attrs.frozen(kw_only=True)
class NumbersPlace:
    """Where the numbers of one tensor lie in its archive, so that some of them can be read without the others."""

    start: int
    """Bytes from the beginning of the archive to the first number."""
    strides: tuple[int, ...]
    """For each axis, how many numbers lie between one element and the next."""


def find_numbers(file: BinaryIO, start: int, num_bytes: int, shape: tuple[int, ...], dtype: str) -> NumbersPlace | str:
    """Return where in `num_bytes` of a file from `start` the numbers of a tensor of this shape and type lie.

    The numbers are not read. Text is the reason why there is no such tensor.
    """
    try:
        with zipfile.ZipFile(part := _Part(file, start, num_bytes)) as archive:
            numbers = math.prod(shape) * ITEM_SIZES[dtype]
            if (problem := _members_problem(archive, numbers, num_bytes)) is not None:
                return problem
            prefix = archive.namelist()[0].partition("/")[0]
            if (order := archive.read(f"{prefix}/{_BYTE_ORDER}").decode()) != sys.byteorder:
                return f"has numbers whose bytes are in {shown(order)} order, and this machine's are {sys.byteorder}"
            strides = _strides_or_problem(
                read_pickle(archive.read(f"{prefix}/{_DESCRIPTION}"), _ALLOWED_NAMES), shape, dtype
            )
            if isinstance(strides, str):
                return strides
            first = _contents_start(part, archive.getinfo(f"{prefix}/{_NUMBERS}"))
        if first + numbers > num_bytes:
            return f"has numbers that end at byte {first + numbers} of its {num_bytes}"
        return NumbersPlace(start=first, strides=strides)
    except Exception as error:  # a damaged archive can raise anything
        return f"is not a tensor that torch.save wrote: {shown(str(error) or type(error).__name__)}"


def record_problem(file: BinaryIO, start: int, num_bytes: int, shape: tuple[int, ...], dtype: str) -> str | None:
    """Say why `num_bytes` of a file from `start` are not a tensor of this shape and type; None where they are.

    The numbers are not read.
    """
    found = find_numbers(file, start, num_bytes, shape, dtype)
    return found if isinstance(found, str) else None


class _Part:
    """A part of a file as a file of its own, of which nothing large is read at once."""

    def __init__(self, file: BinaryIO, start: int, num_bytes: int) -> None:
        self._file, self._start, self._num_bytes = file, start, num_bytes
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._num_bytes - self._position)
        size = left if size < 0 else min(size, left)
        if size > _LARGEST_READ:
            raise ValueError(f"it has a member or a directory of {size} bytes")
        self._file.seek(self._start + self._position)
        data = self._file.read(size)
        self._position += len(data)
        return data


def _members_problem(archive: zipfile.ZipFile, numbers: int, num_bytes: int) -> str | None:
    """Compare an archive's directory with that of a tensor whose numbers take so many bytes."""
    members = archive.infolist()
    prefix = members[0].filename.partition("/")[0] + "/" if members else ""
    names = [member.filename.removeprefix(prefix) for member in members]
    if foreign := sorted(set(names) - _ALLOWED_MEMBERS):
        return f"has a member {shown(foreign[0])}, which torch.save does not write"
    if missing := sorted(_REQUIRED - set(names)):
        return f"has no member {missing[0]}"
    if len(set(names)) < len(names):
        return "has two members of the same name"
    for name, member in zip(names, members, strict=True):
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            return f"has a compressed member {name}, which torch.save does not write"
        if member.flag_bits & _ENCRYPTED:
            return f"has an encrypted member {name}"
        expected = numbers if name == _NUMBERS else None
        if expected is not None and member.file_size != expected:
            return f"has {member.file_size} bytes of numbers, expected {expected}"
        if expected is None and member.file_size > _LARGEST_READ:
            return f"has a member {name} of {member.file_size} bytes"
    if sum(member.file_size for member in members) > num_bytes:
        return f"claims more than its {num_bytes} bytes"
    return None


def _contents_start(part: _Part, member: zipfile.ZipInfo) -> int:
    """Return where the contents of a member begin: after its own header, whose length the directory does not have."""
    part.seek(member.header_offset)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(part.read(_LOCAL_HEADER.size))
    if signature != _LOCAL_SIGNATURE or part.read(name_length) != member.filename.encode():
        raise ValueError(f"the member {member.filename} is not where the directory has it")
    return part.tell() + int(extra_length)


def _strides_or_problem(description: object, shape: tuple[int, ...], dtype: str) -> tuple[int, ...] | str:
    """Compare what an archive's pickle would make with the call that makes this tensor, and return its strides."""
    storage = ("storage", Name("torch", _STORAGES[dtype]), "0", "cpu", math.prod(shape))
    match description:
        case Made(
            of=made_of,
            arguments=(
                Reference(id=found),
                0,
                tuple() as found_shape,
                tuple() as strides,
                bool(),
                Made(of=hooks, arguments=(), state=None),
            ),
            state=None,
        ) if made_of == _TENSOR and hooks == _NO_HOOKS:
            pass
        case _:
            return "is not a plain tensor"
    if not _equal(found, storage) or not _equal(found_shape, shape):
        return f"is another tensor than the {dtype} {list(shape)} that it is said to be"
    if len(strides) != len(shape) or any(type(step) is not int or step < 0 for step in strides):
        return "has strides that are none"
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return "reaches beyond its numbers" if math.prod(shape) and last >= math.prod(shape) else strides


def _equal(found: object, expected: tuple[object, ...]) -> bool:
    """Compare flat tuples, type by type; what a pickle nests is not gone into."""
    if type(found) is not tuple or len(found) != len(expected):
        return False
    return all(type(left) is type(right) and left == right for left, right in zip(found, expected, strict=True))
