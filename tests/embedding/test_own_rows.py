"""Rows that a program holds are the same data as a file of them: tokens, identity, losses, and what a resume refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.launch import launch, run_training
from support.restored import losses

from ckptrain import Trainer, api
from ckptrain.config.base import locate_base
from ckptrain.config.load import load_config
from ckptrain.config.schema import RunConfig
from ckptrain.data.dataset import build_datasets
from ckptrain.data.program_rows import keep_rows
from ckptrain.errors import DataError, StartRefused
from ckptrain.training.tokens import tokenisation

Make = Callable[..., RunConfig]
Row = dict[str, Any]
FORMS: dict[str, list[Row]] = {
    "messages": [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"ok: {n} ✓"}]}
        for n in range(12)
    ],
    "prompt_completion": [{"prompt": f"{n} + 1 = ", "completion": str(n + 1)} for n in range(12)],
    "alpaca": [{"instruction": f"double {n}", "output": str(2 * n)} for n in range(12)],
}


def as_file(rows: list[Row], path: Path) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path


def tokens(config: RunConfig) -> list[tuple[bytes, bytes]]:
    """Return (token ids, what is learnt) of each training sample."""
    how = tokenisation(locate_base(config.model), config.data)
    samples = build_datasets(config.data, how, config.train.seed).train.samples
    return [(sample.token_ids.tobytes(), sample.learnt.tobytes()) for sample in samples]


@pytest.mark.parametrize("form", FORMS)
def test_rows_in_memory_have_the_tokens_and_the_identity_of_their_file(
    form: str, tiny_config: Make, tmp_path: Path
) -> None:
    """In any format; given as a list or as an iterator that is gone through once."""
    file = as_file(FORMS[form], tmp_path / "rows.jsonl")
    of_file = tiny_config(f"data.train={file}")
    for rows in (FORMS[form], iter(FORMS[form])):
        held = Trainer(tiny_config(), run_dir=tmp_path / "run", train=rows).config
        assert tokens(held) == tokens(of_file)
        assert held.data.train[0].path != str(file)
        identities = [api.plan(config, run_dir=tmp_path / "run")[0].data for config in (held, of_file)]
        assert identities[0] == identities[1]


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_on_rows_in_memory_has_the_losses_of_a_run_on_their_file(
    world: int, tiny_config: Make, tmp_path: Path
) -> None:
    """Training and validation; and either goes on where the other stopped, the command line too."""
    rows = FORMS["messages"]
    train, validation = as_file(rows, tmp_path / "train.jsonl"), as_file(rows[:3], tmp_path / "val.jsonl")
    of_files = tiny_config(f"data.train={train}", f"data.validation={validation}", "train.steps=3")
    nowhere = {"model": {"pretrained": of_files.model.pretrained, "dtype": "float32", "verify": "never"}}
    settings = ["lora.dim=8", "lora.alpha=16", "data.sequence_length=128", "optimizer.lr=0.01", "train.steps=3"]
    settings += ["train.global_batch_size=4", "checkpoint.every_steps=2", "log.tensorboard=false"]

    def held() -> None:
        with Trainer(nowhere, settings, run_dir=tmp_path / "held", train=rows, validation=rows[:3]) as trainer:
            trainer.run_until(2)

    launch(world, held)
    launch(world, lambda: api.resume(tmp_path / "held"))
    launch(world, lambda: run_training(of_files, tmp_path / "files"))
    assert losses(tmp_path / "held") == losses(tmp_path / "files")
    assert len(losses(tmp_path / "held")) == 3


def test_a_resume_with_other_rows_is_refused(tiny_config: Make, tmp_path: Path) -> None:
    """By a plan and by a start, as it is for files; the same rows go on."""
    rows = FORMS["messages"]
    config = tiny_config("data.validation=null")

    def stop() -> None:
        with Trainer(config, run_dir=tmp_path, train=rows) as trainer:
            trainer.run_until(1)

    launch(1, stop)
    with pytest.raises(StartRefused, match=r"the training data is .* there and .* now"):
        Trainer(config, run_dir=tmp_path, train=rows[1:]).plan()
    assert Trainer(config, run_dir=tmp_path, train=rows).plan().plan.kind == "Resume"


def test_ranks_with_different_rows_are_refused(tiny_config: Make, tmp_path: Path) -> None:
    """Each would learn its share of another data set, and nobody would see it."""
    import os

    def rank_of_its_own() -> None:
        rows = FORMS["messages"][int(os.environ["RANK"]) :]
        with Trainer(tiny_config(), run_dir=tmp_path, train=rows) as trainer:
            trainer.run()

    with pytest.raises(DataError, match=r"rank 1 has .* rank 0 .*: give all the same"):
        launch(2, rank_of_its_own)


def test_rows_that_are_none_are_told_by_their_numbers(tmp_path: Path, cache: Path) -> None:
    """All at once, and nothing is left of the file."""

    def rows() -> Iterator[Any]:
        yield {"prompt": "a", "completion": "b"}
        yield "text"
        yield {"prompt": float("nan"), "completion": "b"}
        yield {"prompt": {1, 2}, "completion": "b"}
        yield {"prompt": "\ud800", "completion": "b"}

    with pytest.raises(DataError) as refused:
        keep_rows(rows(), "train")
    assert [problem.split(":")[0] for problem in refused.value.problems] == ["row 2", "row 3", "row 4", "row 5"]
    assert "expected a mapping, found str" in refused.value.problems[0]
    with pytest.raises(DataError, match="expected at least one row"):
        keep_rows([], "validation")
    assert not list((cache / "rows-v1").glob(".writing-*"))


def test_a_row_that_is_no_record_is_named_by_its_line(tiny_config: Make, tmp_path: Path) -> None:
    """Line n of the kept file is row n."""
    rows = [*FORMS["prompt_completion"], {"prompt": "no completion"}]
    config = Trainer(tiny_config(), run_dir=tmp_path, train=rows).config
    with pytest.raises(DataError, match=r"\.jsonl:13: "):
        tokens(load_config(config))
