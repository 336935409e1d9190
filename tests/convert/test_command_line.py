"""`ckptrain export`, `merge` and `import-adapter` as a person types them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file
from support.peft_adapters import change_config, same_tensors, write_peft

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.cli.main import cli
from ckptrain.lifecycle.journal import read_lines

BaseOf = Callable[[str], Any]
Save = Callable[..., CommittedCheckpoint]


def ask(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_an_adapter_is_imported_and_exported_again(base_of: BaseOf, tmp_path: Path) -> None:
    """What was chosen is told, and how a run starts from it."""
    peft = write_peft(tmp_path / "peft", base_of("llama").load(), ["q_proj", "v_proj"])
    shown = ask("import-adapter", peft, tmp_path / "imported")
    assert shown.exit_code == 0, shown.output
    told = " ".join(shown.output.split())
    for words in (
        "8 modules, rank 4, alpha 12",
        "canonical",
        "k_proj is not, and Megatron fuses them",
        "model.adapter=",
    ):
        assert words in told
    assert ask("export", tmp_path / "imported", tmp_path / "back", "--no-verify").exit_code == 0
    assert same_tensors(peft, tmp_path / "back")


def test_the_journal_of_a_run_knows_what_was_made_of_it(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """Of the run and of one of its checkpoints; where a checkpoint lies alone, no journal is made for it."""
    checkpoint = save(base_of("llama")).path
    alone = tmp_path / "alone" / checkpoint.name
    shutil.copytree(checkpoint, alone)
    run_dir = tmp_path / "run"
    (run_dir / "journal.jsonl").write_text('{"event": "plan"}\n')
    out = [tmp_path / name for name in ("peft", "megatron", "merged", "of_alone")]
    assert ask("export", run_dir, out[0], "--no-verify").exit_code == 0
    assert ask("export", checkpoint, out[1], "--format=megatron").exit_code == 0
    assert ask("merge", checkpoint, out[2], "--no-verify").exit_code == 0
    assert ask("export", alone, out[3], "--no-verify").exit_code == 0
    told = read_lines(run_dir / "journal.jsonl")[1:]
    assert [(entry["event"], entry["form"], entry["source"], entry["out"]) for entry in told] == [
        ("exported", "PEFT adapter", "run", str(out[0])),
        ("exported", "Megatron-Bridge checkpoint", checkpoint.name, str(out[1])),
        ("exported", "merged model", checkpoint.name, str(out[2])),
    ]
    assert list(tmp_path.rglob("journal.jsonl")) == [run_dir / "journal.jsonl"]


def test_the_report_of_an_import_is_one_json_object(base_of: BaseOf, tmp_path: Path) -> None:
    """With what a pipeline goes on with."""
    peft = write_peft(tmp_path / "peft", base_of("llama").load(), ["o_proj"])
    report = json.loads(ask("import-adapter", peft, tmp_path / "out", "--json").stdout)
    assert (report["kind"], report["rank"], report["alpha"], report["exit_status"]) == ("lora", 4, 12, 0)
    assert Path(report["path"]) == tmp_path / "out"


def test_a_base_that_lies_elsewhere_is_named(base_of: BaseOf, tmp_path: Path) -> None:
    """What the adapter says is of the machine that made it."""
    base = base_of("llama")
    peft = change_config(
        write_peft(tmp_path / "peft", base.load(), ["o_proj"]), base_model_name_or_path="/of/another/machine"
    )
    refused = ask("import-adapter", peft, tmp_path / "out")
    assert refused.exit_code == 78
    assert "--base" in refused.output
    assert ask("import-adapter", peft, tmp_path / "out", "--base", base.path).exit_code == 0


def test_what_cannot_be_held_is_refused_before_anything_is_written(base_of: BaseOf, tmp_path: Path) -> None:
    """All reasons at once."""
    peft = write_peft(tmp_path / "peft", base_of("llama").load())
    change_config(peft, bias="all", rank_pattern={"q_proj": 16})
    refused = ask("import-adapter", peft, tmp_path / "out")
    assert refused.exit_code == 78
    assert "bias is" in refused.output
    assert "rank_pattern is" in refused.output
    assert not (tmp_path / "out").exists()


def test_a_peft_adapter_is_inspected(base_of: BaseOf, tmp_path: Path) -> None:
    """What it would become, and with --norms what its numbers are like."""
    peft = write_peft(tmp_path / "peft", base_of("llama").load(), ["q_proj", "v_proj"])
    told = " ".join(ask("inspect", peft).output.split())
    for words in ("Hugging Face PEFT adapter", "8 modules (linear_q, linear_v), kind canonical, rank 4, alpha 12"):
        assert words in told
    report = json.loads(ask("inspect", peft, "--norms", "--json").stdout)
    assert report["problems"] == []
    matrix = load_file(peft / "adapter_model.safetensors")[
        "base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"
    ]
    [found] = [
        entry for entry in report["matrices"] if "layers.2." in entry["name"] and "v.linear_out" in entry["name"]
    ]
    assert found["norm"] == pytest.approx(matrix.norm().item())


def test_an_export_of_a_peft_adapter_is_the_adapter(base_of: BaseOf, tmp_path: Path) -> None:
    """Whatever can be read can be exported: here to be compared, or to get another type."""
    peft = write_peft(tmp_path / "peft", base_of("qwen3").load())
    shown = ask("export", peft, tmp_path / "out", "--no-verify")
    assert shown.exit_code == 0, shown.output
    assert str(peft) in shown.output
    assert same_tensors(peft, tmp_path / "out")


VLLM_PARTS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


@pytest.mark.parametrize("kind", ["lora", "canonical"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_layout_for_vllm_is_what_its_loader_takes(
    family: str, kind: str, base_of: BaseOf, save: Save, tmp_path: Path
) -> None:
    """By the rules of vllm/lora: names that it parses, A and B for each, one rank, experts one by one and complete."""
    base = base_of(family)
    checkpoint = save(base, "lora.target_modules=[all-linear]", f"lora.kind={kind}")
    shown = ask("export", checkpoint.path, tmp_path / "out", "--layout", "vllm", "--no-verify")
    assert shown.exit_code == 0, shown.output
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["bias"] == "none"
    assert not any(config[key] for key in ("modules_to_save", "use_dora", "rank_pattern", "alpha_pattern"))
    with safe_open(tmp_path / "out/adapter_model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    halves: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        # As parse_fine_tuned_lora_name of vllm/lora/utils.py takes it apart.
        prefix, module, (half, weight) = name[:17], name[17:].rsplit(".", 2)[0], name.rsplit(".", 2)[1:]
        assert (prefix, weight, len(shape)) == ("base_model.model.", "weight", 2)
        assert shape[0 if half == "lora_A" else 1] == config["r"]
        halves.setdefault(module, set()).add(half)
    assert all(found == {"lora_A", "lora_B"} for found in halves.values())
    expected = set()
    for layer in range(base.shape.num_layers):
        for place, parts in VLLM_PARTS.items():
            experts = base.shape.num_experts if place == "mlp" else 0
            at = f"model.layers.{layer}.{place}"
            names = [f"{at}.experts.{expert}" for expert in range(experts)] or [at]
            expected |= {f"{name}.{part}" for name in names for part in parts}
    assert halves.keys() == expected


def test_a_rank_that_vllm_has_no_place_for_is_refused(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """It would be refused there, after a server has been started."""
    checkpoint = save(base_of("llama"), "lora.dim=520")
    assert "max_lora_rank is 512" in ask("export", checkpoint.path, tmp_path / "out", "--layout", "vllm").output
    assert ask("export", checkpoint.path, tmp_path / "out", "--no-verify").exit_code == 0
