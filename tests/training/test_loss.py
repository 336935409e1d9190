"""What a loss is: that of each sample is its own, packed or alone, and that of a step is one mean over its tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.launch import launch, run_training
from support.models import with_model
from support.restored import losses
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from ckptrain.config.base import locate_base
from ckptrain.config.schema import RunConfig
from ckptrain.data.batches import BatchLayout, BatchSource, MicroBatch, assemble
from ckptrain.data.dataset import Dataset, build_datasets
from ckptrain.training.setup import ModelSetup
from ckptrain.training.tokens import tokenisation

MakeConfig = Callable[..., RunConfig]


def dataset_of(config: RunConfig) -> Dataset:
    """Build what a run of this configuration trains on."""
    return build_datasets(config.data, tokenisation(locate_base(config.model), config.data), config.train.seed).train


def alone(batch: MicroBatch, place: int) -> MicroBatch:
    """Learn one sample of a micro-batch only; the others are still computed beside it."""
    begin, end = batch.cu_seqlens[place : place + 2].tolist()
    mask = torch.zeros_like(batch.loss_mask)
    mask[:, begin:end] = batch.loss_mask[:, begin:end]
    return attrs.evolve(batch, loss_mask=mask, num_learnt=int(mask.sum()))


@torch.no_grad()
def loss_in_hugging_face(directory: str, dataset: Dataset) -> tuple[list[float], list[int]]:
    """Return the mean loss of each sample alone in transformers, and how many tokens of it are learnt."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found, counts = [], []
    for sample in dataset.samples:
        ids = torch.tensor(sample.token_ids.tolist())
        learnt = torch.tensor(sample.learnt.tolist())[1:]
        logits = model(input_ids=ids[None]).logits[0, :-1]
        found.append(cross_entropy(logits[learnt], ids[1:][learnt]).item())
        counts.append(int(learnt.sum()))
    return found, counts


def test_a_packed_sample_has_the_loss_that_it_has_alone(tiny_config: MakeConfig) -> None:
    """Rows of several samples beside rows of one, and transformers beside both: to five digits after the point."""
    config = tiny_config()
    dataset = dataset_of(config)
    layout = BatchLayout(micro_batch_size=len(dataset.rows))

    def measure(setup: ModelSetup) -> tuple[dict[int, float], list[float]]:
        from ckptrain.megatron.step import evaluate

        packed = assemble(dataset, dataset.rows[:6], layout)
        assert len(packed.sample_ids) > 6
        in_rows = {
            sample: evaluate(setup.model, [alone(packed, place)])[0] for place, sample in enumerate(packed.sample_ids)
        }
        return in_rows, [evaluate(setup.model, [assemble(dataset, [(i,)], layout)])[0] for i in in_rows]

    [(in_rows, by_themselves)] = with_model(config, measure)
    expected, _ = loss_in_hugging_face(config.model.pretrained, dataset)
    assert list(in_rows.values()) == pytest.approx(by_themselves, abs=1e-5)
    assert list(in_rows.values()) == pytest.approx([expected[sample] for sample in in_rows], abs=1e-5)
    assert len({round(loss, 3) for loss in in_rows.values()}) > 6


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [(1, ["train.micro_batch_size=1"]), (1, ["train.micro_batch_size=4"]), (2, []), (2, ["parallel.pipeline=2"])],
    ids=["micro-batches", "one micro-batch", "data parallel", "pipeline"],
)
def test_the_loss_of_a_step_is_one_mean_over_the_learnt_tokens_of_its_global_batch(
    world_size: int, overrides: list[str], tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Not a mean of the micro-batches' means, which samples of different length would pull apart; per transformers."""
    config = tiny_config("train.steps=1", "data.packing=false", "optimizer.warmup_steps=0", *overrides)
    dataset = dataset_of(config)
    source = BatchSource(
        dataset=dataset, seed=config.train.seed, global_batch_size=4, layout=BatchLayout(micro_batch_size=4)
    )
    [batch] = source.micro_batches(0)
    each, counts = loss_in_hugging_face(config.model.pretrained, dataset)
    chosen: Any = batch.sample_ids
    total = sum(counts[sample] for sample in chosen)
    one_mean = sum(each[sample] * counts[sample] for sample in chosen) / total
    mean_of_means = sum(each[sample] for sample in chosen) / len(chosen)
    assert abs(one_mean - mean_of_means) > 1e-4

    launch(world_size, lambda: run_training(config, tmp_path))
    [found] = losses(tmp_path)
    assert found == pytest.approx(one_mean, abs=1e-5)
