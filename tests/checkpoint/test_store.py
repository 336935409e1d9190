"""The store: what counts as a checkpoint, and that a crash at any point leaves none or a whole one."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from ckptrain.checkpoint.integrity import CommittedCheckpoint, verify_files
from ckptrain.checkpoint.manifest import Manifest, WrittenByNewer
from ckptrain.checkpoint.retention import Retention
from ckptrain.checkpoint.store import (
    CheckpointStore,
    DamagedCheckpoint,
    checkpoint_name,
    save_failures,
    step_of,
)
from ckptrain.errors import CkptrainError, SaveFailed
from ckptrain.lifecycle.journal import Journal

Save = Callable[..., CommittedCheckpoint]

OPERATIONS = 30
"""More than a save makes."""


class Crash(BaseException):
    """The process is gone: no handler of the code under test may answer it."""


def steps(store: CheckpointStore) -> list[int]:
    """Return the steps of the whole checkpoints."""
    return [checkpoint.step for checkpoint in store.committed()]


def names(directory: Path) -> list[str]:
    """Return what is in a directory."""
    return sorted(path.name for path in directory.iterdir())


def test_making_a_store_touches_no_disk(store: CheckpointStore) -> None:
    """Nor does asking it."""
    assert (store.scan(), store.newest(), store.find(1), store.clean_staging()) == ([], None, None, [])
    assert not store.run_dir.exists()


@pytest.mark.parametrize("step", [0, 1, 100, 99_999_999, 100_000_000, 10**12])
def test_the_name_of_a_step_is_read_back(step: int) -> None:
    """Names grow beyond eight digits."""
    assert step_of(checkpoint_name(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        "step-100", "step-0000100", "step-000000100", "step-00000100.bak", "step-00000100-old", "xstep-00000100",
        "step-0000010a", "step-00000100\n", "Step-00000100", "step-00000100 ", "step--0000100", "step-0000010\u0661",
        ".staging-step-00000100-abcd", ".removing-step-00000100-abcd", "", "step-",
    ],
)  # fmt: skip
def test_a_name_that_is_not_exactly_a_checkpoints_is_none(name: str) -> None:
    """Nothing is guessed from a name that someone made up."""
    assert step_of(name) is None


def test_saved_checkpoints_are_found_by_step_in_order(store: CheckpointStore, save: Save) -> None:
    """The newest is that of the highest step, not of the latest date."""
    for step in (200, 100, 100_000_000):
        save(step)
    assert steps(store) == [100, 200, 100_000_000]
    newest, found = store.newest(), store.find(200)
    assert newest is not None
    assert newest.path.name == "step-100000000"
    assert found is not None
    assert verify_files(found) == []
    assert store.find(150) is None


def test_other_names_in_the_directory_do_not_count(store: CheckpointStore, save: Save) -> None:
    """A copy beside a checkpoint is not a newer checkpoint."""
    path = save(100).path
    shutil.copytree(path, path.with_name("step-00000900.bak"))
    store.stage(300)
    assert [found.step for found in store.scan()] == [100]


def test_a_link_under_a_final_name_is_damage_and_is_not_followed(store: CheckpointStore, save: Save) -> None:
    """What it leads to can change without the run."""
    path = save(100).path
    path.with_name("step-00000200").symlink_to(path)
    [_, damaged] = store.scan()
    assert isinstance(damaged, DamagedCheckpoint)
    assert damaged.problems == ("it is a symbolic link",)
    assert steps(store) == [100]


def test_a_renamed_checkpoint_is_damage(store: CheckpointStore, save: Save) -> None:
    """Its data position is not that of its name."""
    path = save(100).path
    path.rename(path.with_name("step-00000200"))
    [damaged] = store.damaged()
    assert "that of step 100" in damaged.problems[0]


def test_a_damaged_checkpoint_is_passed_over_by_newest(store: CheckpointStore, save: Save) -> None:
    """The one before is the newest whole one."""
    save(100)
    (save(200).path / "state.json").unlink()
    newest = store.newest()
    assert newest is not None
    assert newest.step == 100
    assert [(damaged.step, damaged.problems) for damaged in store.damaged()] == [(200, ("state.json is missing",))]
    assert store.damaged()[0].facts().name == "step-00000200"


def test_a_checkpoint_of_a_newer_version_stops_the_scan(store: CheckpointStore, save: Save) -> None:
    """Passing over it would restart from an older step, or quarantine good work."""
    save(100)
    path = save(200).path / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"schema_version":3', b'"schema_version":4'))
    with pytest.raises(WrittenByNewer):
        store.newest()


def test_an_existing_checkpoint_is_never_overwritten(store: CheckpointStore, save: Save) -> None:
    """The first one of a step stays as it is."""
    first = save(100)
    with pytest.raises(SaveFailed, match="step-00000100 is there already"):
        save(100)
    assert verify_files(first) == []
    assert steps(store) == [100]


def test_a_commit_without_a_file_of_another_rank_fails(store: CheckpointStore, manifest: Manifest, save: Save) -> None:
    """Hosts that do not share the disk would each have a part."""
    save(50)
    with pytest.raises(SaveFailed, match=r"adapter is missing.*step-00000050 is untouched.*a disk they share"):
        store.commit(store.stage(100), manifest)
    assert steps(store) == [50]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("operation", range(OPERATIONS))
def test_a_crash_at_any_operation_of_a_commit_leaves_none_or_a_whole_checkpoint(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch, operation: int, *, after: bool
) -> None:
    """Every write, sync and rename is made the last one, before and after it takes effect."""
    save(100)
    done = 0

    def crashing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            nonlocal done
            done += 1
            if done - 1 < operation:
                return real(*arguments, **options)
            if after and done - 1 == operation:
                real(*arguments, **options)
            raise Crash

        return call

    with monkeypatch.context() as patched:
        for owner, name in ((os, "fsync"), (os, "rename"), (Path, "rename"), (Path, "mkdir"), (Path, "open")):
            patched.setattr(owner, name, crashing(getattr(owner, name)))
        try:
            save(200)
            crashed = False
        except Crash:
            crashed = True
    assert steps(store) in ([100], [100, 200])
    assert crashed or steps(store) == [100, 200]
    assert not (crashed and operation == OPERATIONS - 1), "a save makes more operations than are crashed here"
    assert store.damaged() == []
    assert all(verify_files(checkpoint) == [] for checkpoint in store.committed())
    store.clean_staging()
    assert names(store.directory) == [checkpoint_name(step) for step in steps(store)]
    if steps(store) == [100]:
        save(200)  # nothing is left that would be in the way
    assert steps(store) == [100, 200]


def test_the_order_of_a_commit_is_manifest_directories_rename_parent(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name must not reach the disk before what it names."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        real_fsync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    save(100)
    assert events[0] == "manifest.json"
    assert set(events[1:3]) == {"adapter", "optimizer"}
    assert events[3].startswith(".staging-step-00000100-")
    assert events[4:] == ["rename to step-00000100", "checkpoints"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_a_disk_error_in_a_save_says_what_it_means_and_what_is_left(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The previous checkpoint is named, because the user is about to ask."""
    save(100)

    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(SaveFailed) as caught:
            save(200)
    assert str(caught.value).startswith(f"{os.strerror(number)} while writing ")
    assert ".staging-step-00000200" in str(caught.value)
    assert "the previous checkpoint step-00000100 is untouched" in str(caught.value)
    assert steps(store) == [100]


