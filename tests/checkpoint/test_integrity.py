"""Damage of every kind is found, and told apart."""

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptrain.checkpoint.integrity import (
    CommittedCheckpoint,
    fsync_directory,
    fsync_file,
    hash_file,
    open_checkpoint,
    verify_files,
)
from ckptrain.errors import CheckpointDamaged, CkptrainError

Save = Callable[[int], CommittedCheckpoint]
Damage = Callable[[Path], object]


def flip_a_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def moved_away(path: Path) -> Path:
    """Make room at `path` for something else."""
    path.rename(path.parent.parent / "moved-away")
    return path


def replace_by_link(path: Path) -> None:
    """Move a file or directory away and leave a link to it, so that its contents still read the same."""
    path.rename(path.parent.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent.parent / "elsewhere")


def test_a_digest_is_that_of_sha256sum(tmp_path: Path) -> None:
    """Anyone can check a manifest with coreutils."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(300_000))
    expected = subprocess.run(["sha256sum", path], check=True, capture_output=True, text=True).stdout.split()[0]
    assert (hash_file(path).sha256, hash_file(path).num_bytes) == (expected, 300_000)


def test_an_empty_file_has_a_digest(tmp_path: Path) -> None:
    """A rank without tensors writes one."""
    path = tmp_path / "file"
    path.touch()
    assert (hash_file(path).sha256, hash_file(path).num_bytes) == (hashlib.sha256().hexdigest(), 0)


def test_an_intact_checkpoint_has_no_problems(save: Save) -> None:
    """With any number of readers."""
    checkpoint = save(100)
    assert [verify_files(checkpoint, parallel) for parallel in (1, 4)] == [[], []]
    assert open_checkpoint(checkpoint.path) == checkpoint


def test_a_reader_of_one_directory_reads_no_other(save: Save) -> None:
    """The state of the optimizer is larger than the adapter, and none of an export's business."""
    checkpoint = save(100)
    flip_a_bit(checkpoint.path / "state.json")
    assert verify_files(checkpoint, within="adapter") == []
    [problem] = verify_files(checkpoint)
    assert "state.json has other contents" in problem
    flip_a_bit(checkpoint.path / "adapter/__0_0.distcp")
    assert len(verify_files(checkpoint, within="adapter")) == 1


FOUND_BY_OPENING: dict[str, tuple[Damage, str]] = {
    "missing file": (lambda root: (root / "state.json").unlink(), "state.json is missing"),
    "missing directory": (lambda root: (root / "adapter").rename(root.parent / "gone"), "adapter is missing"),
    "truncated file": (
        lambda root: os.truncate(root / "adapter/__0_0.distcp", 99),
        "adapter/__0_0.distcp is truncated: 99 bytes, expected ",
    ),
    "empty file": (lambda root: os.truncate(root / "state.json", 0), "state.json is truncated: 0 bytes, expected 3"),
    "longer file": (lambda root: os.truncate(root / "state.json", 9), "state.json is too long: 9 bytes, expected 3"),
    "linked file": (lambda root: replace_by_link(root / "state.json"), "state.json is a symbolic link"),
    "linked directory": (lambda root: replace_by_link(root / "adapter"), "adapter is a symbolic link"),
    "dangling link": (
        lambda root: moved_away(root / "state.json").symlink_to("nowhere"),
        "state.json is a symbolic link",
    ),
    "directory for a file": (
        lambda root: moved_away(root / "state.json").mkdir(),
        "state.json is not a regular file",
    ),
    "file for a directory": (
        lambda root: moved_away(root / "adapter").touch(),
        "adapter is not a directory",
    ),
}

FOUND_BY_READING: dict[str, tuple[Damage, str]] = {
    "flipped bit": (lambda root: flip_a_bit(root / "adapter/__0_0.distcp"), "adapter/__0_0.distcp has other contents"),
    "extra file": (lambda root: (root / "adapter/x.pt").touch(), "adapter/x.pt is not listed in the manifest"),
    "extra link": (lambda root: (root / "etc").symlink_to("/etc"), "etc is a symbolic link"),
    "extra name with spaces": (lambda root: (root / "a b").touch(), "a b is not listed in the manifest"),
}


@pytest.mark.parametrize("kind", [*FOUND_BY_OPENING, *FOUND_BY_READING])
def test_verification_finds_each_kind_of_damage_and_names_it(save: Save, kind: str) -> None:
    """One problem for one damage, with the file's name and what is wrong with it."""
    damage, expected = (FOUND_BY_OPENING | FOUND_BY_READING)[kind]
    checkpoint = save(100)
    damage(checkpoint.path)
    [problem] = verify_files(checkpoint)
    assert problem.startswith(expected)


@pytest.mark.parametrize("kind", FOUND_BY_OPENING)
def test_what_sizes_and_names_show_is_found_without_reading_the_tensors(save: Save, kind: str) -> None:
    """A start looks at every checkpoint of a run, so it must not read them all."""
    damage, expected = FOUND_BY_OPENING[kind]
    checkpoint = save(100)
    damage(checkpoint.path)
    with pytest.raises(CheckpointDamaged) as caught:
        open_checkpoint(checkpoint.path)
    [problem] = caught.value.problems
    assert problem.startswith(expected)
    assert str(checkpoint.path) in caught.value.summary


def test_several_damages_are_told_together(save: Save) -> None:
    """Whoever repairs it needs the whole list."""
    checkpoint = save(100)
    for damage, _ in (FOUND_BY_OPENING["missing file"], *FOUND_BY_READING.values()):
        damage(checkpoint.path)
    assert len(verify_files(checkpoint)) == 1 + len(FOUND_BY_READING)


@pytest.mark.parametrize("damage", [Path.unlink, replace_by_link, lambda path: path.write_bytes(b"")])
def test_a_checkpoint_without_its_own_manifest_is_damaged(save: Save, damage: Damage) -> None:
    """The manifest is the mark of completeness."""
    path = save(100).path
    damage(path / "manifest.json")
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        open_checkpoint(path)


def test_a_disk_that_refuses_to_be_read_is_not_damage(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be quarantined because of a wrong permission."""
    path = save(100).path

    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CkptrainError, match="Permission denied") as caught:
        open_checkpoint(path)
    assert not isinstance(caught.value, CheckpointDamaged)


def test_syncing_takes_files_and_directories_for_what_they_are(tmp_path: Path) -> None:
    """A directory's sync is refused for a file, so that neither is skipped unseen."""
    file = tmp_path / "file"
    file.write_bytes(b"x")
    fsync_file(file)
    fsync_directory(tmp_path)
    with pytest.raises(NotADirectoryError):
        fsync_directory(file)


def test_the_facts_of_a_checkpoint_say_what_can_be_restored(save: Save) -> None:
    """A start plan sees the optimizer and the random states without opening the tensors."""
    facts = save(100).facts()
    assert (facts.step, facts.consumed_samples, facts.has_optimizer, facts.has_rng) == (100, 800, True, True)
