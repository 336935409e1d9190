"""What identifies a file, and how problems are told."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from ckptrain.data.records import Message, Problem, data_fingerprint, shorten
from ckptrain.errors import DataError

HEAVY = ("torch", "transformers", "numpy", "pyarrow", "datasets", "huggingface_hub", "fsspec")


def test_a_message_is_given_to_templates_with_what_they_may_use() -> None:
    """Role and content first, the rest as it is."""
    message = Message(role="tool", content="4", extra={"name": "add", "tool_call_id": "x"})
    assert message.as_dict() == {"role": "tool", "content": "4", "name": "add", "tool_call_id": "x"}


def test_twenty_problems_are_shown_and_the_others_counted() -> None:
    """A file in the wrong format is wrong on every line."""
    problems = [str(Problem(where=f"f:{number}", text="bad")) for number in range(1, 26)]
    assert shorten(problems[:20]) == problems[:20]
    assert shorten(problems) == [*problems[:20], "and 5 more"]
    assert problems[0] == "f:1: bad"


def test_the_fingerprint_is_the_sha256_of_the_file(tmp_path: Path) -> None:
    """It is what sha256sum prints, so anyone can compare."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"x" * 3_000_000)
    assert data_fingerprint(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_cannot_be_read_has_no_fingerprint(tmp_path: Path) -> None:
    """A missing file and a directory are told with the reason of the operating system."""
    with pytest.raises(DataError, match=r"nowhere\.jsonl\n.*No such file"):
        data_fingerprint(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="Is a directory"):
        data_fingerprint(tmp_path)


def test_a_plan_reads_a_plain_file_without_heavy_imports(tmp_path: Path) -> None:
    """Locating, fingerprinting, counting and reading JSONL is done by the standard library."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    code = (
        "import sys\n"
        "from ckptrain.config.schema import SourceConfig\n"
        "from ckptrain.data.sources import iterate, locate\n"
        f"source = locate(SourceConfig(path={str(path)!r}, split='train[:-1]'), 'train')\n"
        "print(len(list(iterate(source, 'auto', {}))), source.num_rows, len(source.fingerprint()))\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2 None 64", "[]"]
