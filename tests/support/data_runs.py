"""Records that are known again by their tokens, and what the real loop of a run is given of them, step after step.

Samples are not recognised by the numbers that ckptrain gives them, but by the tokens that the model is fed, compared
with what the tokenizer makes of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import batched, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import strategies as st
from tiny import write_tokenizer

from ckptrain.config.load import load_config
from ckptrain.config.schema import RunConfig, SourceConfig
from ckptrain.data.batches import BatchLayout, BatchSource, MicroBatch
from ckptrain.data.dataset import Dataset
from ckptrain.data.prefetch import Prefetcher
from ckptrain.data.sources import locate
from ckptrain.data.token_cache import TokenCache
from ckptrain.data.tokenise import Tell, Tokenisation, tokenised
from ckptrain.errors import CkptrainError
from support.launch import Ranks, run_training

if TYPE_CHECKING:
    from ckptrain.training.observers import Observer
    from ckptrain.training.run import RunResult

type Tokens = tuple[int, ...]
type Micro = tuple[Tokens, ...]
"""The samples of a micro-batch."""
type Known = Mapping[Tokens, int]
"""The number of a record, by its tokens."""

ROW_TOKENS = 64
"""A row takes two of the numbered records, never three."""
BATCH = 256
"""Records that are tokenised together."""


def numbered_row(number: int) -> dict[str, Any]:
    """Return a chat that no other number has, of 24 to 32 of the tiny tokenizer's tokens."""
    answer = "x" * (1 + number * 5 % 9)
    return {"messages": [{"role": "user", "content": f"{number:02d}"}, {"role": "assistant", "content": answer}]}


def write_numbered(path: Path, numbers: Iterable[int]) -> Path:
    """Write the numbered records to a JSONL file."""
    path.write_text("".join(json.dumps(numbered_row(number)) + "\n" for number in numbers))
    return path


