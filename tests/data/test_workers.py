"""Processes that tokenise make the bytes that one makes, end with it, and are missed when they die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from support.data_runs import BATCH, numbered_row, tiny_tokenisation, tokens_of, write_numbered
from support.processes import Child, children_of, runs

from ckptrain.data.chat import Sample, encode_batch
from ckptrain.data.records import Conversation, Message, Record
from ckptrain.data.tokenise import Tokenisation
from ckptrain.data.workers import TokeniserWorkers
from ckptrain.errors import DataError


@pytest.fixture(scope="module")
def how(tmp_path_factory: pytest.TempPathFactory) -> Tokenisation:
    """Tokenise with the tiny tokenizer."""
    return tiny_tokenisation(tmp_path_factory.mktemp("tokenizer"))


def record(number: int) -> Record:
    """Return a numbered record."""
    turns = (Message(role=turn["role"], content=turn["content"]) for turn in numbered_row(number)["messages"])
    return Conversation(where=f"data.jsonl:{number}", messages=tuple(turns))


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_make_the_bytes_of_one_process(
    workers: int, how: Tokenisation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, and though they get the signals that ask a run to stop: those are not for them."""
    path = write_numbered(tmp_path / "data.jsonl", range(8 * BATCH + 10))
    caches = {count: tmp_path / str(count) for count in (0, workers)}
    others = set(children_of(os.getpid()))
    signalled: set[int] = set()

    def tell(*_: Any) -> None:
        if pids := set(children_of(os.getpid())) - signalled - others:
            for pid in pids:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                    os.kill(pid, number)
            signalled.update(pids)

    for count, directory in caches.items():
        monkeypatch.setenv("CKPTRAIN_CACHE", str(directory))
        made = tokens_of(path, attrs.evolve(how, workers=count), tell)
        assert len(made) == 8 * BATCH + 10
    assert len(signalled) == workers
    expected, found = (
        {file.name: file.read_bytes() for file in directory.glob("tokens-*/*/*")} for directory in caches.values()
    )
    assert len(found) == 4
    assert found == expected
    assert not any(map(runs, signalled))


def test_a_worker_that_dies_ends_the_build_with_its_status(
    how: Tokenisation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, nothing waits for it, nothing is kept, and no other worker is left."""
    path = write_numbered(tmp_path / "data.jsonl", range(12 * BATCH))
    monkeypatch.setenv("CKPTRAIN_CACHE", str(tmp_path / "cache"))

    def act() -> Any:
        def kill(*_: Any) -> None:
            workers = children_of(os.getpid())
            if len(workers) == 2:
                os.kill(workers[0], signal.SIGKILL)

        try:
            tokens_of(path, attrs.evolve(how, workers=2), kill)
        except DataError as error:
            return str(error), children_of(os.getpid())
        return "no error"

    message, left = Child(act).result()
    assert "a worker ended with status -9" in message
    assert "set data.workers=0 to see why" in message
    assert left == []
    assert [file.suffix for file in (tmp_path / "cache").glob("*/*")] == [".lock"]


def test_answers_come_in_the_order_of_the_batches_with_the_errors_of_single_records(
    how: Tokenisation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as this process makes it; no file in the working directory is taken for a module of the worker's."""
    (tmp_path / "random.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    unusable = Conversation(where="data.jsonl:0", messages=(Message(role="user", content="x", extra={"at": 1}),))
    template = "{% if messages[0].at %}{{ raise_exception('no') }}{% endif %}" + str(how.tokenizer.chat_template)
    tokenizer = tiny_tokenisation(tmp_path).tokenizer
    tokenizer.chat_template = template
    batches = [(record(1), unusable, record(2)), (), (record(3),), *[(record(number),) for number in range(10, 20)]]
    with TokeniserWorkers(2, tokenizer, "all") as workers:
        found = list(workers.encode(batches))
    for answers, batch in zip(found, batches, strict=True):
        for answer, expected in zip(answers, encode_batch(batch, tokenizer, "all"), strict=True):
            assert type(answer) is type(expected)
            if isinstance(answer, Sample) and isinstance(expected, Sample):
                assert answer.where == expected.where
                assert np.array_equal(answer.token_ids, expected.token_ids)
            else:
                assert str(answer) == str(expected)
    assert isinstance(found[0][1], DataError)


def test_who_leaves_before_the_last_batch_leaves_no_process(how: Tokenisation) -> None:
    """As where so many rows are refused that the others are not looked at."""
    before = set(children_of(os.getpid()))
    with TokeniserWorkers(1, how.tokenizer, "assistant") as workers:
        pids = set(children_of(os.getpid())) - before
        answers = workers.encode((record(number),) for number in range(1000))
        assert len(next(answers)) == 1
    assert len(pids) == 1
    assert not any(map(runs, pids))
