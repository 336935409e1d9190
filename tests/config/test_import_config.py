"""What becomes of the configs of NeMo-RL and Megatron-Bridge: the keys, what changed, and what has no counterpart."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from click.testing import CliRunner, Result
from forked import launch

from ckptrain.cli.main import cli
from ckptrain.config.foreign import read_foreign
from ckptrain.config.load import flatten, load_config
from ckptrain.config.schema import LoraConfig

FOREIGN = Path(__file__).parent / "foreign"
Run = Callable[..., tuple[dict[str, Any], Path]]


def ask(*arguments: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(cli, ["import-config", *map(str, arguments)])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that imports a file; it returns the report and our file."""

    def do(path: Path) -> tuple[dict[str, Any], Path]:
        out = tmp_path / "ours.yaml"
        result = ask(path, "--out", out, "--json")
        assert result.exit_code == 0, result.stdout
        return orjson.loads(result.stdout), out

    return do


def changed(report: dict[str, Any], key: str) -> str:
    """Return what is said of a key that means something else here."""
    return " ".join(report["changed"].get(key, ()))


def test_a_config_of_nemo_rls_torch_backend_is_read_with_its_older_lora_keys(run: Run) -> None:
    """Hugging Face's names and kind of adapters, torch's optimizer and schedulers, and the layout of that backend."""
    report, out = run(FOREIGN / "sft.yaml")
    assert (report["form"], report["missing"], report["problems"]) == ("NeMo-RL", [], [])
    config = load_config(out)
    flat = flatten(config)
    assert config.lora == LoraConfig(
        kind="canonical",
        target_modules=("q_proj", "v_proj"),
        dim=4,
        alpha=8,
        dropout=0.1,
        dropout_position="pre",
        lora_A_init_method="kaiming",
    )
    expected = {
        "model.pretrained": "org/base-1b",
        "model.dtype": "bfloat16",
        "parallel.tensor": 2,
        "parallel.sequence": False,
        "data.train": {"format": "squad", "split": "train"},
        "data.validation": {"format": "squad", "split": "validation[:64]"},
        "data.sequence_length": 512,
        "data.packing": False,
        "data.on_too_long": "drop",
        "optimizer.lr": 3e-5,
        "optimizer.weight_decay": 0.05,
        "optimizer.betas": [0.9, 0.97],
        "optimizer.eps": 1e-6,
        "optimizer.clip_grad": 0.5,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 10,
        "train.steps": 80,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 16,
        "train.seed": 7,
        "train.recompute": "full",
        "train.max_minutes": 225,
        "train.eval_every_steps": 20,
        "checkpoint.every_steps": 20,
        "checkpoint.keep_best": 2,
        "checkpoint.metric": "val_loss",
        "log.wandb": {"project": "tickets", "name": "tickets-squad"},
    }
    assert {key: flat[key] for key in expected} == expected
    # The chat template, text there, is a file here.
    template = Path(str(config.data.chat_template))
    assert template == out.with_suffix(".jinja")
    assert template.read_text() == "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert "lm_head" in changed(report, "lora.target_modules")
    assert "0.1 of the rate" in changed(report, "optimizer.warmup_steps")
    assert "2 epoch" in changed(report, "train.steps")
    assert "it was packed there" in changed(report, "data.packing")
    assert report["no_counterpart"]["policy.dtensor_cfg.cpu_offload"] is True
    assert not [key for key in report["no_counterpart"] if key.startswith("policy.megatron_cfg")]


def test_a_recipe_of_nemo_rls_megatron_backend_is_read_with_what_it_builds_on(run: Run) -> None:
    """The keys of `defaults`, the LoRA keys as they are, Megatron's optimizer, and a schedule of another length."""
    report, out = run(FOREIGN / "recipes/megatron_lora.yaml")
    assert (report["missing"], report["problems"]) == ([], [])
    config = load_config(out)
    assert config.lora == LoraConfig(target_modules=("linear_qkv", "linear_proj"), dim=128, alpha=128)
    parallel = config.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.sequence) == (4, 2, True)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.eps, optimizer.betas) == (2e-5, 2e-5, 1e-5, (0.9, 0.98))
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.clip_grad) == ("cosine", 5, 0.5)
    assert (config.train.steps, config.train.global_batch_size) == (350, 128)
    assert flatten(config)["data.train"] == {"format": "tulu3_sft_mixture", "split": "train"}
    assert (config.data.validation, config.data.split_validation_size) == (None, 0.05)
    assert config.data.chat_template is None
    assert "1000 steps" in changed(report, "optimizer.schedule")
    assert "4e-06" in changed(report, "optimizer.warmup_steps")
    assert "org/base-8b-chat" in changed(report, "data.chat_template")
    assert report["no_counterpart"]["policy.megatron_cfg.moe_permute_fusion"] is False
    assert "--nproc-per-node 8" in report["yaml"]


