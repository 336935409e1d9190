"""The site is built without a warning, fetches nothing from elsewhere, and its generated pages are as the code says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import write_reference
import yaml
from support.documents import ROOT, blocks, pages

from ckptrain.config.load import key_types


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    directory = tmp_path_factory.mktemp("site")
    # With --quiet a warning would be no failure: strict counts what is logged.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "true"}  # the theme advertises another program otherwise
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return directory


class Fetched(HTMLParser):
    """What a browser fetches to show a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the addresses of scripts, styles, pictures and frames."""
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.urls.append(values.get("src") or "")
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.urls.append(values.get("href") or "")


def test_the_site_is_whole_and_fetches_nothing_from_elsewhere(site: Path) -> None:
    """Every page of docs/ is there, and scripts, styles, pictures and fonts are files of the site."""
    for page in pages():
        if page == "README.md":
            continue
        path = site / Path(page).relative_to("docs").with_suffix(".html")
        for url in Fetched(path.read_text(encoding="utf-8")).urls:
            assert not re.match(r"(https?:)?//", url), f"{page} fetches {url}"
            assert not url or (path.parent / url.partition("#")[0].partition("?")[0]).exists(), f"{page}: {url}"
    for style in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?https?:[^)]*\)|@import", style.read_text(encoding="utf-8")) == []


def test_no_page_has_a_diagram_whose_script_would_be_fetched() -> None:
    """The theme loads Mermaid from another site where a page has a diagram of it."""
    assert [block.page for page in pages() for block in blocks(page) if block.language == "mermaid"] == []


def test_the_reference_is_as_the_code_says() -> None:
    """Else: uv run python tools/write_reference.py."""
    assert write_reference.stale() == []


@pytest.mark.parametrize("page", pages())
def test_configs_in_a_page_have_known_keys(page: str) -> None:
    """A YAML block that is a part of a config says only what a config may say."""
    keys = key_types()
    for block in blocks(page):
        if block.language != "yaml":
            continue
        for found in yaml.safe_load_all(block.text):
            if isinstance(found, dict) and found.keys() & keys.keys():
                assert found.keys() <= keys.keys(), f"{page}:{block.line}"
                for section, values in found.items():
                    assert values.keys() <= keys[section].keys(), f"{page}:{block.line}: {section}"
