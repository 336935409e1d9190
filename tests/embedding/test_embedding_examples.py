"""The examples of embedding, on a tiny model: what they print, and that the pipeline does its work once."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from support.launch import launch

from ckptrain.cli.main import cli
from ckptrain.config.load import dump_config
from ckptrain.config.schema import RunConfig

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Import an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(tiny_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a file of a small run, in a working directory of the test's own."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(tiny_config()))
    return str(path)


def test_the_adapter_is_served_while_it_learns(config: str, tmp_path: Path) -> None:
    """embed_trainer.py goes to the end, and what it hands out is a PEFT directory of the step before."""
    launch(1, lambda: example("embed_trainer").main(config, ["train.steps=3"]))
    assert (tmp_path / "runs/on-policy/checkpoints/step-00000003").is_dir()
    assert (tmp_path / "runs/on-policy-adapter/adapter_model.safetensors").is_file()


def test_a_program_trains_on_what_it_makes(config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """embed_own.py goes to the end, and the command line says why it cannot go on with its run."""
    launch(1, lambda: example("embed_own").main(config, ["train.steps=2"]))
    assert "finished at step 2" in capfd.readouterr().out
    refused = CliRunner().invoke(cli, ["resume", str(tmp_path / "runs/additions"), "train.steps=3"])
    assert refused.exit_code == 69
    assert "loss=ckptrain.Loss(function, name='smoothed-0.1')" in " ".join(refused.stderr.split())


def test_the_pipeline_does_its_work_once(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time the run is found done, the export is left alone, and result.json stays as it was."""
    pipeline = example("pipeline")

    def run(words: list[str], **_: Any) -> SimpleNamespace:
        # The processes of the pipeline would import Megatron anew, for half a minute each.
        return SimpleNamespace(returncode=CliRunner().invoke(cli, words[3:]).exit_code)

    monkeypatch.setattr(subprocess, "run", run)
    stages = lambda: pipeline.main(config, Path("run"), Path("adapter"), [])  # noqa: E731
    files = [tmp_path / "run/result.json", tmp_path / "adapter/adapter_model.safetensors"]
    launch(1, stages)
    first = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    launch(1, stages)
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in files] == first