def nemo_rl(tmp_path: Path, **changes: Any) -> Path:
    """Write the config of these tests with some sections changed."""
    values = yaml.safe_load((FOREIGN / "sft.yaml").read_text())
    for section, change in changes.items():
        values[section] = change(values[section])
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"dataset_name": "squad"}, {"format": "squad"}),
        (
            {"dataset_name": "openai_format", "train_data_path": "/d/t.jsonl", "chat_key": "turns"},
            {"path": "/d/t.jsonl", "format": "messages", "columns": {"messages": "turns"}},
        ),
        (
            {"dataset_name": "ResponseDataset", "train_data_path": "/d/t.jsonl", "input_key": "q", "output_key": "a"},
            {"path": "/d/t.jsonl", "format": "input_output", "columns": {"input": "q", "output": "a"}},
        ),
        (
            {
                "train": {"data_path": "/d/t.jsonl", "input_key": "q"},
                "default": {"dataset_name": "ResponseDataset", "output_key": "output"},
            },
            {"path": "/d/t.jsonl", "format": "input_output", "columns": {"input": "q"}},
        ),
        (
            {"train": [{"dataset_name": "gsm8k"}, {"dataset_name": "OpenMathInstruct-2"}]},
            [{"format": "gsm8k"}, {"format": "openmathinstruct2"}],
        ),
    ],
)
def test_the_ways_in_which_nemo_rl_names_data(data: Any, expected: Any, tmp_path: Path, run: Run) -> None:
    """Those of today, with defaults and lists, and the older ones that say both sides at once."""
    report, out = run(nemo_rl(tmp_path, data=lambda _: data))
    assert report["missing"] == []
    assert flatten(load_config(out, check_inputs=False))["data.train"] == expected


def test_what_the_file_does_not_say_is_asked_for(tmp_path: Path, run: Run) -> None:
    """A dataset of a kind that is not here: the rest is written, and loads once it is given."""
    path = nemo_rl(tmp_path, data=lambda _: {"train": {"dataset_name": "clevr"}, "validation": None})
    report, out = run(path)
    assert report["missing"] == ["data.train"]
    assert "'clevr' is not known here" in changed(report, "data.train")
    assert "GIVE data.train" in out.read_text()
    train = tmp_path / "mine.jsonl"
    train.write_text('{"prompt": "a", "completion": "b"}\n')
    assert load_config(out, [f"data.train={train}"]).train.steps == 80


def test_a_training_of_the_whole_model_is_told_as_one(tmp_path: Path, run: Run) -> None:
    """Its learning rate is not one for adapters."""

    def whole(policy: dict[str, Any]) -> dict[str, Any]:
        policy["dtensor_cfg"]["lora_cfg"]["enabled"] = False
        return policy

    report, _ = run(nemo_rl(tmp_path, policy=whole))
    assert "trains the whole model" in changed(report, "lora.dim")


def test_every_key_of_the_file_is_taken_or_told(run: Run) -> None:
    """A key that nobody has heard of is listed with its value."""
    values = read_foreign(FOREIGN / "sft.yaml")
    assert values.look("policy.sequence_packing.train_mb_tokens") == 1024  # 512 x 2, computed from two references
    report, _ = run(FOREIGN / "sft.yaml")
    assert report["no_counterpart"]["policy.make_sequence_length_divisible_by"] == 2


def bridge_config(directory: Path) -> Path:
    """Write a run_config.yaml by Megatron-Bridge's own conversion, with the sections that can be imported here."""
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training.utils.config_utils import _ConfigContainerBase
    from megatron.core.optimizer import OptimizerConfig
    from megatron.training import config as sections
    from megatron.training.config.yaml_utils import safe_yaml_representers

    @dataclass(kw_only=True)
    class ConfigContainer(_ConfigContainerBase):
        model: Any
        peft: Any
        train: Any
        optimizer: Any
        scheduler: Any
        checkpoint: Any
        validation: Any
        logger: Any
        rng: Any
        dataset: Any
        ddp: Any
        mixed_precision: str = "bf16_mixed"

    container = ConfigContainer(
        model={
            "hf_model_id": "org/base-1b",
            "tensor_model_parallel_size": 2,
            "hidden_size": 64,
            "sequence_parallel": True,
        },
        peft=LoRA(dim=16, alpha=64, dropout=0.05, target_modules=["linear_qkv"]),
        train=sections.TrainingConfig(train_iters=200, global_batch_size=32, micro_batch_size=2),
        optimizer=OptimizerConfig(lr=1e-4, min_lr=1e-5, adam_beta2=0.98, bf16=True),
        scheduler=sections.SchedulerConfig(lr_decay_style="cosine", lr_decay_iters=400, lr_warmup_fraction=0.05),
        checkpoint=sections.CheckpointConfig(save="runs/x", save_interval=50, most_recent_k=2, async_save=True),
        validation=sections.ValidationConfig(eval_interval=25, eval_iters=8),
        logger=sections.LoggerConfig(log_interval=10, tensorboard_dir="tb", wandb_project="tickets"),
        rng=sections.RNGConfig(seed=99),
        dataset={
            "_target_": "megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig",
            "dataset_root": "/data/tickets",
            "seq_length": 2048,
            "max_train_samples": 500,
            "offline_packing_specs": {"packed_sequence_size": 2048},
        },
        ddp={"overlap_grad_reduce": True},
    )
    path = directory / "run_config.yaml"
    with safe_yaml_representers():
        path.write_text(yaml.safe_dump(container.to_dict(), default_flow_style=False))
    return path


