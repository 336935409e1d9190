"""What a directory of torch's distributed checkpoint (DCP) holds, known without torch and without running any of it.

DCP describes its tensors in `.metadata`, a pickle, and stores each piece of one as a file that torch.save wrote, which
has a pickle in it too. Both are read as data, by `read_pickle`, so that a checkpoint from anywhere can be looked at,
and what is refused is named. What passes is as ckptrain writes it: tensors only, in pieces that fill them once.

Of a directory that another program has written, the tensors asked for are held to the same; what else there is in it is
listed by name, and never opened.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ckptrain.checkpoint.inert_pickle import MOST_INSTRUCTIONS, Made, Name, read_pickle
from ckptrain.checkpoint.manifest import ITEM_SIZES, MOST_DIMENSIONS, Manifest, TensorEntry, path_problem
from ckptrain.checkpoint.strict_json import LARGEST_INTEGER, shown
from ckptrain.checkpoint.tensor_record import record_problem
from ckptrain.errors import CheckpointDamaged

METADATA_NAME = ".metadata"
ADAPTER_DIRECTORY = "adapter"
OPTIMIZER_DIRECTORY = "optimizer"
DIRECTORIES = {ADAPTER_DIRECTORY: ("adapter",), OPTIMIZER_DIRECTORY: ("optimizer", "rng")}
"""The DCP directories of a checkpoint, and the groups of tensors that each holds."""

_LARGEST_METADATA = 64 * 1024 * 1024
_LARGEST_FOREIGN_METADATA = 4 * _LARGEST_METADATA
"""megatron-core names each layer's experts and random states one by one, and states of the optimizer beside them."""
_MOST_FOREIGN_INSTRUCTIONS = 4 * MOST_INSTRUCTIONS
_MOST_PROBLEMS = 20
_LONGEST_SHOWN = 200
_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INDEX, _MEMORY_FORMAT = (
    Name(_MODULE, name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "_MEM_FORMAT_ENCODING",
    )
)
_STORAGE = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_LAYOUT = Name("torch.serialization", "_get_layout")
_SIZE = Name("torch", "Size")
_DTYPES = {Name("torch", dtype): dtype for dtype in ITEM_SIZES}
_ALLOWED = frozenset(
    {
        *(_METADATA, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INDEX, _MEMORY_FORMAT, _STORAGE, _LAYOUT, _SIZE),
        *_DTYPES,
        Name(_MODULE, "StorageMeta"),
    }
)
# What torch and megatron-core leave in theirs besides: where it was saved, plans, cached metadata.
_FOREIGN = frozenset({Name("pathlib", "PosixPath"), Name("pathlib._local", "PosixPath")})
_FOREIGN_MODULES = (
    "torch.distributed.",
    "megatron.core.dist_checkpointing.",
    "nvidia_resiliency_ext.checkpointing.",
)
_REQUIRED = {"state_dict_metadata", "storage_data"}

_Shape = tuple[int, ...]


@attrs.frozen(kw_only=True)
class DcpChunk:
    """A piece of a tensor: where it lies in the tensor, and where in which file."""

    offset: _Shape
    shape: _Shape
    file: str
    """A file of the directory itself."""
    start: int
    num_bytes: int


@attrs.frozen(kw_only=True)
class DcpTensor:
    """A whole tensor and the pieces that it is stored in."""

    shape: _Shape
    dtype: str
    chunks: tuple[DcpChunk, ...]


@attrs.frozen(kw_only=True)
class DcpMetadata:
    """The tensors of one DCP directory, by global name."""

    tensors: Mapping[str, DcpTensor]


@attrs.frozen(kw_only=True)
class ForeignMetadata:
    """What a DCP directory that another program has written holds."""

    tensors: Mapping[str, DcpTensor]
    """Those that were asked for, by name."""
    others: tuple[str, ...]
    """Names of the tensors that were not."""
    objects: tuple[str, ...]
    """Names of the pickled objects."""


class _ForeignNames:
    """The names that a `.metadata` of another program may hold."""

    def __contains__(self, name: object) -> bool:
        known = name in _ALLOWED or name in _FOREIGN
        return known or (isinstance(name, Name) and name.module.startswith(_FOREIGN_MODULES))


def read_dcp_metadata(directory: Path) -> DcpMetadata:
    """Return what a DCP directory says that it holds, where its files can hold that.

    Raises:
        CheckpointDamaged: it is not as ckptrain writes it; the problems are listed.
    """
    with _damage(directory, "ckptrain"):
        metadata = _metadata(read_pickle(_read_bounded(directory, _LARGEST_METADATA), _ALLOWED))
        _check_places(metadata.tensors, directory)
    return metadata


