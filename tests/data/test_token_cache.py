"""What was written is what is read, wherever the files lie now; and what is not whole is no cache."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptrain.data.chat import Sample
from ckptrain.data.token_cache import TokenCache, TokenCacheWriter, open_token_cache

FILES = [Path("/data/a.jsonl"), Path("/data/a.jsonl.parquet"), Path("/data/3")]
PLACES = ("/data/a.jsonl:7", "/data/a.jsonl.parquet:row 12", "/data/3:45")
PARTS = ("tokens.bin", "learnt.bin", "samples.bin", "index.json")


def sample(tokens: list[int], where: str = PLACES[0], learnt: list[bool] | None = None) -> Sample:
    """Build a sample."""
    is_learnt = [True] * len(tokens) if learnt is None else learnt
    return Sample(where=where, token_ids=np.array(tokens, dtype=np.int32), learnt=np.array(is_learnt, dtype=np.bool_))


def write(directory: Path, *batches: list[Sample]) -> TokenCache | None:
    """Write batches of samples, and read them back."""
    directory.mkdir()
    with TokenCacheWriter(directory, FILES, {"made": "here"}) as writer:
        for batch in batches:
            writer.add(batch)
        writer.finish()
    return open_token_cache(directory, FILES)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Return the directory of a cache of four samples."""
    batches = [[sample([5, 6, 7], place)] for place in PLACES]
    assert write(tmp_path / "whole", *batches, [sample([1, 2, 3, 4])]) is not None
    return tmp_path / "whole"


TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=8)


@given(batches=st.lists(st.lists(st.tuples(TOKENS, st.sampled_from(PLACES)), max_size=4), max_size=4))
def test_samples_come_back_as_they_were(
    batches: list[list[tuple[list[tuple[int, bool]], str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tokens, what is learnt of them, and where they are from; also where there are none."""
    written = [
        [sample([token for token, _ in pairs], where, [learnt for _, learnt in pairs]) for pairs, where in batch]
        for batch in batches
    ]
    cache = write(tmp_path_factory.mktemp("cache") / "new", *written)
    expected = list(itertools.chain(*written))
    assert cache is not None
    assert len(cache) == len(expected)
    assert cache.lengths.tolist() == [len(one.token_ids) for one in expected]
    for index, one in enumerate(expected):
        found = cache.sample(index)
        assert (found.where, cache.where(index)) == (one.where, one.where)
        assert found.token_ids.tolist() == one.token_ids.tolist()
        assert found.learnt.tolist() == one.learnt.tolist()
        assert cache.samples["num_learnt"][index] == one.num_learnt
        for most in (1, 3, 100):
            assert cache.sample(index, most).token_ids.tolist() == one.token_ids[:most].tolist()
            assert cache.learnt_within(index, most) == int(one.learnt[:most].sum())


def test_places_are_told_where_the_files_lie_now(whole: Path) -> None:
    """A cache is known by content: the files may have been moved since, and samples are still found in them."""
    moved = [Path("/elsewhere/x.jsonl"), Path("/elsewhere/y.parquet"), Path("z")]
    cache = open_token_cache(whole, moved)
    assert cache is not None
    places = [cache.where(index) for index in range(4)]
    assert places == ["/elsewhere/x.jsonl:7", "/elsewhere/y.parquet:row 12", "z:45", "/elsewhere/x.jsonl:7"]


def test_tokens_stay_on_disk(whole: Path) -> None:
    """They are mapped, read only, and a sample copies none: every process of a machine shares one copy."""
    cache = open_token_cache(whole, FILES)
    assert cache is not None
    assert isinstance(cache.tokens, np.memmap)
    assert isinstance(cache.learnt, np.memmap)
    assert isinstance(cache.samples, np.memmap)
    assert np.shares_memory(cache.sample(1).token_ids, cache.tokens)
    with pytest.raises(ValueError, match="read-only"):
        cache.sample(1).token_ids[0] = 9


@pytest.mark.parametrize("part", PARTS)
def test_a_directory_that_lacks_a_part_is_no_cache(part: str, whole: Path) -> None:
    """Nor is one that is not there."""
    (whole / part).unlink()
    assert open_token_cache(whole, FILES) is None
    assert open_token_cache(whole / "nowhere", FILES) is None


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_was_cut_anywhere_is_no_cache(part: str, whole: Path) -> None:
    """Whatever is left of it, nothing included."""
    content = (whole / part).read_bytes()
    for length in range(len(content)):
        (whole / part).write_bytes(content[:length])
        assert open_token_cache(whole, FILES) is None, length


@pytest.mark.parametrize("part", PARTS[:3])
def test_a_part_with_more_in_it_is_no_cache(part: str, whole: Path) -> None:
    """Two writers may have met."""
    other = [[sample([5, 6, 7, 8], place)] for place in (*PLACES, *PLACES)]
    assert write(whole.with_name("other"), *other) is not None
    shutil.copy(whole.with_name("other") / part, whole / part)
    assert open_token_cache(whole, FILES) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(num_tokens=index["num_tokens"] + 1),
        lambda index: index.update(num_samples=index["num_samples"] - 1),
        lambda index: index.update(num_tokens=None),
        lambda index: index.update(num_tokens="13"),
        lambda index: index.pop("num_samples"),
        lambda index: index.update(separators=[":"]),
        lambda index: index.update(separators=None),
        lambda index: index.clear(),
    ],
)
def test_an_index_that_says_something_else_is_no_cache(change: Callable[[dict[str, Any]], Any], whole: Path) -> None:
    """It was written last, and must fit what it was written for."""
    path = whole / "index.json"
    index = json.loads(path.read_bytes())
    change(index)
    path.write_text(json.dumps(index))
    assert open_token_cache(whole, FILES) is None


@pytest.mark.parametrize("text", ["", "[]", "null", "7", '"text"', "{", "\x00\x01"])
def test_an_index_that_is_no_object_is_no_cache(text: str, whole: Path) -> None:
    """JSON or not."""
    (whole / "index.json").write_text(text)
    assert open_token_cache(whole, FILES) is None


def test_a_cache_that_was_never_finished_is_none(tmp_path: Path) -> None:
    """The index is written last."""
    (tmp_path / "new").mkdir()
    with TokenCacheWriter(tmp_path / "new", FILES, {}) as writer:
        writer.add([sample([1, 2])])
    assert open_token_cache(tmp_path / "new", FILES) is None
