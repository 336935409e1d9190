"""Datasets of the Hub: from its cache, from a Hub, from the cache of `datasets`, and what is told where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.packaged_modules.parquet.parquet import Parquet
from huggingface_hub import constants
from support.datasets_on_disk import (
    COMMIT,
    GSM8K_ROWS,
    SQUAD_ROWS,
    find,
    put_in_hub_cache,
    refusal,
    rows_of,
    serve_hub,
    write_parquet,
    write_repository,
)

from ckptrain.config.schema import SourceConfig
from ckptrain.data.hub import NotDownloaded
from ckptrain.data.records import Conversation
from ckptrain.data.sources import iterate, locate


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test caches of its own, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Write a repository of two configurations."""
    return write_repository(tmp_path / "repository")


SQUAD_CARD = "---\ndataset_info:\n  config_name: plain_text\nconfigs:\n- config_name: plain_text\n  data_files:\n  - split: train\n    path: plain_text/train-*\n  - split: validation\n    path: plain_text/validation-*\n  default: true\n---\n"  # fmt: skip


def write_squad(directory: Path) -> Path:
    """Write what rajpurkar/squad looks like."""
    write_parquet(directory / "plain_text/train-00000-of-00001.parquet", SQUAD_ROWS[:8])
    write_parquet(directory / "plain_text/validation-00000-of-00001.parquet", SQUAD_ROWS[8:])
    (directory / "README.md").write_text(SQUAD_CARD, encoding="utf-8")
    return directory


def test_squad_is_found_in_the_hub_cache_by_its_name(tmp_path: Path) -> None:
    """Without a network, with the commit that was downloaded, from the files of the snapshot."""
    snapshot = put_in_hub_cache(tmp_path / "hub", "rajpurkar/squad", write_squad(tmp_path / "squad"))
    source = find(None, format="squad")
    assert (source.revision, source.name) == (COMMIT, "rajpurkar/squad (train)")
    assert source.files == (snapshot / "plain_text/train-00000-of-00001.parquet",)
    records = [record for record in iterate(source, "squad", {}) if isinstance(record, Conversation)]
    assert [record.messages[0].content for record in records] == [row["context"] for row in SQUAD_ROWS[:8]]
    assert find("rajpurkar/squad", "validation", revision=COMMIT).num_rows == 4
    assert find("rajpurkar/squad", split="train[:50%]").num_rows == 4


