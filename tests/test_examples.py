"""The examples: those for the Hub against a Hub cache and a directory, the others in a checkout in small.

tests/docs runs the commands by which the documentation shows them.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import orjson
import pytest
from huggingface_hub import constants
from reference_examples import LANGUAGES, NEEDS
from support.datasets_on_disk import COMMIT, put_in_hub_cache
from support.documents import blocks, pages, words_of
from support.documents import commands as of_bash
from support.hub_examples import SQUAD_SPLITS, TULU_SPLITS, write_repository
from support.launch import launch, run_training
from support.sandbox import Sandbox
from transformers import AutoTokenizer

from ckptrain.config.load import load_config
from ckptrain.config.schema import RunConfig
from ckptrain.lifecycle.journal import read_journal

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
        few = ["data.split_validation_size=32"] if name == "tulu3" else []
        return load_config(EXAMPLES / f"{name}_lora.yaml", [*smaller, *shorter, *often, *few, *overrides])

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


def test_the_template_for_llama_says_which_turns_are_learnt(tiny_llama: Path) -> None:
    """Llama 3's format, character by character, and the answers with the token that ends them are learnt."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.bos_token = "<|endoftext|>"
    template = (EXAMPLES / "templates/llama3.jinja").read_text()
    turns = [{"role": "system", "content": "Be short. "}, *TULU_SPLITS["train"][1]["messages"]]
    text = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
    spoken = "".join(
        f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n{turn['content'].strip()}<|eot_id|>" for turn in turns
    )
    assert text == f"<|endoftext|>{spoken}"
    found = tokenizer.apply_chat_template(
        turns, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    learnt = [token for token, learns in zip(found["input_ids"], found["assistant_masks"], strict=True) if learns]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    assert tokenizer.decode(learnt) == "".join(f"{answer}<|eot_id|>" for answer in answers)


def test_every_example_is_shown_and_run() -> None:
    """Each is in the reference, and its command in a page, where tests/docs runs it; two are run below."""
    shown = {path for path in EXAMPLES.rglob("*") if path.is_file() and path.suffix in LANGUAGES}
    assert {path.relative_to(EXAMPLES).as_posix() for path in shown} == NEEDS.keys()
    said = [command.words for page in pages() for block in blocks(page) for command in of_bash(block)]
    runnable = {f"examples/{name}" for name in NEEDS if not name.startswith(("templates/", "make_tickets"))}
    assert runnable - {"examples/train_on.yaml"} <= {word for words in said for word in words}


def test_an_embedded_run_stops_by_its_rule(checkout: Sandbox, tmp_path: Path) -> None:
    """With a learning rate that changes nothing the validation loss stays flat: two validations, and it stops."""
    sandbox = checkout.copy(tmp_path / "checkout", with_runs=False)
    words = ("python", "examples/embed.py", "optimizer.lr=1e-30", "train.steps=6")
    ended = sandbox.run(words_of(*words))
    assert ended.status == 0, ended.output
    assert "stops: the file" in ended.output
    assert "FreshStart: stopped at step 4" in ended.output
    assert not (sandbox.directory / "runs/embedded/stop").exists()


def test_a_warm_start_goes_on_from_an_export(checkout: Sandbox, tmp_path: Path) -> None:
    """The command at the head of train_on.yaml, and what it takes over."""
    sandbox = checkout.copy(tmp_path / "checkout", with_runs=True)
    for words in (
        ("ckptrain", "export", "runs/quickstart", "runs/tickets-peft", "--no-verify"),
        ("ckptrain", "run", "examples/train_on.yaml"),
    ):
        ended = sandbox.run(words_of(*words))
        assert ended.status == 0, ended.output
    journal = read_journal(sandbox.directory / "runs/train_on/journal.jsonl")
    assert [entry["plan"] for entry in journal if entry["event"] == "plan"] == ["WarmStart"]


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (69, False), (75, True)])
def test_the_slurm_script_requeues_a_run_that_stopped_early(status: int, requeued: bool, tmp_path: Path) -> None:
    """And only such a run; its status is the job's in any case, and all that it is given goes to ckptrain."""
    for name, script in {
        "srun": f'printf "%s\\n" "$@" >>"$LOG"; exit {status}',
        "scontrol": 'printf "scontrol %s %s\\n" "$@" >>"$LOG"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    done = subprocess.run(
        ["bash", EXAMPLES / "slurm.sh", "CONFIG", "train.steps=9", "--run-dir", "runs/of mine"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "SLURM_JOB_ID": "17"},
        check=False,
    )
    assert done.returncode == status
    srun, *after = log.read_text().split("\nruns/of mine\n")
    options = ["--kill-on-bad-exit=0", "--wait=300"]
    assert srun.split("\n") == [*options, "ckptrain", "run", "CONFIG", "train.steps=9", "--run-dir"]
    assert after == (["scontrol requeue 17\n"] if requeued else [""])
