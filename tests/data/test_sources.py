"""From a source in a config to its rows: files, globs and directories, as `datasets` reads them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.arrow_reader import ReadInstruction
from hypothesis import given
from hypothesis import strategies as st
from support.datasets_on_disk import (
    CHATS,
    GSM8K_ROWS,
    find,
    loaded,
    refusal,
    rows_of,
    write_lines,
    write_parquet,
    write_repository,
)

from ckptrain.data.records import Conversation, Problem, data_fingerprint
from ckptrain.data.sources import iterate
from ckptrain.data.splits import parse_splits
from ckptrain.errors import DataError

LOCATED = ("train", "validation", "test")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Write a repository of two configurations."""
    return write_repository(tmp_path / "repository")


def test_a_file_has_every_split_and_its_own_fingerprint(tmp_path: Path) -> None:
    """That of a whole file is the SHA-256 of its bytes, so that a run of before goes on."""
    path = write_lines(tmp_path / "train.jsonl", GSM8K_ROWS)
    for role, split in (("train", None), ("validation", None), ("train", "whatever")):
        source = find(path, role, split=split)
        assert (source.files, source.revision, source.num_rows) == ((path,), None, None)
        assert source.fingerprint() == hashlib.sha256(path.read_bytes()).hexdigest() == data_fingerprint(path)
        assert rows_of(source) == GSM8K_ROWS
    assert find(path).name == str(path)
    assert find(path, split="train[:5]").name == f"{path} (train[:5])"


def test_a_glob_has_its_files_in_order(tmp_path: Path) -> None:
    """By name, whatever the order of the directory, and through directories with **."""
    for name, rows in (("b", GSM8K_ROWS[3:5]), ("a", GSM8K_ROWS[:3]), ("c/d", GSM8K_ROWS[5:9])):
        write_lines(tmp_path / "data" / f"{name}.jsonl", rows)
    (tmp_path / "data" / "e.jsonl").mkdir()
    assert rows_of(find(tmp_path / "data/*.jsonl")) == GSM8K_ROWS[:5]
    assert rows_of(find(tmp_path / "data/**/*.jsonl")) == GSM8K_ROWS[:9]
    assert rows_of(find(tmp_path / "data/[b-z].jsonl")) == GSM8K_ROWS[3:5]


LAYOUTS = {
    "one file": {"data.parquet": (0, 9)},
    "shards": {"data/train-00000-of-00002.parquet": (0, 5), "data/train-00001-of-00002.parquet": (5, 9),
               "data/test-00000-of-00001.parquet": (9, 12)},
    "names": {"train.jsonl": (0, 5), "my-validation.jsonl": (5, 9), "notes.txt": (0, 1)},
    "directories": {"train/b.jsonl": (0, 5), "train/a.jsonl": (5, 9), "dev/a.jsonl": (9, 12)},
    "more of one kind": {"train.json": (0, 5), "test.jsonl": (5, 7), "x-train.jsonl": (7, 8)},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_has_the_splits_that_datasets_finds(layout: str, tmp_path: Path) -> None:
    """Splits, files and their order are those of `load_dataset`, without a copy as Arrow."""
    directory = tmp_path / "data"
    for name, (first, past) in LAYOUTS[layout].items():
        write = write_parquet if name.endswith("parquet") else write_lines
        write(directory / name, GSM8K_ROWS[first:past])
    theirs = datasets.load_dataset(str(directory), cache_dir=str(tmp_path / "cache"))
    for split, rows in theirs.items():
        assert rows_of(find(directory, split=str(split))) == list(rows)
    for split in {*LOCATED} - theirs.keys():
        assert f"it has {', '.join(theirs)}; set split to one of them" in refusal(directory, split=split)


@pytest.mark.parametrize(
    ("name", "split"),
    [("main", "train"), ("main", "validation"), ("main", "test"), ("main", "train[3:18]"), ("main", "train[-4:]+test"),
     ("main", "test+train[:10%]+train[90%:]"), ("main", "train[20:900]"), ("socratic", "train")],
)  # fmt: skip
def test_configurations_and_slices_are_those_of_datasets(
    name: str, split: str, repository: Path, tmp_path: Path
) -> None:
    """Row for row, over the shards of a split."""
    assert rows_of(find(repository, name=name, split=split)) == loaded(repository, tmp_path / "cache", name, split)


def test_only_the_files_of_the_split_are_read(repository: Path) -> None:
    """A damaged file of another split does not matter."""
    (repository / "main/test-00000-of-00001.parquet").write_bytes(b"damaged")
    assert [file.name for file in find(repository, name="main").files] == [
        "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"
    ]  # fmt: skip
    assert rows_of(find(repository, "validation", name="main")) == GSM8K_ROWS[25:30]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "has several configurations\n  - set name to one of main, socratic"),
        ({"name": "mian"}, "has no configuration 'mian'\n  - it has main, socratic; set name to one of them"),
        ({"name": "main", "split": "dev"}, "has no split 'dev'\n  - it has train, validation, test; set split"),
        ({"name": "main", "split": "train[5:5]"}, "leaves no rows\n  - the split train is cut to rows 5 to 5"),
        ({"name": "main", "split": "train[90%:50%]"}, "leaves no rows"),
        ({"name": "main", "split": "train[a:b]"}, "cannot use the split 'train[a:b]'"),
        ({"name": "main", "split": "train[1%:2]"}, "expected two numbers or two percentages"),
        ({"name": "main", "split": "train[:101%]"}, "expected at most 100%"),
    ],
)
def test_what_a_repository_does_not_have_is_told_with_what_it_has(
    keys: dict[str, Any], expected: str, repository: Path
) -> None:
    """Configuration, split and slice."""
    assert expected in refusal(repository, **keys)


