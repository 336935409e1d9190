"""What is promised of checkpoints in an S3 store: damage is named, one run works at a time, nothing is overwritten."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from support.object_store import Fault, ObjectStore, cut, data_object, flip, objects
from support.processes import Child, wait_until

from ckptrain import api
from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.lock import Pace
from ckptrain.checkpoint.object_files import ObjectPath
from ckptrain.checkpoint.remote_store import RemoteStore, store_of
from ckptrain.checkpoint.resolve import resolve_checkpoint
from ckptrain.checkpoint.store import DamagedCheckpoint
from ckptrain.checkpoint.working_copy import bring, local_path, publish, to_look_at
from ckptrain.errors import CheckpointDamaged, CkptrainError, ClaimLost, SaveFailed, StartRefused
from ckptrain.training.directory import claimed
from ckptrain.training.start import decide_start, survey_run

SHORT = Pace(beat_s=0.1, patience=3)


DAMAGES = [
    pytest.param(flip, "adapter/__0_0.distcp has other contents", id="flipped"),
    pytest.param(cut, "adapter/__0_0.distcp is truncated", id="truncated"),
    pytest.param(ObjectPath.remove, "adapter/__0_0.distcp is missing", id="removed"),
]


@pytest.mark.parametrize(("harm", "problem"), DAMAGES)
def test_damage_is_named_and_a_start_goes_on_from_the_one_before(
    harm: Callable[[ObjectPath], None], problem: str, run_url: str
) -> None:
    """The newest is set aside in the store with nothing lost; who asks for it is told what is wrong with it."""
    harm(data_object(run_url, 4))
    before = objects(run_url)
    with pytest.raises(CheckpointDamaged, match=problem):
        resolve_checkpoint(local_path(f"{run_url}/checkpoints/step-00000004"))

    run_dir = local_path(run_url)
    config = api.config_of_run(run_dir)
    start = decide_start(survey_run(config, 1, run_dir), run_dir, read_contents=True)
    assert start.checkpoint is not None
    assert start.checkpoint.step == 2
    assert [problem in " ".join(damage.problems) for damage in start.damaged] == [True]

    [damage] = start.damaged
    store_of(run_dir).quarantine(damage.path, damage.problems)
    after = objects(run_url)
    moved = {name: data for name, data in before.items() if name.startswith("checkpoints/step-00000004/")}
    assert {name: after.get(name.replace("checkpoints/", "quarantine/")) for name in moved} == moved
    assert not [name for name in after if name.startswith("checkpoints/step-00000004/")]
    assert problem.encode() in after["quarantine/step-00000004/problems.json"]


def test_a_manifest_that_is_there_is_never_written_over(run_url: str) -> None:
    """Another save of the same step fails, also where the other's manifest comes between the look and the write."""
    store = store_of(local_path(run_url))
    assert isinstance(store, RemoteStore)
    newest = store.newest()
    assert newest is not None
    before = objects(run_url)
    staging = store.stage(4)
    assert isinstance(staging, ObjectPath)
    for name in newest.manifest.files:
        data = before[next(path for path in before if path.startswith("checkpoints/step-00000004/") and name in path)]
        (staging / name).write(data)
    with pytest.raises(SaveFailed, match="is there already; a checkpoint is never overwritten"):
        store.commit(staging, attrs.evolve(newest.manifest, metrics={"loss": 1.0}))
    assert (
        objects(run_url)["checkpoints/step-00000004/manifest.json"]
        == (before["checkpoints/step-00000004/manifest.json"])
    )
    store.discard(staging)
    assert objects(run_url).keys() == before.keys()


def test_what_is_not_complete_is_not_committed(run_url: str) -> None:
    """An object that another host was to write and that is not there fails the save, by name."""
    store = store_of(local_path(run_url))
    newest = store.newest()
    assert newest is not None
    with pytest.raises(SaveFailed, match=r"is not complete: adapter/\.metadata is missing"):
        store.commit(store.stage(6), attrs.evolve(newest.manifest, step=6))
    assert store.newest() == newest


def test_what_unfinished_saves_have_left_goes_at_a_start(store: ObjectStore, run_url: str) -> None:
    """Objects that no manifest names, of a new step and beside a whole checkpoint, and parts of uploads."""
    run, before = ObjectPath(run_url), objects(run_url)
    for name in ("step-00000006/data-00000000/adapter/x", "step-00000004/data-00000000/adapter/x"):
        (run / "checkpoints" / name).write(b"left")
    files = run._files
    bucket, key, _ = files.split_path(f"{run_url}/checkpoints/step-00000006/data-00000000/large")
    files.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    cleaned = store_of(local_path(run_url)).clean_staging()
    assert [path.name for path in cleaned] == ["data-00000000", "data-00000000"]
    assert objects(run_url) == before
    assert files.list_multipart_uploads(bucket) == []


