"""The writer: the same bytes in the background as in the foreground, and no fault of a disk that harms what was there."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import pytest
import torch
from support.faults import FaultyDisk
from support.files import data_files
from support.launch import launch

from ckptrain.checkpoint import writer as writer_module
from ckptrain.checkpoint.integrity import verify_files
from ckptrain.checkpoint.manifest import FileDigest, Manifest, TensorEntry
from ckptrain.checkpoint.retention import Retention
from ckptrain.checkpoint.sharded import StoredTensor, load_tensors
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.checkpoint.writer import CheckpointWriter, Content, NotSaved, Saved, write_checkpoint
from ckptrain.errors import ClaimLost, SaveFailed

GROUPS = {"adapter": "adapter", "optimizer": "optimizer"}
MakeContent = Callable[..., Content]


def state_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return other numbers for every step."""
    whole = torch.arange(64, dtype=torch.float32).view(8, 8) + 1000 * step
    return {"adapter": {"decoder.layers.weight": whole}, "optimizer": {"optimizer.state.exp_avg.weight": -whole}}


@pytest.fixture
def content(manifest: Manifest) -> MakeContent:
    """Return a maker of what a process gives to the checkpoint of a step."""

    def make(step: int) -> Content:
        def describe(tensors: Mapping[str, Mapping[str, StoredTensor]], files: Mapping[str, FileDigest]) -> Manifest:
            entries = {
                name: TensorEntry(shape=tensor.shape, dtype=tensor.dtype, group=GROUPS[directory])  # type: ignore[arg-type]
                for directory, stored in tensors.items()
                for name, tensor in stored.items()
            }
            return attrs.evolve(manifest, step=step, tensors=entries, files=files)

        return Content(step=step, parts=state_of(step), describe=describe)

    return make


@pytest.fixture
def open_writer(store: CheckpointStore) -> Iterator[Callable[..., CheckpointWriter]]:
    """Return a maker of writers for the store, which are left at the end."""
    writers: list[CheckpointWriter] = []

    def make(*, asynchronous: bool = True, **more: object) -> CheckpointWriter:
        writers.append(
            CheckpointWriter(store, Retention(keep_last=5), asynchronous=asynchronous, **more)  # type: ignore[arg-type]
        )
        return writers[-1]

    yield make
    for writer in writers:
        writer.__exit__(None, None, None)


OpenWriter = Callable[..., CheckpointWriter]


def save(writer: CheckpointWriter, content: Content) -> Saved | NotSaved:
    """Save and wait for the outcome."""
    writer.begin(content)
    outcome = writer.wait()
    assert outcome is not None
    return outcome


def test_both_ways_write_the_same_bytes(
    open_writer: OpenWriter, content: MakeContent, store: CheckpointStore, manifest: Manifest
) -> None:
    """The manifest too, whose only time is the one that the test gives."""
    found = []
    for asynchronous in (False, True):
        outcome = save(open_writer(asynchronous=asynchronous), content(7))
        assert isinstance(outcome, Saved)
        path = outcome.checkpoint.path
        found.append({**data_files(path), "manifest.json": (path / "manifest.json").read_bytes()})
        path.rename(store.run_dir / f"kept-{asynchronous}")
    assert found[0] == found[1]
    assert len(found[0]) == 5


def test_what_is_committed_verifies_and_loads(open_writer: OpenWriter, content: MakeContent) -> None:
    """The digests in the manifest, made while writing, are those of the files, and torch reads the numbers back."""
    outcome = save(open_writer(), content(3))
    assert isinstance(outcome, Saved)
    assert verify_files(outcome.checkpoint) == []
    loaded = {"decoder.layers.weight": torch.zeros(8, 8)}
    load_tensors(loaded, outcome.checkpoint.path / "adapter", alone=True)
    assert torch.equal(loaded["decoder.layers.weight"], state_of(3)["adapter"]["decoder.layers.weight"])
    assert outcome.num_bytes == sum(len(data) for data in data_files(outcome.checkpoint.path).values())


def test_nobody_waits_for_a_save_in_the_background(
    open_writer: OpenWriter, content: MakeContent, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk holds the sync, `begin` has returned and nothing is committed; the outcome comes once."""
    go_on = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (go_on.wait(60), fsync(descriptor)))
    writer = open_writer()
    writer.begin(content(1))
    assert writer.is_busy
    assert writer.ended() is None
    assert store.committed() == []
    with pytest.raises(RuntimeError, match="step 2 was begun before"):
        writer.begin(content(2))
    go_on.set()
    assert isinstance(writer.wait(), Saved)
    assert writer.wait() is writer.ended() is None
    assert [checkpoint.step for checkpoint in store.committed()] == [1]


def test_a_synchronous_save_has_ended_when_it_has_begun(
    open_writer: OpenWriter, content: MakeContent, store: CheckpointStore
) -> None:
    """There is nothing to wait for."""
    writer = open_writer(asynchronous=False)
    writer.begin(content(1))
    assert not writer.is_busy
    assert [checkpoint.step for checkpoint in store.committed()] == [1]
    assert isinstance(writer.ended(), Saved)


def test_leaving_the_writer_waits_for_the_save(
    content: MakeContent, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the run ends by an error, what was begun is committed before the process can end."""
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.05), fsync(descriptor)))
    with (
        pytest.raises(ZeroDivisionError),
        CheckpointWriter(store, Retention(keep_last=1), asynchronous=True) as writer,
    ):
        writer.begin(content(4))
        raise ZeroDivisionError
    assert [checkpoint.step for checkpoint in store.committed()] == [4]


