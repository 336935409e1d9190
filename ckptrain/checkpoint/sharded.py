"""Tensors in and out of a checkpoint, each process its own pieces, through torch.distributed.checkpoint (DCP).

A state is a flat mapping from global names to tensors: plain ones, or `ShardedState` for the parts of a larger one.
Files are DCP's, so megatron-core and torch read them. Nothing in them is code: DCP's byte entries are pickles, so there
are none; its `.metadata` is a pickle, so it is read as data and never loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Buffer, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import attrs
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as ObjectFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.futures import Future

from ckptrain.checkpoint.dcp_metadata import read_dcp_metadata
from ckptrain.checkpoint.manifest import FileDigest
from ckptrain.checkpoint.object_files import ObjectPath, store_failures
from ckptrain.checkpoint.ranks import Group, rank, together, world_size
from ckptrain.checkpoint.store import Staging, save_failures
from ckptrain.errors import CheckpointDamaged, SaveFailed


@attrs.frozen(kw_only=True)
class StoredTensor:
    """A tensor as a whole, as it lies in a checkpoint."""

    shape: tuple[int, ...]
    dtype: str


@attrs.frozen(kw_only=True)
class Shard:
    """A part of a whole tensor, where it lies in it."""

    offset: tuple[int, ...]
    data: Tensor


class ShardedState(Tensor):
    """The parts that this process holds of one tensor, as DCP wants them (its `_Checkpointable` protocol).

    It has the shape and type of the whole and no data of its own.
    """

    shards: tuple[Shard, ...]

    @staticmethod
    def __new__(cls: type[Self], shape: tuple[int, ...], shards: Sequence[Shard]) -> Self:
        """Wrap shards of a tensor of this shape."""
        wrapper: Self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=shards[0].data.dtype)
        wrapper.shards = tuple(shards)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be computed with."""
        raise TypeError(f"{cls.__name__} stands for a tensor in a checkpoint; {func} cannot be applied to it")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, shards={[shard.offset for shard in self.shards]})"

    def _chunk(self, shard: Shard) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(shard.offset), sizes=shard.data.size())

    def __create_write_items__(self, fqn: str, _: ShardedState) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(shard.offset), position),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self._chunk(shard),
                    properties=TensorProperties.create_from_tensor(shard.data),
                    size=self.size(),
                ),
            )
            for position, shard in enumerate(self.shards)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(shard) for shard in self.shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(shard.data for shard in self.shards if torch.Size(shard.offset) == index.offset)


@attrs.frozen(kw_only=True)
class Written:
    """What a save has put into a directory."""

    tensors: Mapping[str, StoredTensor]
    """All tensors of all processes, by name."""
    files: Mapping[str, FileDigest]
    """The files of this process, by name: its data, and on rank 0 the metadata."""


_HOW: Mapping[str, Any] = {
    "single_file_per_rank": True,
    "thread_count": 1,
    "per_thread_copy_ahead": 0,  # all is in host memory: no stream, which would be one of GPU 0 on every rank
}


class _HashedFile:
    """A file that is hashed as it is written: the digest is that of the bytes that were meant."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_bytes = 0
        self._sha256 = hashlib.sha256()

    def write(self, data: Buffer) -> int:
        """Write all of `data`."""
        self._sha256.update(data)
        written = self._file.write(data)
        self._num_bytes += written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def digest(self) -> FileDigest:
        """Return size and SHA-256 of what was written."""
        return FileDigest(num_bytes=self._num_bytes, sha256=self._sha256.hexdigest())


class _Hashing:
    """Makes one of DCP's file systems know the digest of every file that it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, _HashedFile] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:  # type: ignore[misc]
            self.written[Path(path).name] = hashed = _HashedFile(file)
            yield hashed

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)  # type: ignore[misc]
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _HashingDisk(_Hashing, FileSystem):
    """DCP's files on a disk."""


class _HashingStore(_Hashing, ObjectFileSystem):
    """DCP's files in an object store."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with store_failures(str(path), "writing"), super().create_stream(path, mode) as file:
            yield file

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make nothing: there are no directories, and a bucket that is not there is not to be made."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        with store_failures(str(path), "renaming"):
            super().rename(path, new_path)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        with store_failures(str(path), "looking for"):
            return bool(super().exists(path))


class _Plain:
    """Makes one of DCP's writers leave out what makes two saves of the same state differ (a random id, the path)."""

    fs: Any

    def digests(self) -> dict[str, FileDigest]:
        """Return what this process wrote, by file name."""
        return {name: file.digest() for name, file in sorted(self.fs.written.items())}

    def storage_meta(self) -> None:
        return None

    def write_data(self, plan: Any, planner: Any) -> Any:
        if not plan.items:  # other ranks save all that this one holds: an empty file would be one more to sync
            nothing: Future[list[Any]] = Future()
            nothing.set_result([])
            return nothing
        try:
            return super().write_data(plan, planner)  # type: ignore[misc]
        except Exception as error:
            # torch reports a full disk as "unexpected pos"; what the system said is what explains it.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


