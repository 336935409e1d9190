"""Which checkpoint a path means, and what is said where it means none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.resolve import resolve_checkpoint
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.errors import CheckpointDamaged, CheckpointNotFound

Save = Callable[..., CommittedCheckpoint]


def test_a_run_means_its_newest_checkpoint_however_it_is_named(store: CheckpointStore, save: Save) -> None:
    """The run, its checkpoints directory, the checkpoint and its manifest."""
    save(100)
    path = save(200).path
    for given in (store.run_dir, store.directory, path, path / "manifest.json"):
        assert resolve_checkpoint(given).step == 200
    assert resolve_checkpoint(store.directory / "step-00000100").step == 100


def test_a_checkpoint_that_was_copied_elsewhere_is_found_by_its_path(save: Save, tmp_path: Path) -> None:
    """Only inside a run does the name matter."""
    path = save(100).path.rename(tmp_path / "the-good-one")
    assert resolve_checkpoint(path).step == 100


def test_a_relative_path_is_taken_from_where_one_stands(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ckptrain inspect .` inside a run or its checkpoints works."""
    save(100)
    for directory in (store.run_dir, store.directory, store.directory / "step-00000100"):
        monkeypatch.chdir(directory)
        assert resolve_checkpoint(Path()).step == 100


def test_a_run_whose_newest_checkpoint_is_damaged_means_no_other(store: CheckpointStore, save: Save) -> None:
    """An older step must be asked for by name."""
    save(100)
    (save(200).path / "state.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"step-00000200, is damaged; .*name it: .*step-00000100") as caught:
        resolve_checkpoint(store.run_dir)
    assert caught.value.problems == ("state.json is missing",)


def _touch(path: Path, *files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name in files:
        (path / name).touch()


@pytest.mark.parametrize(
    ("prepare", "given", "expected"),
    [
        (lambda _: None, "gone", "does not exist"),
        (lambda root: _touch(root / "x"), "x", "is an empty directory"),
        (lambda root: _touch(root, "x"), "x", "is a file"),
        (lambda root: _touch(root / "x", "README"), "x", "is neither a run nor a checkpoint"),
        (lambda root: _touch(root / "x", "adapter_config.json"), "x", "is a PEFT adapter; `ckptrain import-adapter`"),
        (lambda root: _touch(root / "x", "config.json", "model.safetensors"), "x", "is a Hugging Face model"),
        (lambda root: _touch(root / "x", "latest_checkpointed_iteration.txt"), "x", "is a checkpoint of Megatron"),
        (lambda root: _touch(root / "x/iter_0000100"), "x", "is a checkpoint of Megatron"),
        (lambda root: _touch(root / "iter_0000100", ".metadata"), "iter_0000100", "is a checkpoint of Megatron"),
        (lambda root: _touch(root / "x", ".metadata"), "x", "is a bare distributed checkpoint"),
        (lambda root: _touch(root / "x", "run.yaml"), "x", "is a run without checkpoints/"),
        (lambda root: _touch(root / "x/checkpoints"), "x", "has no checkpoint yet"),
        (lambda root: _touch(root / "step-00000100", "state.json"), "step-00000100", "it was never completed"),
        (lambda root: _touch(root / ".staging-step-00000100", "manifest.json"), ".staging-step-00000100", "unfinished"),
    ],
)  # fmt: skip
def test_what_is_not_a_checkpoint_is_described(
    tmp_path: Path, prepare: Callable[[Path], None], given: str, expected: str
) -> None:
    """The message says what the path looks like and is complete with the path."""
    prepare(tmp_path)
    with pytest.raises(CheckpointNotFound) as caught:
        resolve_checkpoint(tmp_path / given)
    assert expected in str(caught.value)
    assert str(tmp_path / given) in str(caught.value)


def test_a_part_of_a_checkpoint_leads_to_the_whole(save: Save) -> None:
    """Someone completed the path one level too far."""
    path = save(100).path
    with pytest.raises(CheckpointNotFound, match=f"is a part of the checkpoint {path}"):
        resolve_checkpoint(path / "adapter")
