"""Damage to any file of a checkpoint that a run has made is found, all of it, and named for what it is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from ckptrain.checkpoint.integrity import open_checkpoint, verify_files
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.errors import CheckpointDamaged
from ckptrain.lifecycle.journal import read_journal
from ckptrain.training.directory import prepare
from ckptrain.training.start import decide_start

FILES = [
    "manifest.json",
    *(f"{directory}/{name}" for directory in ("adapter", "optimizer") for name in (".metadata", "__0_0.distcp", "__1_0.distcp")),
]  # fmt: skip
FLIPS = 20


@pytest.fixture
def newest(run: Any) -> Path:
    """Return the checkpoint of step 4, which has that of step 2 beside it."""
    path: Path = run.path / "checkpoints/step-00000004"
    return path


def problems_of(checkpoint: Path) -> list[str]:
    """Return what opening and reading a checkpoint in full finds."""
    try:
        return verify_files(open_checkpoint(checkpoint))
    except CheckpointDamaged as error:
        return [f"{error.summary}: {problem}" for problem in error.problems]


def test_the_files_are_those_of_a_checkpoint(newest: Path) -> None:
    """All of them are damaged below, and none is damaged before."""
    assert sorted(FILES) == sorted(path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file())
    assert problems_of(newest) == []


@pytest.mark.parametrize("file", FILES)
def test_a_removed_file_is_missing(file: str, newest: Path) -> None:
    """Named by its path in the checkpoint."""
    (newest / file).unlink()
    [problem] = problems_of(newest)
    assert f"{file} is missing" in problem


@pytest.mark.parametrize("left", ["nothing", "half", "all but a byte"])
@pytest.mark.parametrize("file", FILES)
def test_a_truncated_file_is_truncated(file: str, left: str, newest: Path) -> None:
    """The manifest, whose size nobody has noted, is no manifest any more."""
    size = (newest / file).stat().st_size
    length = {"nothing": 0, "half": size // 2, "all but a byte": size - 1}[left]
    if file == "manifest.json" and left == "all but a byte":
        length -= 1  # the last byte is the end of the line, without which it says the same
    os.truncate(newest / file, length)
    [problem] = problems_of(newest)
    expected = f"is truncated: {length} bytes, expected {size}" if file != "manifest.json" else "it is not a manifest"
    assert file in problem
    assert expected in problem


def flipped(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the contents of a file with one bit changed, at places from its first byte to its last."""
    data = path.read_bytes()
    for number in range(FLIPS):
        place = number * (len(data) - 1) // (FLIPS - 1)
        changed = bytearray(data)
        changed[place] ^= 1 << number % 8
        yield place, bytes(changed)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_found_wherever_it_is(file: str, newest: Path) -> None:
    """In the first byte, in the last, and between, with every bit of a byte having its turn."""
    size = (newest / file).stat().st_size
    places = []
    for place, changed in flipped(newest / file):
        (newest / file).write_bytes(changed)
        [problem, *more] = problems_of(newest)
        assert file in problem
        assert file == "manifest.json" or (problem.startswith(f"{file} has other contents: SHA-256") and not more)
        places.append(place)
    assert len(set(places)) == FLIPS
    assert (places[0], places[-1]) == (0, size - 1)


@pytest.mark.parametrize("file", [file for file in FILES if file.endswith(".distcp")])
def test_a_file_of_another_step_is_known_again(file: str, newest: Path) -> None:
    """It has the same name and size, and is whole: only the digest tells, and that of the other step says whose it is."""
    shutil.copy(newest.parent / "step-00000002" / file, newest / file)
    assert problems_of(newest) == [f"{file} has the contents of step-00000002's {file}"]


def test_two_files_that_changed_places_are_known_again(newest: Path) -> None:
    """As after a restore from a backup that went wrong."""
    first, second = newest / "adapter/__0_0.distcp", newest / "adapter/__1_0.distcp"
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    assert problems_of(newest) == [
        "adapter/__0_0.distcp has the contents of its own adapter/__1_0.distcp",
        "adapter/__1_0.distcp has the contents of its own adapter/__0_0.distcp",
    ]


def test_the_description_of_another_step_describes_the_same_files(newest: Path) -> None:
    """Two steps of one layout have the same .metadata, byte for byte, so that one in the other's place is no damage."""
    for directory in ("adapter", "optimizer"):
        shutil.copy(newest.parent / "step-00000002" / directory / ".metadata", newest / directory / ".metadata")
    assert problems_of(newest) == []


def test_the_manifest_of_another_step_is_found(run: Any, newest: Path) -> None:
    """By the files, none of which are those of step 2, and by the name of the directory."""
    shutil.copy(newest.parent / "step-00000002/manifest.json", newest / "manifest.json")
    assert len(problems_of(newest)) == len([file for file in FILES if file.endswith(".distcp")])
    [damaged] = CheckpointStore(run.path).damaged()
    assert damaged.problems == ("its manifest is that of step 2: it was renamed",)


