"""One run in a directory: real processes that hold, die, pause and fork, with the locks of several file systems."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.holders import (
    BEATING,
    FORK,
    SHORT,
    Run,
    here,
    leave_record,
    on_host,
    raised_by,
    refusal,
    refuse_flock,
    start,
)

from ckptrain.checkpoint import lock
from ckptrain.checkpoint.lock import Pace, hold, holder
from ckptrain.checkpoint.lock_records import FileRecords
from ckptrain.checkpoint.processes import pid_space
from ckptrain.errors import ClaimLost, SaveFailed, StartRefused


@pytest.fixture(params=["flock", "ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Try a file system with a lock, and three that say in their own ways that they have none."""
    if request.param != "flock":
        monkeypatch.setattr(fcntl, "flock", refuse_flock(getattr(errno, request.param)))
    return request.param


@pytest.fixture(params=["none", "of this host only"])
def useless_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a lock that says nothing of other hosts."""
    nothing = refuse_flock(errno.ENOSYS) if request.param == "none" else lambda _descriptor, _operation: None
    monkeypatch.setattr(fcntl, "flock", nothing)


@pytest.mark.usefixtures("file_system")
def test_a_second_start_is_refused_at_once_with_process_host_and_age(tmp_path: Path) -> None:
    """It can see that the process is alive, so it waits for nothing."""
    run = Run(tmp_path)
    message, told = refusal(tmp_path, Pace())
    assert told == []
    assert f"process {run.pid} on {socket.gethostname()}, started 0:00:0" in message
    assert run.check() is None
    run.end()


@pytest.mark.usefixtures("file_system")
def test_a_killed_holder_is_followed_at_once(tmp_path: Path) -> None:
    """Nobody has to remove anything, and nothing is waited for."""
    run = Run(tmp_path)
    run.kill()
    assert start(tmp_path, Pace()) == []


@pytest.mark.usefixtures("file_system")
def test_a_holder_that_nobody_has_buried_is_dead(tmp_path: Path) -> None:
    """A killed process keeps its number until its parent asks for it."""
    run = Run(tmp_path)
    os.kill(run.pid, signal.SIGKILL)
    os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
    assert start(tmp_path, Pace()) == []
    run.process.join()


@pytest.mark.usefixtures("file_system")
def test_starts_follow_one_another(tmp_path: Path) -> None:
    """A run that has ended is not waited for; one record stays, and its number only goes up."""
    for number in (1, 2, 3):
        assert start(tmp_path, Pace()) == []
        assert [path.name for path in tmp_path.glob(".lock-*")] == [f".lock-{number}"]


def test_the_number_of_a_dead_process_that_another_has_now_is_no_holder(tmp_path: Path) -> None:
    """It is alive, and began at another time than the record says."""
    pid = os.getppid()
    leave_record(tmp_path, pid=pid, pid_space=pid_space())
    assert start(tmp_path, Pace()) == []


@pytest.mark.usefixtures("useless_flock")
def test_a_holder_on_another_host_that_beats_is_not_touched(tmp_path: Path) -> None:
    """Its number means nothing here, its beats do."""
    run = Run(tmp_path, arrange=on_host("far"))
    message, told = refusal(tmp_path)
    assert f"process {run.pid} on far, started 0:00:0" in message
    assert len(told) == 1
    assert f"process {run.pid} on far" in told[0]
    assert run.check() is None
    run.end()


@pytest.mark.usefixtures("useless_flock")
def test_a_silent_holder_on_another_host_is_followed_after_a_while(tmp_path: Path) -> None:
    """Its host is gone with it: no human is needed."""
    run = Run(tmp_path, arrange=on_host("far"))
    run.kill()
    [told] = start(tmp_path, SHORT)
    assert f"held by process {run.pid} on far" in told
    assert "waiting up to 0.1 s for a sign of life" in told


@pytest.mark.usefixtures("useless_flock")
def test_a_run_that_ends_while_it_is_watched_makes_room(tmp_path: Path) -> None:
    """What changed was no beat."""
    run = Run(tmp_path, Pace(beat_s=0.2, patience=50), on_host("far"))
    with hold(tmp_path, pace=BEATING, tell=lambda _: run.end()) as claim:
        assert claim.number == 2


@pytest.mark.usefixtures("useless_flock")
def test_a_start_goes_by_the_slower_pace_of_the_two(tmp_path: Path) -> None:
    """A holder that beats rarely is not taken for dead by a start that is used to more."""
    run = Run(tmp_path, Pace(beat_s=0.5), on_host("far"))
    message, _ = refusal(tmp_path, Pace(beat_s=0.001, patience=8))
    assert "on far" in message
    run.end()


@pytest.mark.usefixtures("useless_flock")
@pytest.mark.parametrize("year", [1999, 2099])
def test_the_clock_of_another_host_does_not_matter(year: int, tmp_path: Path) -> None:
    """It is decades away; the age is told by the holder's own clock, and death is silence."""

    def move() -> None:
        on_host("far")()
        lock.datetime = FakeDatetime  # type: ignore[attr-defined]

    class FakeDatetime(datetime):
        @classmethod
        def now(cls, _zone: object = None) -> datetime:  # type: ignore[override]
            return datetime(year, 1, 1, tzinfo=UTC)

    run = Run(tmp_path, arrange=move)
    message, _ = refusal(tmp_path)
    assert f"started 0:00:0{message.split('started 0:00:0')[1][0]} ago ({year}-01-01" in message
    run.kill()
    assert len(start(tmp_path, SHORT)) == 1


