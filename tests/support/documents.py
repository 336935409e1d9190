"""README.md and docs/**: their fenced blocks, the commands in them, and what the inline code names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_DIRECTIVE = re.compile(r"<!-- test: (?P<words>[^>]+) -->\s*$")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=.*")


@attrs.frozen(kw_only=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    directive: str | None
    """What an HTML comment `<!-- test: ... -->` right before the block says of how it is run."""


@attrs.frozen(kw_only=True)
class Command:
    """One command of a bash block."""

    where: str
    text: str
    """As it is written, its lines joined."""
    environment: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    """Without the assignments before it, the comment behind it, and a leading `uv run`."""
    directive: str | None


def pages() -> list[str]:
    """Return the paths of all pages."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


def read(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def without_blocks(text: str) -> str:
    """Return a page's prose: its fenced blocks are left out."""
    return _FENCE.sub("", text)


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = read(page)
    for found in _FENCE.finditer(text):
        directive = _DIRECTIVE.search(text[: found.start()])
        indent = found["indent"]
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=found["language"],
            text="".join(line.removeprefix(indent) for line in found["text"].splitlines(keepends=True)),
            directive=None if directive is None else directive["words"],
        )


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a block, if it is one of bash; `&&` ends one as a line does, a backslash joins two lines."""
    joined = ""
    if block.language != "bash":
        return
    for number, line in enumerate(block.text.split("\n"), start=block.line + 1):
        joined = f"{joined} {line.strip()}".strip()
        if joined.endswith("\\"):
            joined = joined.removesuffix("\\")
            continue
        for text in joined.split(" && "):
            if words := shlex.split(text, comments=True):
                yield _command(f"{block.page}:{number}", " ".join(text.split()), words, block.directive)
        joined = ""


def _command(where: str, text: str, words: list[str], directive: str | None) -> Command:
    environment = []
    while _ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        environment.append((name, value))
    return Command(
        where=where,
        text=text,
        environment=tuple(environment),
        words=tuple(words[2:] if words[:2] == ["uv", "run"] else words),
        directive=directive,
    )


def words_of(*words: str) -> Command:
    """Return a command that no page has."""
    return Command(where="", text=" ".join(words), environment=(), words=words, directive=None)


def inline_code(page: str) -> set[str]:
    """Return what stands between backticks in the prose of a page."""
    return set(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", without_blocks(read(page))))