def test_a_checkpoint_under_the_name_of_another_step_is_found(run: Any, newest: Path) -> None:
    """Its data position is not that of its name."""
    newest.rename(newest.with_name("step-00000003"))
    [damaged] = CheckpointStore(run.path).damaged()
    assert (damaged.path.name, damaged.problems) == (
        "step-00000003",
        ("its manifest is that of step 4: it was renamed",),
    )


def test_a_manifest_of_a_newer_version_is_told_apart(newest: Path) -> None:
    """It is no damage, and the way out is named."""
    manifest = json.loads((newest / "manifest.json").read_bytes())
    (newest / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 4}))
    [problem] = problems_of(newest)
    assert "written by a newer ckptrain" in problem
    assert "upgrade ckptrain" in problem


def linked(path: Path) -> None:
    """Move a file or directory away and leave a link to it, so that its contents still read the same."""
    path.rename(path.parents[3] / "elsewhere")
    path.symlink_to(path.parents[3] / "elsewhere")


OTHER: dict[str, tuple[Callable[[Path], object], str]] = {
    "an extra file": (
        lambda root: (root / "adapter/__2_0.distcp").touch(),
        "adapter/__2_0.distcp is not listed in the manifest",
    ),
    "an extra FIFO": (lambda root: os.mkfifo(root / "fifo"), "fifo is not listed in the manifest"),
    "an empty directory": (lambda root: (root / "a/b").mkdir(parents=True), "a/b is an empty directory"),
    "an extra name that is no text": (
        lambda root: (root / os.fsdecode(b"adapter/\xff\x1b[2J")).touch(),
        "adapter/\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[2J is not listed in the manifest",
    ),
    "a file in an extra directory": (
        lambda root: ((root / "a").mkdir(), (root / "a/b").touch()),
        "a/b is not listed in the manifest",
    ),
    "a linked file": (
        lambda root: linked(root / "adapter/__0_0.distcp"),
        "adapter/__0_0.distcp is a symbolic link",
    ),
    "a linked description": (lambda root: linked(root / "adapter/.metadata"), "adapter/.metadata is a symbolic link"),
    "a linked manifest": (lambda root: linked(root / "manifest.json"), "manifest.json is a symbolic link"),
    "a linked directory": (lambda root: linked(root / "optimizer"), "optimizer is a symbolic link"),
    "a linked checkpoint": (linked, "it is a symbolic link"),
    "a removed directory": (lambda root: shutil.rmtree(root / "optimizer"), "optimizer is missing"),
    "a file for a directory": (
        lambda root: (shutil.rmtree(root / "optimizer"), (root / "optimizer").touch()),
        "optimizer is not a directory",
    ),
    "a directory for a file": (
        lambda root: ((root / "adapter/.metadata").unlink(), (root / "adapter/.metadata").mkdir()),
        "adapter/.metadata is not a regular file",
    ),
    "a longer file": (
        lambda root: (root / "adapter/__0_0.distcp").open("ab").write(b"\0"),
        "adapter/__0_0.distcp is too long",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER)
def test_whatever_else_can_happen_to_a_directory_is_named(kind: str, newest: Path) -> None:
    """One problem for one damage."""
    damage, expected = OTHER[kind]
    damage(newest)
    [problem] = problems_of(newest)
    assert expected in problem


@pytest.mark.parametrize("file", ["manifest.json", "adapter/.metadata", "optimizer/__1_0.distcp"])
def test_a_start_sets_damage_aside_and_goes_on_from_the_newest_that_is_whole(file: str, run: Any, newest: Path) -> None:
    """What was found is in the journal, and in the problems.json beside the files, none of which is lost."""
    *_, (_, changed) = flipped(newest / file)
    (newest / file).write_bytes(changed)
    config = run.survey.config
    config = attrs.evolve(config, checkpoint=attrs.evolve(config.checkpoint, on_damaged="quarantine"))
    survey = attrs.evolve(run.survey, config=config)
    start = decide_start(survey, run.path, read_contents=True)
    assert (start.plan.kind, start.plan.step) == ("Resume", 2)
    prepare(survey, start, run.path)
    assert [path.name for path in newest.parent.iterdir()] == ["step-00000002"]
    moved = run.path / "quarantine/step-00000004"
    assert (moved / file).read_bytes() == changed
    told = json.loads((moved / "problems.json").read_bytes())["problems"]
    [event] = [event for event in read_journal(run.path / "journal.jsonl") if event["event"] == "quarantined"]
    assert event["problems"] == told
    assert event["checkpoint"] == newest.name
    assert told


def test_a_start_that_is_to_refuse_damage_leaves_everything_where_it_is(run: Any, newest: Path) -> None:
    """checkpoint.on_damaged=refuse: the damage is named, and the older checkpoint is not used in its place."""
    os.truncate(newest / "adapter/__0_0.distcp", 7)
    with pytest.raises(CheckpointDamaged, match=r"adapter/__0_0\.distcp is truncated: 7 bytes"):
        decide_start(run.survey, run.path, read_contents=True)
    assert newest.is_dir()
