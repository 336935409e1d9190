"""Who prepares data in bench_data.py, each in a process of its own: ckptrain, and `datasets.map` with TRL's packing.

For TRL the steps are those that its SFTTrainer takes with `packing` and `assistant_only_loss`, by its own
`_prepare_dataset`; there is no model, so the trainer around it is a stand-in with what that method asks for. Its
batches come from a DataLoader with TRL's collator, as the trainer sets it up. Each goes as far as the micro-batches of
the first optimizer step.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
from data_memory import peak_of_process

if TYPE_CHECKING:
    from ckptrain.data.dataset import Dataset

MICRO_BATCHES = 8
"""Of one row each, in an optimizer step."""
CONSUMED_PER_S = 100_000
"""Tokens that the training loop of `waiting` takes in a second."""
TOKENISE = ("tokenise", "load_dataset", "Tokenizing train dataset", "Building labels for train dataset")
PACK = ("pack", "Packing train dataset")
"""The parts of a start, by the names that both have for them: from text to tokens on disk, and from those to rows."""
_SEED = 1234
_MOST_ENCODED = 2000

type _Sample = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Token ids, and which of them are learnt."""


@attrs.frozen(kw_only=True)
class Task:
    """What to prepare: the rows of a file."""

    data: Path
    tokenizer: Path
    """A Hugging Face directory, with `marked.jinja` beside its files."""
    cache: Path
    workers: int | None
    """Processes that tokenise; 0 is the one that trains, None leaves it to ckptrain."""
    sequence_length: int
    look_for_s: float = 0.0
    """After the start: how long to lay out batches, and to train on them, each time; 0 does not."""
    has_content: bool = False
    """Look at every sample after that, too."""


@attrs.frozen(kw_only=True)
class Content:
    """What is trained on; two with the same `digest` have the same samples, token by token, learnt by learnt."""

    samples: int
    tokens: int
    learnt_tokens: int
    digest: str


@attrs.frozen(kw_only=True)
class Started:
    """One start, as the process that made it saw it."""

    imports_s: float
    first_batch_s: float
    """From the end of the imports to the first step's batches."""
    ready_at: float
    """When they were there, by `time.monotonic`."""
    cpu_s: float
    """Of this process and its children, in that time."""
    parts_s: dict[str, float]
    imported_bytes: int | None
    """The most memory of this process until the end of the imports."""
    peak_bytes: int | None
    """The same until it was ready."""
    rows: int
    fill: float
    """Of the rows' tokens, those that are of samples."""
    content: Content | None = None
    laid_out_per_s: float | None = None
    """Tokens that one thread lays out in batches."""
    waiting: dict[int, float] = attrs.field(factory=dict)
    """Share of its time that a loop waits that takes CONSUMED_PER_S, by how much is laid out ahead, if anything.

    For ckptrain it is steps ahead, in a thread; for TRL the processes of its DataLoader, two micro-batches ahead each.
    """


def start_ours(task: Task) -> Started:
    """Start with ckptrain, from a configuration to the first batches, as a run does."""
    began = time.monotonic()
    from transformers import AutoTokenizer  # noqa: F401  # what loading a tokenizer imports is no part of the start

    import ckptrain.data.dataset
    import ckptrain.data.records
    import ckptrain.data.sources
    from ckptrain.config.schema import DataConfig, SourceConfig
    from ckptrain.convert.pretrained import load_tokenizer
    from ckptrain.data.batches import BatchLayout, BatchSource
    from ckptrain.data.prefetch import Prefetcher
    from ckptrain.data.tokenise import Tokenisation
    from ckptrain.training.revisions import identify_data

    os.environ["CKPTRAIN_CACHE"] = str(task.cache)
    imported, imported_bytes, imported_cpu = time.monotonic(), peak_of_process(), _cpu_s()
    parts: dict[str, float] = {}
    data = DataConfig(train=(SourceConfig(path=str(task.data)),), sequence_length=task.sequence_length)
    with (
        _timed(ckptrain.data.dataset, "tokenised", parts, "tokenise"),
        _timed(ckptrain.data.dataset, "packed_rows", parts, "pack"),
        _timed(ckptrain.data.sources, "data_fingerprint", parts, "hash"),
    ):
        data, _ = identify_data(data, None)
        tokenizer = load_tokenizer(task.tokenizer)
        how = Tokenisation(
            tokenizer=tokenizer,
            tokenizer_fingerprint=hashlib.sha256((task.tokenizer / "tokenizer.json").read_bytes()).hexdigest(),
            loss_on=data.loss_on,
            workers=task.workers,
        )
        dataset = ckptrain.data.dataset.build_datasets(data, how, _SEED).train
        layout = BatchLayout(micro_batch_size=1)
        source = BatchSource(dataset=dataset, seed=_SEED, global_batch_size=MICRO_BATCHES, layout=layout)
        source.micro_batches(0)
    ready = time.monotonic()
    started = Started(
        imports_s=imported - began,
        first_batch_s=ready - imported,
        ready_at=ready,
        cpu_s=_cpu_s() - imported_cpu,
        parts_s=parts,
        imported_bytes=imported_bytes,
        peak_bytes=peak_of_process(),
        rows=len(dataset.rows),
        fill=dataset.summary.row_fill,
    )

    def steps(ahead: int) -> Iterator[int]:
        with Prefetcher(source, first_step=0, ahead=ahead) as prefetcher:
            while True:
                yield sum(int(batch.cu_seqlens[-1]) for batch in prefetcher.take())

    return _looked_at(started, task, steps, _our_samples(dataset))