def card(directory: Path, text: str) -> Path:
    """Write a card over files of a single split."""
    write_lines(directory / "train.jsonl", GSM8K_ROWS[:3])
    (directory / "README.md").write_text(f"---\n{text}\n---\n", encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("configs:\n- data_files: train.jsonl", "its card (README.md) is not understood"),
        ("configs: [}", "its card (README.md) is not understood"),
        ("configs:\n- {config_name: a, data_files: ../other.jsonl}", "names '../other.jsonl', which is not in it"),
        ("configs:\n- {config_name: a, data_files: 'https://x.org/a.jsonl'}", "which is not in it"),
        ("configs:\n- {config_name: a, data_files: none.jsonl}", "found nothing for the pattern none.jsonl"),
        ("configs:\n- {config_name: a, data_files: train.jsonl, field: rows}", "the configuration a sets field"),
    ],
)
def test_a_card_that_cannot_be_followed_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    """Never other files than the card names, and never files from elsewhere."""
    assert expected in refusal(card(tmp_path / "data", text))


def test_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    """An empty one, one of pictures, and one of archives, which are not opened."""
    (tmp_path / "data").mkdir()
    assert "holds no data files" in refusal(tmp_path / "data")
    for name in ("train.png", "train.zip"):
        (tmp_path / name / name).mkdir(parents=True)
        (tmp_path / name / name / name).write_bytes(b"")
        assert "expected JSON, CSV, Parquet or Arrow; found" in refusal(tmp_path / name)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    """Files, globs, and what a file does not have."""
    assert "there is no such file, directory, or file of that pattern" in refusal(tmp_path / "none.jsonl")
    assert "there is no such file" in refusal(tmp_path / "*.jsonl")
    path = write_lines(tmp_path / "data.jsonl", GSM8K_ROWS)
    assert "it has no configurations; remove name (main)" in refusal(path, name="main")
    assert "train and test would be the same rows twice" in refusal(path, split="train+test")
    assert "neither a path that exists nor a Hub id" in refusal("a/b/c")
    assert "give one, or one of squad, tulu3_sft_mixture" in refusal(None, format="alpaca")
    assert "set split to a part of the one for training" in refusal(None, "validation", format="openmathinstruct2")


