"""The table of families is whole, and what it says is what its tool measures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from families import FAMILIES
from family_cells import COLUMNS, Refusal
from family_table import DOCUMENT, document, measure_family, refusals

from ckptrain.config.shape import REFUSED, SUPPORTED

ROUNDING = 2e-5
"""Most that float32 sums in another order move a logit of the table's models, whose logits are below 5."""


def rows() -> list[list[str]]:
    """Return the cells of the table's rows: family, architecture, numbers."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ") and "ForCausalLM" in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_family_and_every_architecture_has_a_row() -> None:
    """None was added or left out since the table was written."""
    assert [row[0] for row in rows()] == list(FAMILIES)
    assert {row[1] for row in rows()} == set(SUPPORTED)
    assert all(len(row) == 2 + len(COLUMNS) for row in rows())


def test_every_number_of_the_table_is_rounding_and_every_other_cell_has_its_reason() -> None:
    """A cell without a number is a refusal, which a line below the table gives; no base is without one."""
    below = DOCUMENT.read_text().partition("## What a family cannot do")[2].partition("## What is refused")[0]
    for name, _, *cells in rows():
        assert cells[0] != "no"
        for cell in cells:
            if cell == "no":
                assert re.search(rf"^- ([^:]*, )?{re.escape(name)}(, [^:]*)?: ", below, re.MULTILINE)
            else:
                assert float(cell) <= ROUNDING


def test_every_refusal_is_told_with_the_reason_that_is_given_today(tmp_path: Path) -> None:
    """Architectures, and what a config.json can say."""
    told = DOCUMENT.read_text().partition("## What is refused")[2]
    refused = refusals(tmp_path)
    assert refused.keys() >= REFUSED.keys()
    for name, why in refused.items():
        assert f"- {name}: {why}\n" in told


@pytest.mark.parametrize("name", ["Llama, yarn rope", "GPT-OSS"])
def test_a_family_measures_as_the_table_says(name: str, tmp_path: Path) -> None:
    """Its base, and an adapter through an export and its gate."""
    row = measure_family(name, tmp_path, ("base", "adapters, TP=1", "exported"))
    for column, outcome in row.cells.items():
        assert not isinstance(outcome, Refusal), f"{column}: {outcome}"
        assert 0 <= outcome <= ROUNDING
    assert any("experts" in limit for limit in row.limits) == (name == "GPT-OSS")
    assert f"| {name} | {row.architecture} |" in document([row], {})
