"""Tokens are made once, by one process while others wait; what is cut short leaves nothing that is taken for whole."""

from __future__ import annotations

import json
import resource
import signal
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data_runs import BATCH, numbered_row, tiny_tokenisation, tiny_tokenizer, tokens_of, write_numbered
from support.processes import FORK, HANGS_S, Child, children_of, runs, wait_until

from ckptrain.config.base import locate_base
from ckptrain.config.schema import DataConfig, ModelConfig, SourceConfig
from ckptrain.data import tokenise
from ckptrain.data.sources import locate
from ckptrain.data.token_cache import TokenCache, TokenCacheWriter
from ckptrain.data.tokenise import Tokenisation, tokenised
from ckptrain.errors import DataError
from ckptrain.training.tokens import tokenisation


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the tokens of this test are kept, which is empty."""
    monkeypatch.setenv("CKPTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the tiny tokenizer."""
    directory = tmp_path_factory.mktemp("tiny-tokenizer")
    tiny_tokenizer(directory)
    return directory


@pytest.fixture
def how(tokenizer_dir: Path) -> Tokenisation:
    """Tokenise in this process."""
    return tiny_tokenisation(tokenizer_dir)


def samples(cache: TokenCache) -> list[tuple[str, list[int], list[bool]]]:
    """Return all that a cache says of its samples."""
    found = [cache.sample(index) for index in range(len(cache))]
    return [(one.where, one.token_ids.tolist(), one.learnt.tolist()) for one in found]