def start_theirs(task: Task) -> Started:
    """Start with `datasets` and TRL, from a file to the first batches, as an SFTTrainer does."""
    began = time.monotonic()
    import datasets
    import torch
    from transformers import AutoTokenizer
    from trl import SFTConfig
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

    datasets.disable_progress_bars()
    imported, imported_bytes, imported_cpu = time.monotonic(), peak_of_process(), _cpu_s()
    parts: dict[str, float] = {}
    tokenizer = AutoTokenizer.from_pretrained(task.tokenizer)
    tokenizer.chat_template = (task.tokenizer / "marked.jinja").read_text()
    config = SFTConfig(
        output_dir=str(task.cache / "run"),
        assistant_only_loss=True,
        packing=True,
        max_length=task.sequence_length,
        dataset_num_proc=task.workers or None,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    trainer: Any = SimpleNamespace(chat_template=None, _tokenizer=tokenizer, completion_only_loss=False)
    with _timed(datasets, "load_dataset", parts, "load_dataset"), _timed(datasets.Dataset, "map", parts):
        rows = datasets.load_dataset("json", data_files=str(task.data), split="train", cache_dir=str(task.cache))
        packed = SFTTrainer._prepare_dataset(
            trainer, rows, tokenizer, config, packing=True, formatting_func=None, dataset_name="train"
        )
        collator = DataCollatorForLanguageModeling(
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id, padding_free=True
        )

        def steps(ahead: int) -> Iterator[int]:
            generator = torch.Generator().manual_seed(_SEED)
            order = torch.utils.data.RandomSampler(packed, generator=generator)
            while True:
                loader = torch.utils.data.DataLoader(packed, sampler=order, collate_fn=collator, num_workers=ahead)
                for batches in itertools.batched(loader, MICRO_BATCHES):
                    yield sum(batch["input_ids"].numel() for batch in batches)

        next(steps(0))
    ready = time.monotonic()
    num_tokens = int(sum(lengths.sum() for lengths in _columns(packed, "seq_lengths")))
    started = Started(
        imports_s=imported - began,
        first_batch_s=ready - imported,
        ready_at=ready,
        cpu_s=_cpu_s() - imported_cpu,
        parts_s=parts,
        imported_bytes=imported_bytes,
        peak_bytes=peak_of_process(),
        rows=len(packed),
        fill=num_tokens / (len(packed) * task.sequence_length),
    )
    return _looked_at(started, task, steps, _their_samples(packed))


@contextlib.contextmanager
def _timed(owner: Any, name: str, parts: dict[str, float], part: str | None = None) -> Iterator[None]:
    """Add up what a function takes, under the name `part`; `datasets.map` says itself what it does, as `desc`."""
    original: Callable[..., Any] = getattr(owner, name)

    def measured(*arguments: Any, **options: Any) -> Any:
        begun = time.monotonic()
        try:
            return original(*arguments, **options)
        finally:
            key = part or str(options.get("desc")).strip()
            parts[key] = parts.get(key, 0.0) + time.monotonic() - begun

    setattr(owner, name, measured)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _cpu_s() -> float:
    return sum(os.times()[:4])


def _looked_at(
    started: Started, task: Task, feed: Callable[[int], Iterator[int]], samples: Iterable[_Sample]
) -> Started:
    """Add what the task asks for besides; `feed` yields the tokens of step after step, with so many laid out ahead."""
    if task.look_for_s:
        started = attrs.evolve(
            started,
            waiting={ahead: _waiting(feed(ahead), task.look_for_s) for ahead in (2, 0)},
            laid_out_per_s=_speed(feed(0), task.look_for_s),
        )
    return attrs.evolve(started, content=_content(samples)) if task.has_content else started


def _speed(steps: Iterator[int], seconds: float) -> float:
    """Return how many tokens come in a second where nothing is done with them."""
    next(steps)
    tokens, begun = 0, time.monotonic()
    while not tokens or time.monotonic() - begun < seconds:
        tokens += next(steps)
    return tokens / (time.monotonic() - begun)


def _waiting(steps: Iterator[int], seconds: float) -> float:
    """Return the share of its time that a training loop waits for the steps after the first."""
    tokens = next(steps)
    waited, begun = 0.0, time.monotonic()
    while not waited or time.monotonic() - begun < seconds:
        time.sleep(tokens / CONSUMED_PER_S)
        asked = time.monotonic()
        tokens = next(steps)
        waited += time.monotonic() - asked
    return waited / (time.monotonic() - begun)


def _content(samples: Iterable[_Sample]) -> Content:
    """Return what the samples are, in whatever order they come."""
    digests, tokens, learnt_tokens = [], 0, 0
    for token_ids, learnt in samples:
        digests.append(hashlib.sha256(token_ids.tobytes() + b"|" + learnt.tobytes()).digest())
        tokens += len(token_ids)
        learnt_tokens += int(learnt.sum())
    return Content(
        samples=len(digests),
        tokens=tokens,
        learnt_tokens=learnt_tokens,
        digest=hashlib.sha256(b"".join(sorted(digests))).hexdigest(),
    )


def _our_samples(dataset: Dataset) -> Iterator[_Sample]:
    for sample in dataset.samples:
        yield np.asarray(sample.token_ids, dtype=np.int32), np.asarray(sample.learnt)


def _their_samples(packed: Any) -> Iterator[_Sample]:
    names = ("input_ids", "labels", "seq_lengths")
    for token_ids, labels, lengths in zip(*(_columns(packed, name) for name in names), strict=True):
        learnt = labels != -100
        for end, length in zip(np.cumsum(lengths).tolist(), lengths.tolist(), strict=True):
            own = learnt[end - length : end].copy()
            own[:1] = False  # as the collator has it: nothing predicts the first token
            yield token_ids[end - length : end].astype(np.int32), own


def _columns(packed: Any, name: str) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the values of a column of lists, a few rows at a time."""
    for batch in packed.select_columns([name]).with_format("arrow").iter(64):
        yield batch[name].combine_chunks().flatten().to_numpy()


def encoded_per_s(data: Path, tokenizer_directory: Path) -> float:
    """Return the tokens that the tokenizer alone makes of rendered conversations in a second, on one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import orjson
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    with data.open("rb") as file:
        rows = [orjson.loads(line)["messages"] for line in itertools.islice(file, _MOST_ENCODED)]
    texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    begun = time.monotonic()
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return sum(map(len, encodings)) / (time.monotonic() - begun)


@attrs.frozen(kw_only=True)
class Packed:
    """Lengths in rows, by one of the two."""

    rows: int
    fill: float
    seconds: float


def pack_both(lengths: npt.NDArray[np.int64], sequence_length: int) -> tuple[Packed, Packed]:
    """Pack samples that are cut to the length of a row, by ckptrain and by TRL."""
    import datasets
    import pyarrow as pa
    from trl.data_utils import pack_dataset

    from ckptrain.data.packing import packed_rows

    datasets.disable_progress_bars()
    cut = np.minimum(lengths, sequence_length)
    begun = time.monotonic()
    ours = len(packed_rows(cut, sequence_length, _SEED))
    between = time.monotonic()
    tokens = pa.array(np.zeros(int(lengths.sum()), dtype=np.int32))
    ids = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), tokens)
    made = time.monotonic()
    theirs = len(pack_dataset(datasets.Dataset(pa.table({"input_ids": ids})), sequence_length, "bfd"))
    ended = time.monotonic()
    total = int(cut.sum())
    return (
        Packed(rows=ours, fill=total / (ours * sequence_length), seconds=between - begun),
        Packed(rows=theirs, fill=total / (theirs * sequence_length), seconds=ended - made),
    )
