"""A file written tensor by tensor is, byte for byte, the one that safetensors writes of all of them at once."""

from __future__ import annotations

import io
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptrain.checkpoint.manifest import ITEM_SIZES
from ckptrain.convert.stream import Declared, SafetensorsStream

DRAW = torch.Generator().manual_seed(3)
LAYERS = {f"layers.{n}.lora_A.weight": torch.randn(4, 6, generator=DRAW) for n in (0, 1, 10, 2)}
ALL_TYPES = {f"{kind}.{n}": torch.randn(3, n, generator=DRAW).to(getattr(torch, kind)) for kind in ITEM_SIZES for n in (5, 2)}  # fmt: skip
ODD = {"nothing": torch.zeros(0, 3), "scalar": torch.tensor(2.5), 'é"\\\n\x7f x': torch.arange(3)}


def declared(tensors: dict[str, Tensor]) -> dict[str, Declared]:
    """Return what is to be told of tensors before any of them is there."""
    return {
        name: Declared(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors in an order that is neither theirs nor the file's."""
    names = list(tensors)
    random.Random(1).shuffle(names)
    with SafetensorsStream(path, declared(tensors)) as stream:
        for name in names:
            stream.write(name, tensors[name])


@pytest.mark.parametrize(
    "tensors",
    [
        LAYERS,
        {name: tensor.bfloat16() for name, tensor in LAYERS.items()},
        ALL_TYPES,
        ODD,
        {**ODD, **ALL_TYPES, **LAYERS},
        {},
    ],
    ids=["float32", "bfloat16", "all types", "odd", "everything", "nothing"],
)
def test_the_bytes_are_those_of_safetensors(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    """Header, order and numbers, of every type that a checkpoint can have; and they are read back as they were."""
    write(tmp_path / "streamed", tensors)
    save_file(tensors, tmp_path / "saved", metadata={"format": "pt"})
    assert (tmp_path / "streamed").read_bytes() == (tmp_path / "saved").read_bytes()
    with safe_open(tmp_path / "streamed", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    found = load_file(tmp_path / "streamed")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    """Rows and columns of another tensor, and one that is trained, need not be copied by the caller."""
    whole = torch.arange(24.0).view(4, 6).requires_grad_()
    views = {"rows": whole[1:3], "columns": whole[:, ::2], "turned": whole.t(), "expanded": whole[:1].expand(4, 6)}
    write(tmp_path / "streamed", views)
    found = load_file(tmp_path / "streamed")
    assert all(torch.equal(found[name], view) for name, view in views.items())


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("other", torch.zeros(4, 6), "other was not declared"),
        ("layers.1.lora_A.weight", torch.zeros(6, 4), r"float32 \[6, 4\], and was declared .* as float32 \[4, 6\]"),
        ("layers.1.lora_A.weight", torch.zeros(4, 6).half(), r"float16 \[4, 6\]"),
        ("layers.0.lora_A.weight", torch.zeros(4, 6), "second time"),
    ],
    ids=["unknown", "shape", "type", "twice"],
)
def test_what_was_not_declared_is_refused(name: str, tensor: Tensor, problem: str, tmp_path: Path) -> None:
    """By name, type or shape, or because it is there already; and what is left is no file that loads."""
    path = tmp_path / "streamed"
    with pytest.raises(ValueError, match=problem), SafetensorsStream(path, declared(LAYERS)) as stream:
        stream.write("layers.0.lora_A.weight", LAYERS["layers.0.lora_A.weight"])
        stream.write(name, tensor)
    with pytest.raises(SafetensorError):
        load_file(path)


def test_a_type_that_no_checkpoint_has_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Nothing is made on the disk."""
    with pytest.raises(ValueError, match="complex64 is not one of bfloat16, bool, "):
        SafetensorsStream(tmp_path / "streamed", {"weight": Declared("complex64", (2,))})
    assert list(tmp_path.iterdir()) == []


def test_more_tensors_than_safetensors_reads_are_refused(tmp_path: Path) -> None:
    """Its headers end at a hundred megabytes, which it tells on loading only."""
    names = {f"{n}{'x' * 1_000_000}": Declared("float32", (0,)) for n in range(100)}
    with pytest.raises(ValueError, match="100 tensors are more than one"):
        SafetensorsStream(tmp_path / "streamed", names)


@pytest.mark.parametrize("count", [0, 3])
def test_a_file_that_lacks_tensors_does_not_load(count: int, tmp_path: Path) -> None:
    """Leaving without an error names what is missing; there is no file then that looks whole with zeros in it."""
    path = tmp_path / "streamed"
    missing = r"lacks \d of the 4 tensors declared: .*layers\.2\.lora_A\.weight"
    with pytest.raises(ValueError, match=missing), SafetensorsStream(path, declared(LAYERS)) as stream:
        for name in itertools.islice(LAYERS, count):
            stream.write(name, LAYERS[name])
    with pytest.raises(SafetensorError):
        load_file(path)


def test_an_error_of_the_caller_is_not_hidden(tmp_path: Path) -> None:
    """What is missing then follows from it and is not what went wrong."""
    with pytest.raises(KeyError, match="layer"), SafetensorsStream(tmp_path / "streamed", declared(LAYERS)):
        raise KeyError("layer")


def test_no_copy_is_made_of_what_lies_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is given the tensor's own memory; of what does not lie together it is given a copy."""
    tensor = LAYERS["layers.0.lora_A.weight"]
    given: list[int] = []

    class Watched(io.FileIO):
        def write(self, data: Any, /) -> int:
            if not isinstance(data, bytes):
                given.append(data.__array_interface__["data"][0])
            return super().write(data)

    def open_watched(path: Path, mode: str) -> Watched:
        return Watched(path, mode)

    monkeypatch.setattr(Path, "open", open_watched)
    write(tmp_path / "streamed", {"weight": tensor})
    assert given == [tensor.data_ptr()]
    write(tmp_path / "streamed", {"weight": tensor[:, ::2]})
    assert given[1:] != [tensor.data_ptr()]
