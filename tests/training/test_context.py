"""Context parallelism: every sequence is cut over processes, and the run is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from families import write_family
from support.launch import launch, run_training
from support.models import assert_alike, logits_of_each, packed, packed_logits, with_model
from support.records import apart, assert_same_run, column
from torch import Tensor

from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.config.schema import RunConfig
from ckptrain.data.batches import MicroBatch
from ckptrain.data.context import PADDING, context_part, padded_length
from ckptrain.errors import ConfigError
from ckptrain.lifecycle.journal import read_journal
from ckptrain.training.start import survey_run

if TYPE_CHECKING:
    from ckptrain.training.setup import ModelSetup

LOCAL = "model.backend=local"
RUNS = {
    "CP=2": (2, ["parallel.context=2"]),
    "CP=2, canonical": (2, ["parallel.context=2", "lora.kind=canonical"]),
    "CP=2, DoRA": (2, ["parallel.context=2", "lora.kind=dora"]),
    "CP=2 x TP=2": (4, ["parallel.context=2", "parallel.tensor=2"]),
    "CP=2 x DP=2": (4, ["parallel.context=2"]),
    "CP=2 x PP=2": (4, ["parallel.context=2", "parallel.pipeline=2"]),
}
# Longer than windows and than the limit of a rope, and none a multiple of what they are padded to, but for one.
LENGTHS = (5, 40, 1, 33, 27)
# Behind the limit a rope turns otherwise: the padding of the sequence of 33 tokens must not count.
LONGROPE_OF_33 = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 33,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}


@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_a_micro_batch_is_cut_as_megatron_core_cuts_its_rotary_angles(num_processes: int) -> None:
    """Position for position; over all processes every token is there once, with the label and the mask that it had."""
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    batch = packed(LENGTHS)
    parts = [context_part(batch, rank, num_processes) for rank in range(num_processes)]
    for rank, part in enumerate(parts):
        padded = part.cu_seqlens_padded.diff()
        assert (padded % (2 * num_processes) == 0).all()
        assert (padded >= torch.tensor(LENGTHS)).all()
        assert int(padded.max()) == part.max_seqlen
        sequences = part.position_ids[0].split((padded // num_processes).tolist())
        for length, positions in zip(padded.tolist(), sequences, strict=True):
            expected = _get_thd_freqs_on_this_cp_rank(rank, num_processes, positions, torch.arange(length))
            assert torch.equal(positions, expected)
        kept = part.origin != PADDING
        assert torch.equal(part.tokens[0, kept], batch.tokens[0, part.origin[kept]])
        assert torch.equal(part.labels[0, kept], batch.labels[0, part.origin[kept]])
        assert torch.equal(part.loss_mask[0, kept], batch.loss_mask[0, part.origin[kept]])
        assert torch.equal(part.position_ids[0, kept], batch.position_ids[0, part.origin[kept]])
        assert part.loss_mask[0, ~kept].sum() == 0
    origins = torch.cat([part.origin for part in parts])
    assert len(origins) == padded_length(batch, num_processes) == parts[0].whole_length
    assert torch.equal(origins[origins != PADDING].sort().values, torch.arange(sum(LENGTHS)))


def test_a_process_alone_gets_the_micro_batch_as_it_is() -> None:
    """Nothing is padded and nothing moves."""
    batch = packed(LENGTHS)
    part = context_part(batch, 0, 1)
    for name in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen"):
        assert torch.equal(torch.as_tensor(getattr(part, name)), torch.as_tensor(getattr(batch, name)))
    assert torch.equal(part.cu_seqlens_padded, batch.cu_seqlens)


def test_micro_batches_can_be_given_one_length() -> None:
    """What is missing is a sequence of padding, after all others and learnt nowhere."""
    batch = packed(LENGTHS)
    length = padded_length(batch, 2) + 12
    parts = [context_part(batch, rank, 2, length) for rank in range(2)]
    for part in parts:
        assert part.whole_length == length == 2 * part.tokens.shape[1]
        assert part.cu_seqlens_padded.diff()[-1] == 12
        assert (part.origin[-6:] == PADDING).all()
    assert sum(int(part.loss_mask.sum()) for part in parts) == batch.num_learnt


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where runs of one process are kept, by the kind of their adapters."""
    return tmp_path_factory.mktemp("one-process")


