"""`ckptrain data`: what a run learns from, as the model sees it, before it costs anything."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptrain import api
from ckptrain.cli.outcome import Answer
from ckptrain.cli.page import Row, facts
from ckptrain.cli.wording import count_text, plural

_LEARNT, _GIVEN = "bold green", "dim"
# A sample may hold what would move the cursor or worse: such characters are shown by their pictures.
_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def data_answer(source: Path, overrides: tuple[str, ...], num_shown: int) -> Answer:
    """Tokenise the data of a config file or of a run, or find it in the cache, and tell what it is.

    Raises:
        CkptrainError: the data cannot be read or tokenised.
    """
    report = api.describe_data(api.config_of_run(source) if source.is_dir() else source, overrides, num_shown=num_shown)
    return Answer(report=report, show=functools.partial(_show, report))


def _show(report: Mapping[str, Any], console: Console) -> None:
    for role in ("train", "validation"):
        if report[role] is not None:
            console.print(facts([(role, ""), *_rows(report[role], report)]))
            console.print()
    steps = report["steps"]
    console.print(facts([("run", f"{plural(steps, 'step')} of {plural(report['rows_per_step'], 'row')} are"
                          f" {report['epochs']:.3g} epochs")]))  # fmt: skip
    for role in ("train", "validation"):
        for number, sample in enumerate((report[role] or {}).get("shown", ())):
            _show_sample(f"{role} {number + 1}", sample, console)


def _rows(part: Mapping[str, Any], report: Mapping[str, Any]) -> list[Row]:
    lengths = part["length_percentiles"]
    padding = 1 - part["row_fill"]
    rows: list[Row] = [
        ("records", f"{part['records']:,}"),
        ("samples", f"{part['samples']:,}, {_left_out(part)}"),
        (
            "tokens",
            (
                f"{count_text(part['tokens'])}, of which {count_text(part['learnt_tokens'])}"
                f" ({part['learnt_share']:.1%}) are learnt"
            ),
        ),
        ("lengths", ", ".join(f"{_percentile(share)} {length:,}" for share, length in lengths.items())),
        (
            "rows",
            (
                f"{part['rows']:,} of {report['sequence_length']:,} tokens, {part['row_fill']:.2%} full"
                f" ({padding:.2%} would be padding)"
            ),
        ),
    ]
    if part["rows_per_epoch"] != part["rows"]:
        rows.append(("epoch", f"{part['rows_per_epoch']:,} rows, by the weights of the sources"))
    if part["would_refuse"]:
        rows.append(("refused", Text(part["would_refuse"], style="yellow")))
    return rows


def _left_out(part: Mapping[str, Any]) -> str:
    said = {
        "too long": part["dropped_too_long"],
        "with nothing to learn": part["dropped_nothing_learnt"],
    }
    dropped = [f"{count:,} {why}" for why, count in said.items() if count]
    text = f"left out: {', '.join(dropped)}" if dropped else "none left out"
    return f"{text}; {part['truncated']:,} truncated" if part["truncated"] else text


def _percentile(share: str) -> str:
    return {"0": "shortest", "50": "median", "100": "longest"}.get(share, f"{share} %")


def _show_sample(title: str, sample: Mapping[str, Any], console: Console) -> None:
    console.print()
    console.print(
        Text.assemble(
            (title, "bold"),
            f"  {sample['where']}, {sample['num_tokens']} tokens, {sample['num_learnt']} ",
            ("learnt", _LEARNT),
        )
    )
    pieces = ((text.translate(_PICTURES), _LEARNT if learnt else _GIVEN) for learnt, text in sample["pieces"])
    console.print(Text.assemble(*pieces))
