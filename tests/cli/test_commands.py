"""What the commands tell, and how they end."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import Result

from ckptrain.cli.export import loading_lines
from ckptrain.config.schema import RunConfig

Ask = Callable[..., Result]
AskJson = Callable[..., dict[str, Any]]
Save = Callable[..., Any]

HEAVY = ("torch", "transformers", "megatron", "numpy", "datasets", "gguf", "peft")


def test_a_plan_tells_the_start_the_arithmetic_and_the_cost(ask: Ask, config_file: Path) -> None:
    """Whoever reads a plan need not compute anything."""
    result = ask("plan", config_file, "train.global_batch_size=8", "--nproc-per-node=2")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "FreshStart" in text
    assert "2 processes = tensor 1 x pipeline 1 x context 1 x data 2" in text
    assert "8 rows = 2 data parallel x 4 micro-batches of 1 row; at most 8,192 tokens" in text
    assert "LlamaForCausalLM" in text
    assert "base weights" in text


def test_a_plan_counts_what_the_model_has(ask_json: AskJson, config_file: Path) -> None:
    """The numbers are those of a hand calculation: 4 layers of four fused modules under rank 8."""
    report = ask_json("plan", config_file, "lora.dim=8")
    # Each layer: qkv 64 -> 128, proj 64 -> 64, fc1 64 -> 256, fc2 128 -> 64; A and B have dim * (in + out) values.
    assert report["adapters"]["parameters"] == 4 * 8 * ((64 + 128) + (64 + 64) + (64 + 256) + (128 + 64))
    assert report["checkpoint_bytes"]["total"] == sum(
        report["checkpoint_bytes"][part] for part in ("adapter", "optimizer")
    )
    assert report["memory_bytes"]["total"] == sum(v for k, v in report["memory_bytes"].items() if k != "total")
    assert report["plan"]["plan"] == "FreshStart"
    assert report["layout"]["world_size"] == 1


@pytest.mark.parametrize(
    ("overrides", "layers", "fused"),
    [
        ([], "fused (they compute this model and these adapters); a GPU and Transformer Engine's", True),
        (["lora.kind=dora"], "plain (DoRA's magnitudes are not in them); a GPU and Transformer Engine's", False),
        (
            ["model.backend=local"],
            "plain (model.backend is local, so no GPU is assumed); no GPU and megatron-core's",
            False,
        ),
    ],
)
def test_a_plan_says_which_layers_its_estimate_is_of(
    overrides: list[str], layers: str, fused: bool, ask: Ask, ask_json: AskJson, config_file: Path
) -> None:
    """A run on another machine may have others, and its memory is not that of these."""
    assert layers in " ".join(ask("plan", config_file, *overrides).stdout.split())
    report = ask_json("plan", config_file, *overrides)
    assert report["layers"]["fused"] is fused
    assert (report["memory_bytes"]["adapter_copy"] > 0) is fused


def test_a_plan_refuses_what_the_run_would_not_compute(ask: Ask, config_file: Path) -> None:
    """Not only on the GPU, after the base is loaded."""
    result = ask("plan", config_file, "lora.fused=always", "lora.kind=dora")
    assert result.exit_code == 78
    assert "DoRA's magnitudes are not in them" in result.stderr


def test_a_plan_of_a_run_is_that_of_its_next_start(ask_json: AskJson, run_dir: Path, save: Save) -> None:
    """A run directory stands for its config and its checkpoints."""
    save(50)
    report = ask_json("plan", run_dir)
    assert (report["plan"]["plan"], report["plan"]["first_step"]) == ("Resume", 51)
    assert ask_json("plan", run_dir, "train.steps=50")["plan"]["plan"] == "AlreadyDone"


def test_a_plan_changes_nothing_on_disk(ask: Ask, config_file: Path, tmp_path: Path) -> None:
    """Not even the run directory is made."""
    before = sorted(tmp_path.rglob("*"))
    assert ask("plan", config_file, "--run-dir", tmp_path / "new").exit_code == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_with_another_run_directory_is_a_usage_error(ask: Ask, run_dir: Path, tmp_path: Path) -> None:
    """One of the two would have to be ignored."""
    result = ask("plan", run_dir, "--run-dir", tmp_path / "other")
    assert result.exit_code == 2
    assert "leave out --run-dir" in result.stderr


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["plan"], 0),
        (["status"], 0),
        (["report"], 0),
        (["verify"], 0),
        (["inspect"], 0),
        (["diff", "."], 0),
        (["prune"], 0),
        (["plan", "lora.dim=16"], 69),
    ],
)
def test_answers_about_a_run_load_nothing_heavy(run_dir: Path, save: Save, command: list[str], status: int) -> None:
    """They answer at once, also where torch is broken."""
    save(50)
    name, *overrides = command
    code = (
        "import sys, ckptrain.cli.main as m\n"
        f"sys.argv = ['ckptrain', {name!r}, {str(run_dir)!r}, *{overrides!r}]\n"
        "try:\n    m.main()\nfinally:\n"
        f"    print('heavy', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=run_dir)
    assert done.returncode == status, done.stderr
    assert "heavy []" in done.stdout


def test_help_loads_neither_the_commands_nor_rich() -> None:
    """`ckptrain --help` answers in the time that Python itself needs."""
    code = (
        "import sys, ckptrain.cli.main as m\nsys.argv = ['ckptrain', '--help']\n"
        "try:\n    m.main()\nfinally:\n    print('loaded', [n for n in ('rich', 'yaml', 'ckptrain.api') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loaded []" in done.stdout
    assert "verify" in done.stdout


def test_status_of_a_stopped_run_says_why_and_what_comes_next(
    ask: Ask, ask_json: AskJson, run_dir: Path, save: Save
) -> None:
    """Phase, reason, losses, checkpoints and the plan of the next start, in text and in JSON."""
    from ckptrain.lifecycle.journal import Journal

    manifest = save(50, {"val_loss": 1.25}).manifest
    journal = Journal(run_dir / "journal.jsonl")
    journal.record("stop_requested", reason="signal SIGTERM", step=60)
    journal.record("phase", **{"from": "DRAINING", "to": "STOPPED"})
    (run_dir / "metrics.jsonl").write_text(
        '{"step": 50, "val_loss": 1.25}\n{"step": 59, "loss": 2.0}\n{"step": 60, "loss": 1.5, "seconds": 0.1}\n{"step"'
    )
    report = ask_json("status", run_dir)
    assert (report["phase"], report["reason"], report["seems_dead"]) == ("STOPPED", "signal SIGTERM", False)
    assert (report["step"], report["steps"], report["loss"], report["val_loss"]) == (60, 100, 1.5, 1.25)
    assert [(c["name"], c["health"], c["num_bytes"]) for c in report["checkpoints"]] == [
        ("step-00000050", "whole", sum(file.num_bytes for file in manifest.files.values()))
    ]
    assert report["next"]["plan"]["plan"] == "Resume"
    text = ask("status", run_dir).stdout
    assert "signal SIGTERM" in text
    assert "60 of 100" in text
    assert "next start" in text


def test_status_tells_a_process_that_died_from_one_that_works(ask_json: AskJson, run_dir: Path) -> None:
    """By silence: steps of 0.1 s are written as they are made, so an hour without one is the end of it."""
    import os

    from ckptrain.lifecycle.journal import Journal

    Journal(run_dir / "journal.jsonl").record("phase", **{"from": "OPTIMIZER_BUILT", "to": "TRAINING"})
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "seconds": 0.1}\n')
    assert ask_json("status", run_dir)["seems_dead"] is False
    for name in ("journal.jsonl", "metrics.jsonl"):
        entry = (run_dir / name).stat()
        os.utime(run_dir / name, (entry.st_atime, entry.st_mtime - 3600))
    report = ask_json("status", run_dir)
    assert report["seems_dead"] is True
    assert report["phase"] == "TRAINING"


HOLD = """
import pathlib, sys
from ckptrain.checkpoint.lock import hold
with hold(pathlib.Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_status_knows_the_process_that_holds_the_directory(ask: Ask, ask_json: AskJson, run_dir: Path) -> None:
    """One that is there is not dead however long it is silent, and one that was killed is dead at once."""
    import os

    from ckptrain.lifecycle.journal import Journal

    journal = run_dir / "journal.jsonl"
    Journal(journal).record("phase", **{"from": "OPTIMIZER_BUILT", "to": "TRAINING"})
    os.utime(journal, (0, 0))
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        report = ask_json("status", run_dir)
        text = ask("status", run_dir).stdout
        process.kill()
    assert report["seems_dead"] is False
    assert (report["holder"]["pid"], report["holder"]["alive"]) == (process.pid, True)
    assert f"process {process.pid} on " in text
    os.utime(journal)
    report = ask_json("status", run_dir)
    assert (report["seems_dead"], report["holder"]["alive"]) == (True, False)
    assert "died in it" in " ".join(ask("status", run_dir).stdout.split())


def test_status_shows_the_reason_where_the_next_start_is_refused(
    ask: Ask, ask_json: AskJson, run_dir: Path, save: Save, model_dir: Path
) -> None:
    """Another base under the same name does not make a status fail."""
    save(50)
    (model_dir / "model.safetensors").write_bytes(b"other weights")
    report = ask_json("status", run_dir)
    assert report["exit_status"] == 0
    assert report["next"]["plan"] is None
    assert report["next"]["error"]["kind"] == "StartRefused"
    assert "refused" in ask("status", run_dir).stdout


def test_status_works_where_the_model_and_the_data_are_gone(ask_json: AskJson, run_dir: Path, save: Save) -> None:
    """A run is looked at on other machines than its own."""
    save(50)
    for line in (run_dir / "run.yaml").read_text().splitlines():
        if line.strip().startswith("train: /"):
            Path(line.split(": ")[1]).unlink()
    report = ask_json("status", run_dir)
    assert report["steps"] == 100
    assert report["next"]["error"]["kind"] == "ConfigError"


def test_damage_is_shown_by_status_and_verify(ask: Ask, ask_json: AskJson, run_dir: Path, save: Save) -> None:
    """A truncated file is seen by its size; a flipped byte only by who reads it."""
    short, flipped = save(25), save(50)
    (short.path / "adapter/__0_0.distcp").write_bytes(b"")
    content = (flipped.path / "optimizer/__0_0.distcp").read_bytes()
    (flipped.path / "optimizer/__0_0.distcp").write_bytes(b"N" + content[1:])

    found = ask_json("status", run_dir)["checkpoints"]
    assert [checkpoint["health"] for checkpoint in found] == ["damaged", "whole"]
    report = ask_json("verify", run_dir)
    assert (report["exit_status"], report["intact"]) == (65, False)
    assert [len(checkpoint["problems"]) for checkpoint in report["checkpoints"]] == [1, 1]
    assert "truncated" in report["checkpoints"][0]["problems"][0]
    assert "other contents" in report["checkpoints"][1]["problems"][0]
    result = ask("verify", flipped.path)
    assert result.exit_code == 65
    assert "damaged" in result.stdout


def test_an_intact_run_verifies(ask: Ask, run_dir: Path, save: Save) -> None:
    """Exit status 0, and what was read is told."""
    save(25)
    result = ask("verify", run_dir)
    assert result.exit_code == 0
    assert "4 files" in result.stdout


def test_commands_are_listed_in_the_order_of_a_runs_life(ask: Ask) -> None:
    """Not by the alphabet: who reads the help for the first time starts at the top."""
    lines = [line.split() for line in ask("--help").stdout.split("Commands:")[1].splitlines()]
    listed = [words[0] for words in lines if words]
    order = ["run", "resume", "plan", "status", "report", "inspect", "diff", "verify", "prune", "export", "merge"]
    assert [name for name in listed if name in order] == order


@pytest.mark.parametrize("command", ["status", "verify", "resume", "prune"])
def test_a_path_that_is_no_run_is_a_usage_error(ask: Ask, tmp_path: Path, command: str) -> None:
    """The message says what was expected there."""
    result = ask(command, tmp_path / "nothing")
    assert result.exit_code == 2
    assert "run directory" in result.stderr


def test_a_directory_given_to_run_leads_to_resume(ask: Ask, run_dir: Path) -> None:
    """It is the likely mistake, so the answer is the command to type."""
    result = ask("run", run_dir)
    assert result.exit_code == 2
    assert f"ckptrain resume {run_dir}" in result.stderr


def test_a_bad_config_is_refused_before_anything_is_launched(ask: Ask, config_file: Path, tmp_path: Path) -> None:
    """Exit status 78, every problem, and no process was started."""
    result = ask("run", config_file, "lora.dim=0", "train.stpes=3", "--nproc-per-node=2", "--run-dir", tmp_path / "new")
    assert result.exit_code == 78
    assert "lora.dim" in result.stderr
    assert "did you mean steps" in result.stderr
    assert not (tmp_path / "new").exists()


def test_a_layout_that_does_not_fit_is_refused_before_anything_is_launched(ask: Ask, config_file: Path) -> None:
    """Three processes cannot be laid out as two by anything."""
    result = ask("run", config_file, "parallel.tensor=2", "--nproc-per-node=3")
    assert result.exit_code == 78
    assert "3 processes" in result.stderr


def test_a_contradiction_with_the_run_is_refused_before_anything_is_launched(
    ask_json: AskJson, run_dir: Path, save: Save
) -> None:
    """Exit status 69, with the difference in the one JSON object."""
    save(50)
    report = ask_json("resume", run_dir, "lora.dim=16", "--nproc-per-node=2")
    assert report["exit_status"] == 69
    assert report["error"]["kind"] == "StartRefused"
    assert any("lora.dim" in problem for problem in report["error"]["problems"])


def test_explain_has_every_key_of_every_section(ask_json: AskJson) -> None:
    """Compared with the classes themselves."""
    keys = [row["key"] for row in ask_json("explain")["keys"]]
    expected = [
        f"{section.name}.{field.name}"
        for section in attrs.fields(RunConfig)
        for field in attrs.fields(section.metadata["section"])
    ]
    assert keys == expected


def test_explain_of_one_section_or_key_has_that_alone(ask: Ask, ask_json: AskJson) -> None:
    """An unknown section is a usage error with what there is."""
    assert {row["key"].partition(".")[0] for row in ask_json("explain", "lora")["keys"]} == {"lora"}
    assert [row["key"] for row in ask_json("explain", "lora.dim")["keys"]] == ["lora.dim"]
    result = ask("explain", "trian")
    assert result.exit_code == 2
    assert "did you mean train?" in result.stderr


def test_the_loading_lines_are_python_that_names_what_was_written(tmp_path: Path) -> None:
    """Three lines that compile, whatever quotes are in the path; a GGUF file is named beside its directory."""
    lines = loading_lines(f"{tmp_path}/base.gguf", "/it's/here")
    assert len(lines) == 3
    compile("\n".join(lines), "lines", "exec")
    assert f"{str(tmp_path)!r}, gguf_file='base.gguf'" in lines[1]
    assert "from_pretrained('org/name')" in loading_lines("org/name", "out")[1]


def test_an_export_of_nothing_says_so(ask: Ask, tmp_path: Path) -> None:
    """The error of the conversion comes through as it is."""
    result = ask("export", tmp_path / "nothing", tmp_path / "out")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
