"""One layer, or a whole tensor, comes out of any pieces with the bits that DCP gives, and no more is read than that."""

from __future__ import annotations

import io
import itertools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hostile import change_metadata, change_record, rezipped
from torch import Tensor

from ckptrain.checkpoint import slices
from ckptrain.checkpoint.manifest import ITEM_SIZES
from ckptrain.checkpoint.sharded import Shard, ShardedState, load_tensors, save_tensors
from ckptrain.checkpoint.slices import SliceReader
from ckptrain.errors import CheckpointDamaged

SHAPE = (4, 6, 8)
CUTS = {
    "one piece": (4, 6, 8),
    "by layer": (1, 6, 8),
    "by stages of unequal size": (3, 6, 8),
    "by rows": (4, 2, 8),
    "by columns": (4, 6, 4),
    "by rows and columns": (4, 3, 2),
    "by layer, rows and columns": (2, 4, 5),
}
"""The largest piece of each layout; the last ones along an axis are smaller where it does not divide."""


def cut(whole: Tensor, largest: tuple[int, ...]) -> ShardedState:
    """Return a tensor in pieces of at most this size, as the ranks of a layout would save it."""
    offsets = itertools.product(*(range(0, size, step) for size, step in zip(whole.shape, largest, strict=True)))
    shards = []
    for offset in offsets:
        place = tuple(slice(start, start + step) for start, step in zip(offset, largest, strict=True))
        shards.append(Shard(offset=offset, data=whole[place].clone()))
    return ShardedState(tuple(whole.shape), shards)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return random numbers of any type."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


