"""What does a run learn from? Lengths, what is left out, how full the rows are, and samples as the model sees them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from ckptrain.data.chat import Sample
from ckptrain.data.dataset import Dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PERCENTILES = (0, 10, 50, 90, 99, 100)


@attrs.frozen(kw_only=True)
class ShownSample:
    """A sample as text, cut where learnt tokens begin and end."""

    where: str
    num_tokens: int
    num_learnt: int
    pieces: tuple[tuple[bool, str], ...]
    """Whether it is learnt, and the text."""


def shown(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> ShownSample:
    """Decode a sample, special tokens included."""
    learnt, tokens = sample.learnt.tolist(), sample.token_ids.tolist()
    groups = itertools.groupby(zip(learnt, tokens, strict=True), key=lambda pair: pair[0])
    return ShownSample(
        where=sample.where,
        num_tokens=sample.num_tokens,
        num_learnt=sample.num_learnt,
        pieces=tuple((is_learnt, _text(tokenizer, [token for _, token in pairs])) for is_learnt, pairs in groups),
    )


def data_report(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, seed: int, num_shown: int) -> dict[str, Any]:
    """Return what is known of a dataset, in JSON's types, with the first samples in the order of training."""
    order = dataset.order(seed)
    first_rows = order.rows_in(0, min(num_shown, order.epoch_length))
    first_samples = [index for row in first_rows for index in dataset.rows[row]][:num_shown]
    lengths = np.percentile(dataset.sample_tokens, _PERCENTILES, method="nearest").tolist()
    return {
        **attrs.asdict(dataset.summary),
        "length_percentiles": {str(share): int(length) for share, length in zip(_PERCENTILES, lengths, strict=True)},
        "learnt_share": dataset.summary.learnt_tokens / dataset.summary.tokens,
        "rows_per_epoch": order.epoch_length,
        "shown": [attrs.asdict(shown(dataset.samples[index], tokenizer)) for index in first_samples],
    }


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))  # as it is, not made nicer
