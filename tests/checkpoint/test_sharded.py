"""Tensors go in and out of a checkpoint by DCP, in pieces, and nothing in it is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from ckptrain.checkpoint.integrity import hash_file
from ckptrain.checkpoint.sharded import (
    Shard,
    ShardedState,
    StoredTensor,
    _Writer,
    load_tensors,
    read_metadata,
    save_tensors,
)
from ckptrain.errors import CheckpointDamaged

WHOLE = torch.arange(24, dtype=torch.float32).view(4, 6)


def in_pieces(*rows: slice, data: torch.Tensor = WHOLE) -> ShardedState:
    """Return the rows of a tensor as shards of it."""
    return ShardedState((4, 6), [Shard(offset=(part.start, 0), data=data[part]) for part in rows])


def test_pieces_are_read_in_other_pieces(tmp_path: Path) -> None:
    """Saved as 1 + 3 rows, read as 2 + 2, and whole by torch alone."""
    written = save_tensors({"weight": in_pieces(slice(0, 1), slice(1, 4))}, tmp_path)
    assert written.tensors == {"weight": StoredTensor(shape=(4, 6), dtype="float32")}
    assert written.files == {name: hash_file(tmp_path / name) for name in (".metadata", "__0_0.distcp")}
    target = torch.zeros(4, 6)
    load_tensors({"weight": in_pieces(slice(0, 2), slice(2, 4), data=target)}, tmp_path)
    assert torch.equal(target, WHOLE)
    plain = {"weight": torch.zeros(4, 6)}
    dcp.load(plain, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(plain["weight"], WHOLE)


def test_two_saves_of_the_same_state_are_the_same_bytes(tmp_path: Path) -> None:
    """DCP's own metadata has a random id and the path in it; ours has neither."""
    for name in ("a", "b"):
        save_tensors({"weight": WHOLE}, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [".metadata", "__0_0.distcp"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


class Attack:
    """Runs a command when it is unpickled by a reader that allows it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        """Ask for a system call."""
        return (os.system, (f"touch {self.mark}",))


@pytest.mark.parametrize("nested", [False, True])
def test_metadata_that_would_run_code_is_refused(nested: bool, tmp_path: Path) -> None:
    """A pickle with a function of another module in it is not read, wherever in it that stands."""
    mark = tmp_path / "ran"
    attack: Any = Attack(mark)
    hostile = Metadata(state_dict_metadata={"weight": attack}) if nested else attack
    (tmp_path / ".metadata").write_bytes(pickle.dumps(hostile))
    with pytest.raises(CheckpointDamaged, match=r"system"):
        read_metadata(tmp_path)
    with pytest.raises(CheckpointDamaged, match=r"system"):
        load_tensors({"weight": torch.zeros(1)}, tmp_path)
    assert not mark.exists()


def test_byte_entries_are_refused(tmp_path: Path) -> None:
    """Byte entries are what torch unpickles without restriction, so a checkpoint of ours has none."""
    dcp.save({"weight": WHOLE, "extra": {"any": "object"}}, storage_writer=_Writer(tmp_path), no_dist=True)
    with pytest.raises(CheckpointDamaged, match=r"extra.* is a pickled object"):
        read_metadata(tmp_path)


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Nothing is left as it was without a word."""
    save_tensors({"weight": WHOLE}, tmp_path)
    with pytest.raises(CheckpointDamaged, match="other"):
        load_tensors({"other": torch.zeros(4, 6)}, tmp_path)
