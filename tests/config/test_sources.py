"""Training data as people write it, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptrain.config.load import flatten, load_config
from ckptrain.config.schema import SourceConfig
from ckptrain.config.sources import is_data_path
from ckptrain.errors import ConfigError


def sources_of(train: Any, *overrides: str) -> tuple[SourceConfig, ...]:
    """Load a config with this training data."""
    return load_config(
        {"model": {"pretrained": "a/b"}, "data": {"train": train}}, overrides, check_inputs=False
    ).data.train


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("org/name", [SourceConfig(path="org/name")]),
        ("squad", [SourceConfig(format="squad")]),
        ({"path": "org/name", "name": "main"}, [SourceConfig(path="org/name", name="main")]),
        (["squad", {"path": "/x.jsonl", "split": "a"}], [SourceConfig(format="squad"), SourceConfig(path="/x.jsonl", split="a")]),
        ({"path": "/x.csv", "columns": {"prompt": "q"}}, [SourceConfig(path="/x.csv", columns={"prompt": "q"})]),
    ],
)  # fmt: skip
def test_a_source_may_be_written_short_or_long(written: Any, expected: list[SourceConfig]) -> None:
    """Text, a mapping, or a list of both; and it is written back as short as it can be."""
    config = load_config({"model": {"pretrained": "a/b"}, "data": {"train": written}}, check_inputs=False)
    assert config.data.train == tuple(expected)
    again = load_config({"model": {"pretrained": "a/b"}, "data": {"train": flatten(config)["data.train"]}}, check_inputs=False)  # fmt: skip
    assert again == config


def test_a_path_alone_is_written_back_as_it_was() -> None:
    """run.yaml stays readable."""
    config = load_config({"model": {"pretrained": "a/b"}, "data": {"train": "/x.jsonl"}}, check_inputs=False)
    assert flatten(config)["data.train"] == "/x.jsonl"


def test_an_override_reaches_into_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same config runs against a copy of the dataset; the path is that of the shell."""
    monkeypatch.chdir(tmp_path)
    (source,) = sources_of({"format": "squad"}, "data.train.path=./copy", "data.train.split=train[:10]")
    assert source == SourceConfig(format="squad", path=str(tmp_path / "copy"), split="train[:10]")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"pth": "x"}, "data.train.pth: unknown key (did you mean path?)"),
        ([], "data.train: the list is empty"),
        (["a/b", 5], "data.train[1]: expected a path, a mapping of path, name, split"),
        ([{"path": "a/b", "format": "mesages"}], "data.train[0].format: expected one of auto, messages"),
        ([{"path": "a/b", "weight": 0}], "data.train[0].weight: must be above 0"),
    ],
)
def test_a_malformed_source_is_told_with_its_place(written: Any, expected: str) -> None:
    """Which of them, and which key."""
    with pytest.raises(ConfigError) as caught:
        sources_of(written)
    assert expected in caught.value.problems[0]


@pytest.mark.parametrize("text", ["x.jsonl", "x.jsonl.gz", "./x", "data/*.parquet", "~/x", "/x", "there"])
def test_what_looks_like_a_path_or_is_there_is_one(text: str, tmp_path: Path) -> None:
    """A mistyped file name is told as a file that is not there, not looked for on the Hub."""
    (tmp_path / "there").mkdir()
    assert is_data_path(text, tmp_path)
    assert not is_data_path("org/name", tmp_path)
