"""What is said of packages that are missing, too old, or of another version than the tested one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptrain import api, installed
from ckptrain.errors import PackageMissing
from ckptrain.installed import MEGATRON, TESTED, require, untested, untested_text


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Return the versions that are there, to be changed; None is a package that is not."""
    there: dict[str, str | None] = dict(TESTED)
    monkeypatch.setattr(installed, "version_of", there.get)
    monkeypatch.setattr(installed, "is_installed", lambda package: there[package] is not None)
    return there


def test_the_tested_versions_are_required_and_told_nothing_of(versions: Mapping[str, str | None]) -> None:
    """What a builder adds to a version makes no other of it."""
    require(MEGATRON, "training")
    assert untested() == {}


def test_every_package_that_is_missing_is_named_with_its_command(versions: dict[str, str | None]) -> None:
    """At once, so that nobody installs one after the other."""
    versions |= {"megatron-core": None, "megatron-bridge": None}
    with pytest.raises(PackageMissing, match="training needs torch, megatron-core") as caught:
        require(MEGATRON, "training")
    core, bridge, everything = caught.value.problems
    assert core == f"megatron-core is not installed: pip install megatron-core=={TESTED['megatron-core']}"
    assert bridge.endswith(f"pip install --no-deps megatron-bridge=={TESTED['megatron-bridge']}")
    assert "pip install 'ckptrain[megatron]'" in everything


def test_a_version_that_is_known_not_to_work_is_refused(versions: dict[str, str | None]) -> None:
    """Megatron-Bridge reads the configs of transformers 5 only."""
    versions["transformers"] = "4.57.1"
    with pytest.raises(PackageMissing) as caught:
        require(MEGATRON, "training")
    assert caught.value.problems[0].startswith("transformers is 4.57.1, and nothing below 5.8 works: pip install")


@pytest.mark.parametrize(
    ("there", "told"), [("2.11.0+cu126", False), ("2.11.0a0+gitabc", True), ("2.12.1", True), ("of a container", True)]
)
def test_other_versions_are_allowed_and_told(there: str, told: bool, versions: dict[str, str | None]) -> None:
    """A container's own build of the tested version is that version; a pre-release, or what is no version, is not."""
    versions["torch"] = there
    assert ("torch" in untested()) == told
    if told:
        assert f"torch {there} (2.11.0)" in untested_text(untested())


def test_a_start_tells_once_of_versions_that_were_not_tested(
    tiny_llama: Path, chats: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the notes of the plan, which the journal keeps."""
    config = {"model": {"pretrained": str(tiny_llama)}, "data": {"train": str(chats[0]), "sequence_length": 128}}
    monkeypatch.setattr("ckptrain.training.start.untested", lambda: {"torch": "2.12.1"})
    _, start = api.plan(config, run_dir=tmp_path / "run")
    assert [note for note in start.plan.notes if "not tested with" in note] == [untested_text({"torch": "2.12.1"})]
    monkeypatch.setattr("ckptrain.training.start.untested", dict)
    _, start = api.plan(config, run_dir=tmp_path / "run")
    assert not [note for note in start.plan.notes if "not tested with" in note]
