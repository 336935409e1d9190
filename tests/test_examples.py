"""The examples for the Hub, run as they are against a Hub cache and against a directory with rows of the same schema."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import orjson
import pytest
from huggingface_hub import constants
from support.datasets_on_disk import COMMIT, put_in_hub_cache
from support.hub_examples import SQUAD_SPLITS, TULU_SPLITS, write_repository
from support.launch import launch, run_training

from ckptrain.config.load import load_config
from ckptrain.config.schema import RunConfig

EXAMPLES = Path(__file__).parents[1] / "examples"
REPOSITORIES = {
    "squad": ("rajpurkar/squad", SQUAD_SPLITS),
    "tulu3": ("allenai/tulu-3-sft-mixture", TULU_SPLITS),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a Hub cache of the test's own, and no network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return cache


@pytest.fixture
def example(tiny_llama: Path) -> Callable[..., RunConfig]:
    """Return a maker of an example's configuration for a model and a machine of this size; its data stays its own."""

    def make(name: str, *overrides: str) -> RunConfig:
        smaller = [
            f"model.pretrained={tiny_llama}",
            "model.dtype=float32",
            "model.verify=never",
            "log.tensorboard=false",
        ]
        shorter = ["data.sequence_length=512", "train.steps=2", "train.global_batch_size=2", "optimizer.warmup_steps=0"]
        often = ["train.eval_every_steps=null", "checkpoint.every_steps=2"]
        return load_config(EXAMPLES / f"{name}_lora.yaml", [*smaller, *shorter, *often, *overrides])

    return make


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read what a run measured."""
    return [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize("name", ["squad", "tulu3"])
def test_an_example_trains_on_the_hub_and_goes_on_with_the_revision_that_it_began_with(
    name: str, hub: Path, example: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The branch has other rows by the time of the resume: the run keeps its own."""
    path, splits = REPOSITORIES[name]
    snapshot = put_in_hub_cache(hub, path, write_repository(tmp_path / "repository", splits))
    run_dir = tmp_path / "run"
    launch(1, lambda: run_training(example(name), run_dir))
    measured = read_metrics(run_dir)
    assert [line["step"] for line in measured if "loss" in line] == [1, 2]
    assert all(math.isfinite(line.get("loss", line.get("val_loss"))) for line in measured)
    assert all(0 < line["learnt_tokens"] < line["tokens"] for line in measured if "loss" in line)
    assert load_config(run_dir / "run.yaml", check_inputs=False).data.train[0].revision == COMMIT

    later = "f" * 40
    shutil.copytree(snapshot, snapshot.parent / later)
    write_repository(tmp_path / "later", {split: rows[:-1] for split, rows in splits.items()})
    shutil.copytree(tmp_path / "later", snapshot.parent / later, dirs_exist_ok=True)
    (snapshot.parents[1] / "refs/main").write_text(later)
    launch(1, lambda: run_training(example(name, "train.steps=3"), run_dir))
    assert [line["step"] for line in read_metrics(run_dir) if "loss" in line] == [1, 2, 3]
    assert load_config(run_dir / "run.yaml", check_inputs=False).data.train[0].revision == COMMIT

    launch(1, lambda: run_training(example(name), tmp_path / "another"))
    assert load_config(tmp_path / "another/run.yaml", check_inputs=False).data.train[0].revision == later


@pytest.mark.parametrize("name", ["squad", "tulu3"])
def test_an_example_trains_on_a_directory_with_rows_of_the_same_schema(
    name: str, hub: Path, example: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """As its first lines say, for machines without a network; the same rows give the same losses as from the Hub."""
    path, splits = REPOSITORIES[name]
    repository = write_repository(tmp_path / "repository", splits)
    here = [f"data.train.path={repository}"]
    here += [f"data.validation.path={repository}"] if "validation" in splits else []
    launch(1, lambda: run_training(example(name, *here), tmp_path / "from_directory"))
    put_in_hub_cache(hub, path, repository)
    launch(1, lambda: run_training(example(name), tmp_path / "from_hub"))
    runs = [read_metrics(tmp_path / run) for run in ("from_directory", "from_hub")]
    losses = [[line.get("loss", line.get("val_loss")) for line in measured] for measured in runs]
    assert losses[0] == losses[1]
