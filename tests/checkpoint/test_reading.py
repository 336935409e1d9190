"""Who reads a checkpoint keeps it from being removed, in this process, in others, and on any file system."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ckptrain.checkpoint.integrity import CommittedCheckpoint, open_checkpoint
from ckptrain.checkpoint.reading import reading, unread
from ckptrain.checkpoint.retention import Retention
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.errors import CheckpointNotFound

Save = Callable[..., CommittedCheckpoint]

HOLD = """
import os, sys, ckptrain.checkpoint.integrity as integrity, ckptrain.checkpoint.reading as reading, pathlib
with reading.reading(integrity.open_checkpoint(pathlib.Path(sys.argv[1]))):
    print("holds", flush=True)
    sys.stdin.read()
"""


@contextmanager
def read_by_another_process(checkpoint: CommittedCheckpoint) -> Iterator[subprocess.Popen[str]]:
    """Have a second process read a checkpoint."""
    command = [sys.executable, "-c", HOLD, str(checkpoint.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


def test_a_checkpoint_that_another_process_reads_is_left_until_it_is_done(store: CheckpointStore, save: Save) -> None:
    """An export in another terminal is not to lose its files; a reader that is killed holds nothing any more."""
    first, second, _ = save(100), save(200), save(300)
    with read_by_another_process(first) as reader:
        assert store.prune(Retention(keep_last=1)) == [second.path]
        assert [found.step for found in store.scan()] == [100, 300]
        reader.kill()
        reader.wait()
        assert store.prune(Retention(keep_last=1)) == [first.path]


def test_several_may_read_a_checkpoint_at_once_and_one_is_enough_to_hold_it(store: CheckpointStore, save: Save) -> None:
    """Within one process too: a run prunes while it reads."""
    first = save(100)
    save(200)
    with reading(first):
        with reading(first):
            pass
        assert store.prune(Retention(keep_last=1)) == []
    assert store.prune(Retention(keep_last=1)) == [first.path]


def test_a_read_only_checkpoint_can_be_read(store: CheckpointStore, save: Save) -> None:
    """Nothing is written in order to hold it."""
    checkpoint = save(100)
    before = (checkpoint.path / "manifest.json").stat()
    (checkpoint.path / "manifest.json").chmod(0o444)
    checkpoint.path.chmod(0o555)
    with reading(checkpoint):
        assert open_checkpoint(checkpoint.path) == checkpoint
    after = (checkpoint.path / "manifest.json").stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
    checkpoint.path.chmod(0o755)


def test_without_locks_checkpoints_are_read_and_pruned_all_the_same(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have none."""
    first = save(100)
    save(200)

    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with reading(first):
        assert store.prune(Retention(keep_last=1)) == [first.path]


def test_a_checkpoint_that_is_removed_before_it_is_held_is_said_to_be_gone(store: CheckpointStore, save: Save) -> None:
    """Rather than that its files are missing, which would be damage."""
    first = save(100)
    save(200)
    store.prune(Retention(keep_last=1))
    with pytest.raises(CheckpointNotFound, match="step-00000100 was removed while"), reading(first):
        pass


def test_a_checkpoint_that_is_removed_while_the_lock_is_waited_for_is_said_to_be_gone(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that comes second opens the manifest, waits, and then holds a file without a name."""
    first = save(100)
    save(200)
    real = fcntl.flock

    def come_second(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH:
            store.prune(Retention(keep_last=1))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", come_second)
    with pytest.raises(CheckpointNotFound, match="step-00000100 was removed while"), reading(first):
        pass


def test_whoever_removes_keeps_readers_out_meanwhile(store: CheckpointStore, save: Save) -> None:
    """Between the look and the rename nobody begins to read, and nobody else removes."""
    checkpoint = save(100)
    with unread(checkpoint.path) as is_free:
        assert is_free
        with unread(checkpoint.path) as is_free_too:
            assert not is_free_too
    with unread(checkpoint.path) as is_free_again:
        assert is_free_again
    with unread(checkpoint.path.with_name("step-00000200")) as is_there:
        assert not is_there


def test_a_child_that_outlives_the_reading_holds_nothing(store: CheckpointStore, save: Save) -> None:
    """A forked child has the descriptor too, and may live as long as the run."""
    first = save(100)
    save(200)
    with reading(first):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        assert store.prune(Retention(keep_last=1)) == [first.path]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