def by_dcp(name: str, like: Tensor, directory: Path) -> Tensor:
    """Return a tensor as DCP reads it."""
    target = torch.zeros(like.shape, dtype=like.dtype)
    load_tensors({name: target}, directory)
    return target


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Tell whether two tensors are equal in type, shape and every bit."""
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", CUTS.values(), ids=CUTS.keys())
def test_layers_have_the_bits_that_dcp_gives(largest: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    """Whichever layout wrote them, beside another tensor in the same file."""
    whole = draw(*SHAPE, dtype=dtype)
    save_tensors({"before": draw(3), "weight": cut(whole, largest)}, tmp_path)
    expected = by_dcp("weight", whole, tmp_path)
    with SliceReader(tmp_path) as reader:
        assert (reader.tensors["weight"].shape, reader.tensors["weight"].dtype) == (
            SHAPE,
            str(dtype).removeprefix("torch."),
        )
        assert same_bits(reader.read("weight"), expected)
        for layer in (2, 0, 3, 1, 2):
            assert same_bits(reader.read("weight", layer), expected[layer])
    assert same_bits(expected, whole)


@pytest.mark.parametrize("dtype", ITEM_SIZES)
def test_every_type_is_read(dtype: str, tmp_path: Path) -> None:
    """All that a checkpoint can hold; NaN and the sign of zero are bits like any others."""
    whole = draw(3, 5, dtype=getattr(torch, dtype))
    if whole.is_floating_point():
        whole[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    save_tensors({"weight": cut(whole, (2, 3))}, tmp_path)
    with SliceReader(tmp_path) as reader:
        assert same_bits(reader.read("weight"), whole)
        assert all(same_bits(reader.read("weight", row), whole[row]) for row in range(3))


def test_experts_and_odd_shapes_are_read(tmp_path: Path) -> None:
    """Four axes, cut along the experts and the rows; one axis; none; and no numbers at all."""
    state = {"experts": draw(3, 4, 6, 2, seed=1), "vector": draw(5), "scalar": draw(), "nothing": draw(2, 0, 3)}
    save_tensors({**state, "experts": cut(state["experts"], (2, 1, 4, 2))}, tmp_path)
    with SliceReader(tmp_path) as reader:
        for name, tensor in state.items():
            assert same_bits(reader.read(name), tensor)
            for index in range(len(tensor) if tensor.ndim else 0):
                assert same_bits(reader.read(name, index), tensor[index])


@pytest.mark.parametrize("axes", itertools.permutations(range(3)), ids=str)
def test_numbers_that_lie_in_another_order_are_read_as_what_they_are(axes: tuple[int, ...], tmp_path: Path) -> None:
    """Torch saves a transposed tensor with its strides, and not as a copy."""
    whole = draw(4, 4, 4).permute(axes)
    save_tensors({"weight": ShardedState((4, 8, 4), [Shard(offset=(0, start, 0), data=whole) for start in (0, 4)])}, tmp_path)  # fmt: skip
    expected = by_dcp("weight", torch.zeros(4, 8, 4), tmp_path)
    assert same_bits(expected[:, 4:], whole)
    with SliceReader(tmp_path) as reader:
        assert same_bits(reader.read("weight"), expected)
        assert all(same_bits(reader.read("weight", index), expected[index]) for index in range(4))


class CountingFile(io.FileIO):
    """A file that adds up what is read of all of its kind."""

    num_bytes = 0

    def read(self, size: int = -1, /) -> bytes:
        """Read, and count what came."""
        data = super().read(size)
        CountingFile.num_bytes += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer, and count what came."""
        count = super().readinto(buffer)
        CountingFile.num_bytes += count
        return count


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Count what is read of data files; gives a function that tells how much since it was last asked."""
    original = Path.open

    def open_path(path: Path, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
        if (path.suffix, mode, buffering) == (".distcp", "rb", 0):  # a buffer would read more than is asked of it
            return CountingFile(path)
        return original(path, mode, buffering, **options)

    def since() -> int:
        count, CountingFile.num_bytes = CountingFile.num_bytes, 0
        return count

    monkeypatch.setattr(Path, "open", open_path)
    since()
    yield since


@pytest.mark.parametrize("largest", [(16, 64, 256), (1, 64, 256), (4, 32, 256), (16, 64, 64)], ids=str)
def test_no_more_is_read_than_the_layer(largest: tuple[int, ...], tmp_path: Path, counted: Callable[[], int]) -> None:
    """Of a megabyte of 16 layers: the layer, and once for each piece some two kilobytes on where its numbers are."""
    whole = draw(16, 64, 256)
    save_tensors({"weight": cut(whole, largest)}, tmp_path)
    layer_bytes = whole[0].nbytes
    with SliceReader(tmp_path) as reader:
        assert counted() == 0
        reader.read("weight", 3)
        pieces_of_layer = sum(
            chunk.offset[0] <= 3 < chunk.offset[0] + chunk.shape[0] for chunk in reader.tensors["weight"].chunks
        )
        assert layer_bytes < counted() < layer_bytes + 3000 * pieces_of_layer
        reader.read("weight", 3)
        assert counted() == layer_bytes
        reader.read("weight")
        assert counted() < whole.nbytes + 3000 * len(reader.tensors["weight"].chunks)


@pytest.mark.parametrize("given", [1, 7, 100])
def test_a_system_that_gives_little_at_a_time_is_asked_again(
    given: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux gives no more than two gigabytes, network file systems what they like."""

    class Reluctant(CountingFile):
        def readinto(self, buffer: Any, /) -> int:
            return super().readinto(memoryview(buffer)[:given])

    whole = draw(*SHAPE)
    save_tensors({"weight": cut(whole, (2, 6, 8))}, tmp_path)
    reader = SliceReader(tmp_path)
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Reluctant(path))
    with reader:
        assert same_bits(reader.read("weight"), whole)