def test_a_full_disk_at_the_first_save_says_that_there_is_no_other_checkpoint(tmp_path: Path) -> None:
    """Any writer below a staging directory can use the same words."""
    path = tmp_path / "checkpoints" / ".staging-step-00000001-abcd" / "adapter"
    with (
        pytest.raises(
            SaveFailed, match=r"No space left on device while writing .*; there is no other checkpoint; free"
        ),
        save_failures(path),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path / "__0_0.distcp"))


def test_a_run_directory_that_is_a_file_fails_the_save_in_words(tmp_path: Path) -> None:
    """A typing mistake in --run-dir is not a traceback."""
    (tmp_path / "run").write_text("")
    with pytest.raises(SaveFailed, match="Not a directory while writing"):
        CheckpointStore(tmp_path / "run").stage(1)


def test_a_given_up_save_leaves_nothing(store: CheckpointStore) -> None:
    """And only a staging directory can be discarded."""
    staging = store.stage(100)
    (staging / "part").write_bytes(b"x")
    store.discard(staging)
    assert names(store.directory) == []
    with pytest.raises(ValueError, match="not a staging directory"):
        store.discard(store.directory / "step-00000100")


def test_cleaning_removes_only_what_was_left_by_saves_and_removals(store: CheckpointStore, save: Save) -> None:
    """A link is removed itself; what it leads to stays."""
    kept = save(100)
    staging = store.stage(200)
    (staging / "part").write_bytes(b"x")
    (store.directory / ".removing-step-00000050-abcd").mkdir()
    (store.directory / ".staging-link").symlink_to(kept.path)
    (store.directory / "notes.txt").write_text("mine")
    assert len(store.clean_staging()) == 3
    assert names(store.directory) == ["notes.txt", "step-00000100"]
    assert verify_files(kept) == []


def test_a_quarantined_checkpoint_is_kept_whole_with_its_problems(store: CheckpointStore, save: Save) -> None:
    """Nothing is deleted: someone may want to look."""
    path = save(100).path
    (path / "state.json").unlink()
    before = names(path)
    target = store.quarantine(path, ["state.json is missing"])
    assert target == store.run_dir / "quarantine" / "step-00000100"
    assert names(target) == sorted([*before, "problems.json"])
    assert json.loads((target / "problems.json").read_bytes())["problems"] == ["state.json is missing"]
    assert store.scan() == []


def test_quarantining_the_same_step_again_keeps_both(store: CheckpointStore, save: Save) -> None:
    """A run can fall back, save the step again, and be damaged again."""
    targets = [store.quarantine(save(100).path, ["bad"]).name for _ in range(3)]
    assert targets == ["step-00000100", "step-00000100-2", "step-00000100-3"]


