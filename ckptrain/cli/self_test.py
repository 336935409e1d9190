"""Does a run work here, and does it go on after a kill as if nothing had happened? Tried on a tiny model in seconds.

Three processes run what `ckptrain run` runs: one trains without a stop; one is killed with SIGKILL after its first
checkpoint; one goes on from there. The last checkpoints must be the same, byte for byte. All of it is made on the spot,
in a temporary directory, and no network is asked for anything.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import attrs

from ckptrain.checkpoint.integrity import CommittedCheckpoint, open_checkpoint
from ckptrain.checkpoint.store import CHECKPOINTS, checkpoint_name
from ckptrain.training.observers import Observer, StepRecord

_SAVED_STEP, _LAST_STEP = 2, 4
_TIMEOUT_S = 300.0
"""For everything; a slow disk and a cold page cache take their time."""
_READY = "ready"
_WIDER = {"hidden_size": 512, "intermediate_size": 1024}
"""So that heads are wide enough for the attention of a GPU."""


@attrs.frozen(kw_only=True)
class SelfTest:
    """What came out of it."""

    seconds: float
    tensors: int
    """In the checkpoint that was resumed from."""
    differing: tuple[str, ...]
    """Files of the last checkpoint that the resumed run wrote otherwise than the one that was not killed."""
    losses: tuple[float, ...]


class SelfTestFailedError(Exception):
    """A run did not do what it should; the message says which and how it ended."""


def run_self_test(*, has_gpu: bool) -> SelfTest:
    """Train, kill, resume and compare.

    Args:
        has_gpu: whether there is one. What has called CUDA must not fork, so that the processes are new ones then, and
            each imports Megatron for itself; without, they are forks of this one, which imports it once.

    Raises:
        SelfTestFailedError: something that should work does not.
    """
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckptrain-self-test-") as name:
        directory = Path(name)
        config = _write_inputs(directory, has_gpu=has_gpu)
        if not has_gpu:
            import ckptrain.megatron.entered
            import ckptrain.training.run  # noqa: F401  # imported before the forks, and so once
        context: Any = multiprocessing.get_context("spawn" if has_gpu else "fork")
        whole, killed = directory / "whole", directory / "killed"
        with _processes(context, directory) as start:
            victim = start(_train_until_killed, config, killed)
            straight = start(_train, config, whole)
            successor = start(_train_when_told, config, killed)
            victim.expect(_READY)
            victim.kill()
            successor.say(_READY)
            straight.expect_end()
            successor.expect_end()
        resumed_from = open_checkpoint(killed / CHECKPOINTS / checkpoint_name(_SAVED_STEP))
        return SelfTest(
            seconds=time.monotonic() - began_s,
            tensors=len(resumed_from.manifest.tensors),
            differing=_differing(
                *(open_checkpoint(run / CHECKPOINTS / checkpoint_name(_LAST_STEP)) for run in (whole, killed))
            ),
            losses=_losses(killed),
        )


def _write_inputs(directory: Path, *, has_gpu: bool) -> dict[str, Any]:
    """Write a model and some chats; returns the configuration of a run on them."""
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar for a file of 100 kB
        from ckptrain.convert.tiny import write_chats, write_llama

        write_llama(directory / "model", **(_WIDER if has_gpu else {}))
    write_chats(directory / "chats.jsonl", 24)
    return {
        "model": {
            "pretrained": str(directory / "model"),
            "dtype": "bfloat16" if has_gpu else "float32",
            "verify": "never",
        },
        # With dropout the random generators have something to restore; a GPU's fused layers do without.
        "lora": {"dim": 16, "dropout": 0.0 if has_gpu else 0.1},
        "data": {"train": str(directory / "chats.jsonl"), "sequence_length": 128, "workers": 0},
        "train": {"steps": _LAST_STEP, "global_batch_size": 2, "deterministic": True},
        "checkpoint": {"every_steps": _SAVED_STEP},
        "log": {"tensorboard": False},
    }


class _Child:
    """A process of the test, and the connection to it."""

    def __init__(self, process: BaseProcess, connection: Connection, log: Path) -> None:
        self.process, self._connection, self._log = process, connection, log

    def expect(self, word: str) -> None:
        """Wait until the process says `word`.

        Raises:
            SelfTestFailedError: it ends before, or says nothing for too long.
        """
        if not self._connection.poll(_TIMEOUT_S):
            raise SelfTestFailedError(f"{self.process.name}: nothing for {_TIMEOUT_S:.0f} s")
        heard: Any = None
        with contextlib.suppress(EOFError):
            heard = self._connection.recv()
        if heard != word:
            self.process.join(_TIMEOUT_S)
            raise SelfTestFailedError(f"{self.process.name}: its last words: {self._last_words()}")

    def expect_end(self) -> None:
        """Wait until the process has ended, and well."""
        self.expect("done")
        self.process.join(_TIMEOUT_S)

    def say(self, word: str) -> None:
        """Tell the process something."""
        self._connection.send(word)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the kernel has taken the process down."""
        self.process.kill()
        self.process.join()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.is_file() else []
        return lines[-1] if lines else f"none (exit code {self.process.exitcode})"