def test_few_files_are_open_at_a_time_and_none_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout can have written more files than a process may have open."""
    monkeypatch.setattr(slices, "_MOST_OPEN_FILES", 2)
    whole, opened = draw(*SHAPE), []
    save_tensors({f"weight.{n}": whole * n for n in range(5)}, tmp_path)
    spread_over_files(tmp_path)
    original = Path.open

    def open_path(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(original(path, *arguments, **options))
        return opened[-1]

    reader = SliceReader(tmp_path)
    monkeypatch.setattr(Path, "open", open_path)
    with reader:
        for _, n in itertools.product(range(2), range(5)):
            assert same_bits(reader.read(f"weight.{n}", 1), whole[1] * n)
            assert sum(not file.closed for file in opened) <= 2
        assert len({file.name for file in opened}) == 5
        number_opened = len(opened)
        reader.read("weight.4", 0)
        assert len(opened) == number_opened
    assert all(file.closed for file in opened)


def spread_over_files(directory: Path) -> None:
    """Give each stored tensor a file of its own, as if each had been saved by another rank."""
    data = (directory / "__0_0.distcp").read_bytes()

    def spread(metadata: Any) -> None:
        for number, place in enumerate(metadata.storage_data.values()):
            name = f"__{number}_0.distcp"
            (directory / name).write_bytes(data[place.offset : place.offset + place.length])
            place.relative_path, place.offset = name, 0

    (directory / "__0_0.distcp").unlink()
    change_metadata(directory, spread)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    """A name that is no tensor's, an index beyond the first axis or below it, and any of a number."""
    save_tensors({"weight": draw(*SHAPE), "scalar": draw()}, tmp_path)
    with SliceReader(tmp_path) as reader:
        with pytest.raises(KeyError, match="other"):
            reader.read("other")
        for name, index in (("weight", 4), ("weight", -1), ("scalar", 0)):
            with pytest.raises(IndexError, match=f"{name} has the shape"):
                reader.read(name, index)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no archive": (lambda record: bytes(len(record)), "not a zip file"),
    "cut short": (lambda record: record[: len(record) // 2], "not a zip file"),
    "compressed": (lambda record: rezipped(record, {}, zipfile.ZIP_DEFLATED), "has a compressed member"),
    "fewer numbers": (lambda record: rezipped(record, {"data/0": bytes(8)}), "has 8 bytes of numbers, expected 768"),
    "another description": (lambda record: rezipped(record, {"data.pkl": b"N."}), "is not a plain tensor"),
    "the other byte order": (lambda record: rezipped(record, {"byteorder": b"big"}), 'in "big" order'),
    "a header that is none": (lambda record: b"XX" + record[2:], "Bad magic number"),
    "numbers without a header": (lambda record: blanked(record, header_of_numbers(record), 4), "data/0 is not where"),
    "numbers beyond the end": (lambda record: padded(record, 40_000), "has numbers that end at byte"),
}  # fmt: skip


def blanked(record: bytes, start: int, count: int) -> bytes:
    """Replace some bytes by zeros."""
    return record[:start] + bytes(count) + record[start + count :]


def padded(record: bytes, count: int) -> bytes:
    """Claim so many bytes of padding between the header of the numbers and the numbers themselves."""
    start = header_of_numbers(record)
    return record[: start + 28] + count.to_bytes(2, "little") + record[start + 30 :]


def header_of_numbers(record: bytes) -> int:
    """Return where the header of the numbers begins, which lies before them."""
    return record.rindex(b"PK\x03\x04", 0, record.index(b"data/0"))


@pytest.mark.parametrize(("damage", "problem"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_archive_is_told_as_damage(damage: Callable[[bytes], bytes], problem: str, tmp_path: Path) -> None:
    """Where the piece is and what is wrong with it, before a number of it is used; other tensors can still be read."""
    whole = draw(*SHAPE)
    save_tensors({"a": whole, "b": whole}, tmp_path)
    change_record(tmp_path, damage)
    with SliceReader(tmp_path) as reader:
        assert same_bits(reader.read("b", 1), whole[1])
        with pytest.raises(CheckpointDamaged, match=rf"a, stored in __0_0.distcp at byte 0, .*{problem}"):
            reader.read("a", 1)


def test_a_file_that_shrinks_or_goes_is_told_as_damage(tmp_path: Path) -> None:
    """What happens to it after the directory was looked at, too."""
    save_tensors({"weight": draw(*SHAPE)}, tmp_path)
    data = tmp_path / "__0_0.distcp"
    with SliceReader(tmp_path) as reader:
        reader.read("weight", 0)
        data.write_bytes(data.read_bytes()[:900])
        with pytest.raises(CheckpointDamaged, match=r"ends before byte \d+ of the file"):
            reader.read("weight", 3)
    data.unlink()
    with pytest.raises(CheckpointDamaged, match=r"No such file"):
        SliceReader(tmp_path)


def test_a_directory_that_is_none_is_told_as_damage(tmp_path: Path) -> None:
    """As the rest of the package tells it."""
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        SliceReader(tmp_path)
