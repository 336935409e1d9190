"""What may differ in the data between a checkpoint and a resume: what would change the samples is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.data_runs import (
    numbered_config,
    run_all,
    run_recorded,
    seen_tokens,
    tiny_tokenizer,
    write_numbered,
)
from support.files import data_files
from support.hostile import change_manifest
from tiny import write_llama

from ckptrain.config.schema import RunConfig
from ckptrain.errors import DataError, StartRefused
from ckptrain.training.observers import Observer

STEPS = 4


@attrs.frozen(kw_only=True)
class Saved:
    """A run of two sources that was saved after step 2 of 4, and what it was made of; not to be changed."""

    home: Path
    base: Path
    train: list[dict[str, Any]]
    template: Path

    @property
    def run_dir(self) -> Path:
        """Return the run's directory."""
        return self.home / "run"

    def config(self, *overrides: str, train: Any = None, base: Path | None = None) -> RunConfig:
        """Return its configuration with other values."""
        asked = [f"train.steps={STEPS}", f"data.chat_template={self.template}", "data.split_validation_size=2"]
        return numbered_config(base or self.base, train or self.train, *asked, *overrides)

    def with_first(self, **changes: Any) -> RunConfig:
        """Return its configuration with another first source."""
        return self.config(train=[{**self.train[0], **changes}, *self.train[1:]])

    def new(self, name: str) -> Path:
        """Return a path that nothing lies at."""
        return self.home / f"changed {name}"


