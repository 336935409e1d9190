"""Tensors are read as they were written, a few at a time, and measured as torch would measure them."""

import math
from collections.abc import Callable, Mapping

import attrs
import pytest
import torch
from torch import Tensor

from ckptrain.checkpoint import tensors as module
from ckptrain.checkpoint.integrity import CommittedCheckpoint, hash_file
from ckptrain.checkpoint.manifest import Manifest, TensorEntry
from ckptrain.checkpoint.sharded import Shard, ShardedState, load_tensors, save_tensors
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.checkpoint.tensors import compare, measure, read_each, zero_layers
from ckptrain.errors import CheckpointDamaged

SaveState = Callable[[Mapping[str, Mapping[str, Tensor]]], CommittedCheckpoint]

DRAW = torch.Generator().manual_seed(7)
A = torch.randn(4, 8, 16, generator=DRAW)
B = torch.randn(4, 24, 8, generator=DRAW).bfloat16()
STATE = {
    "adapter": {"linear_out": B, "linear_in": ShardedState((4, 8, 16), [Shard(offset=(0, 0, 0), data=A[:1]), Shard(offset=(1, 0, 0), data=A[1:])])},
    "optimizer": {"exp_avg": A / 3, "rng.rank00000.default": torch.arange(100, dtype=torch.uint8)},
}  # fmt: skip
WHOLE = {"linear_in": A, "linear_out": B, "exp_avg": A / 3, "rng.rank00000.default": STATE["optimizer"]["rng.rank00000.default"]}  # fmt: skip


@pytest.fixture
def save_state(store: CheckpointStore, manifest: Manifest) -> SaveState:
    """Return a function that commits tensors, by directory, as a checkpoint."""

    def save(state: Mapping[str, Mapping[str, Tensor]]) -> CommittedCheckpoint:
        staging = store.stage(manifest.step)
        entries = {}
        for directory, group in state.items():
            for name, tensor in save_tensors(group, staging / directory).tensors.items():
                kind = "rng" if name.startswith("rng.") else directory
                entries[name] = TensorEntry(shape=tensor.shape, dtype=tensor.dtype, group=kind)  # type: ignore[arg-type]
        files = {path.relative_to(staging).as_posix(): hash_file(path) for path in staging.rglob("*") if path.is_file()}
        return store.commit(staging, attrs.evolve(manifest, files=files, tensors=entries))

    return save


def test_every_tensor_is_read_whole_and_as_it_was_written(save_state: SaveState) -> None:
    """Whatever pieces it lies in, and in an order that does not depend on the caller's."""
    checkpoint = save_state(STATE)
    found = dict(read_each(checkpoint, set(WHOLE)))
    assert list(found) == ["linear_in", "linear_out", "exp_avg", "rng.rank00000.default"]
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (WHOLE[name].dtype, WHOLE[name].shape)
        assert torch.equal(tensor, WHOLE[name])
    assert list(dict(read_each(checkpoint, ["exp_avg"]))) == ["exp_avg"]
    assert list(read_each(checkpoint, [])) == []


@pytest.mark.parametrize(("limit", "loads"), [(1, 4), (3000, 3), (1 << 20, 2)])
def test_no_more_is_in_memory_than_the_limit_or_the_largest_tensor(
    save_state: SaveState, monkeypatch: pytest.MonkeyPatch, limit: int, loads: int
) -> None:
    """The tensors take 2,048, 1,536, 2,048 and 100 bytes, in two directories."""
    checkpoint = save_state(STATE)
    sizes: list[int] = []

    def load(state: Mapping[str, Tensor], *arguments: object, **options: bool) -> None:
        sizes.append(sum(tensor.nbytes for tensor in state.values()))
        load_tensors(state, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "load_tensors", load)
    monkeypatch.setattr(module, "_BYTES_AT_ONCE", limit)
    assert [name for name, _ in read_each(checkpoint, set(WHOLE))] == [
        "linear_in", "linear_out", "exp_avg", "rng.rank00000.default"
    ]  # fmt: skip
    assert len(sizes) == loads
    assert max(sizes) <= max(limit, A.nbytes)


