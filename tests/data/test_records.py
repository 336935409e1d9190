"""Reading JSONL: what is accepted, and how a malformed line is told."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptrain.data.records import Conversation, Message, PromptCompletion, data_fingerprint, read_records
from ckptrain.errors import DataError

USER = {"role": "user", "content": "hello"}
ASSISTANT = {"role": "assistant", "content": "hi"}


def test_conversations_are_read_with_the_place_they_stand_at(write_jsonl: Callable[..., Path]) -> None:
    """The line number counts blank lines, as an editor does, and other keys of a record are left alone."""
    path = write_jsonl({"messages": [USER, ASSISTANT], "source": "forum"}, "", "   ", {"messages": [ASSISTANT]})
    first, second = read_records(path)
    user, assistant = Message(role="user", content="hello"), Message(role="assistant", content="hi")
    assert first == Conversation(where=f"{path}:1", messages=(user, assistant))
    assert second == Conversation(where=f"{path}:4", messages=(assistant,))


def test_prompts_and_completions_are_read(write_jsonl: Callable[..., Path]) -> None:
    """The format follows from the keys of the first record."""
    path = write_jsonl({"prompt": "2 + 2 =", "completion": " 4"})
    assert read_records(path) == [PromptCompletion(where=f"{path}:1", prompt="2 + 2 =", completion=" 4")]


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    """Files that were edited on Windows are ordinary files."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\r\n\r\n{"prompt": "c", "completion": "d"}')
    assert [record.where for record in read_records(path)] == [f"{path}:1", f"{path}:3"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('{"messages": [', "not JSON"),
        ("[1, 2]", "expected a JSON object, found a list"),
        ("NaN", "expected a JSON object, found a number"),
        ({}, "expected `messages`, or `prompt` and `completion`; found an empty object"),
        ({"text": "x"}, "found the keys 'text'"),
        ({"messages": "hello"}, "messages: expected a list of {role, content}, found a string"),
        ({"messages": []}, "messages: the list is empty"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": ["hello"]}, "messages[0]: expected {role, content}, found a string"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1]: content missing, found the keys 'role'"),
        ({"messages": [{"role": "human", "content": "x"}]}, "messages[0].role: expected one of system, "),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role: expected one of"),
        ({"messages": [USER, {**ASSISTANT, "content": None}]}, "messages[1].content: expected a string, found null"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: expected a string, found a list"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages[1].content: the text is empty"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [{}]}]}, "messages[1]: only role and content are supported"),
        ({"prompt": "x"}, "completion missing, found the keys 'prompt'"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "for turns write {messages: [...]}"),
        ({"prompt": "x", "completion": True}, "completion: expected a string, found a boolean"),
        ({"prompt": "", "completion": "y"}, "prompt: the text is empty"),
        ('{"prompt": "a", "prompt": "b", "completion": "c"}', "'prompt' appears twice"),
        ('{"prompt": "\\ud800", "completion": "c"}', "half a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_malformed_line_is_named_with_what_was_found(
    write_jsonl: Callable[..., Path], row: Any, expected: str
) -> None:
    """File, line, expected and found, for everything a line can get wrong."""
    path = write_jsonl(row)
    with pytest.raises(DataError) as caught:
        read_records(path)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{path}:1: ")
    assert expected in caught.value.problems[0]


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    """Latin-1 is told as a place in the line rather than as a traceback."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9", "completion": "x"}\n')
    with pytest.raises(DataError, match="not UTF-8 at byte 15"):
        read_records(path)


def test_all_malformed_lines_are_told_at_once_up_to_twenty(write_jsonl: Callable[..., Path]) -> None:
    """Twenty are enough to see the pattern; the others are counted."""
    path = write_jsonl({"messages": [ASSISTANT]}, *[{"messages": []}] * 25)
    with pytest.raises(DataError) as caught:
        read_records(path)
    assert "25 malformed line(s)" in caught.value.summary
    assert [problem.split(": ")[0] for problem in caught.value.problems[:20]] == [f"{path}:{n}" for n in range(2, 22)]
    assert caught.value.problems[20:] == ("and 5 more",)


def test_records_must_be_alike(write_jsonl: Callable[..., Path]) -> None:
    """A line in another format than the first, or than the one asked for, is malformed."""
    path = write_jsonl({"messages": [ASSISTANT]}, {"prompt": "a", "completion": "b"})
    with pytest.raises(DataError, match=r"data\.jsonl:2: expected `messages`, found the keys 'prompt', 'completion'"):
        read_records(path)
    with pytest.raises(DataError, match=r"data\.jsonl:1: prompt and completion missing"):
        read_records(path, "prompt_completion")


def test_a_file_without_records_is_refused(write_jsonl: Callable[..., Path]) -> None:
    """Blank lines only, which would otherwise be a run without data."""
    with pytest.raises(DataError, match="has no records"):
        read_records(write_jsonl("", " "))


@pytest.mark.parametrize("read", [read_records, data_fingerprint])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, read: Callable[[Path], object]) -> None:
    """A missing file and a directory are told with the reason of the operating system."""
    with pytest.raises(DataError, match=r"nowhere\.jsonl\n.*No such file"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="Is a directory"):
        read(tmp_path)


def test_the_fingerprint_is_the_sha256_of_the_file(tmp_path: Path) -> None:
    """It is what sha256sum prints, so anyone can compare."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"x" * 3_000_000)
    assert data_fingerprint(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_reading_records_loads_neither_torch_nor_numpy() -> None:
    """The planner reads and fingerprints data in well under a second."""
    heavy = "{'torch', 'transformers', 'numpy'} & set(sys.modules)"
    code = f"import sys, ckptrain.data.records; print({heavy} or 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none"
