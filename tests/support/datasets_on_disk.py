"""Datasets as they lie on disks and on the Hub: files of every kind, repositories, caches, and a Hub of our own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckptrain.config.schema import SourceConfig
from ckptrain.data.rows import Row, read_rows
from ckptrain.data.sources import Located, Role, iterate, locate
from ckptrain.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"

GSM8K_ROWS = [
    {"question": f"What is {number} + {number}?", "answer": f"{number} + {number} = {2 * number}\n#### {2 * number}"}
    for number in range(40)
]
# As in rajpurkar/squad: id, title, context, question, and the answers with where they begin.
SQUAD_ROWS = [
    {
        "id": f"{number:024x}",
        "title": "Bridges",
        "context": f"The bridge of line {number} was built in {1800 + number}.",
        "question": f"When was the bridge of line {number} built?",
        "answers": {"text": [str(1800 + number), f"in {1800 + number}"], "answer_start": [34, 31]},
    }
    for number in range(12)
]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    }
    for number in range(10)
]

TWO_CONFIGURATIONS = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: validation
    path: main/validation.parquet
  - split: test
    path: main/test-*
- config_name: socratic
  data_dir: socratic
---
# A dataset
"""


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], row_group_size: int = 7) -> Path:
    """Write rows to a Parquet file of several row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=row_group_size)
    return path


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows to a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_repository(directory: Path) -> Path:
    """Write a repository of two configurations: one of three splits, of which one is in two shards, and one of one."""
    for number, rows in enumerate((GSM8K_ROWS[:15], GSM8K_ROWS[15:25])):
        write_parquet(directory / f"main/train-{number:05d}-of-00002.parquet", rows)
    write_parquet(directory / "main/validation.parquet", GSM8K_ROWS[25:30])
    write_parquet(directory / "main/test-00000-of-00001.parquet", GSM8K_ROWS[30:])
    write_parquet(directory / "socratic/train.parquet", GSM8K_ROWS[:4])
    (directory / "README.md").write_text(TWO_CONFIGURATIONS, encoding="utf-8")
    return directory


def loaded(directory: Path, cache: Path, name: str | None = None, split: str = "train") -> list[dict[str, Any]]:
    """Return the rows that `datasets` reads."""
    return list(datasets.load_dataset(str(directory), name, split=split, cache_dir=str(cache)))


def find(path: Path | str | None, role: Role = "train", **keys: Any) -> Located:
    """Locate a source."""
    return locate(SourceConfig(path=None if path is None else str(path), **keys), role)


def refusal(path: Path | str | None, role: Role = "train", **keys: Any) -> str:
    """Return why a source is refused."""
    with pytest.raises(ConfigError) as caught:
        find(path, role, **keys)
    return str(caught.value)


def rows_of(source: Located) -> list[dict[str, Any]]:
    """Return the rows of {question, answer} that the records of a source were made of."""
    rows = {row.where: row.data for file in source.files for row in read_rows(file) if isinstance(row, Row)}
    records = list(iterate(source, "input_output", {"input": "question", "output": "answer"}))
    assert source.num_rows in (None, len(records))
    return [rows[record.where] for record in records]


def put_in_hub_cache(cache: Path, path: str, repository: Path, *, leave_out: Sequence[str] = ()) -> Path:
    """Lay a repository into a Hub cache as downloads do: blobs, a snapshot of links to them, and the branch's commit."""
    home = cache / f"datasets--{path.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    for file in sorted(repository.rglob("*")):
        name = file.relative_to(repository).as_posix()
        if file.is_dir() or name in leave_out:
            continue
        blob = home / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.read_bytes())
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    return snapshot


@contextlib.contextmanager
def serve_hub(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the repositories ORG/NAME under a directory as the Hub does; tell its address, and the files it is asked for.

    ORG/gated is gated.
    """
    asked: list[str] = []

    class Handler(_HubHandler):
        repositories = root
        files = asked

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _HubHandler(BaseHTTPRequestHandler):
    """The three questions that a download asks: which commit, which files, and their bytes."""

    repositories: Path
    files: list[str]

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "datasets"] and len(parts) > 4:
            self._answer_about("/".join(parts[2:4]), parts[4], parts[5])
        elif parts[0] == "datasets" and parts[3] == "resolve":
            self._send_file(self.repositories / parts[1] / parts[2] / "/".join(parts[5:]), "/".join(parts[5:]))
        else:
            self._send(404, b"")

    def _answer_about(self, path: str, question: str, revision: str) -> None:
        repository = self.repositories / path
        if path.endswith("/gated"):
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif not repository.is_dir():
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif question == "revision":
            self._send(200, json.dumps({"id": path, "sha": COMMIT, "siblings": []}).encode())
        else:
            files = [file for file in sorted(repository.rglob("*")) if file.is_file()]
            listed = [
                {
                    "type": "file",
                    "path": file.relative_to(repository).as_posix(),
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in files
            ]
            self._send(200, json.dumps(listed).encode())

    def _send_file(self, file: Path, name: str) -> None:
        if not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = file.read_bytes()
        if self.command == "GET":
            self.files.append(name)
        self._send(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
