"""What a DCP directory holds is read without torch, and is what torch reads in it."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata

from ckptrain.checkpoint.dcp_metadata import (
    DcpChunk,
    _fill,
    metadata_problems,
    read_dcp_metadata,
    read_foreign_metadata,
)
from ckptrain.checkpoint.inert_pickle import Made, Name, Reference, read_pickle
from ckptrain.checkpoint.manifest import ITEM_SIZES, Manifest, TensorEntry
from ckptrain.checkpoint.sharded import Shard, ShardedState, read_metadata, save_tensors
from ckptrain.errors import CheckpointDamaged

WHOLE = torch.arange(48, dtype=torch.float32).view(4, 6, 2)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Return a tensor of every type, with no, one and five dimensions, empty, turned around, and in pieces."""
    pieces = [slice(0, 1), slice(1, 4)]
    return {
        **{dtype: torch.ones(3, 2).to(getattr(torch, dtype)) for dtype in ITEM_SIZES},
        "number": torch.tensor(1.5),
        "five": torch.zeros(1, 2, 1, 3, 1),
        "empty": torch.zeros(0, 4),
        "turned": torch.zeros(3, 5).mT,
        "large": torch.zeros(300, 300),
        "pieces": ShardedState(
            WHOLE.shape, [Shard(offset=(part.start, 0, 0), data=WHOLE[part].clone()) for part in pieces]
        ),
    }


def entries(state: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
    """Return what a manifest says of a state."""
    return {
        name: TensorEntry(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), group="adapter")
        for name, tensor in state.items()
    }