@contextlib.contextmanager
def _processes(context: ForkContext | SpawnContext, directory: Path) -> Iterator[Callable[..., _Child]]:
    """Give a function that starts processes; none is left at the end."""
    children: list[_Child] = []

    def start(act: Callable[..., None], config: dict[str, Any], run_dir: Path) -> _Child:
        here, there = context.Pipe()
        log = directory / f"{act.__name__}.log"
        name = act.__name__.strip("_").replace("_", " ")
        process = context.Process(target=_child, args=(act, config, run_dir, there, log), name=name, daemon=True)
        process.start()
        there.close()
        children.append(_Child(process, here, log))
        return children[-1]

    try:
        yield start
    finally:
        for child in children:
            child.kill()


def _child(act: Callable[..., None], config: dict[str, Any], run_dir: Path, parent: Connection, log: Path) -> None:
    """Be one of the processes: alone, whatever launch the doctor was called in, and silent on the terminal."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    file = log.open("w")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["CKPTRAIN_CACHE"] = str(run_dir.parent / f"cache-{act.__name__}")
    import torch

    torch.set_num_threads(1)
    act(config, run_dir, parent)
    parent.send("done")


def _train(config: dict[str, Any], run_dir: Path, _parent: Connection) -> None:
    """Train from the first step to the last."""
    from ckptrain import api

    api.run(config, run_dir=run_dir)


def _train_until_killed(config: dict[str, Any], run_dir: Path, parent: Connection) -> None:
    """Train past the first checkpoint, and wait there for the kill."""
    from ckptrain import api

    api.run(config, run_dir=run_dir, observers=[_Victim(run_dir, parent)])


def _train_when_told(config: dict[str, Any], run_dir: Path, parent: Connection) -> None:
    """Import what takes time, and go on with a run once it has been killed.

    Raises:
        SelfTestFailedError: it began anew.
    """
    import ckptrain.training.run  # noqa: F401  # while the others train
    from ckptrain import api

    parent.recv()
    plan = api.run(config, run_dir=run_dir).plan
    if plan.kind != "Resume":
        raise SelfTestFailedError(f"the start after the kill was a {plan.kind}: {plan.reason}")


class _Victim(Observer):
    """Says when the first checkpoint is there and a step past it is done, and goes no further."""

    def __init__(self, run_dir: Path, parent: Connection) -> None:
        self._checkpoint, self._parent = run_dir / CHECKPOINTS / checkpoint_name(_SAVED_STEP), parent

    def on_step(self, record: StepRecord) -> None:
        if record.step <= _SAVED_STEP:
            return
        while not self._checkpoint.is_dir():
            time.sleep(0.01)
        self._parent.send(_READY)
        signal.pause()


def _differing(straight: CommittedCheckpoint, resumed: CommittedCheckpoint) -> tuple[str, ...]:
    """Return the files with other bytes; the manifests, which say when they were made, are left out."""
    a, b = straight.manifest.files, resumed.manifest.files
    return tuple(sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)))


def _losses(run_dir: Path) -> tuple[float, ...]:
    import orjson

    lines = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    return tuple(line["loss"] for line in lines if "loss" in line)
