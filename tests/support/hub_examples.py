"""Rows as the Hub datasets of examples/ have them, and repositories of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.datasets_on_disk import SQUAD_ROWS, write_parquet

Splits = Mapping[str, Sequence[Mapping[str, Any]]]

SQUAD_SPLITS: Splits = {"train": SQUAD_ROWS * 20, "validation": SQUAD_ROWS}
# As in allenai/tulu-3-sft-mixture: some conversations have a system's turn, some go on for longer than others.
TULU_SPLITS: Splits = {
    "train": [
        {
            "id": f"made_up_{number}",
            "messages": [
                *([{"role": "system", "content": "Be short."}] if number % 3 == 0 else []),
                *(
                    turn
                    for count in range(1 + number % 4)
                    for turn in (
                        {"role": "user", "content": f"What is {number} + {count}?"},
                        {"role": "assistant", "content": f"{number + count}" + "." * (number % 40)},
                    )
                ),
            ],
            "source": "made up",
        }
        for number in range(600)
    ]
}


def write_repository(directory: Path, splits: Splits) -> Path:
    """Write a Hub repository with a Parquet file a split."""
    for split, rows in splits.items():
        write_parquet(directory / f"data/{split}-00000-of-00001.parquet", rows, row_group_size=100)
    return directory
