"""docs/errors.md is current: every kind of error, what was really said, and every text that is raised."""

from __future__ import annotations

from pathlib import Path

import pytest
from error_examples import Example, provoke_all
from error_table import DOCUMENT, KINDS, classes, document

from ckptrain import errors


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    """Make every error happen."""
    return provoke_all(tmp_path_factory.mktemp("errors"))


def test_the_document_is_what_its_tool_writes(examples: list[Example]) -> None:
    """Otherwise: uv run python tools/error_table.py."""
    assert DOCUMENT.read_text() == document(examples)


def test_every_class_of_error_has_a_cause_a_cure_and_an_example(examples: list[Example]) -> None:
    """None was added without them, and each ends with the status that it says."""
    assert classes().keys() <= KINDS.keys()
    for name, kind in classes().items():
        statuses = {example.exit_status for example in examples if example.kind == name}
        assert statuses == {kind.exit_status}, name
        assert KINDS[name].cause
        assert KINDS[name].cure


def test_every_exit_status_of_an_error_is_in_the_readme() -> None:
    """The table there is the short form of this one."""
    readme = (Path(DOCUMENT).parents[1] / "README.md").read_text()
    statuses = {kind.exit_status for kind in classes().values()} | {errors.EXIT_STOPPED_EARLY}
    assert all(f"| {status} |" in readme for status in statuses)


def test_no_example_names_this_machine(examples: list[Example], tmp_path: Path) -> None:
    """What is shown is the same wherever it is made."""
    assert not [example for example in examples if "/tmp" in example.message or str(tmp_path.parent) in example.message]