class _Writer(_Plain, dcp.FileSystemWriter):
    """Writes to a disk, and waits until all is on it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True, **_HOW)
        self.fs = _HashingDisk()


class _StoreWriter(_Plain, FsspecWriter):
    """Writes to an object store, where what is closed is there."""

    def __init__(self, directory: ObjectPath) -> None:
        super().__init__(directory.url, sync_files=False, **_HOW)
        self.fs = _HashingStore()
        self.path = self.fs.init_path(directory.url, **directory.options)


class _Reader(dcp.FileSystemReader):
    """DCP's reader, with a `.metadata` that was read without running code."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


def read_metadata(directory: Path) -> Metadata:
    """Return what a directory's `.metadata` says, in DCP's own types; the pickle that it is in is never loaded.

    Raises:
        CheckpointDamaged: it is missing, or not as `save_tensors` writes it.
    """
    tensors = read_dcp_metadata(directory).tensors
    return Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(chunk.offset), sizes=torch.Size(chunk.shape))
                    for chunk in tensor.chunks
                ],
            )
            for name, tensor in tensors.items()
        },
        storage_data={
            MetadataIndex(name, chunk.offset, position): _StorageInfo(chunk.file, chunk.start, chunk.num_bytes)
            for name, tensor in tensors.items()
            for position, chunk in enumerate(tensor.chunks)
        },
    )


def stored_tensors(metadata: Metadata) -> dict[str, StoredTensor]:
    """Return what a DCP directory holds, by name."""
    return {
        name: StoredTensor(shape=tuple(entry.size), dtype=str(entry.properties.dtype).removeprefix("torch."))
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }


def save_tensors(state: Mapping[str, Tensor], directory: Staging, group: Group = None) -> Written:
    """Write a state, every process its pieces, and wait until they are on disk; collective.

    Args:
        state: tensors in host memory, which nobody may change meanwhile.
        directory: is made; must not hold a state.
        group: the processes, where it is not torch's default group that they talk over.

    Raises:
        SaveFailed: any process could not write; on every rank.
    """
    writer = _Writer(directory) if isinstance(directory, Path) else _StoreWriter(directory)
    try:
        with _without_warning():
            metadata = dcp.save(
                dict(state),
                storage_writer=writer,
                planner=dcp.DefaultSavePlanner(),
                process_group=group,
                no_dist=world_size() == 1,
            )
    except CheckpointException as error:
        failures = {where: failure[0] for where, failure in error.failures.items()}
        with save_failures(directory):
            for failure in failures.values():
                if isinstance(failure, OSError):
                    raise failure from None
        reasons = [f"rank {where}: {_reason(failure)}" for where, failure in failures.items()]
        raise SaveFailed(f"could not write {directory}: {'; '.join(reasons)}") from error
    assert isinstance(metadata, Metadata)
    return Written(tensors=stored_tensors(metadata), files=writer.digests())


def load_tensors(state: Mapping[str, Tensor], directory: Path, *, alone: bool = False) -> None:
    """Read into the tensors of a state, in place, every process its pieces of however many were written.

    Each process plans what it reads by itself: rank 0 has nothing to add to it, and plans of thousands of processes for
    all tensors would be hundreds of megabytes there.

    Args:
        state: where to read into.
        directory: what `save_tensors` wrote.
        alone: this process reads by itself; otherwise all do together.

    Raises:
        CheckpointDamaged: a tensor is missing, has another shape, or its file cannot be read.
    """
    if alone:
        _load(state, directory)
    else:
        together(lambda: _load(state, directory))


def _load(state: Mapping[str, Tensor], directory: Path) -> None:
    metadata = read_metadata(directory)  # its problems told as ours, before DCP wraps them in its own
    try:
        with _without_warning():
            dcp.load(
                dict(state),
                storage_reader=_Reader(directory, metadata),
                planner=dcp.DefaultLoadPlanner(allow_partial_load=False),
                no_dist=True,
            )
    except CheckpointException as error:
        reasons = [f"rank {rank()}: {_reason(failure[0])}" for failure in error.failures.values()]
        raise CheckpointDamaged(f"could not read {directory}", reasons) from error


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """Keep DCP from warning that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{os.strerror(error.errno)} ({error.filename})" if error.filename else os.strerror(error.errno)
    return f"{type(error).__name__}: {error}"
