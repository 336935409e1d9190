"""What a config may not say in two places at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptrain.config.checks import config_problems
from ckptrain.config.schema import RunConfig
from ckptrain.errors import ConfigError

CONTRADICTIONS = [
    (["lora.enabled=false"], "lora.enabled is false"),
    (["lora.exclude_modules=[linear_fc1]"], "set lora.target_modules=[] too"),
    (["lora.lora_A_init_method=zero"], "neither ever has a gradient"),
    (["lora.target_modules=[q_porj]"], "unknown module 'q_porj' (did you mean q_proj?)"),
    (["lora.target_modules=[]", "lora.exclude_modules=[lm_head]"], "lora.exclude_modules: unknown module 'lm_head'"),
    (["model.pretrained=/models/x", "model.revision=main"], "remove model.revision"),
    (["parallel.sequence=true"], "parallel.tensor is 1"),
    (["parallel.context=2", "data.sequence_length=1026"], "not a multiple of 4"),
    (["train.micro_batch_size=3"], "not a multiple of train.micro_batch_size=3"),
    (["optimizer.min_lr=0.1"], "above optimizer.lr=0.0001"),
    (["optimizer.warmup_steps=100"], "leaves nothing of train.steps=100"),
    (["checkpoint.keep_best=1"], "compares val_loss, but data.validation is null"),
    (["train.eval_every_steps=5"], "says when to validate"),
    (["log.sample_tokens=5"], "answers a validation sample"),
    (["data.validation=/none.jsonl"], "data.validation: /none.jsonl: there is no such file"),
    (["data.split_validation_size=2.5"], "neither a share below 1 nor a whole number"),
    (["data.validation=org/name", "data.split_validation_size=0.1"], "remove one of them"),
    (["data.chat_template=/none.jinja"], "data.chat_template: /none.jinja: there is no such file"),
    (["data.train=[{path: org/a, weight: 1}, org/b]"], "data.train: 1 of 2 sources have a weight"),
    (["data.train={split: train}"], "data.train.path is required"),
    (["data.train=[squad, {path: /none/*.csv, revision: main}]"], "data.train[1].revision is 'main', but /none/*.csv"),
    (["data.validation={path: org/a, weight: 1}"], "its sources take no weight"),
    (["model.adapter=/none"], "there is no such directory"),
]


@pytest.mark.parametrize(("overrides", "expected"), CONTRADICTIONS, ids=[row[0][-1] for row in CONTRADICTIONS])
def test_a_contradiction_is_one_problem_that_says_what_to_do(
    config: Callable[..., RunConfig], overrides: list[str], expected: str
) -> None:
    """Each is found alone, and by nothing else."""
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    (problem,) = caught.value.problems
    assert expected in problem


@pytest.mark.parametrize(
    "overrides",
    [
        ["lora.target_modules=[]", "lora.exclude_modules=[linear_fc1]"],
        ["optimizer.warmup_steps=100", "optimizer.schedule=constant"],
        ["parallel.tensor=2", "parallel.sequence=true"],
        ["parallel.tensor=2", "parallel.sequence=true", "model.backend=local"],
        ["train.micro_batch_size=4"],
        ["lora.target_modules=['*.layers.0.*', all-linear, model.layers.1.mlp.gate_proj]"],
    ],
)
def test_what_goes_together_has_no_problems(config: Callable[..., RunConfig], overrides: list[str]) -> None:
    """The rules refuse no more than they should."""
    assert config_problems(config(*overrides)) == []


def test_without_inputs_no_file_is_looked_for(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """The data may have gone since."""
    loaded = config()
    (tmp_path / "train.jsonl").unlink()
    assert config_problems(loaded, check_inputs=False) == []
    assert len(config_problems(loaded)) == 1