def test_a_link_and_a_file_under_a_final_name_can_be_quarantined(store: CheckpointStore, save: Save) -> None:
    """The link itself is moved; its target is not touched."""
    good = save(100)
    link, file = (store.directory / f"step-0000020{number}" for number in range(2))
    link.symlink_to(good.path)
    file.write_text("not a directory")
    for damaged in store.damaged():
        store.quarantine(damaged.path, damaged.problems)
    assert steps(store) == [100]
    assert verify_files(good) == []
    assert names(store.quarantine_directory / "step-00000201") == ["problems.json", "step-00000201"]


def test_pruning_keeps_the_newest_the_best_and_those_in_use(store: CheckpointStore, save: Save) -> None:
    """Lower is better; a checkpoint without the metric is never the best."""
    losses = {100: 0.5, 200: 0.9, 300: 0.4, 400: None, 500: 0.8, 600: 0.7}
    for step, loss in losses.items():
        save(step, {} if loss is None else {"val_loss": loss})
    in_use = store.directory / "step-00000200"
    removed = store.prune(Retention(keep_last=2, keep_best=1), in_use=[in_use])
    assert steps(store) == [200, 300, 500, 600]
    assert [path.name for path in removed] == ["step-00000100", "step-00000400"]
    assert names(store.directory) == [checkpoint_name(step) for step in (200, 300, 500, 600)]


def test_pruning_never_removes_the_only_whole_checkpoint(store: CheckpointStore, save: Save) -> None:
    """Damaged ones do not count as newer, and are not removed either."""
    save(100)
    (save(200).path / "state.json").unlink()
    assert store.prune(Retention(keep_last=1)) == []
    assert [found.step for found in store.scan()] == [100, 200]


def test_what_another_prune_has_removed_already_is_passed_over(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run and a person prune at once: whoever comes second finds the name gone, at the latest moment there is."""
    first, second, _ = save(100), save(200), save(300)
    real = Path.rename

    def be_late(path: Path, target: Path) -> Path:
        if path == first.path:
            real(path, target.with_name(".removing-by-another"))
        return real(path, target)

    monkeypatch.setattr(Path, "rename", be_late)
    assert store.prune(Retention(keep_last=1)) == [second.path]
    assert steps(store) == [300]


@pytest.mark.parametrize("error", [None, errno.ENOENT], ids=["as damage", "as an error"])
def test_a_checkpoint_that_goes_while_the_directory_is_scanned_is_not_taken_for_damage(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    """A start would put it into quarantine otherwise, and a prune would fail."""
    import ckptrain.checkpoint.store as module

    first, _ = save(100), save(200)
    real = module.open_checkpoint

    def lose(path: Path) -> CommittedCheckpoint:
        if path == first.path:
            shutil.rmtree(path)
            if error is not None:
                raise CkptrainError(f"cannot read {path}: {os.strerror(error)}")
        return real(path)

    monkeypatch.setattr(module, "open_checkpoint", lose)
    assert [found.step for found in store.scan()] == [200]


def test_a_crash_in_a_removal_leaves_no_half_under_a_final_name(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name goes first; the next start removes the rest."""
    save(100)
    save(200)

    def crash(path: Path, **_options: object) -> None:
        (path / "state.json").unlink()
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", crash)
        with pytest.raises(Crash):
            store.prune(Retention(keep_last=1))
    assert [found.step for found in store.scan()] == [200]
    assert store.damaged() == []
    store.clean_staging()
    assert names(store.directory) == ["step-00000200"]


def test_a_removal_that_the_disk_refuses_is_told(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the checkpoint stays whole."""
    save(100)
    save(200)

    def refuse(_path: Path, _target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        with pytest.raises(SaveFailed, match="Permission denied while removing"):
            store.prune(Retention(keep_last=1))
    assert steps(store) == [100, 200]


def test_a_directory_that_cannot_be_listed_is_an_error_and_not_an_empty_run(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting over because of a permission would be the worst answer."""
    save(100)

    def refuse(_path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CkptrainError, match="Permission denied"):
        store.newest()


def test_what_is_committed_is_what_was_given(store: CheckpointStore, save: Save, manifest: Manifest) -> None:
    """Nothing is changed on the way to the disk."""
    save(100, manifest.metrics)
    newest = store.newest()
    assert newest is not None
    assert attrs.evolve(newest.manifest, step=manifest.step) == manifest


def test_a_checkpoint_of_another_run_is_damage(store: CheckpointStore, save: Save) -> None:
    """Whole as it is, going on from it would be going on with another training; without a journal nobody can tell."""
    save(100)
    assert [checkpoint.step for checkpoint in store.committed()] == [100]
    Journal(store.run_dir / "journal.jsonl").record("plan", plan="FreshStart", run_id="of-this-run")
    [stranger] = CheckpointStore(store.run_dir).scan()
    assert isinstance(stranger, DamagedCheckpoint)
    assert stranger.problems == (
        "it is of another run: its run_id is 20261130-120000-abcd, that of the run here is of-this-run",
    )
    Journal(store.run_dir / "journal.jsonl").record("plan", plan="Resume", run_id="20261130-120000-abcd")
    assert CheckpointStore(store.run_dir).damaged() == []