def test_what_save_to_disk_has_written_is_read(tmp_path: Path) -> None:
    """One dataset has any split, several have theirs; shards are in their order."""
    rows = datasets.Dataset.from_list(GSM8K_ROWS)
    rows.save_to_disk(tmp_path / "one", num_shards=3)
    assert rows_of(find(tmp_path / "one")) == rows_of(find(tmp_path / "one", "validation")) == GSM8K_ROWS
    assert len(find(tmp_path / "one").files) == 3
    splits = {"train": rows.select(range(30)), "test": rows.select([39, 3, 7])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "several")
    for split, theirs in datasets.load_from_disk(tmp_path / "several").items():
        assert rows_of(find(tmp_path / "several", split=split)) == list(theirs)
    assert rows_of(find(tmp_path / "several", split="train[-2:]+test")) == [*GSM8K_ROWS[28:30], *list(splits["test"])]
    assert "has no split 'validation'\n  - it has train, test" in refusal(tmp_path / "several", "validation")
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match=r"one is not whole\n.*which state.json lists"):
        find(tmp_path / "one")


@given(
    split=st.builds(
        "{}[{}:{}]".format,
        st.sampled_from(["train", "test"]),
        st.none().map(lambda _: "") | st.integers(-30, 30),
        st.none().map(lambda _: "") | st.integers(-30, 30),
    ),
    percent=st.booleans(),
    total=st.integers(0, 40),
)
def test_slices_are_rounded_and_clipped_as_in_datasets(split: str, percent: bool, total: int) -> None:
    """Numbers and percentages, from either end, beyond the ends."""
    if percent:
        split = split.replace(":", "%:").replace("[%", "[").replace("]", "%]").replace(":%", ":")
    (ours,) = parse_splits(split)
    (theirs,) = ReadInstruction.from_spec(split).to_absolute({"train": total, "test": total})
    rows = list(range(total))
    first, past = ours.rows(lambda: total)
    assert (ours.split, rows[first:past]) == (theirs.splitname, rows[theirs.from_ : theirs.to])


def test_a_fingerprint_is_of_what_is_read_not_of_where_it_lies(repository: Path, tmp_path: Path) -> None:
    """Moved data is the same data; other rows, other bytes or another order are not."""
    moved = shutil.copytree(repository, tmp_path / "elsewhere")
    splits = ("train", "train[:5]", "train[:5]+train[7:]", "test+train", "train+test", "test")
    prints = {split: find(repository, name="main", split=split).fingerprint() for split in splits}
    assert len(set(prints.values())) == len(splits)
    assert prints == {split: find(moved, name="main", split=split).fingerprint() for split in splits}
    assert prints["test"] == data_fingerprint(repository / "main/test-00000-of-00001.parquet")
    write_parquet(moved / "main/train-00001-of-00002.parquet", GSM8K_ROWS[15:24])
    assert find(moved, name="main").fingerprint() != prints["train"]
    digests = [data_fingerprint(file) for file in find(repository, name="main").files]
    text = json.dumps([{"files": digests, "rows": [0, None]}], separators=(",", ":"))
    assert prints["train"] == hashlib.sha256(text.encode()).hexdigest()


def test_all_rows_are_looked_at_and_those_that_are_none_are_told(tmp_path: Path) -> None:
    """A problem does not hide the next one, and the records around it keep their places."""
    rows: list[dict[str, Any]] = [*CHATS[:2], {"messages": []}, CHATS[2], {"text": "x"}]
    path = write_lines(tmp_path / "data.jsonl", rows)
    path.write_text(path.read_text() + "[1]\n")
    found = list(iterate(find(path), "auto", {}))
    assert [item.where for item in found] == [f"{path}:{number}" for number in range(1, 7)]
    assert [str(item) for item in found if isinstance(item, Problem)] == [
        f"{path}:3: messages: the list is empty",
        f"{path}:5: messages missing, found the keys 'text'",
        f"{path}:6: expected a JSON object, found a list",
    ]


def test_the_format_is_told_by_the_first_row_that_tells(tmp_path: Path) -> None:
    """Each source has its own; columns are renamed before it is looked for."""
    path = write_parquet(tmp_path / "data.parquet", GSM8K_ROWS[:3])
    first, *_ = iterate(find(path), "auto", {"instruction": "question", "output": "answer"})
    assert isinstance(first, Conversation)
    assert [message.content for message in first.messages] == list(GSM8K_ROWS[0].values())
    assert all(isinstance(item, Problem) for item in iterate(find(path), "auto", {}))