def write_prompts(path: Path, prompt: str = "prompt") -> Path:
    """Write records of prompt and completion, the first of which may be called otherwise."""
    rows = [
        {prompt: f"{number:02d}" * 6, "question": "?" * number, "completion": "y" * number} for number in range(1, 7)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Train two steps, and save."""
    home = tmp_path_factory.mktemp("changed-data")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    base = write_llama(home / "base", num_hidden_layers=1, **sizes)
    template = home / "template.jinja"
    template.write_text(str(tiny_tokenizer(base).chat_template))
    train = [
        {"path": str(write_numbered(home / "chats.jsonl", range(10))), "weight": 2},
        {"path": str(write_prompts(home / "prompts.jsonl")), "weight": 1},
    ]
    run = Saved(home=home, base=base, train=train, template=template)
    first = run.config("train.steps=2")
    run_all(1, {"": partial(run_recorded, first, run.run_dir)})
    return run


def other_rows(saved: Saved, numbers: list[int], name: str) -> RunConfig:
    """Return the configuration with other rows in the first source."""
    return saved.with_first(path=str(write_numbered(saved.new(name), numbers)))


def other_template(saved: Saved) -> RunConfig:
    """Put a space into the template."""
    path = saved.new("template")
    path.write_text(saved.template.read_text() + " ")
    return saved.config(f"data.chat_template={path}")


def other_tokenizer(saved: Saved) -> RunConfig:
    """Give the tokenizer a token that no text has."""
    base = shutil.copytree(saved.base, saved.new("base"))
    tokenizer = tiny_tokenizer(base)
    tokenizer.add_tokens(["never seen"])
    tokenizer.save_pretrained(base)
    return saved.config(base=base)


SAMPLES = "the samples after the checkpoint would be others"
REFUSED: dict[str, tuple[Callable[[Saved], RunConfig], str]] = {
    "a row more": (lambda saved: other_rows(saved, [*range(10), 10], "more"), SAMPLES),
    "another row": (lambda saved: other_rows(saved, [*range(9), 10], "other"), SAMPLES),
    "rows in another order": (lambda saved: other_rows(saved, [*range(9, -1, -1)], "order"), SAMPLES),
    "sources in another order": (lambda saved: saved.config(train=saved.train[::-1]), SAMPLES),
    "a source less": (lambda saved: saved.config(train=saved.train[:1]), SAMPLES),
    "a part of a source": (lambda saved: saved.with_first(split="train[:9]"), SAMPLES),
    "another weight": (lambda saved: saved.with_first(weight=3), SAMPLES),
    "columns": (
        lambda saved: saved.config(train=[saved.train[0], {**saved.train[1], "columns": {"prompt": "question"}}]),
        SAMPLES,
    ),
    "the format of a source": (lambda saved: saved.with_first(format="messages"), SAMPLES),
    "the format of all": (lambda saved: saved.config("data.format=messages"), "data.format is auto there and messages"),
    "the size of the validation set": (
        lambda saved: saved.config("data.split_validation_size=0.2"),
        "data.split_validation_size is 2.0 there and 0.2 in the config",
    ),
    "another template": (other_template, "tokenizer or its chat template"),
    "the tokenizer's own template": (
        lambda saved: saved.config("data.chat_template=null"),
        "tokenizer or its chat template",
    ),
    "another tokenizer": (other_tokenizer, "tokenizer or its chat template"),
    "the global batch": (
        lambda saved: saved.config("train.global_batch_size=4"),
        "train.global_batch_size is 2 there and 4 in the config",
    ),
    "the seed": (lambda saved: saved.config("train.seed=1"), "train.seed is 1234 there and 1"),
    "packing": (lambda saved: saved.config("data.packing=false"), "data.packing is true there and false"),
    "the length of a row": (lambda saved: saved.config("data.sequence_length=72"), "data.sequence_length is 64 there"),
    "what is learnt": (lambda saved: saved.config("data.loss_on=all"), "data.loss_on is assistant there and all"),
    "what is too long": (lambda saved: saved.config("data.on_too_long=drop"), "data.on_too_long is refuse there"),
}


@pytest.fixture(scope="module")
def refusals(saved: Saved) -> dict[str, list[Any]]:
    """Try to go on with each of the changes, on two ranks, in a copy of the run."""
    jobs = {}
    for name, (change, _) in REFUSED.items():
        copy = shutil.copytree(saved.run_dir, saved.new(f"run: {name}"))
        jobs[name] = partial(run_recorded, change(saved), copy)
    return run_all(2, jobs)


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_of_the_samples_or_of_their_order_is_refused_by_name(
    name: str, saved: Saved, refusals: dict[str, list[Any]]
) -> None:
    """On every rank, before anything is trained; what was saved stays as it was."""
    _, expected = REFUSED[name]
    for found in refusals[name]:
        assert isinstance(found, StartRefused)
        assert expected in str(found)
        assert len(found.problems) == 1, "and nothing else is blamed"
    there, here = (path / "checkpoints" for path in (saved.run_dir, saved.new(f"run: {name}")))
    assert data_files(here) == data_files(there)


def test_moved_files_workers_and_micro_batches_change_nothing(saved: Saved, tmp_path: Path) -> None:
    """All at once, on another number of ranks: the same samples in the same steps as without."""
    moved = shutil.copytree(saved.home, tmp_path / "moved", ignore=shutil.ignore_patterns("run", "changed*"))
    (moved / "chats.jsonl").rename(moved / "renamed.json")
    (moved / "template.jinja").rename(moved / "other.txt")
    train = [
        {**saved.train[0], "path": str(moved / "renamed.json")},
        {**saved.train[1], "path": f"{moved}/prompts.jsonl"},
    ]
    config = saved.config(
        "data.workers=1",
        "train.micro_batch_size=2",
        f"data.chat_template={moved}/other.txt",
        train=train,
        base=moved / "base",
    )
    copies = [shutil.copytree(saved.run_dir, tmp_path / name) for name in ("as it was", "changed")]
    [same] = run_all(2, {"": partial(run_recorded, saved.config(), copies[0])}).values()
    [changed] = run_all(1, {"": partial(run_recorded, config, copies[1])}).values()
    assert [found.result.plan.kind for found in (*same, *changed)] == ["Resume"] * 3
    steps = seen_tokens([rank.steps for rank in same])
    assert len(steps) == STEPS - 2
    assert steps == seen_tokens([rank.steps for rank in changed])
    assert same[0].result.val_loss_after == pytest.approx(changed[0].result.val_loss_after, abs=1e-6)


def test_another_number_of_rows_from_the_same_files_is_refused(saved: Saved) -> None:
    """As another version would make them, which packs otherwise: known once the data is tokenised."""
    copy = shutil.copytree(saved.run_dir, saved.new("run: another version"))
    change_manifest(copy / "checkpoints/step-00000002", lambda said: said["data"].update(num_rows=99))
    [(found,)] = run_all(1, {"": partial(run_recorded, saved.config(), copy)}).values()
    assert isinstance(found, StartRefused)
    assert "gives 99 rows there and" in str(found)


class Rewriting(Observer):
    """Writes to a file once a start has been decided."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_plan(self, plan: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write other rows, as many."""
        write_numbered(self._path, range(10, 20))


def test_files_that_change_while_a_run_starts_are_refused(saved: Saved, tmp_path: Path) -> None:
    """What was decided by their fingerprint would not be what is trained on, and the checkpoint would say otherwise."""
    path = write_numbered(tmp_path / "chats.jsonl", range(10))
    config = saved.with_first(path=str(path))
    [(found,)] = run_all(1, {"": partial(run_recorded, config, tmp_path / "run", [Rewriting(path)])}).values()
    assert isinstance(found, DataError)
    assert "changed while the run was starting" in str(found)