def kept(cache: Path) -> list[str]:
    """Return what lies in a cache, apart from locks."""
    names = sorted(path.name for path in cache.glob("tokens-*/*"))
    return [name for name in names if not name.endswith(".lock")]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the records that are tokenised, batch after batch."""
    counts: list[int] = []
    encode_batch = tokenise.encode_batch

    def counted(records: Sequence[Any], *arguments: Any) -> Any:
        counts.append(len(records))
        return encode_batch(records, *arguments)

    monkeypatch.setattr(tokenise, "encode_batch", counted)
    return counts


def test_the_second_start_tokenises_nothing(
    empty_cache: Path, how: Tokenisation, tmp_path: Path, encoded: list[int]
) -> None:
    """It needs no tokenizer at all, and has the samples of the first; also of a file that was moved."""
    path = write_numbered(tmp_path / "data.jsonl", range(300))
    first = samples(tokens_of(path, how))
    assert encoded == [BATCH, 300 - BATCH]
    without = attrs.evolve(how, tokenizer=None)
    assert samples(tokens_of(path, without)) == first
    moved = path.rename(tmp_path / "moved.json")
    told: list[Any] = []
    again = samples(tokens_of(moved, without, lambda *news: told.append(news)))
    assert [tokens for _, tokens, _ in again] == [tokens for _, tokens, _ in first]
    assert again[299][0] == f"{moved}:300"
    assert told == []
    assert len(kept(empty_cache)) == 1


CHANGES: dict[str, Callable[[Path, DataConfig], Any]] = {
    "a row": lambda path, _: path.write_text(path.read_text().replace('"00"', '"0O"')),
    "the order of rows": lambda path, _: path.write_text("".join(reversed(path.read_text().splitlines(keepends=True)))),
    "the format": lambda _, data: attrs.evolve(data, format="prompt_completion"),
    "the columns": lambda path, data: attrs.evolve(
        data, train=(SourceConfig(path=str(path), columns={"messages": "messages"}),)
    ),
    "the rows that are taken": lambda path, data: attrs.evolve(
        data, train=(SourceConfig(path=str(path), split="train[:4]"),)
    ),
    "what is learnt": lambda _, data: attrs.evolve(data, loss_on="all"),
    "the template": lambda path, data: attrs.evolve(data, chat_template=str(write_template(path))),
}


def write_rows(path: Path, count: int) -> Path:
    """Write rows that have both a chat and a prompt with its completion."""
    rows = ({**numbered_row(number), "prompt": f"{number}?", "completion": f"{number}!"} for number in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_template(path: Path) -> Path:
    """Write a template that shouts."""
    template = path.with_name("template.jinja")
    template.write_text("{% for m in messages %}{{ m.role|upper }}: {{ m.content }}!\n{% endfor %}")
    return template


@pytest.mark.parametrize("change", [*CHANGES, "the tokenizer"])
def test_what_the_tokens_depend_on_is_what_the_cache_is_known_by(
    change: str,
    empty_cache: Path,
    tokenizer_dir: Path,
    tmp_path: Path,
    encoded: list[int],
    write_base: Callable[..., Path],
) -> None:
    """A change of it is tokenised anew; and when it is taken back, what was there is found again."""
    path = write_rows(tmp_path / "data.jsonl", 6)
    content = path.read_bytes()
    data = DataConfig(train=(SourceConfig(path=str(path)),), format="messages")

    def start(data: DataConfig, base: Path) -> TokenCache:
        [source] = data.train
        asked = tokenisation(locate_base(ModelConfig(pretrained=str(base))), data)
        return tokenised(locate(source, "train"), data.format, source.columns, asked)

    base = write_base("base")
    first = samples(start(data, base))
    changed, other = data, base
    if change == "the tokenizer":
        other = write_base("other", extra="xx")
    else:
        changed = found if isinstance(found := CHANGES[change](path, data), DataConfig) else data
    second = samples(start(changed, other))
    assert len(encoded) == len(kept(empty_cache)) == 2
    assert (second == first) == (change == "the columns")  # which say here what they are called anyway
    path.write_bytes(content)
    assert samples(start(data, base)) == first
    assert len(encoded) == len(kept(empty_cache)) == 2


@pytest.fixture
def write_base(tokenizer_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write what a base is known by, its tokenizer with it, and one word more in that where it is asked for."""

    def write(name: str, extra: str | None = None) -> Path:
        base = tmp_path / name
        tokenizer = tiny_tokenizer(tokenizer_dir)
        if extra is not None:
            tokenizer.add_tokens([extra])
        tokenizer.save_pretrained(base)
        (base / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
        (base / "model.safetensors").touch()
        return base

    return write


@pytest.mark.parametrize("damage", ["tokens.bin", "learnt.bin", "samples.bin", "index.json", "gone"])
def test_a_cache_that_is_not_whole_is_made_again(
    damage: str, empty_cache: Path, how: Tokenisation, tmp_path: Path, encoded: list[int]
) -> None:
    """A file that was cut, an index that is no JSON, a directory that somebody emptied."""
    path = write_numbered(tmp_path / "data.jsonl", range(20))
    first = samples(tokens_of(path, how))
    [directory] = [empty_cache / "tokens-v1" / name for name in kept(empty_cache)]
    for file in [directory / damage] if damage != "gone" else list(directory.iterdir()):
        file.write_bytes(file.read_bytes()[:-3])
        if damage == "gone":
            file.unlink()
    assert samples(tokens_of(path, how)) == first
    assert samples(tokens_of(path, attrs.evolve(how, tokenizer=None))) == first
    assert encoded == [20, 20]
    assert kept(empty_cache) == [directory.name]


@pytest.mark.parametrize("moment", ["rows are read", "nothing but the name is missing", "a worker is at work"])
def test_a_build_that_is_killed_leaves_no_cache_and_the_next_one_cleans_up(
    moment: str, empty_cache: Path, how: Tokenisation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SIGKILL, in the middle and at the very end; no process is left behind either."""
    path = write_numbered(tmp_path / "data.jsonl", range(3 * BATCH))
    reached = FORK.Event()

    def stay(*_: Any) -> None:
        reached.set()
        time.sleep(HANGS_S)

    with monkeypatch.context() as patch:
        if moment == "nothing but the name is missing":
            finish = TokenCacheWriter.finish
            patch.setattr(TokenCacheWriter, "finish", lambda writer: (finish(writer), stay()))
        asked = attrs.evolve(how, workers=1 if moment == "a worker is at work" else 0)
        tell = stay if moment != "nothing but the name is missing" else lambda *_: None
        child = Child(lambda: len(tokens_of(path, asked, tell)))
    assert reached.wait(HANGS_S)
    assert child.process.pid is not None
    workers = children_of(child.process.pid)
    assert len(workers) == asked.workers
    child.kill()
    wait_until(lambda: not any(map(runs, workers)))
    [left] = kept(empty_cache)
    assert left.startswith(".building-")

    built = tokens_of(path, how)
    assert len(built) == 3 * BATCH
    [directory] = kept(empty_cache)
    assert left.startswith(f".building-{directory}-")


def test_of_two_processes_one_builds_and_the_other_waits(empty_cache: Path, how: Tokenisation, tmp_path: Path) -> None:
    """Both get the same samples, and the rows were tokenised once."""
    path = write_numbered(tmp_path / "data.jsonl", range(2 * BATCH))
    building, arrived, go_on = FORK.Event(), FORK.Event(), FORK.Event()

    def act(tell: Callable[[], Any]) -> tuple[int, Any]:
        told: list[Any] = []
        made = tokens_of(path, how, lambda *news: (told.append(news), tell()))
        return len(told), samples(made)

    first = Child(lambda: act(lambda: (building.set(), go_on.wait(HANGS_S))))
    assert building.wait(HANGS_S)
    second = Child(lambda: (arrived.set(), act(lambda: None))[1])
    assert arrived.wait(HANGS_S)
    time.sleep(0.5)
    assert second.process.is_alive(), "it waits"
    assert [name for name in kept(empty_cache) if not name.startswith(".building-")] == []
    go_on.set()
    (told, expected), (told_by_second, found) = first.result(), second.result()
    assert (told, told_by_second) == (2, 0)
    assert found == expected
    assert len(found) == 2 * BATCH
    assert len(kept(empty_cache)) == 1


def test_who_waits_for_a_build_that_is_killed_builds_itself(
    empty_cache: Path, how: Tokenisation, tmp_path: Path
) -> None:
    """The lock goes with its process."""
    path = write_numbered(tmp_path / "data.jsonl", range(40))
    building = FORK.Event()
    first = Child(lambda: tokens_of(path, how, lambda *_: (building.set(), time.sleep(HANGS_S))))
    assert building.wait(HANGS_S)
    second = Child(lambda: len(tokens_of(path, how)))
    time.sleep(0.2)
    first.kill()
    assert second.result() == 40
    assert len(kept(empty_cache)) == 1


def test_a_cache_that_cannot_be_written_is_told_with_the_way_out(
    how: Tokenisation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is in the way of the directory."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CKPTRAIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=rf"cannot keep the tokens of(.|\n)*{tmp_path}/file.*set CKPTRAIN_CACHE"):
        tokens_of(write_numbered(tmp_path / "data.jsonl", range(3)), how)


def test_a_full_disk_leaves_nothing(empty_cache: Path, how: Tokenisation, tmp_path: Path) -> None:
    """With files limited to 4 kB the kernel refuses a write in the middle."""
    path = write_numbered(tmp_path / "data.jsonl", range(2 * BATCH))

    def act() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return len(tokens_of(path, how))

    error = Child(act).result()
    assert isinstance(error, DataError)
    assert "File too large; set CKPTRAIN_CACHE to keep them elsewhere" in str(error)
    assert kept(empty_cache) == []
    assert len(tokens_of(path, how)) == 2 * BATCH


def test_a_file_that_changes_while_it_is_read_is_not_kept(empty_cache: Path, how: Tokenisation, tmp_path: Path) -> None:
    """What was read is neither the old content nor the new, and would be found as that of the old for ever."""
    path = write_numbered(tmp_path / "data.jsonl", range(2 * BATCH))

    def write_on(*_: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps(numbered_row(7)) + "\n")

    with pytest.raises(DataError, match="changed while it was tokenised"):
        tokens_of(path, how, write_on)
    assert kept(empty_cache) == []


@pytest.mark.parametrize(("count", "said"), [(3, "3"), (45, "45"), (1500, "more than 1000")])
def test_malformed_rows_are_told_at_once_and_nothing_is_kept(
    count: int, said: str, empty_cache: Path, how: Tokenisation, tmp_path: Path
) -> None:
    """Each with its line, the first twenty of them; rows that are well do not hide them."""
    rows = [json.dumps(numbered_row(number)) for number in range(count)]
    bad = ["{", "[]", '{"messages": "none"}']
    lines = [line for number, row in enumerate(rows) for line in (row, bad[number % 3])]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=f"has {said} malformed row") as caught:
        tokens_of(path, how)
    shown = min(count, 20)
    problems = caught.value.problems
    assert [problem.split(": ")[0] for problem in problems[:shown]] == [f"{path}:{2 * n + 2}" for n in range(shown)]
    assert len(problems) == shown + (count > 20)
    assert kept(empty_cache) == []


def test_a_source_without_rows_is_refused(empty_cache: Path, how: Tokenisation, tmp_path: Path) -> None:
    """Nothing would be found in it the next time, too."""
    (tmp_path / "data.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="has no records"):
        tokens_of(tmp_path / "data.jsonl", how)
    assert kept(empty_cache) == []


def test_progress_is_told_with_the_total_where_the_file_knows_it(
    empty_cache: Path, how: Tokenisation, tmp_path: Path
) -> None:
    """Parquet does, JSON lines do not; after every batch, with the source's name."""
    path = write_numbered(tmp_path / "data.jsonl", range(600))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    for file, total in ((path, None), (tmp_path / "data.parquet", 600)):
        told: list[Any] = []
        tokens_of(file, how, lambda *news, told=told: told.append(news))
        assert told == [(str(file), done, total) for done in (256, 512, 600)]
    assert len(kept(empty_cache)) == 2


def test_memory_is_that_of_a_batch(empty_cache: Path, how: Tokenisation, tmp_path: Path) -> None:
    """However many rows there are: the tokens of all of them are never in memory together."""
    path = tmp_path / "data.jsonl"
    question = "a rather long question " * 8
    row = json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "yes"}]})
    path.write_text((row + "\n") * 12_000)
    tracemalloc.start()
    try:
        made = tokens_of(path, how)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(made) == 12_000
    assert peak < (made.tokens.nbytes + made.learnt.nbytes + made.samples.nbytes) / 4