def test_of_two_that_follow_a_dead_one_exactly_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty times, without a lock of the kernel, both at the same moment."""
    monkeypatch.setattr(fcntl, "flock", refuse_flock(errno.ENOSYS))
    for number in range(50):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        leave_record(run_dir, pid_space=pid_space())
        assert sorted(outcomes(run_dir, [here, here])) == ["held", "refused"]


@pytest.mark.usefixtures("useless_flock")
def test_of_two_on_different_hosts_exactly_one_starts(tmp_path: Path) -> None:
    """Neither can see the other's process, and the loser watches the winner."""
    for number in range(10):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        assert sorted(outcomes(run_dir, [on_host("far"), on_host("near")])) == ["held", "refused"]


def outcomes(run_dir: Path, arrangements: list[Callable[[], None]], pace: Pace = BEATING) -> list[str]:
    """Start in a directory from several processes at the same moment; those that hold it do so until all have tried."""
    gate, tried = FORK.Barrier(len(arrangements)), FORK.Barrier(len(arrangements))
    results = FORK.Queue()

    def attempt(arrange: Callable[[], None]) -> None:
        arrange()
        gate.wait()
        try:
            with hold(run_dir, pace=pace) as claim:
                tried.wait(60)
                results.put("held" if raised_by(claim) is None else "lost")
        except StartRefused:
            results.put("refused")
            tried.wait(60)

    processes = [FORK.Process(target=attempt, args=(arrange,), daemon=True) for arrange in arrangements]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    return found


