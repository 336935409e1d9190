"""What would a run learn from? Told without Megatron, from the same tokens that the run would train on."""

from __future__ import annotations

from typing import Any

import attrs

from ckptrain.config.base import locate_base
from ckptrain.config.schema import RunConfig
from ckptrain.convert.pretrained import fetch
from ckptrain.data.dataset import Dataset, build_datasets
from ckptrain.data.report import data_report
from ckptrain.training.tokens import tokenisation


def report_data(config: RunConfig, num_shown: int) -> dict[str, Any]:
    """Return what is known of a run's data, in JSON's types; `api.describe_data` says what is in it.

    Raises:
        CkptrainError: the data cannot be read or tokenised.
    """
    data, train = config.data, config.train
    refuses = data.on_too_long == "refuse"
    how = tokenisation(fetch(locate_base(config.model)), data)
    built = build_datasets(attrs.evolve(data, on_too_long="drop") if refuses else data, how, train.seed)

    def part(dataset: Dataset) -> dict[str, Any]:
        too_long = dataset.summary.dropped_too_long if refuses else 0
        why = f"{too_long} samples are longer than data.sequence_length={data.sequence_length}; raise it, or set"
        return {
            **data_report(dataset, how.tokenizer, train.seed, num_shown),
            "would_refuse": f"{why} data.on_too_long=drop or truncate" if too_long else None,
        }

    rows = train.steps * train.global_batch_size
    return {
        "sequence_length": data.sequence_length,
        "steps": train.steps,
        "rows_per_step": train.global_batch_size,
        "epochs": rows / built.train.order(train.seed).epoch_length,
        "train": part(built.train),
        "validation": None if built.validation is None else part(built.validation),
    }