def read_foreign_metadata(directory: Path, wanted: Callable[[str], bool]) -> ForeignMetadata:
    """Return what a DCP directory that another program has written says that it holds.

    Args:
        directory: as megatron-core's torch_dist writes it.
        wanted: tells by its name whether a tensor is asked for; only of those all is checked.

    Raises:
        CheckpointDamaged: it is no such directory, or its files cannot hold what is asked for; the problems are listed.
    """
    with _damage(directory, "megatron-core"):
        data = _read_bounded(directory, _LARGEST_FOREIGN_METADATA)
        metadata = _foreign(read_pickle(data, _ForeignNames(), _MOST_FOREIGN_INSTRUCTIONS), wanted)
        _check_places(metadata.tensors, directory)
    return metadata


def metadata_problems(root: Path, manifest: Manifest) -> list[str]:
    """Return where the tensors in the checkpoint at `root` are not those of its manifest, or are none.

    Every piece of every tensor is looked at, and none of the numbers is read.
    """
    problems: list[str] = []
    for directory, groups in DIRECTORIES.items():
        tensors = {name: entry for name, entry in manifest.tensors.items() if entry.group in groups}
        listed = {name.removeprefix(f"{directory}/") for name in manifest.files if name.startswith(f"{directory}/")}
        if METADATA_NAME not in listed:
            if tensors:
                problems.append(f"{directory}/{METADATA_NAME} is not listed in the manifest, and tensors in it are")
            continue
        try:
            metadata = read_dcp_metadata(root / directory)
            found = [*_differences(metadata, tensors, listed)]
            found += [] if found else itertools.islice(_record_problems(metadata, root / directory), _MOST_PROBLEMS)
        except CheckpointDamaged as error:
            found = [*error.problems]
        except OSError as error:
            found = [f"a file beside it cannot be read: {error.strerror} ({error.filename})"]
        problems += [f"{directory}/{METADATA_NAME}: {problem}" for problem in found[:_MOST_PROBLEMS]]
    return problems


@contextlib.contextmanager
def _damage(directory: Path, program: str) -> Iterator[None]:
    """Tell what goes wrong with a description as damage of the checkpoint."""
    try:
        yield
    except OSError as error:
        raise CheckpointDamaged(f"{directory} cannot be read", [f"{error.strerror} ({error.filename})"]) from error
    except ValueError as error:
        path = directory / METADATA_NAME
        raise CheckpointDamaged(f"{path} is not a description of tensors by {program}", [str(error)]) from None


def _read_bounded(directory: Path, most: int) -> bytes:
    path = directory / METADATA_NAME
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > most:
        raise ValueError(f"it has {status.st_size} bytes, and {most} are more than a checkpoint needs")
    return path.read_bytes()


def _check_places(tensors: Mapping[str, DcpTensor], directory: Path) -> None:
    problems = list(itertools.islice(_place_problems(tensors, directory), _MOST_PROBLEMS))
    if problems:
        raise CheckpointDamaged(f"{directory / METADATA_NAME} does not describe the files beside it", problems)