@pytest.mark.parametrize("name", RUNS)
def test_context_parallel_processes_train_the_run_of_one(
    name: str, tiny_config: Callable[..., RunConfig], one_process: Path, tmp_path: Path
) -> None:
    """Losses, gradient norms, validation and what was trained within rounding; the same answers, the same tokens."""
    num_ranks, overrides = RUNS[name]
    common = [
        LOCAL,
        "model.verify=always",
        "train.steps=6",
        "train.eval_every_steps=2",
        # With B at random, rounding grows a hundredfold in these steps under Adam, in any layout.
        "optimizer.lr=1e-3",
        "log.sample_tokens=4",
    ]
    kinds = [override for override in overrides if override.startswith("lora.kind")]
    single = one_process / "-".join(["run", *kinds])
    if not single.exists():
        launch(1, lambda: run_training(tiny_config(*common, *kinds), single))
    run_dir = tmp_path / "run"
    results = launch(num_ranks, lambda: run_training(tiny_config(*common, *overrides), run_dir))

    assert_same_run(run_dir, single)
    assert len({result.loss for result in results}) == 1, "every rank knows the same"

    assert open_checkpoint(run_dir / "checkpoints/step-00000006").manifest.layout.context == 2
    [loaded] = [entry for entry in read_journal(run_dir / "journal.jsonl") if "parity" in entry]
    assert loaded["parity"]["checked"], "and the base computes what Hugging Face computes"


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(2, 1), (1, 2)], ids=["CP=2 to CP=1", "CP=1 to CP=2"])
def test_a_checkpoint_goes_on_under_another_number_of_context_parallel_processes(
    saved_by: int, resumed_by: int, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The losses are those of the run that was not moved; the receipt says what could not be restored."""
    common = [LOCAL, "train.steps=6", "checkpoint.every_steps=3", "checkpoint.keep_last=9", "optimizer.lr=1e-3"]
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    launch(saved_by, lambda: run_training(tiny_config(*common, f"parallel.context={saved_by}"), straight))
    (moved / "checkpoints").mkdir(parents=True)
    name = "checkpoints/step-00000003"
    (straight / name).rename(moved / name)

    config = tiny_config(*common, f"parallel.context={resumed_by}")
    [*_, result] = launch(resumed_by, lambda: run_training(config, moved))
    assert result.plan.kind == "Resume"
    change = f"parallel.context is {saved_by} there and {resumed_by} in the config"
    assert any(change in note for note in result.plan.notes)
    assert apart(column(moved, "loss"), column(straight, "loss")[3:]) < 1e-5
    [receipt] = [entry for entry in read_journal(moved / "journal.jsonl") if entry["event"] == "receipt"]
    assert "the layout differs" in receipt["rng"]


@pytest.mark.parametrize(
    ("name", "num_processes"),
    [
        ("Mistral, sliding window", 2),
        ("Mistral, sliding window", 4),
        ("Qwen2, sliding window", 2),
        ("Gemma 2", 2),
        ("Gemma 3", 2),
        ("Qwen3-MoE", 2),
        ("OLMoE", 2),
        ("GPT-OSS", 2),
        ("GPT-OSS", 4),
        ("Llama, longrope", 2),
    ],
)
def test_every_family_computes_what_hugging_face_computes(
    name: str, num_processes: int, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Windows, capped scores, sinks and ropes of two kinds go on where a sequence is cut; every rank has all logits."""
    changes = {"rope_parameters": LONGROPE_OF_33} if name == "Llama, longrope" else {}
    directory = write_family(tmp_path / "model", name, **changes)
    batch = packed(LENGTHS)
    targets = "lora.target_modules=[linear_qkv, linear_proj]"
    config = tiny_config(LOCAL, targets, f"parallel.context={num_processes}", pretrained=str(directory))
    found = with_model(config, partial(packed_logits, batch), num_processes)
    expected = logits_of_each(directory, batch)
    for logits in found:
        assert_alike(logits, expected)


def gradients(batch: MicroBatch, setup: ModelSetup) -> dict[str, Tensor]:
    """Take a step; return the gradient of every adapter weight, by global name and number."""
    from ckptrain.megatron.step import train_step

    train_step(setup.model, setup.optimizer, [batch])
    return {f"{each.name} {number}": each.parameter.main_grad.clone() for number, each in enumerate(setup.adapters)}


@pytest.mark.parametrize("name", ["Gemma 2", "Gemma 3", "Qwen3-MoE", "OLMoE", "GPT-OSS"])
def test_every_family_has_the_gradients_of_one_process(
    name: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Those of experts too, whose tokens are on both processes."""
    directory = write_family(tmp_path / "model", name)
    targets = ["lora.target_modules=[linear_qkv, linear_proj]"] if name == "GPT-OSS" else []
    common = [LOCAL, "lora.lora_B_init_method=xavier", *targets]
    act = partial(gradients, packed(LENGTHS))
    [expected] = with_model(tiny_config(*common, pretrained=str(directory)), act)
    for found in with_model(tiny_config(*common, "parallel.context=2", pretrained=str(directory)), act, 2):
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            assert gradient.abs().max() > 0
            assert (found[key] - gradient).abs().max() < 1e-5 * max(1.0, gradient.abs().max().item()), key


@pytest.mark.parametrize("backend", ["auto", "transformer_engine"])
def test_other_layers_are_refused(backend: str, tiny_config: Callable[..., RunConfig]) -> None:
    """What no test has shown to be the run of one process is not run; the message says what is."""
    with pytest.raises(ConfigError) as caught:
        survey_run(tiny_config(f"model.backend={backend}", "parallel.context=2", "model.dtype=bfloat16"), 2)
    [problem] = caught.value.problems
    assert "set model.backend=local, or parallel.context=1" in problem
    assert survey_run(tiny_config(LOCAL, "parallel.context=2"), 2).layout.context == 2