def write_gsm8k(directory: Path) -> Path:
    """Write what openai/gsm8k looks like: two configurations, and no split for validation."""
    for name in ("main", "socratic"):
        write_parquet(directory / f"{name}/train-00000-of-00001.parquet", GSM8K_ROWS[:30])
        write_parquet(directory / f"{name}/test-00000-of-00001.parquet", GSM8K_ROWS[30:])
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*\n  - split: test\n    path: {name}/test-*\n"
        for name in ("main", "socratic")
    )  # fmt: skip
    (directory / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")
    return directory


def test_gsm8k_is_found_with_its_configuration_and_its_test_split(tmp_path: Path) -> None:
    """The known dataset knows both; who names the path says them."""
    put_in_hub_cache(tmp_path / "hub", "openai/gsm8k", write_gsm8k(tmp_path / "gsm8k"))
    assert rows_of(find(None, format="gsm8k")) == GSM8K_ROWS[:30]
    assert rows_of(find(None, "validation", format="gsm8k")) == GSM8K_ROWS[30:]
    assert find(None, "validation", format="gsm8k").name == "openai/gsm8k (main, test)"
    assert "set name to one of main, socratic" in refusal("openai/gsm8k", format="gsm8k")
    assert "it has train, test" in refusal("openai/gsm8k", "validation", name="main")


def test_a_cache_that_lacks_shards_is_not_used(tmp_path: Path, repository: Path) -> None:
    """A download that was stopped would train on fewer rows without a word."""
    left_out = "main/train-00001-of-00002.parquet"
    put_in_hub_cache(tmp_path / "hub", "org/name", repository, leave_out=[left_out])
    text = refusal("org/name", name="main")
    assert f"of what is downloaded of it {left_out} is missing" in text
    assert "hf download org/name --repo-type dataset" in text
    assert rows_of(find("org/name", name="main", split="test")) == GSM8K_ROWS[30:]


def test_a_dataset_that_is_nowhere_is_told_with_what_was_tried(tmp_path: Path) -> None:
    """Path, cache, network, and what to do."""
    assert refusal("org/name").splitlines() == [
        "cannot use the dataset 'org/name'",
        f"  - it is no path that exists, and not in the cache {tmp_path / 'hub'}",
        "  - the Hub was not asked: HF_HUB_OFFLINE is set",
        "  - download it where there is a network: hf download org/name --repo-type dataset; or give a directory",
    ]


def test_arrow_files_of_datasets_do_without_a_network(tmp_path: Path) -> None:
    """What `load_dataset` has once written is read where it is, if nothing else is there."""
    files = {"train": str(write_parquet(tmp_path / "a.parquet", GSM8K_ROWS)), "test": str(write_parquet(tmp_path / "b.parquet", GSM8K_ROWS[:5]))}  # fmt: skip
    builder = Parquet(
        cache_dir=str(tmp_path / "datasets"),
        dataset_name="MyName",
        config_name="main",
        config_id="main",
        hash=COMMIT,
        data_files=files,
    )
    builder.download_and_prepare(max_shard_size=500)
    (tmp_path / "datasets" / "my_name").rename(tmp_path / "datasets" / "org___my_name")
    theirs = datasets.load_dataset("org/MyName", "main", cache_dir=str(tmp_path / "datasets"))
    for split in ("train", "test"):
        source = find("org/MyName", name="main", split=split)
        assert rows_of(source) == list(theirs[split])
        assert source.revision == COMMIT
        assert {file.suffix for file in source.files} == {".arrow"}
    assert len(find("org/MyName").files) > 1
    assert "it has train, test" in refusal("org/MyName", "validation")
    assert "not in the cache" in refusal("org/MyName", revision="v1")
    assert "not in the cache" in refusal("org/MyName", name="other")


@pytest.fixture
def hub(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve the repository as org/name, and tell the files that are downloaded."""
    shutil.copytree(repository, tmp_path / "served" / "org" / "name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with serve_hub(tmp_path / "served") as (address, asked):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}")  # fmt: skip
        yield asked


def test_a_split_is_downloaded_once_and_then_read_without_a_network(
    hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card and the files of the split that is asked for, no more; a plan downloads nothing."""
    with pytest.raises(NotDownloaded, match="org/name is not downloaded yet"):
        locate(SourceConfig(path="org/name", name="main"), "train", fetch=False)
    assert hub == []
    source = find("org/name", name="main")
    assert rows_of(source) == GSM8K_ROWS[:25]
    assert source.revision == COMMIT
    assert sorted(hub) == ["README.md", "main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"]
    hub.clear()
    assert locate(SourceConfig(path="org/name", name="main"), "train", fetch=False) == source
    assert hub == []
    with pytest.raises(NotDownloaded, match=r"of what is downloaded of it main/validation\.parquet is missing"):
        locate(SourceConfig(path="org/name", name="main"), "validation", fetch=False)
    assert rows_of(find("org/name", "validation", name="main", revision="main")) == GSM8K_ROWS[25:30]
    assert hub == ["main/validation.parquet"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert rows_of(find("org/name", name="main", split="validation[1:3]")) == GSM8K_ROWS[26:28]
    assert "of what is downloaded of it socratic/train.parquet is missing" in refusal("org/name", name="socratic")
    (source.files[0].parents[1] / "README.md").unlink()
    assert "of what is downloaded of it README.md is missing" in refusal("org/name", name="main")


@pytest.mark.parametrize(
    ("path", "keys", "expected"),
    [
        ("org/name", {}, "the dataset org/name has several configurations\n  - set name to one of main, socratic"),
        ("org/name", {"name": "x"}, "has no configuration 'x'\n  - it has main, socratic"),
        ("org/name", {"name": "main", "split": "x"}, "has no split 'x'\n  - it has train, validation, test"),
        ("org/name", {"revision": "v9"}, "it has no revision 'v9'"),
        ("org/gated", {}, "it is gated: ask for access at https://huggingface.co/datasets/org/gated"),
        ("org/none", {}, "there is no such dataset on the Hub, or it is private: hf auth login"),
    ],
)
def test_what_the_hub_does_not_give_is_told(path: str, keys: dict[str, Any], expected: str, hub: list[str]) -> None:
    """With what there is, and no data is downloaded."""
    assert expected in refusal(path, **keys)
    assert [name for name in hub if name != "README.md"] == []


def test_a_hub_that_does_not_answer_is_told(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do where there is no network."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    text = refusal("org/name", name="main")
    assert "the Hub could not be reached: " in text
    assert "download it where there is a network: hf download org/name" in text
