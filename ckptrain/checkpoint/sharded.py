"""Tensors in and out of a checkpoint, each process its own pieces, through torch.distributed.checkpoint (DCP).

A state is a flat mapping from global names to tensors: plain ones, or `ShardedState` for the parts of a larger one.
Files are DCP's, so megatron-core and torch read them. Nothing in them is code: DCP's byte entries are pickles, so there
are none; its `.metadata` is a pickle, so it is read by an unpickler that knows DCP's types alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckptrain.checkpoint.ranks import rank, world_size
from ckptrain.checkpoint.store import save_failures
from ckptrain.errors import CheckpointDamaged, SaveFailed

_METADATA_FILE = ".metadata"
# Everything that DCP itself puts into `.metadata`; a pickle that names anything else is not one of DCP's.
_DCP_TYPES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", name) for name in ("float32", "bfloat16", "float16", "float64", "uint8", "int32", "int64", "bool")),
}


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


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, without the marks that make two saves of the same state differ (a random id, the path)."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, single_file_per_rank=True, sync_files=True, thread_count=1)

    def storage_meta(self) -> None:
        return None

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # torch reports a full disk as "unexpected pos"; what the system said is what explains it.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


class _Reader(dcp.FileSystemReader):
    """DCP's reader, with a `.metadata` that cannot run code."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return read_metadata(self._directory)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _DCP_TYPES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a type of DCP's metadata")
        return super().find_class(module, name)


def read_metadata(directory: Path) -> Metadata:
    """Read DCP's `.metadata` without running code from it.

    Raises:
        CheckpointDamaged: it is missing, not DCP's, or holds entries that torch would unpickle without restriction.
    """
    path = directory / _METADATA_FILE
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointDamaged(f"{path} cannot be read", [f"{type(error).__name__}: {error}"]) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointDamaged(f"{path} cannot be read", [f"it holds a {type(metadata).__name__}, not DCP's Metadata"])
    foreign = [name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    if foreign:
        raise CheckpointDamaged(
            f"{directory} is not a checkpoint of ckptrain",
            [f"{name} is a pickled object; ckptrain stores tensors only" for name in foreign[:10]],
        )
    return metadata


def stored_tensors(metadata: Metadata) -> dict[str, StoredTensor]:
    """Return what a DCP directory holds, by name."""
    return {
        name: StoredTensor(shape=tuple(entry.size), dtype=str(entry.properties.dtype).removeprefix("torch."))
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }


def save_tensors(state: Mapping[str, Tensor], directory: Path) -> dict[str, StoredTensor]:
    """Write a state, every process its pieces; collective. Returns all tensors of all processes, by name.

    Raises:
        SaveFailed: any process could not write; on every rank.
    """
    with save_failures(directory):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        with _without_warning():
            metadata = dcp.save(
                dict(state),
                storage_writer=_Writer(directory),
                planner=dcp.DefaultSavePlanner(),
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
    return stored_tensors(metadata)


def load_tensors(state: Mapping[str, Tensor], directory: Path, *, alone: bool = False) -> None:
    """Read into the tensors of a state, in place, every process its pieces of however many were written.

    Args:
        state: where to read into.
        directory: what `save_tensors` wrote.
        alone: this process reads by itself; otherwise all do together.

    Raises:
        CheckpointDamaged: a tensor is missing, has another shape, or its file cannot be read.
    """
    read_metadata(directory)  # its problems told as ours, before DCP wraps them in its own
    try:
        with _without_warning():
            dcp.load(
                dict(state),
                storage_reader=_Reader(directory),
                planner=dcp.DefaultLoadPlanner(allow_partial_load=False),
                no_dist=alone or world_size() == 1,
            )
    except CheckpointException as error:
        reasons = [f"rank {where}: {_reason(failure[0])}" for where, failure in error.failures.items()]
        raise CheckpointDamaged(f"could not read {directory}", reasons) from error


def files_of_this_rank(directory: Path) -> list[Path]:
    """Return the files under `directory` that this process wrote: its own data, and on rank 0 the metadata."""
    mine = sorted(directory.rglob(f"__{rank()}_*.distcp"))
    return [*mine, *sorted(directory.rglob(_METADATA_FILE))] if rank() == 0 else mine


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
