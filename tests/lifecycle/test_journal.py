"""The journal: what it writes, and what is left of it after a crash."""

import errno
import math
import multiprocessing
import os
import re
from pathlib import Path

import pytest

from ckptrain.errors import CkptrainError
from ckptrain.lifecycle.journal import Journal, NullJournal, read_journal


def test_entries_come_back_in_order_with_time_event_and_facts(tmp_path: Path) -> None:
    """The directory is made at the first line, not by the constructor."""
    path = tmp_path / "run" / "journal.jsonl"
    journal = Journal(path)
    assert not path.parent.exists()
    journal.record("plan", plan="FreshStart", notes=("a", "b"), step=0)
    journal.record("saved", path=Path("/r/step-00000001"), seconds=0.25)
    first, second = read_journal(path)
    assert list(first) == ["time", "event", "plan", "notes", "step"]
    assert (first["event"], first["notes"]) == ("plan", ["a", "b"])
    assert second["path"] == "/r/step-00000001"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])


def test_not_a_number_is_written_as_text_and_not_as_null(tmp_path: Path) -> None:
    """The JSON library writes null for each of them, which would read as "not measured"."""
    path = tmp_path / "journal.jsonl"
    Journal(path).record("warning", loss=math.nan, norms=[math.inf, -math.inf, 1.5])
    [entry] = read_journal(path)
    assert (entry["loss"], entry["norms"]) == ("nan", ["inf", "-inf", 1.5])


def test_facts_that_json_does_not_have_are_written_as_text(tmp_path: Path) -> None:
    """A journal line about an error must not fail for what the error holds."""
    path = tmp_path / "journal.jsonl"
    Journal(path).record("error", big=2**80, name=os.fsdecode(b"caf\xe9"), mapping={1: ValueError("no")})
    [entry] = read_journal(path)
    assert entry["big"] == str(2**80)
    assert entry["name"] == "caf\\udce9"
    assert entry["mapping"] == {"1": "no"}


@pytest.mark.parametrize("torn", [b'{"time":"2026', b'{"event":"sav', b"\0\0\0\0", b"{"])
def test_a_torn_last_line_is_passed_over_and_the_next_line_starts_anew(tmp_path: Path, torn: bytes) -> None:
    """A crash in the middle of a write costs that line, not the one after it."""
    path = tmp_path / "journal.jsonl"
    Journal(path).record("first")
    with path.open("ab") as file:
        file.write(torn)
    assert [entry["event"] for entry in read_journal(path)] == ["first"]
    Journal(path).record("second")
    Journal(path).record("third")
    assert [entry["event"] for entry in read_journal(path)] == ["first", "second", "third"]


def test_a_journal_cut_at_any_byte_keeps_every_complete_line(tmp_path: Path) -> None:
    """All prefixes of a journal, as a crash could leave it."""
    path = tmp_path / "journal.jsonl"
    for number in range(3):
        Journal(path).record("step", number=number)
    whole = path.read_bytes()
    ends = [match.end() for match in re.finditer(rb"\n", whole)]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        complete = sum(end - 1 <= length for end in ends)  # the text of a line is complete without its line feed
        assert [entry["number"] for entry in read_journal(path)] == list(range(complete))


def test_a_line_written_in_two_parts_is_still_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write may be short; the rest follows."""
    path = tmp_path / "journal.jsonl"
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:7]))
    Journal(path).record("saved", step=100)
    assert [entry["step"] for entry in read_journal(path)] == [100]


def _record_many(path: Path, writer: int) -> None:
    for number in range(50):
        Journal(path).record("line", writer=writer, number=number)


def test_lines_of_two_processes_never_mix(tmp_path: Path) -> None:
    """A relaunched run and the tail of the one before may write at the same time."""
    path = tmp_path / "journal.jsonl"
    Journal(path).record("start")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_record_many, args=(path, writer)) for writer in range(2)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    entries = read_journal(path)[1:]
    assert sorted((entry["writer"], entry["number"]) for entry in entries) == [
        (w, n) for w in range(2) for n in range(50)
    ]


def test_a_rank_without_a_journal_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank calls record; rank 0 alone has a file."""
    monkeypatch.chdir(tmp_path)
    NullJournal().record("phase", to="PLANNED")
    Journal(None).record("phase", to="PLANNED")
    assert list(tmp_path.iterdir()) == []


def test_a_journal_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    """`status` asks before the first line is written."""
    assert read_journal(tmp_path / "journal.jsonl") == []


def test_a_full_disk_is_told_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user sees which file and why, not a traceback."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CkptrainError, match=r"journal\.jsonl: No space left on device"):
        Journal(tmp_path / "journal.jsonl").record("saved")


def test_an_event_cannot_overwrite_its_time(tmp_path: Path) -> None:
    """The order of a journal rests on it."""
    with pytest.raises(TypeError, match="time"):
        Journal(tmp_path / "journal.jsonl").record("saved", time="yesterday")