def test_a_run_config_that_megatron_bridge_writes_is_read(tmp_path: Path, run: Run) -> None:
    """Its classes are names here: nothing is built of them, and no torch is loaded for it."""
    [path] = launch(1, lambda: bridge_config(tmp_path))
    report, out = run(path)
    assert (report["form"], report["missing"], report["problems"]) == ("Megatron-Bridge", [], [])
    config = load_config(out, check_inputs=False)
    assert (config.lora.kind, config.lora.target_modules) == ("lora", ("linear_qkv",))
    assert (config.lora.dim, config.lora.alpha, config.lora.dropout) == (16, 64, 0.05)
    assert config.lora.dropout_position == "pre"  # Megatron-Bridge's default, which is not ours
    flat = flatten(config)
    expected = {
        "model.pretrained": "org/base-1b",
        "model.dtype": "bfloat16",
        "parallel.tensor": 2,
        "parallel.sequence": True,
        "data.train": {"path": "/data/tickets/training.jsonl", "format": "auto"},
        "data.validation": {"path": "/data/tickets/validation.jsonl", "format": "auto"},
        "data.sequence_length": 2048,
        "data.packing": True,
        "optimizer.lr": 1e-4,
        "optimizer.min_lr": 1e-5,
        "optimizer.betas": [0.9, 0.98],
        "optimizer.weight_decay": 0.01,
        "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": 20,  # 5 % of the 400 steps of the schedule
        "train.steps": 200,
        "train.global_batch_size": 32,
        "train.micro_batch_size": 2,
        "train.seed": 99,
        "train.eval_every_steps": 25,
        "checkpoint.every_steps": 50,
        "checkpoint.keep_last": 2,
        "checkpoint.asynchronous": True,
        "log.every_steps": 10,
        "log.tensorboard": True,
        "log.wandb": {"project": "tickets"},
    }
    assert {key: flat[key] for key in expected} == expected
    assert "400 steps" in changed(report, "optimizer.schedule")
    assert report["no_counterpart"]["dataset.max_train_samples"] == 500
    assert any(text.startswith("ddp: ") for text in report["ignored"])


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    """Neither a class that is named, nor YAML that asks Python for an object."""
    path = tmp_path / "run_config.yaml"
    path.write_text("model: {}\ntrain: {_target_: os.system, command: touch pwned}\n")
    assert ask(path).exit_code == 0
    path.write_text("model: !!python/object/apply:os.system ['touch pwned']\ntrain: {}\n")
    result = ask(path)
    assert result.exit_code == 78
    assert "not YAML of plain values" in result.stderr
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n", "neither a config of NeMo-RL"),
        ("- 1\n", "expected a mapping, found a list"),
        ("defaults: ../sft.yaml\npolicy: {}\n", "it builds on ../sft.yaml (`defaults`), which is not there"),
        ("defaults: theirs.yaml\npolicy: {}\n", "go deeper than 8 files"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_the_reason(text: str, said: str, tmp_path: Path) -> None:
    """What it is, and what is wrong with it."""
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    result = ask(path)
    assert result.exit_code == 78
    assert said in result.stderr


def test_without_out_the_file_is_printed_and_with_it_none_is_replaced_unasked(tmp_path: Path) -> None:
    """What is printed loads as it is."""
    shutil.copytree(FOREIGN, tmp_path / "foreign")
    printed = ask(tmp_path / "foreign/recipes/megatron_lora.yaml")
    assert yaml.safe_load(printed.stdout)["lora"]["dim"] == 128
    out = tmp_path / "ours.yaml"
    assert ask(tmp_path / "foreign/sft.yaml", "-o", out).exit_code == 0
    again = ask(tmp_path / "foreign/sft.yaml", "-o", out)
    assert (again.exit_code, "--overwrite" in again.stderr) == (2, True)
    assert ask(tmp_path / "foreign/sft.yaml", "-o", out, "--overwrite").exit_code == 0