@pytest.mark.usefixtures("useless_flock")
def test_a_directory_that_is_listed_as_it_was_before_hides_no_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS remembers names for a while, and knows better when a file is to be made."""
    start(tmp_path)
    run = Run(tmp_path)
    monkeypatch.setattr(FileRecords, "numbers", lambda _records: [1])
    message, _ = refusal(tmp_path, SHORT)
    assert f"process {run.pid} on" in message
    run.end()


@pytest.mark.usefixtures("useless_flock")
def test_a_holder_that_was_paused_finds_out_and_leaves_its_successor_alone(tmp_path: Path) -> None:
    """Suspended, it counts as dead; awake again, it may not commit, and neither its beats nor its end do harm."""
    run = Run(tmp_path, arrange=on_host("far"))
    os.kill(run.pid, signal.SIGSTOP)
    with hold(tmp_path, pace=SHORT) as claim:
        os.kill(run.pid, signal.SIGCONT)
        lost = run.check()
        assert isinstance(lost, ClaimLost)
        assert f"taken over by process {os.getpid()} on {socket.gethostname()}" in str(lost)
        run.end()
        claim.check()
        assert [path.name for path in tmp_path.glob(".lock-*")] == [".lock-2"]


def test_a_holder_whose_record_was_removed_may_not_commit(tmp_path: Path) -> None:
    """Somebody meant to make room for another run."""
    with hold(tmp_path) as claim:
        claim.path.unlink()
        with pytest.raises(ClaimLost, match="removed by hand"):
            claim.check()


def test_a_holder_loses_its_claim_to_the_name_alone(tmp_path: Path) -> None:
    """Another run has just made its record, and has done nothing else yet."""
    with hold(tmp_path) as claim:
        (tmp_path / ".lock-2").touch()
        with pytest.raises(ClaimLost):
            claim.check()


def test_a_record_of_another_run_is_not_written_over(tmp_path: Path) -> None:
    """Somebody removed the first one, so that numbers began anew."""
    with hold(tmp_path, pace=BEATING) as claim:
        claim.path.unlink()
        leave_record(tmp_path)
        time.sleep(0.1)
    assert holder(tmp_path) is not None
    with pytest.raises(ClaimLost):
        claim.check()


def test_records_are_of_one_length(tmp_path: Path) -> None:
    """They are written over one another, and the file is never made shorter."""
    sizes = set()
    for changes in ({}, {"held_s": 0.1234567890123}, {"held_s": 3.0, "released": True}):
        leave_record(tmp_path, **changes)
        sizes.add((tmp_path / ".lock-1").stat().st_size)
    assert len(sizes) == 1


def test_a_disk_that_cannot_be_read_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But nothing is committed to it either."""

    def fail(_path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with hold(tmp_path) as claim:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", fail)
            with pytest.raises(SaveFailed, match="Input/output error"):
                claim.check()
        claim.check()


@pytest.mark.usefixtures("file_system")
def test_a_disk_that_takes_no_beats_costs_neither_the_run_nor_its_claim(tmp_path: Path) -> None:
    """The kernel refuses to write to the record; its process can be seen all the same, and so can its end."""
    run = Run(tmp_path)
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (0, 0))
    time.sleep(0.1)  # for a beat that was under way
    before = (tmp_path / ".lock-1").read_bytes()
    time.sleep(0.3)
    assert (tmp_path / ".lock-1").read_bytes() == before
    assert run.check() is None
    message, told = refusal(tmp_path, Pace())
    assert (f"process {run.pid}" in message, told) == (True, [])
    run.end()
    assert run.process.exitcode == 0
    assert start(tmp_path, Pace()) == []


@pytest.mark.usefixtures("file_system")
def test_a_run_that_could_not_say_that_it_ended_blocks_no_later_one_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is alive, the run is not: a notebook goes on after a full disk."""
    end_without_a_word(tmp_path, monkeypatch)
    assert len(start(tmp_path, SHORT)) == 1


def test_a_run_that_could_not_say_that_it_ended_blocks_no_other_process_where_there_is_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says that its process has let go."""
    end_without_a_word(tmp_path, monkeypatch)
    run = Run(tmp_path, SHORT)
    assert run.refused is None
    run.end()