def _metadata(value: object) -> DcpMetadata:
    fields = _fields(
        value, _METADATA, {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    )
    tensors, stored = _tables(fields)
    if pickled := [name for name, entry in tensors.items() if type(entry) is Made and entry.of == _BYTES]:
        listed = ", ".join(_named(name) for name in pickled[:10])
        raise ValueError(f"{listed} is a pickled object; ckptrain stores tensors only")
    return DcpMetadata(tensors=_tensors(tensors, [(_index(index), entry) for index, entry in stored.items()]))


def _foreign(value: object, wanted: Callable[[str], bool]) -> ForeignMetadata:
    match value:
        case Made(of=of, arguments=(), state=dict() as fields) if of == _METADATA and fields.keys() >= _REQUIRED:
            entries, stored = _tables(fields)
        case _:
            raise ValueError(f"it has {_text(value)} where a {_METADATA.name} is expected")
    if unnamed := [name for name in entries if type(name) is not str]:
        raise ValueError(f"it has a tensor whose name is {_text(unnamed[0])} and not text")
    objects = {name for name, entry in entries.items() if type(entry) is Made and entry.of == _BYTES}
    chosen = {name: entry for name, entry in entries.items() if name not in objects and wanted(name)}
    pieces = []
    for index, entry in stored.items():
        match index:
            case Made(of=of, arguments=(), state={"fqn": str() as name}) if of == _INDEX:
                pass
            case _:
                raise ValueError(f"it has {_text(index)} where a {_INDEX.name} is expected")
        if name in chosen:  # the index of an object has no place in a tensor
            pieces.append((_index(index), entry))
    return ForeignMetadata(
        tensors=_tensors(chosen, pieces),
        others=tuple(name for name in entries if name not in objects and name not in chosen),
        objects=tuple(name for name in entries if name in objects),
    )


def _tables(fields: Mapping[str, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    tensors, stored = fields["state_dict_metadata"], fields["storage_data"]
    if type(tensors) is not dict or type(stored) is not dict:
        raise ValueError("it has no table of tensors, or none of where they are stored")
    return tensors, stored


def _tensors(
    entries: Mapping[Any, object], stored: Iterable[tuple[tuple[str, _Shape], object]]
) -> dict[str, DcpTensor]:
    """Return the tensors of a table, each with where its pieces are stored."""
    places: dict[tuple[str, _Shape], tuple[str, int, int]] = {}
    for place, entry in stored:
        if place in places:
            raise ValueError(f"{_named(place[0])} has a piece that is stored twice")
        places[place] = _place(entry, place[0])
    result = {name: _tensor(name, entry, places) for name, entry in entries.items()}
    if places:
        raise ValueError(f"{_named(next(iter(places))[0])} is stored, and is not a piece of a tensor")
    return result


def _tensor(name: object, value: object, places: dict[tuple[str, _Shape], tuple[str, int, int]]) -> DcpTensor:
    """Return a tensor, and take out of `places` where its pieces are stored."""
    if type(name) is not str:
        raise ValueError("it has a tensor whose name is not text")
    fields = _fields(value, _TENSOR, {"properties", "size", "chunks"})
    if type(fields["chunks"]) is not list:
        raise ValueError(f"{_named(name)} has no list of pieces")
    shape = _shape(fields["size"])
    chunks = []
    for entry in fields["chunks"]:
        chunk = _fields(entry, _CHUNK, {"offsets", "sizes"})
        offset = _shape(chunk["offsets"])
        if (name, offset) not in places:
            raise ValueError(f"{_named(name)} has a piece at {list(offset)} that is not stored")
        file, start, num_bytes = places.pop((name, offset))
        chunks.append(
            DcpChunk(offset=offset, shape=_shape(chunk["sizes"]), file=file, start=start, num_bytes=num_bytes)
        )
    if not _fill(shape, chunks):
        raise ValueError(f"the pieces of {_named(name)} do not fill its shape {list(shape)} once")
    return DcpTensor(shape=shape, dtype=_dtype(fields["properties"], name), chunks=tuple(chunks))


def _dtype(value: object, name: str) -> str:
    match value:
        case Made(of=of, arguments=(), state=(Name() as dtype, layout, bool(), memory, bool())) if of == _PROPERTIES:
            pass
        case _:
            raise ValueError(f"{_named(name)} has no type")
    if (
        dtype not in _DTYPES
        or not _is_call(layout, _LAYOUT, "torch.strided")
        or not _is_call(memory, _MEMORY_FORMAT, 0)
    ):
        raise ValueError(f"{_named(name)} is not a plain tensor of numbers")
    return _DTYPES[dtype]


def _index(value: object) -> tuple[str, _Shape]:
    fields = _fields(value, _INDEX, {"fqn", "index", "offset"})
    if type(fields["fqn"]) is not str:
        raise ValueError("it has a piece of a tensor whose name is not text")
    return fields["fqn"], _shape(fields["offset"])


def _place(value: object, name: str) -> tuple[str, int, int]:
    """Return (file, start, bytes) of a stored piece of the tensor `name`."""
    if type(value) is Made and type(value.state) is dict and "transform_descriptors" in value.state:
        raise ValueError(f"{_named(name)} is stored under a transformation, which ckptrain never does")
    fields = _fields(value, _STORAGE, {"relative_path", "offset", "length"})
    file = fields["relative_path"]
    if type(file) is not str or "/" in file or path_problem(file) is not None:
        raise ValueError(f"{_named(name)} is stored in {_text(file)}, which is not a file of the directory")
    return file, _count(fields["offset"]), _count(fields["length"])


def _shape(value: object) -> _Shape:
    match value:
        case Made(of=of, arguments=(tuple() as sizes,), state=None) if of == _SIZE:
            if len(sizes) > MOST_DIMENSIONS:
                raise ValueError(f"it has a tensor of {len(sizes)} dimensions, {MOST_DIMENSIONS} at most are known")
            return tuple(_count(size) for size in sizes)
        case _:
            raise ValueError("it has a shape that is none")


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_INTEGER:
        raise ValueError(f"it has {_text(value)} for a size")
    return value


def _fields(value: object, of: Name, keys: set[str]) -> dict[str, Any]:
    """Return the fields of an object of class `of`, which has exactly these."""
    match value:
        case Made(of=found, arguments=(), state=dict() as state) if found == of and state.keys() == keys:
            return state
        case _:
            raise ValueError(f"it has {_text(value)} where a {of.name} of this version of torch is expected")


def _is_call(value: object, of: Name, argument: object) -> bool:
    match value:
        case Made(of=found, arguments=(given,), state=None):
            return found == of and type(given) is type(argument) and given == argument
        case _:
            return False


def _named(name: object) -> str:
    """Return a tensor's name for a message, as it is where it can be shown."""
    return name if type(name) is str and name.isprintable() and len(name) <= _LONGEST_SHOWN else _text(name)


def _text(value: object) -> str:
    """Describe anything that a pickle holds in a few words, without going into it."""
    if type(value) in (str, int, bool):
        return shown(value)
    return f"a {value.of}" if type(value) is Made else f"a {type(value).__name__}"


def _fill(shape: _Shape, chunks: Sequence[DcpChunk]) -> bool:
    """Tell whether the chunks fill the whole once: none leaves it, no two overlap, nothing is left out.

    Each point of space is in an odd number of boxes exactly where the boxes' corners, counted modulo 2, say so. So if
    all corners cancel but those of the whole, each point of it is covered an odd number of times, and if besides the
    volumes add up to its own, once. That takes time in proportion to the number of chunks, however they lie.
    """
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        return False
    if 0 in shape:
        return all(_is_inside(chunk, shape) for chunk in chunks)
    odd_corners = set(_corners((0,) * len(shape), shape))
    for chunk in chunks:
        if 0 in chunk.shape or not _is_inside(chunk, shape):
            return False
        odd_corners ^= set(_corners(chunk.offset, chunk.shape))
    return not odd_corners


def _is_inside(chunk: DcpChunk, shape: _Shape) -> bool:
    if not len(chunk.offset) == len(chunk.shape) == len(shape):
        return False
    return all(start + size <= whole for start, size, whole in zip(chunk.offset, chunk.shape, shape, strict=True))


def _corners(offset: _Shape, shape: _Shape) -> Iterator[_Shape]:
    return itertools.product(*((start, start + size) for start, size in zip(offset, shape, strict=True)))


def _pieces(tensors: Mapping[str, DcpTensor]) -> dict[str, list[tuple[DcpChunk, str]]]:
    """Return the pieces in each file, in their order there, and the tensors that they are of."""
    by_file: dict[str, list[tuple[DcpChunk, str]]] = {}
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            by_file.setdefault(chunk.file, []).append((chunk, name))
    return {file: sorted(pieces, key=lambda piece: piece[0].start) for file, pieces in sorted(by_file.items())}


def _place_problems(tensors: Mapping[str, DcpTensor], directory: Path) -> Iterator[str]:
    """Yield what is wrong with the files that the pieces are in, and with their places there."""
    for file, pieces in _pieces(tensors).items():
        status = (directory / file).lstat()
        if not stat.S_ISREG(status.st_mode):
            yield f"{file}, in which {_named(pieces[0][1])} is stored, is not a regular file"
            continue
        end = 0
        for chunk, name in pieces:
            if chunk.start < end:
                yield f"{_named(name)}, stored in {file} at byte {chunk.start}, overlaps the piece before it"
            end = chunk.start + chunk.num_bytes
            if end > status.st_size:
                yield f"{_named(name)} ends at byte {end} of {file}, which has {status.st_size}"


def _record_problems(metadata: DcpMetadata, directory: Path) -> Iterator[str]:
    """Yield which pieces torch would not read as the tensors that they are said to be."""
    for file, pieces in _pieces(metadata.tensors).items():
        with (directory / file).open("rb") as stream:
            for chunk, name in pieces:
                dtype = metadata.tensors[name].dtype
                problem = record_problem(stream, chunk.start, chunk.num_bytes, chunk.shape, dtype)
                if problem is not None:
                    yield f"{_named(name)}, stored in {file} at byte {chunk.start}, {problem}"


def _differences(metadata: DcpMetadata, tensors: Mapping[str, TensorEntry], listed: set[str]) -> Iterator[str]:
    """Yield where what is stored and what the manifest says differ."""
    for name in sorted(tensors.keys() - metadata.tensors.keys()):
        yield f"{name} is not in it, and is a tensor of the manifest"
    for name in sorted(metadata.tensors.keys() - tensors.keys()):
        yield f"{_named(name)} is in it, and is not a tensor of the manifest"
    for name in sorted(tensors.keys() & metadata.tensors.keys()):
        found, expected = metadata.tensors[name], tensors[name]
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            yield (
                f"{name} is {found.dtype} {list(found.shape)} in it, and {expected.dtype} {list(expected.shape)} in the"
                " manifest"
            )
    files = {chunk.file for tensor in metadata.tensors.values() for chunk in tensor.chunks}
    for file in sorted(files - listed):
        yield f"{file} holds pieces of it, and is not listed in the manifest"
