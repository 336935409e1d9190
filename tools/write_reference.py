"""uv run python tools/write_reference.py [--check]

Write the pages of docs/reference from the code: config keys, command line, manifest, journal and metrics, examples.

They are committed, so that they can be read without building anything; a test fails where one is not what this writes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from reference_cli import cli_page
from reference_config import config_page
from reference_examples import examples_page
from reference_files import files_page, manifest_page

REFERENCE = Path(__file__).parents[1] / "docs/reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "config.md": config_page,
    "cli.md": cli_page,
    "manifest.md": manifest_page,
    "run-files.md": files_page,
    "examples.md": examples_page,
}
NOTE = "\n---\n\nWritten by `uv run python tools/write_reference.py` from the code.\n"


def pages() -> dict[str, str]:
    """Return the pages by their names."""
    return {name: make() + NOTE for name, make in PAGES.items()}


def stale() -> list[str]:
    """Return the names of the pages that are not what the code says."""
    return [
        name
        for name, text in pages().items()
        if not (REFERENCE / name).is_file() or (REFERENCE / name).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write, or check; exit code 1 where a check finds a stale page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, tell which pages are stale")
    if parser.parse_args().check:
        found = stale()
        print("\n".join(f"docs/reference/{name} is stale" for name in found) or "all are as the code says")
        return int(bool(found))
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