def test_it_is_what_torch_reads(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Shapes, types, pieces and places, compared with torch's own unpickling of the same file."""
    save_tensors(state, tmp_path)
    expected: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    found = read_dcp_metadata(tmp_path).tensors
    assert found.keys() == expected.state_dict_metadata.keys() == state.keys()
    for name, entry in expected.state_dict_metadata.items():
        assert (found[name].shape, f"torch.{found[name].dtype}") == (tuple(entry.size), str(entry.properties.dtype))
        assert [(chunk.offset, chunk.shape) for chunk in found[name].chunks] == [
            (tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks
        ]
    places = {(name, chunk.offset): chunk for name, tensor in found.items() for chunk in tensor.chunks}
    assert {key: (chunk.file, chunk.start, chunk.num_bytes) for key, chunk in places.items()} == {
        (index.fqn, tuple(index.offset)): (place.relative_path, place.offset, place.length)
        for index, place in expected.storage_data.items()
    }
    built = read_metadata(tmp_path)
    assert built.storage_data == expected.storage_data
    assert built.state_dict_metadata == expected.state_dict_metadata


def test_every_kind_of_tensor_that_can_be_saved_is_accepted(
    state: dict[str, torch.Tensor], manifest: Manifest, tmp_path: Path
) -> None:
    """The check refuses nothing of ours."""
    written = save_tensors(state, tmp_path / "adapter")
    files = {f"adapter/{name}": digest for name, digest in written.files.items()}
    assert metadata_problems(tmp_path, attrs.evolve(manifest, tensors=entries(state), files=files)) == []


@pytest.mark.parametrize("difference", ["shape", "dtype", "missing", "more"])
def test_a_tensor_that_differs_from_the_manifest_is_named(
    difference: str, state: dict[str, torch.Tensor], manifest: Manifest, tmp_path: Path
) -> None:
    """On either side, and how."""
    written = save_tensors(state, tmp_path / "adapter")
    tensors = entries(state)
    if difference == "missing":
        tensors["other"] = tensors["number"]
    elif difference == "more":
        del tensors["number"]
    else:
        changed: Any = {"shape": (7,), "dtype": "uint8"}[difference]
        tensors["number"] = attrs.evolve(tensors["number"], **{difference: changed})
    expected = {
        "shape": "number is float32 [] in it, and float32 [7] in the manifest",
        "dtype": "number is float32 [] in it, and uint8 [] in the manifest",
        "missing": "other is not in it, and is a tensor of the manifest",
        "more": "number is in it, and is not a tensor of the manifest",
    }[difference]
    files = {f"adapter/{name}": digest for name, digest in written.files.items()}
    found = metadata_problems(tmp_path, attrs.evolve(manifest, tensors=tensors, files=files))
    assert found == [f"adapter/.metadata: {expected}"]


def test_a_checkpoint_of_adapters_alone_needs_no_optimizer(manifest: Manifest, tmp_path: Path) -> None:
    """An imported adapter has none; and where tensors are claimed, their description must be there."""
    written = save_tensors({"weight": WHOLE}, tmp_path / "adapter")
    files = {f"adapter/{name}": digest for name, digest in written.files.items()}
    adapter = attrs.evolve(manifest, tensors=entries({"weight": WHOLE}), files=files)
    assert metadata_problems(tmp_path, adapter) == []
    [problem] = metadata_problems(tmp_path, attrs.evolve(adapter, files={}))
    assert problem == "adapter/.metadata is not listed in the manifest, and tensors in it are"


def test_nothing_of_torch_is_imported(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Whoever looks at a checkpoint need not have torch."""
    save_tensors(state, tmp_path)
    code = (
        "import sys, pathlib; sys.modules['torch'] = None;"
        "from ckptrain.checkpoint.integrity import verify_files;"
        "from ckptrain.checkpoint.dcp_metadata import read_dcp_metadata;"
        "print(len(read_dcp_metadata(pathlib.Path(sys.argv[1])).tensors))"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert int(result.stdout) == len(state)


@pytest.mark.parametrize("path", ["gone", "file"])
def test_what_is_no_directory_of_tensors_is_damage(path: str, tmp_path: Path) -> None:
    """Not an error of the operating system."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        read_dcp_metadata(tmp_path / path)


Box = tuple[Sequence[int], Sequence[int]]


def chunk(offset: Sequence[int], shape: Sequence[int]) -> DcpChunk:
    """Return a piece that lies there."""
    return DcpChunk(offset=tuple(offset), shape=tuple(shape), file="x", start=0, num_bytes=0)


@settings(deadline=None)
@given(data=st.data())
def test_pieces_fill_a_tensor_where_every_number_is_in_one_of_them(data: st.DataObject) -> None:
    """Compared with counting, for pieces that were cut well and then, perhaps, moved."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    cuts = [[0, *data.draw(st.sets(st.integers(1, size - 1)) if size > 1 else st.just(set())), size] for size in shape]
    cells = itertools.product(*(itertools.pairwise(sorted(axis)) for axis in cuts))
    boxes = [([low for low, _ in cell], [high - low for low, high in cell]) for cell in cells]
    for _ in range(data.draw(st.integers(0, 2))):
        offset, size = boxes[data.draw(st.integers(0, len(boxes) - 1))]
        axis = data.draw(st.integers(0, len(shape) - 1))
        moved = data.draw(st.sampled_from([offset, size]))
        moved[axis] = max(0, moved[axis] + data.draw(st.sampled_from([-1, 1])))
    counted = np.zeros([2 * size + 2 for size in shape], dtype=int)
    for offset, size in boxes:
        counted[tuple(slice(low, low + width) for low, width in zip(offset, size, strict=True))] += 1
    whole = np.zeros_like(counted)
    whole[tuple(slice(0, size) for size in shape)] = 1
    expected = np.array_equal(counted, whole) and all(0 not in size for _, size in boxes)
    assert _fill(tuple(shape), [chunk(*box) for box in boxes]) == expected


@pytest.mark.parametrize(
    ("shape", "boxes", "fills"),
    [
        ((), [((), ())], True),
        ((), [], False),
        ((), [((), ()), ((), ())], False),
        ((2,), [((0, 0), (2, 1))], False),
        ((0, 4), [((0, 0), (0, 4))], True),
        ((0, 4), [((0, 5), (0, 4))], False),
        ((2, 2), [((0, 0), (1, 2)), ((0, 1), (2, 1))], False),
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))], True),
    ],
)
def test_pieces_at_the_edges_of_what_is_possible(shape: tuple[int, ...], boxes: list[Box], fills: bool) -> None:
    """No dimensions, nothing in it, and pieces that are no grid."""
    assert _fill(shape, [chunk(*box) for box in boxes]) is fills


def test_a_thousand_pieces_are_compared_in_time_that_goes_with_their_number(manifest: Manifest, tmp_path: Path) -> None:
    """A pairwise comparison of pieces would take a million."""
    rows = torch.arange(3000, dtype=torch.float32).view(1000, 3)
    state = ShardedState((1000, 3), [Shard(offset=(row, 0), data=rows[row : row + 1].clone()) for row in range(1000)])
    written = save_tensors({"rows": state}, tmp_path / "adapter")
    files = {f"adapter/{name}": digest for name, digest in written.files.items()}
    assert metadata_problems(tmp_path, attrs.evolve(manifest, tensors=entries({"rows": state}), files=files)) == []


def test_a_pickle_is_read_as_what_it_describes() -> None:
    """Plain values as they are, calls as calls, ids as ids."""
    size = Name("torch", "Size")
    assert read_pickle(pickle.dumps(["a", (1, True, None, -5, 2**40), {"b": []}]), []) == [
        "a",
        (1, True, None, -5, 2**40),
        {"b": []},
    ]
    made = read_pickle(pickle.dumps(torch.Size([2, 3])), [size])
    assert isinstance(made, Made)
    assert (made.of, made.arguments, made.state) == (size, ((2, 3),), None)
    referred = read_pickle(b"\x80\x04\x8c\x01aQ.", [])
    assert isinstance(referred, Reference)
    assert referred.id == "a"


@pytest.fixture
def foreign(state: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """Return a directory that torch has written, with objects beside the tensors, and plans in what describes it."""
    anothers: dict[str, Any] = {**state, "object": 3, "model.object": [1.5, None]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is one process
        dcp.save(anothers, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.all_local_plans = [create_default_local_save_plan(anothers, is_coordinator=True)]
    path.write_bytes(pickle.dumps(metadata))
    return tmp_path


def test_of_anothers_directory_the_tensors_asked_for_are_what_torch_reads(
    state: dict[str, torch.Tensor], foreign: Path
) -> None:
    """Whatever else is in it is listed by name, as a tensor or as an object."""
    expected: Metadata = pickle.loads((foreign / ".metadata").read_bytes())
    found = read_foreign_metadata(foreign, lambda name: name != "large")
    assert set(found.objects) == {"object", "model.object"}
    assert found.others == ("large",)
    assert found.tensors.keys() == state.keys() - {"large"}
    places = {(name, chunk.offset): chunk for name, tensor in found.tensors.items() for chunk in tensor.chunks}
    assert {key: (chunk.file, chunk.start, chunk.num_bytes) for key, chunk in places.items()} == {
        (index.fqn, tuple(index.offset)): (place.relative_path, place.offset, place.length)
        for index, place in expected.storage_data.items()
        if index.fqn in found.tensors
    }


def test_of_anothers_directory_only_what_is_asked_for_has_to_be_whole(foreign: Path) -> None:
    """A piece that is missing is damage where its tensor is asked for."""
    path = foreign / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["pieces"].chunks.pop()
    path.write_bytes(pickle.dumps(metadata))
    assert "pieces" in read_foreign_metadata(foreign, lambda name: name != "pieces").others
    with pytest.raises(CheckpointDamaged, match=r"pieces of pieces do not fill its shape \[4, 6, 2\] once"):
        read_foreign_metadata(foreign, lambda _: True)


@pytest.mark.parametrize(
    "name", [("os", "system"), ("torch", "load"), ("torch.distributedx", "run"), ("builtins", "eval")]
)
def test_names_that_do_not_belong_there_are_refused_in_anothers_directory(name: tuple[str, str], foreign: Path) -> None:
    """Though nothing that is named is ever imported."""
    module, function = (text.encode() for text in name)
    (foreign / ".metadata").write_bytes(b"c" + module + b"\n" + function + b"\n(tR.")
    with pytest.raises(CheckpointDamaged, match=f"it names '{name[0]}.{name[1]}', which does not belong there"):
        read_foreign_metadata(foreign, lambda _: True)


def test_the_strict_reading_refuses_anothers_objects(foreign: Path) -> None:
    """What is allowed in others' directories stays refused in ours."""
    with pytest.raises(CheckpointDamaged):
        read_dcp_metadata(foreign)