def test_a_run_that_has_lost_its_directory_commits_nothing(
    open_writer: OpenWriter, content: MakeContent, store: CheckpointStore
) -> None:
    """Unlike a failed save, that is nothing to go on from."""

    def refuse() -> None:
        raise ClaimLost("another run has taken the directory over")

    writer = open_writer(may_commit=refuse)
    writer.begin(content(1))
    with pytest.raises(ClaimLost):
        writer.wait()
    assert list(store.directory.iterdir()) == []


def test_a_disk_that_returns_other_bytes_is_found_before_the_commit(
    open_writer: OpenWriter, content: MakeContent, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit flips between the sync and the reading back."""
    forget = writer_module._forget_cached

    def flip(path: Path) -> None:
        forget(path)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(writer_module, "_forget_cached", flip)
    outcome = save(open_writer(), content(1))
    assert isinstance(outcome, NotSaved)
    assert "reads back as other bytes" in str(outcome.error)
    assert store.scan() == []
    assert list(store.directory.iterdir()) == []


def test_an_old_checkpoint_that_cannot_go_does_not_fail_the_save(
    content: MakeContent, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is committed; what stands in the way is told."""
    with CheckpointWriter(store, Retention(keep_last=1), asynchronous=True) as writer:
        assert isinstance(save(writer, content(1)), Saved)
        rename = Path.rename

        def refuse(self: Path, target: Path) -> Path:
            if ".removing-" in str(target):
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", refuse)
        outcome = save(writer, content(2))
    assert isinstance(outcome, Saved)
    assert outcome.removed == ()
    assert "Permission denied while removing" in str(outcome.prune_problem)
    assert [checkpoint.step for checkpoint in store.committed()] == [1, 2]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_a_fault_at_any_call_of_a_save_harms_nothing(
    error: int, lasting: bool, content: MakeContent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every open, write, close, sync, mkdir and rename of a save fails in its turn.

    Each time the outcome is a named failure, or a save that is whole; the checkpoint before is what it was; nothing
    damaged has a final name; and the next save works.
    """
    disk = FaultyDisk(monkeypatch, tmp_path)
    number_of_calls = None
    failed = 0
    number = 0
    while number_of_calls is None or number < number_of_calls:
        store = CheckpointStore(tmp_path / f"run-{number}")
        with CheckpointWriter(store, Retention(keep_last=5), asynchronous=True) as writer:
            disk.fail(None, error)
            before = save(writer, content(1))
            assert isinstance(before, Saved)
            if number_of_calls is None:
                number_of_calls = len(disk.calls)
                assert {call.split()[0] for call in disk.calls} == {
                    "mkdir",
                    "open",
                    "write",
                    "close",
                    "fsync",
                    "rename",
                }
            contents = data_files(before.checkpoint.path)

            disk.fail(number, error, lasting=lasting)
            outcome = save(writer, content(2))
            disk.fail(None, error)

            if isinstance(outcome, NotSaved):
                failed += 1
                assert os.strerror(error) in str(outcome.error)
            assert store.damaged() == []
            assert data_files(before.checkpoint.path) == contents
            for checkpoint in store.committed():
                assert verify_files(checkpoint) == []
            after = save(writer, content(3))
            assert isinstance(after, Saved)
            newest = store.newest()
            assert newest is not None
            assert newest.step == 3
            store.clean_staging()
            assert {path.name for path in store.directory.iterdir()} <= {f"step-0000000{step}" for step in (1, 2, 3)}
        number += 1
    assert failed > 20, "a save makes more calls than that, and nearly all of them matter"


def test_a_fault_on_one_rank_is_a_failed_save_on_both(content: MakeContent, tmp_path: Path) -> None:
    """Rank 1 has the full disk; rank 0 commits nothing, and both save again."""

    def on_rank() -> tuple[str, str, list[int]]:
        import torch.distributed as dist

        from ckptrain.megatron.world import open_process_group

        with pytest.MonkeyPatch.context() as patch, open_process_group():
            disk = FaultyDisk(patch, tmp_path)
            store = CheckpointStore(tmp_path / "run")
            mine = content(1)
            if dist.get_rank() == 1:  # its own piece, so that it has a file to write
                mine = attrs.evolve(mine, parts={"adapter": {"decoder.layers.other": torch.ones(4)}, "optimizer": {}})
                disk.fail(1, errno.ENOSPC)
            with CheckpointWriter(store, Retention(keep_last=5), asynchronous=True) as writer:
                first = save(writer, mine)
                disk.fail(None, errno.ENOSPC)
                second = save(writer, mine)
            assert isinstance(first, NotSaved)
            return type(first).__name__, str(first.error), [type(second) is Saved]

    results = launch(2, on_rank, timeout_s=60)
    assert [(kind, again) for kind, _, again in results] == [("NotSaved", [True])] * 2
    assert all("No space left on device" in message for _, message, _ in results)
    checkpoint = CheckpointStore(tmp_path / "run").newest()
    assert checkpoint is not None
    assert sorted(checkpoint.manifest.files) == [
        "adapter/.metadata",
        "adapter/__0_0.distcp",
        "adapter/__1_0.distcp",
        "optimizer/.metadata",
        "optimizer/__0_0.distcp",
    ]
    assert verify_files(checkpoint) == []


def test_a_failed_save_raises_where_it_is_called_directly(content: MakeContent, tmp_path: Path) -> None:
    """A file stands where the run's checkpoints should go."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(SaveFailed, match="there is no other checkpoint"):
        write_checkpoint(CheckpointStore(tmp_path), content(1))
