"""How bench_checkpoint.py measures one case: all contestants in the same ranks, taking turns, from a cold cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from forked import launch
from tiny import VOCAB_SIZE, write_chats, write_tokenizer

from ckptrain.checkpoint.integrity import fsync_directory, fsync_file
from ckptrain.config.load import load_config
from ckptrain.training.start import survey_run

if TYPE_CHECKING:
    from checkpoint_contestants import Contestant
    from checkpoint_state import LoraState

FEATURES = 18.5
"""Inputs and outputs of a layer's four linear modules, in hidden sizes: 1 + 1.5 (qkv), 1 + 1, 1 + 8 (fc1), 4 + 1."""
BYTES_PER_PARAMETER = 12  # float32: the weight and two moments
TENSORS_PER_LAYER = 24  # of each of these: two matrices for each of four modules
QUIET_STEPS = 30
TIMEOUT_S = 900.0


@attrs.frozen(kw_only=True)
class Case:
    """A LoRA run whose state is saved: a Llama of this shape, tensor parallel over all ranks."""

    num_layers: int
    hidden_size: int
    dim: int
    ranks: int
    repeats: int
    """Rounds after the first, which is told apart."""
    with_unstacked: bool = False
    """Let ckptrain also save every layer's tensors by themselves."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapter weights and moments, on all ranks together."""
        return int(BYTES_PER_PARAMETER * self.num_layers * FEATURES * self.hidden_size * self.dim)

    @property
    def num_tensors(self) -> int:
        """Tensors that the training has, on each rank its part of every one."""
        return TENSORS_PER_LAYER * self.num_layers


@attrs.frozen(kw_only=True)
class Sample:
    """One save and what followed; of the ranks the slowest counts."""

    stall_s: float
    """What the training waited for: the beginning, and the end where the training itself commits."""
    commit_s: float
    """From the beginning until everything was committed."""
    restore_s: float | None
    num_bytes: int
    """Of all files."""
    num_tensors: int
    """Over all ranks."""
    num_equal: int | None
    """How many of them a restore has brought back as they were; None where that was not looked at."""
    parts: Mapping[str, float]
    """Seconds by what they were spent on, where the contestant tells."""


def measure(case: Case, directory: Path) -> dict[str, Any]:
    """Let all contestants save and restore a case in processes of its own, and return the numbers for JSON."""
    import checkpoint_contestants  # noqa: F401  # here, before the fork, and so once

    started = time.monotonic()
    write_base(directory / "base", case)
    result: dict[str, Any] = launch(case.ranks, lambda: _on_rank(case, directory), TIMEOUT_S)[0]
    shutil.rmtree(directory)
    about = {"num_bytes": case.num_bytes, "num_tensors": case.num_tensors, "seconds": time.monotonic() - started}
    return {**attrs.asdict(case), **about, **result}


