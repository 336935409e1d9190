"""Every link of README.md and docs/ leads somewhere, and so does every anchor in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

import pytest
from markdown.extensions.toc import slugify
from support.documents import ROOT, pages, read, without_blocks

_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^()\s]+)\)|(?:href|src)=\"(?P<html>[^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")


def links(page: str) -> Iterator[str]:
    """Yield the targets of a page's links and pictures."""
    for found in _LINK.finditer(_CODE.sub("", without_blocks(read(page)))):
        yield found["target"] or found["html"]


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub and the site both give the headings of a page."""
    found: set[str] = set()
    for heading in _HEADING.findall(without_blocks(read(page))):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        on_github = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        if slugify(plain, "-") == on_github:
            found.add(on_github)
    return found


@pytest.mark.parametrize("page", pages())
def test_every_link_leads_somewhere(page: str) -> None:
    """Files are there, and headings have the anchor; of other sites only the form is looked at."""
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https", f"{page}: {link}"
            assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), f"{page}: {link}"
            continue
        assert not link.startswith("/"), f"{page}: {link} is absolute"
        target = ((ROOT / page).parent / unquote(parts.path)).resolve() if parts.path else ROOT / page
        assert target.exists(), f"{page}: {link} is not there"
        if parts.fragment:
            there = anchors(target.relative_to(ROOT).as_posix())
            assert parts.fragment in there, f"{page}: {link}: of its anchors none is that: {sorted(there)}"


@pytest.mark.parametrize("page", [page for page in pages() if page != "README.md"])
def test_a_page_of_the_site_links_to_no_file_outside_of_it(page: str) -> None:
    """What the site does not hold it cannot lead to."""
    for link in links(page):
        if not urlsplit(link).scheme and urlsplit(link).path:
            target = ((ROOT / page).parent / unquote(urlsplit(link).path)).resolve()
            assert target.is_relative_to(ROOT / "docs"), f"{page}: {link}"