def test_a_second_start_is_refused_and_a_dead_one_succeeded(bucket: str, tmp_path: Path) -> None:
    """Two at once: one has it, the other is told who; after a kill the next takes over and the first cannot commit."""
    url = f"{bucket}/runs/a"
    elsewhere = tmp_path / "elsewhere"

    def hold_on() -> None:
        os.environ["CKPTRAIN_CACHE"] = str(elsewhere)
        with claimed(local_path(url), pace=SHORT):
            wait_until(lambda: False)

    child = Child(hold_on)
    wait_until(lambda: ".lock-1" in ObjectPath.parse(url).list_below())
    with pytest.raises(StartRefused, match=f"process {child.process.pid} on"), claimed(local_path(url), pace=SHORT):
        pass
    child.kill()
    with contextlib.ExitStack() as stack:
        claim = stack.enter_context(claimed(local_path(url), pace=SHORT))
        assert claim.number == 2
        claim.check()
        (ObjectPath.parse(url) / ".lock-3").create(b"another's")
        with pytest.raises(ClaimLost, match="no longer holds"):
            claim.check()


def test_a_silent_run_on_another_host_is_watched_before_it_is_succeeded(bucket: str) -> None:
    """Its process cannot be seen from here; only its record tells, which does not change."""
    url = f"{bucket}/runs/a"
    told: list[str] = []

    def hold_and_die() -> None:
        from ckptrain.checkpoint import processes

        processes.pid_space = lambda: "another host"
        with claimed(local_path(url), pace=SHORT):
            os._exit(1)

    child = Child(hold_and_die)
    child.process.join()
    with claimed(local_path(url), pace=SHORT, tell=told.append) as claim:
        assert claim.number == 2
    assert "waiting up to" in told[0]


def test_a_store_that_denies_is_no_fresh_start(store: ObjectStore, run_url: str) -> None:
    """A start that cannot look into the store ends with what to do, and names the variables, not their values."""
    config = api.config_of_run(local_path(run_url))
    store.faults(Fault(request="^GET /[^/]*[?].*checkpoints", status=403))
    with pytest.raises(CkptrainError, match="the store failed listing") as refused:
        api.plan(config, run_dir=run_url)
    assert "AWS_ACCESS_KEY_ID" in str(refused.value)
    assert store.environment["AWS_SECRET_ACCESS_KEY"] not in str(refused.value)


def test_a_scan_says_whole_or_damaged_by_name_and_size(run_url: str) -> None:
    """Manifests only are read; a manifest that is cut is damage, and not a checkpoint that never was."""
    found = store_of(local_path(run_url)).scan()
    assert [type(checkpoint) for checkpoint in found] == [CommittedCheckpoint, CommittedCheckpoint]
    cut(ObjectPath(run_url) / "checkpoints/step-00000002/manifest.json")
    first, second = store_of(local_path(run_url)).scan()
    assert isinstance(first, DamagedCheckpoint)
    assert isinstance(second, CommittedCheckpoint)


def journal_in(run: ObjectPath) -> bytes:
    """Return the journal that the store has."""
    return (run / "journal.jsonl").read() or b""


def test_the_small_files_of_a_working_copy_follow_the_store(run_url: str) -> None:
    """The store's are brought; lines that were only written here stay; a request to stop does not leave this machine."""
    run_dir, run = local_path(run_url), ObjectPath(run_url)
    bring(run_dir)
    journal = run_dir / "journal.jsonl"
    assert journal.read_bytes() == journal_in(run)
    journal.write_bytes(journal.read_bytes() + b'{"event": "here alone"}\n')
    (run_dir / "stop").touch()
    bring(run_dir)
    assert journal.read_bytes().endswith(b'{"event": "here alone"}\n')
    publish(run_dir)
    assert journal_in(run) == journal.read_bytes()
    assert "stop" not in run.list_below()
    (run / "journal.jsonl").write(b'{"event": "another machine went on"}\n')
    bring(run_dir)
    assert journal.read_bytes() == b'{"event": "another machine went on"}\n'
    (run / "journal.jsonl").remove()
    bring(run_dir)
    assert not journal.exists()


def test_a_beat_in_the_store_is_a_sign_of_life(run_url: str) -> None:
    """Between commits the journal in the store does not change, and the run is not dead for that."""
    look = to_look_at(local_path(run_url))
    os.utime(look / "journal.jsonl", (1, 1))
    (ObjectPath(run_url) / ".lock-7").create(b"a beat")
    assert (to_look_at(local_path(run_url)) / "journal.jsonl").stat().st_mtime > time.time() - 60