def tiny_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of the tiny models, which is written where there is none."""
    from transformers import AutoTokenizer

    if not (directory / "tokenizer.json").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        write_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def tiny_tokenisation(directory: Path, **options: Any) -> Tokenisation:
    """Tokenise with the tiny tokenizer, which is known by its template."""
    tokenizer = tiny_tokenizer(directory)
    how = {"tokenizer_fingerprint": str(tokenizer.chat_template), "loss_on": "assistant", "workers": 0, **options}
    return Tokenisation(tokenizer=tokenizer, **how)


def tokens_of(path: Path, how: Tokenisation, tell: Tell = lambda *_: None) -> TokenCache:
    """Tokenise the chats of a file, which is located anew, as every start does."""
    return tokenised(locate(SourceConfig(path=str(path)), "train"), "messages", {}, how, tell)


def known_records(tokenizer: Any, numbers: Iterable[int]) -> Known:
    """Tokenise numbered records with transformers alone."""
    known = {}
    for number in numbers:
        text = tokenizer.apply_chat_template(numbered_row(number)["messages"], tokenize=False)
        known[tuple(tokenizer(text, add_special_tokens=False)["input_ids"])] = number
    return known


def samples_of(batch: MicroBatch) -> Micro:
    """Return the tokens of the samples in a micro-batch, cut where attention cuts them."""
    bounds = batch.cu_seqlens.tolist()
    found = [tuple(batch.tokens[0, begin:end].tolist()) for begin, end in pairwise(bounds)]
    return tuple(found[: len(batch.sample_ids)])


def seen_tokens(ranks: Sequence[Sequence[Sequence[Micro]]]) -> list[list[Tokens]]:
    """Return the samples of each step over all ranks, in the order of training: ranks are dealt to like card players."""
    steps = []
    for of_ranks in zip(*ranks, strict=True):
        turns = zip(*of_ranks, strict=True)
        steps.append([tokens for micro in chain.from_iterable(turns) for tokens in micro])
    return steps


def seen_records(ranks: Sequence[Sequence[Sequence[Micro]]], known: Known) -> list[list[int]]:
    """Return the numbers of the records of each step, in the same order."""
    return [[known[tokens] for tokens in step] for step in seen_tokens(ranks)]


def assert_once_an_epoch(steps: Sequence[Sequence[int]], numbers: Iterable[int]) -> None:
    """Check that each record comes once before any comes again, epoch after epoch; the last one may not be whole."""
    expected = sorted(numbers)
    *whole, last = list(batched(chain.from_iterable(steps), len(expected))) or [()]
    assert [sorted(epoch) for epoch in whole] == [expected] * len(whole)
    assert len(set(last)) == len(last)
    assert set(last) <= set(expected)


@attrs.frozen(kw_only=True)
class Dealt:
    """On how many data parallel ranks a start is, how many rows each takes at a time, and how far it looks ahead."""

    ranks: int = 1
    micro: int = 1
    ahead: int = 0


def starts() -> st.SearchStrategy[list[tuple[int, Dealt]]]:
    """Draw the starts of a run: how many steps each makes, and how."""
    dealt = st.builds(Dealt, ranks=st.sampled_from([1, 2, 4]), micro=st.sampled_from([1, 2]), ahead=st.integers(0, 5))
    return st.lists(st.tuples(st.integers(1, 6), dealt), min_size=1, max_size=4)


def taken(dataset: Dataset, seed: int, dealt: Dealt, first: int, steps: int) -> list[list[tuple[Micro, ...]]]:
    """Return what each rank of a start at step `first` is given in so many steps of eight rows, before it leaves."""
    found = []
    for rank in range(dealt.ranks):
        layout = BatchLayout(micro_batch_size=dealt.micro, data_parallel_rank=rank, data_parallel_size=dealt.ranks)
        source = BatchSource(dataset=dataset, seed=seed, global_batch_size=8, layout=layout)
        with Prefetcher(source, first_step=first, ahead=dealt.ahead) as batches:
            found.append([tuple(map(samples_of, batches.take())) for _ in range(steps)])
    return found


def numbered_config(base: Path, train: Any, *overrides: str) -> RunConfig:
    """Return the configuration of a small run over numbered records, two rows a step."""
    return load_config(
        {
            "model": {"pretrained": str(base), "dtype": "float32", "verify": "never"},
            "lora": {"dim": 4, "alpha": 8},
            "data": {"train": train, "sequence_length": ROW_TOKENS},
            "optimizer": {"lr": 1.0e-3, "schedule": "constant"},
            "train": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 2},
            "checkpoint": {"every_steps": 100},
            "log": {"tensorboard": False},
        },
        overrides,
    )


@attrs.frozen(kw_only=True)
class RecordedRun:
    """What one rank was given."""

    result: RunResult
    steps: list[tuple[Micro, ...]]
    """The micro-batches of each step, as they came to the model."""
    validation: tuple[Micro, ...]
    """The micro-batches of the last validation."""


def run_recorded(config: RunConfig, run_dir: Path, observers: Iterable[Observer] = ()) -> RecordedRun:
    """Run on this rank, and return what its model was given."""
    from ckptrain.training import session as run_module
    from ckptrain.training import steps as steps_module

    steps: list[tuple[Micro, ...]] = []
    validation: list[tuple[Micro, ...]] = [()]
    train_step, validation_loss = steps_module.train_step, run_module.validation_loss

    def recorded_step(model: Any, optimizer: Any, batches: Any, *loss: Any) -> Any:
        steps.append(tuple(map(samples_of, batches)))
        return train_step(model, optimizer, batches, *loss)

    def recorded_validation(setup: Any, data: Any) -> Any:
        validation.append(tuple(map(samples_of, data.validation_batches)))
        return validation_loss(setup, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module, "train_step", recorded_step)
        patch.setattr(run_module, "validation_loss", recorded_validation)
        result = run_training(config, run_dir, observers)
    return RecordedRun(result=result, steps=steps, validation=validation[-1])


def run_all[Key](world_size: int, jobs: Mapping[Key, Callable[[], Any]], cores: int = 2) -> dict[Key, list[Any]]:
    """Run jobs one after the other on the ranks of a launch, which need not start anew for each; returns all ranks'.

    Where there are cores left, launches share the jobs among them. An error of ckptrain is the result of a job.
    """
    launches = max(1, cores // world_size)
    shares = [dict(list(jobs.items())[first::launches]) for first in range(launches)]
    started = [Ranks(world_size, lambda share=share: _run_each(share)) for share in shares]
    outcomes = [ranks.wait() for ranks in started]
    return {key: [rank[key] for rank in ranks] for share, ranks in zip(shares, outcomes, strict=True) for key in share}


def _run_each[Key](jobs: Mapping[Key, Callable[[], Any]]) -> dict[Key, Any]:
    results: dict[Key, Any] = {}
    for key, job in jobs.items():
        try:
            results[key] = job()
        except CkptrainError as error:
            results[key] = error
    return results