def full_disk(*_: object) -> None:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def end_without_a_word(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold a directory for a moment, and fail to say that it is over."""
    with monkeypatch.context() as patched, hold(run_dir, pace=SHORT):
        patched.setattr(FileRecords, "rewrite", full_disk)


def test_a_disk_without_room_for_a_record_refuses_the_start_and_keeps_no_half_of_one(tmp_path: Path) -> None:
    """The next start finds nothing to wait for."""
    run = Run(tmp_path, arrange=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)))
    assert isinstance(run.refused, OSError)
    assert run.refused.errno == errno.EFBIG
    assert start(tmp_path, Pace()) == []


@pytest.mark.parametrize("torn", [b"", b'{"beat_s":5.0,"bo', b"\0" * 640])
def test_a_torn_record_blocks_nobody_for_ever(torn: bytes, tmp_path: Path) -> None:
    """A crash in the middle of a start leaves one; it might be one that is being written, so it is watched."""
    (tmp_path / ".lock-7").write_bytes(torn)
    with hold(tmp_path, pace=SHORT) as claim:
        assert claim.number == 8


def test_a_lock_whose_holder_left_no_record_is_respected(tmp_path: Path) -> None:
    """It is not ours to break: a person may have locked the directory."""
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        message, _ = refusal(tmp_path, SHORT)
    assert "has left no record of itself" in message


def test_a_lock_that_outlives_its_silent_holder_does_not_block(tmp_path: Path) -> None:
    """The lock daemon of an NFS server keeps that of a host that never comes back."""
    leave_record(tmp_path)
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert len(start(tmp_path, SHORT)) == 1


@pytest.mark.usefixtures("file_system")
def test_a_forked_child_neither_beats_nor_lets_go(tmp_path: Path) -> None:
    """It leaves the block as its parent would, and the parent goes on holding the directory."""
    with contextlib.ExitStack() as stack:
        claim = stack.enter_context(hold(tmp_path, pace=BEATING))
        if (child := os.fork()) == 0:
            try:
                stack.close()
            finally:
                # By its name: a library may start threads of its own in a child.
                os._exit(sum(thread.name == "ckptrain-heartbeat" for thread in threading.enumerate()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        claim.check()
        assert Run(tmp_path).refused is not None
        before = claim.path.read_bytes()
        while claim.path.read_bytes() == before:
            time.sleep(0.01)


@pytest.mark.usefixtures("file_system")
def test_a_child_that_outlives_its_killed_holder_holds_nothing(tmp_path: Path) -> None:
    """It inherited every open file, the one with the lock of the kernel included."""
    run = Run(tmp_path)
    child = run.fork()
    run.kill()
    try:
        assert start(tmp_path, Pace()) == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    """Whether the run ends well or not."""
    before = threading.enumerate()
    with hold(tmp_path, pace=BEATING):
        assert len(threading.enumerate()) == len(before) + 1
    with pytest.raises(KeyboardInterrupt), hold(tmp_path, pace=BEATING):
        raise KeyboardInterrupt
    assert threading.enumerate() == before


def test_the_same_process_holds_a_directory_once(tmp_path: Path) -> None:
    """Two threads of a program that embeds ckptrain."""
    with hold(tmp_path, pace=BEATING):
        message, _ = refusal(tmp_path)
    assert f"process {os.getpid()} on" in message


def test_a_claim_can_be_asked_for_by_other_processes(tmp_path: Path) -> None:
    """Rank 0 holds it; what it sends to the others tells them the same."""
    with hold(tmp_path) as claim:
        pickle.loads(pickle.dumps(claim)).check()
    start(tmp_path)
    with pytest.raises(ClaimLost):
        pickle.loads(pickle.dumps(claim)).check()


def test_who_holds_a_directory_can_be_read_without_touching_it(tmp_path: Path) -> None:
    """Alive, dead, not to be told from here, and nobody."""
    assert holder(tmp_path / "missing") is None
    run = Run(tmp_path)
    found = holder(tmp_path)
    assert found is not None
    assert (found.pid, found.host, found.alive) == (run.pid, socket.gethostname(), True)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(found.started)).total_seconds() < 60
    run.kill()
    found = holder(tmp_path)
    assert found is not None
    assert found.alive is False
    start(tmp_path)
    assert holder(tmp_path) is None
    (tmp_path / ".lock-2").unlink()
    leave_record(tmp_path)
    found = holder(tmp_path)
    assert found is not None
    assert (found.host, found.held_s, found.alive) == ("lost", 90.0, None)
