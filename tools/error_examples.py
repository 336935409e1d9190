"""Make every kind of error happen, on a tiny model: what docs/errors.md shows is what was really said."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import click
from click.testing import CliRunner
from forked import launch
from tiny import write_chats, write_llama

from ckptrain import api
from ckptrain.cli.main import cli
from ckptrain.cli.outcome import Failure, failure_of

CONFIG = """\
model: {pretrained: model, dtype: float32, verify: never}
lora: {dim: 4}
data: {train: chats.jsonl, sequence_length: 128}
train: {steps: 2, global_batch_size: 2}
checkpoint: {every_steps: 1}
log: {tensorboard: false}
"""


@attrs.frozen(kw_only=True)
class Example:
    """One error that was provoked."""

    kind: str
    title: str
    """What was done, as a command where it was one."""
    exit_status: int
    message: str


def provoke_all(work: Path) -> list[Example]:
    """Make every error happen, in a directory that is there for it; returns them in the order of this file."""
    with contextlib.chdir(work):
        _prepare()
        return [_clean(example, work) for act in _ACTS for example in act()]


def _prepare() -> None:
    """Write a model, chats and a config, and train a run of two steps."""
    write_llama(Path("model"))
    write_chats(Path("chats.jsonl"), 12)
    Path("tickets.yaml").write_text(CONFIG)
    _run("runs/tickets")


def _run(run_dir: str, *overrides: str, ranks: int = 1) -> None:
    launch(ranks, lambda: api.run("tickets.yaml", overrides, run_dir=run_dir).status)


def _clean(example: Example, work: Path) -> Example:
    """Leave out what is only true of this machine."""
    message = example.message.replace(f"{work.resolve()}/", "").replace(f"{work}/", "")
    message = message.replace(socket.gethostname(), "node1")
    message = re.sub(r"\bpid \d+|process \d+", lambda found: f"{found[0].split()[0]} 4711", message)
    message = re.sub(r"started [^;)]*\)", "started 0:02:00 ago", message)
    return attrs.evolve(example, message=message)


def _command(*words: str) -> Example:
    """Run a command that fails."""
    result = CliRunner().invoke(cli, words)
    kind = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)["error"]["kind"]
    title = " ".join(["ckptrain", *(f"'{word}'" if " " in word else word for word in words)])
    return Example(kind=kind, title=f"`{title}`", exit_status=result.exit_code, message=result.stderr.strip())


def _call(title: str, act: Callable[[], Any]) -> Example:
    """Call something that raises, and tell that as the command line does."""
    try:
        act()
    except Exception as error:
        return _told(title, failure_of(error))
    raise AssertionError(f"{title}: nothing was raised")


def _told(title: str, failure: Failure) -> Example:
    return Example(kind=failure.kind, title=title, exit_status=failure.exit_status, message=f"error: {failure.message}")


def _configs() -> Iterator[Example]:
    yield _command("run", "tickets.yaml", "lora.rank=16", "train.steps=ten", "optimizer.min_lr=1")
    yield _command("run", "absent.yaml")
    yield _command("run", "tickets.yaml", "data.train=absent.jsonl")
    yield _command("run", "tickets.yaml", "model.pretrained=./absent")
    yield _command("run", "tickets.yaml", "lora.target_modules=[q_prj]")
    yield _command("run", "tickets.yaml", "lora.target_modules=['*.layers.9.*']")
    yield _command("run", "tickets.yaml", "parallel.tensor=3", "--nproc-per-node", "3")
    yield _command("import-config", "tickets.yaml")


def _data() -> Iterator[Example]:
    lines = Path("chats.jsonl").read_text().splitlines()
    Path("bad.jsonl").write_text("\n".join([lines[0], '{"messages": "hello"}', lines[1][:-3]]) + "\n")
    yield _command("data", "tickets.yaml", "data.train=bad.jsonl")


def _refused() -> Iterator[Example]:
    yield _command("plan", "runs/tickets", "lora.dim=8", "train.global_batch_size=4")
    yield _command("plan", "tickets.yaml", "--run-dir", "runs/new", "train.start=resume")
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=1000)):
        yield _command("plan", "tickets.yaml", "--run-dir", "runs/new")
    from ckptrain.checkpoint.lock import hold

    def again() -> None:
        with hold(Path("runs/tickets")), hold(Path("runs/tickets")):
            pass

    yield _call("A start in a run directory where another run is at work", again)


def _claim() -> Iterator[Example]:
    from ckptrain.checkpoint.lock import hold

    def lose() -> None:
        with hold(Path("runs/tickets")) as claim:
            claim.path.unlink()
            claim.check()

    yield _call("A run whose directory was taken over while it was suspended", lose)


def _damaged() -> Iterator[Example]:
    import shutil

    shutil.copytree("runs/tickets", "runs/damaged")
    file = next(Path("runs/damaged/checkpoints/step-00000002/adapter").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-7])
    yield _command("inspect", "runs/damaged/checkpoints/step-00000002")
    yield _command("plan", "runs/damaged", "checkpoint.on_damaged=refuse", "train.steps=3")


def _not_found() -> Iterator[Example]:
    yield _command("status", "runs/ticket")
    yield _command("export", "model", "my-adapter")


def _out() -> Iterator[Example]:
    yield _command("export", "runs/tickets", "model", "--no-verify")


def _mismatch() -> Iterator[Example]:
    from ckptrain.checkpoint.integrity import open_checkpoint
    from ckptrain.training.restore import _check_shapes

    checkpoint = open_checkpoint(Path("runs/tickets/checkpoints/step-00000002"))
    wanted = {name: entry.shape for name, entry in checkpoint.manifest.tensors.items() if entry.group == "adapter"}
    name, shape = next(iter(wanted.items()))
    wanted[name] = (shape[0], 8, shape[-1])
    yield _call("A resume whose adapters have other shapes", lambda: _check_shapes(wanted, checkpoint, "adapter"))


def _save() -> Iterator[Example]:
    from ckptrain.checkpoint.store import CheckpointStore

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch("uuid.uuid4", return_value=mock.Mock(hex="0" * 32)),
        mock.patch.object(Path, "mkdir", side_effect=full),
    ):
        yield _call("A save on a full disk", lambda: CheckpointStore(Path("runs/tickets")).stage(3))


def _diverged() -> Iterator[Example]:
    yield _call("A run with `optimizer.lr=1e30`", lambda: _run("runs/diverged", "optimizer.lr=1e30", "train.steps=3"))


def _model() -> Iterator[Example]:
    from safetensors.torch import load_file, save_file

    write_llama(Path("nan"))
    weights = load_file("nan/model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].fill_(float("nan"))
    save_file(weights, "nan/model.safetensors", metadata={"format": "pt"})
    yield _call("A run on a base with NaN in a weight", lambda: _run("runs/nan", "model.pretrained=nan"))


def _adapter() -> Iterator[Example]:
    from safetensors.torch import load_file, save_file

    from ckptrain.convert.compare import peft_logits
    from ckptrain.convert.parity import probe_batch

    api.export("runs/tickets", "exported", verify=False)
    weights = load_file("exported/adapter_model.safetensors")
    name = next(iter(weights))
    weights[name.replace("layers.0", "layers.9")] = weights.pop(name)
    save_file(weights, "exported/adapter_model.safetensors", metadata={"format": "pt"})
    compared: list[Any] = launch(
        1, lambda: _caught(lambda: peft_logits(Path("model"), Path("exported"), probe_batch(264)))
    )
    yield _told("An export of which PEFT drops a tensor", compared[0])


def _caught(act: Callable[[], Any]) -> Failure:
    try:
        act()
    except Exception as error:
        return failure_of(error)
    raise AssertionError("nothing was raised")


def _package() -> Iterator[Example]:
    with mock.patch("ckptrain.installed.is_installed", lambda package: package != "megatron-bridge"):
        yield _command("run", "tickets.yaml", "--run-dir", "runs/new")


def _phase() -> Iterator[Example]:
    from ckptrain.lifecycle.phases import Lifecycle, Phase

    yield _call("A phase that does not follow the one before", lambda: Lifecycle().advance(Phase.TRAINING))


def _rank() -> Iterator[Example]:
    def on_rank() -> Failure:
        from ckptrain.checkpoint import ranks
        from ckptrain.megatron.world import open_process_group

        with open_process_group():
            return _caught(lambda: ranks.together(lambda: 1 // (1 - ranks.rank())))

    yield _told("What rank 0 says where rank 1 alone fails", launch(2, on_rank)[0])


def _lost() -> Iterator[Example]:
    def on_rank() -> Failure:
        from ckptrain.checkpoint.ranks import rank
        from ckptrain.training import steps

        if rank() == 1:
            steps.train_step = mock.Mock(side_effect=MemoryError("no room for 2 GiB"))
        return _caught(lambda: api.run("tickets.yaml", ["train.timeout_minutes=0.1"], run_dir="runs/lost"))

    yield _told("What rank 0 says where rank 1 has no memory left", launch(2, on_rank)[0])


def _others() -> Iterator[Example]:
    yield _command("run")
    yield _command("verfy", "runs/tickets")
    missing = ModuleNotFoundError("No module named 'einops'", name="einops")
    yield _told("A run where Megatron-Bridge was installed without what it needs", failure_of(missing))
    yield _told("Ctrl-C while a run starts", failure_of(click.Abort()))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/tickets/metrics.jsonl")
    yield _told("A disk that is full", failure_of(full))
    memory = type("OutOfMemoryError", (RuntimeError,), {})
    yield _told(
        "A GPU whose memory does not suffice", failure_of(memory("CUDA out of memory. Tried to allocate 2.00 GiB"))
    )
    yield _told("A fault in ckptrain, or in a library", failure_of(ZeroDivisionError("division by zero")))


_ACTS: Sequence[Callable[[], Iterator[Example]]] = (
    _configs,
    _data,
    _refused,
    _claim,
    _damaged,
    _not_found,
    _out,
    _mismatch,
    _save,
    _diverged,
    _model,
    _adapter,
    _package,
    _phase,
    _rank,
    _lost,
    _others,
)
