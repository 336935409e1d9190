"""What the processes of a launch agree on when one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from forked import launch

from ckptrain.errors import RankFailed


@pytest.mark.parametrize(("name", "failing"), [("together", 1), ("on_rank0", 0)])
def test_a_fault_of_one_rank_ends_all_and_keeps_its_traceback_there(name: str, failing: int) -> None:
    """The others know whose it is and what it says; where it happened, it is the cause."""

    def on_rank() -> tuple[str, str | None]:
        from ckptrain.checkpoint import ranks
        from ckptrain.megatron.world import open_process_group

        agree: Callable[[Callable[[], Any]], Any] = getattr(ranks, name)
        with open_process_group():
            try:
                agree(lambda: 1 // (ranks.rank() != failing))
            except RankFailed as error:
                return str(error), None if error.__cause__ is None else type(error.__cause__).__name__
        raise AssertionError("it did not fail")

    said = f"rank {failing}: ZeroDivisionError: integer division or modulo by zero"
    causes = ["ZeroDivisionError" if rank == failing else None for rank in range(2)]
    assert launch(2, on_rank) == [(said, cause) for cause in causes]