def write_base(directory: Path, case: Case) -> None:
    """Write what a run wants to know of a base model, and a weight file without weights."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    directory.mkdir(parents=True)
    LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=case.hidden_size,
        intermediate_size=4 * case.hidden_size,
        num_hidden_layers=case.num_layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=128,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    save_file({}, directory / "model.safetensors")
    write_tokenizer(directory)
    write_chats(directory / "train.jsonl", 4)


@contextlib.contextmanager
def open_state(case: Case, base: Path) -> Iterator[LoraState]:
    """Build what this rank has to save, among all ranks of the case; `base` is what `write_base` has written."""
    from checkpoint_state import LoraState

    from ckptrain.megatron.world import open_process_group
    from ckptrain.training.setup import model_parallel

    config = load_config(
        {
            "model": {"pretrained": str(base), "dtype": "float32", "verify": "never"},
            "lora": {"dim": case.dim},
            "data": {"train": str(base / "train.jsonl"), "sequence_length": 128},
            "parallel": {"tensor": case.ranks},
            "train": {"global_batch_size": 1},
        }
    )
    survey = survey_run(config, case.ranks)
    with open_process_group(), model_parallel(survey):
        yield LoraState(survey)


def _on_rank(case: Case, directory: Path) -> dict[str, Any]:
    from checkpoint_contestants import CONTESTANTS, CkptrainUnstacked

    with open_state(case, directory / "base") as state, contextlib.ExitStack() as stack:
        kinds = (*CONTESTANTS, CkptrainUnstacked) if case.with_unstacked else CONTESTANTS
        contestants = [kind(directory / str(number), state) for number, kind in enumerate(kinds)]
        for contestant in contestants:
            stack.callback(contestant.close)
        samples = _take_turns(contestants, 1 + case.repeats)
        steps = range(1 + case.repeats, 2 + case.repeats + case.repeats // 2)
        return {
            "contestants": [
                {"name": contestant.name, "keeps": contestant.keeps, **_summary(samples[contestant.name])}
                for contestant in contestants
            ],
            "interference": [
                {"name": contestant.name, **_interference(contestant, steps)}
                for contestant in contestants
                if contestant.asynchronous
            ],
        }


def _take_turns(contestants: list[Contestant], rounds: int) -> dict[str, list[Sample]]:
    """Let each save and restore once a round; what it restores in the first round is compared with what it saved."""
    samples: dict[str, list[Sample]] = {contestant.name: [] for contestant in contestants}
    for turn in range(rounds):
        first = turn % len(contestants)  # what one leaves to the next, such as a busy disk, falls on all in turn
        for contestant in contestants[first:] + contestants[:first]:
            samples[contestant.name].append(_sample(contestant, turn, compare=turn == 0))
    return samples


def _sample(contestant: Contestant, step: int, *, compare: bool) -> Sample:
    from checkpoint_state import digests

    place = contestant.place(step)
    with _removed(contestant, step):
        stall_s, commit_s = _save(contestant, step)
        num_bytes = _on_rank0_when_all_are_here(lambda: sum(path.stat().st_size for path in _files(place)))
        restore_s = num_equal = None
        if contestant.restores:
            before = digests(contestant.tensors) if compare else {}
            for tensor in contestant.tensors.values() if compare else ():
                tensor.zero_()
            _on_rank0_when_all_are_here(lambda: _forget(place))
            restore_s = _timed(lambda: contestant.restore(step))
            if compare:
                after = digests(contestant.tensors)
                num_equal = sum(after[name] == digest for name, digest in before.items())
    return _of_all_ranks(
        Sample(
            stall_s=stall_s,
            commit_s=commit_s,
            restore_s=restore_s,
            num_bytes=num_bytes,
            num_tensors=len(contestant.tensors),
            num_equal=num_equal,
            parts=dict(contestant.parts),
        )
    )


def _save(contestant: Contestant, step: int) -> tuple[float, float]:
    """Save, and return for how long the training waited and when all was committed, in seconds."""
    started = time.perf_counter()
    contestant.begin(step)
    stall_s = time.perf_counter() - started
    while True:
        asked = time.perf_counter()
        ended = contestant.ended()
        now = time.perf_counter()
        if ended:
            return stall_s + (now - asked), now - started
        time.sleep(contestant.asked_every_s)


def _interference(contestant: Contestant, steps: Sequence[int]) -> dict[str, Any]:
    """Train while saves go on: the time of a step with and without one, and what one save costs the training in all."""
    from ckptrain.checkpoint.ranks import gather_to_all

    train = _training_step()
    quiet: list[float] = []
    saving: list[float] = []
    lost: list[float] = []
    for step in steps:
        with _removed(contestant, step):
            before = [_timed(train) for _ in range(QUIET_STEPS)]
            during: list[float] = []
            started = time.perf_counter()
            contestant.begin(step)
            while not contestant.ended():
                during.append(_timed(train))
            elapsed = time.perf_counter() - started
        quiet += before
        saving += during
        lost.append(max(gather_to_all(elapsed - len(during) * statistics.median(before))))
    quiet = [seconds for part in gather_to_all(quiet) for seconds in part]
    saving = [seconds for part in gather_to_all(saving) for seconds in part]
    return {
        "step_s": statistics.median(quiet),
        "step_while_saving_s": statistics.median(saving) if saving else None,
        "steps_while_saving": len(saving),
        "lost_per_save_s": statistics.median(lost),
    }


def _training_step() -> Callable[[], object]:
    """Return a step of many small operations: like a thread that feeds a GPU, it needs the interpreter all the time."""
    import torch

    weight = torch.randn(256, 256) / 16

    def step() -> None:
        activations = torch.ones(64, 256)
        for _ in range(100):
            activations = torch.tanh(activations @ weight)

    return step


def _timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


@contextlib.contextmanager
def _removed(contestant: Contestant, step: int) -> Iterator[None]:
    """Make room for a save before, and remove it after; the ranks begin together and leave together."""

    def remove() -> None:
        place = contestant.place(step)
        shutil.rmtree(place)
        fsync_directory(place.parent)  # or the file system does the work in the time of the next

    _on_rank0_when_all_are_here(lambda: contestant.prepare(step))
    yield
    _on_rank0_when_all_are_here(remove)


def _on_rank0_when_all_are_here[T](act: Callable[[], T]) -> T:
    """Run something on rank 0 between two barriers, and return its result."""
    from ckptrain.checkpoint.ranks import gather_to_all, on_rank0

    gather_to_all(None)
    return on_rank0(act)


def _forget(place: Path) -> None:
    """Make what is in a directory be read from the disk."""
    for path in _files(place):
        fsync_file(path)  # what is not on the disk yet cannot be forgotten
        if hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def _of_all_ranks(own: Sample) -> Sample:
    """Return the sample of the slowest rank, of all their tensors."""
    from ckptrain.checkpoint.ranks import gather_to_all

    samples = gather_to_all(own)
    equal = [sample.num_equal for sample in samples if sample.num_equal is not None]
    restores = [sample.restore_s for sample in samples if sample.restore_s is not None]
    return attrs.evolve(
        own,
        stall_s=max(sample.stall_s for sample in samples),
        commit_s=max(sample.commit_s for sample in samples),
        restore_s=max(restores, default=None),
        num_tensors=sum(sample.num_tensors for sample in samples),
        num_equal=sum(equal) if equal else None,
        parts={part: max(sample.parts[part] for sample in samples) for part in own.parts},
    )


def _summary(samples: Sequence[Sample]) -> dict[str, Any]:
    first, *others = samples
    times = ("stall_s", "commit_s", "restore_s")
    return {
        "num_bytes": first.num_bytes,
        "num_tensors": first.num_tensors,
        "num_equal": first.num_equal,
        "first": {name: getattr(first, name) for name in times},
        "median": {name: _median([getattr(sample, name) for sample in others]) for name in times},
        "median_parts": {part: _median([sample.parts[part] for sample in others]) for part in first.parts},
        "samples": [{name: getattr(sample, name) for name in times} for sample in others],
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