def test_a_changed_byte_is_found_before_a_tensor_is_read(save_state: SaveState) -> None:
    """Numbers that are not those that were saved are not shown as if they were."""
    checkpoint = save_state(STATE)
    path = checkpoint.path / "adapter" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"adapter/__0_0.distcp has other contents"):
        next(read_each(checkpoint, ["exp_avg"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("at_once", [7, 1 << 20])
def test_norm_and_largest_value_are_those_that_torch_computes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, at_once: int
) -> None:
    """Over the whole tensor in float64, in however many parts it is done here."""
    monkeypatch.setattr(module, "_VALUES_AT_ONCE", at_once)
    tensor = (A * 100).to(dtype)
    numbers = measure(tensor)
    assert numbers.norm == pytest.approx(torch.linalg.vector_norm(tensor.double()).item(), rel=1e-12)
    assert numbers.largest == tensor.double().abs().max().item()
    assert numbers.num_not_finite == 0


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    """One NaN would hide all the others."""
    tensor = torch.tensor([[3.0, math.nan], [-math.inf, -4.0]])
    numbers = measure(tensor)
    assert (numbers.norm, numbers.largest, numbers.num_not_finite) == (5.0, 4.0, 2)
    nothing = measure(torch.full((3,), math.nan))
    assert (nothing.norm, nothing.largest, nothing.num_not_finite) == (0.0, 0.0, 3)
    assert measure(torch.empty(0)).norm == 0.0


@pytest.mark.parametrize("at_once", [7, 1 << 20])
def test_a_change_is_the_one_that_torch_computes(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Euclidean norm of the difference, relative to the first tensor, and the largest difference."""
    monkeypatch.setattr(module, "_VALUES_AT_ONCE", at_once)
    other = A + torch.randn(A.shape, generator=torch.Generator().manual_seed(1)) / 50
    change = compare(A, other)
    assert change is not None
    difference = other.double() - A.double()
    norm, norm_before = (torch.linalg.vector_norm(tensor.double()).item() for tensor in (difference, A))
    assert change.norm == pytest.approx(norm, rel=1e-12)
    assert change.norm_before == pytest.approx(norm_before, rel=1e-12)
    assert change.relative == pytest.approx(norm / norm_before, rel=1e-12)
    assert change.largest == difference.abs().max().item()
    assert change.num_not_finite == 0


def test_equal_bits_are_no_change() -> None:
    """NaN is not equal to itself, and unchanged all the same; one bit of one number is a change."""
    for tensor in (A, B, torch.tensor([math.nan, 1.0]), torch.tensor(2.5), torch.arange(5, dtype=torch.uint8)):
        assert compare(tensor, tensor.clone()) is None
    changed = B.clone()
    changed.view(torch.int16)[0, 0, 0] ^= 1
    assert compare(B, changed) is not None


def test_a_change_from_nothing_has_no_relative_size() -> None:
    """B is zero when an adapter is new."""
    change = compare(torch.zeros(2, 2), torch.ones(2, 2))
    assert change is not None
    assert (change.norm, change.largest, change.relative) == (2.0, 1.0, None)


def test_a_change_to_what_is_not_finite_is_counted() -> None:
    """Its size is that of the other values."""
    change = compare(torch.tensor([1.0, 1.0, math.inf]), torch.tensor([math.nan, 3.0, math.inf]))
    assert change is not None
    assert (change.norm, change.largest, change.norm_before, change.num_not_finite) == (2.0, 2.0, 1.0, 2)


def test_layers_that_are_all_zero_are_found() -> None:
    """A NaN is not a zero."""
    tensor = torch.zeros(4, 3, 2)
    tensor[1, 2, 1] = 1e-30
    tensor[2, 0, 0] = math.nan
    assert zero_layers(tensor) == [0, 3]
