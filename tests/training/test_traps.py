"""Traps that runs of other trainers fell into, at a resume and under other layouts; docs/traps.md lists them all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import orjson
import pytest
import torch
from support.hostile import change_manifest
from support.launch import launch, run_training
from support.restored import (
    assert_same_end,
    equal,
    is_restored,
    losses,
    pieces,
    restored,
    run_straight_and_in_two,
    whole_tensors,
)
from tiny import write_llama
from torch import Tensor

from ckptrain import api
from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.config.schema import RunConfig
from ckptrain.errors import ConfigError, RestoreMismatch
from ckptrain.megatron import world
from ckptrain.megatron.adapters import draw_matrix
from ckptrain.megatron.optimizer import MASTER, MOMENTS, adam_states, set_step_count, step_count
from ckptrain.megatron.state import rng_row, rng_state
from ckptrain.training import restore as restore_module
from ckptrain.training import run as run_module
from ckptrain.training import setup as setting_up
from ckptrain.training import steps as steps_module
from ckptrain.training.evaluation import validation_loss
from ckptrain.training.setup import ModelSetup, set_up_data
from ckptrain.training.start import Survey, decide_start, survey_run

MakeConfig = Callable[..., RunConfig]

STEP_2 = "checkpoints/step-00000002"
# Every step has another learning rate, and none repeats one before.
SAVED = ["lora.dropout=0.1", "optimizer.warmup_steps=2", "checkpoint.keep_last=9"]


@attrs.frozen(kw_only=True)
class Step:
    """What a step of this rank was given."""

    rates: frozenset[float]
    """In Adam's parameter groups."""
    samples: tuple[int, ...]


@attrs.frozen(kw_only=True)
class SavedRun:
    """A bfloat16 run of four steps on two data parallel ranks, saved after steps 2 and 4; not to be changed."""

    path: Path
    ranks: list[list[Step]]


def run_watched(config: RunConfig, run_dir: Path) -> list[Step]:
    """Run on this rank, and return what each step was given."""
    steps: list[Step] = []
    train_step = steps_module.train_step

    def watched(model: Any, optimizer: Any, batches: Any, *loss: Any) -> Any:
        rates = frozenset(group["lr"] for group in optimizer.param_groups)
        steps.append(Step(rates=rates, samples=tuple(i for batch in batches for i in batch.sample_ids)))
        return train_step(model, optimizer, batches, *loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module, "train_step", watched)
        run_training(config, run_dir)
    return steps


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a place for what several tests look at."""
    return {"directory": tmp_path_factory.mktemp("kept")}


@pytest.fixture
def saved(tiny_config: MakeConfig, kept: dict[str, Any]) -> SavedRun:
    """Return the run that is resumed here, made once."""
    if "run" not in kept:
        path = kept["directory"] / "run"
        ranks = launch(2, lambda: run_watched(tiny_config(*SAVED, dtype="bfloat16"), path))
        kept["run"] = SavedRun(path=path, ranks=ranks)
    run: SavedRun = kept["run"]
    return run


def as_of_step_2(run: Path, copy: Path) -> Path:
    """Copy a run as it was when step 2 was its last checkpoint."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints/step-00000004")
    return copy


def test_the_base_is_loaded_once_and_before_any_adapter(
    saved: SavedRun, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Of every start; and no checkpoint holds anything of the base, or anything that is no tensor."""
    events: list[str] = []

    def told(event: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            events.append(event)
            return act(*arguments, **options)

        return call

    def on_rank() -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            for module, name in (
                (setting_up, "load_base_weights"),
                (setting_up, "attach_adapters"),
                (setting_up, "wrap_for_training"),
                (restore_module, "load_tensors"),
                (restore_module, "fill_adapters"),
            ):
                patch.setattr(module, name, told(name, getattr(module, name)))
            run_training(tiny_config("train.steps=1", dtype="bfloat16"), tmp_path / "fresh")
            run_training(
                tiny_config("train.steps=1", dtype="bfloat16", adapter=str(saved.path / STEP_2)), tmp_path / "warm"
            )
            run_training(tiny_config(*SAVED, dtype="bfloat16"), as_of_step_2(saved.path, tmp_path / "resume"))
        return events

    [found] = launch(1, on_rank)
    fresh = ["load_base_weights", "attach_adapters", "wrap_for_training"]
    # A warm start fills the adapters and their masters; a resume under another number of ranks reads adapters and
    # optimizer, and the random states are new ones.
    warm = [*fresh, "fill_adapters", "fill_adapters"]
    assert found == [*fresh, *warm, *fresh, "load_tensors", "load_tensors"]
    entries = open_checkpoint(saved.path / STEP_2).manifest.tensors
    assert all(".adapter." in name or entry.group == "rng" for name, entry in entries.items())


@pytest.mark.parametrize(
    ("world_size", "left_out"),
    [(1, ["restore.optimizer=false"]), (2, ["restore.optimizer=false", "restore.rng=false"]), (4, [])],
    ids=["DP=1, no optimizer", "DP=2, no optimizer, no random states", "DP=4"],
)
def test_a_resume_has_the_rates_and_the_samples_of_the_uninterrupted_run(
    world_size: int, left_out: list[str], saved: SavedRun, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Neither depends on what else is restored, nor on how many ranks there were."""
    copy = as_of_step_2(saved.path, tmp_path / "run")
    config = tiny_config(*SAVED, *left_out, dtype="bfloat16")
    ranks = launch(world_size, lambda: run_watched(config, copy))

    def together(ranks: list[list[Step]]) -> list[tuple[set[float], list[int]]]:
        return [
            ({rate for step in steps for rate in step.rates}, sorted(i for step in steps for i in step.samples))
            for steps in zip(*ranks, strict=True)
        ]

    straight = together(saved.ranks)
    assert len({*map(str, straight)}) == 4, "a restart or a shift would show"
    assert all(len(rates) == 1 for rates, _ in straight)
    assert together(ranks) == straight[2:]


@pytest.mark.parametrize("rng", ["true", "false"])
@pytest.mark.parametrize("optimizer", ["true", "false"])
def test_what_is_asked_for_comes_back_bit_for_bit_and_nothing_else(
    optimizer: str, rng: str, saved: SavedRun, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Adapters, moments, bfloat16's float32 masters and each rank's own random states, right after the restore."""
    copy = as_of_step_2(saved.path, tmp_path / "run")
    config = tiny_config(*SAVED, f"restore.optimizer={optimizer}", f"restore.rng={rng}", dtype="bfloat16")
    there = whole_tensors(copy / STEP_2, "adapter", "optimizer", "rng")

    def look(setup: ModelSetup, survey: Survey) -> Tensor:
        mine = rng_state()
        assert is_restored(setup, there, "adapter")
        for kind in (*MOMENTS, MASTER):
            assert is_restored(setup, there, kind) == (optimizer == "true"), kind
        if optimizer == "false":
            assert not any(piece.data.any() for kind in MOMENTS for _, piece in pieces(setup, kind))
            for (_, master), (_, adapter) in zip(pieces(setup, MASTER), pieces(setup, "adapter"), strict=True):
                assert torch.equal(master.data, adapter.data.float())
        assert step_count(setup.optimizer) == (2 if optimizer == "true" else 0)
        [row] = rng_row(mine)["rng.states"].shards
        assert torch.equal(row.data, there["rng.states"][row.offset[0] :][: len(row.data)]) == (rng == "true")
        world.seed_generators(config.train.seed)
        assert not equal(mine, rng_state()), "these numbers were drawn in the first step"
        return next(state for name, state in mine.items() if name.endswith(".default"))

    first, second = launch(2, lambda: restored(config, copy, look))
    assert not torch.equal(first, second), "replicas drop out alike"


def test_a_step_that_learns_nothing_leaves_a_restored_adapter_as_it_is(
    saved: SavedRun, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Masters of the adapter before the restore would overwrite it in the first step, whatever the learning rate."""
    still = ["optimizer.lr=1e-44", "optimizer.schedule=constant"]
    copy = as_of_step_2(saved.path, tmp_path / "resumed")
    resumed = tiny_config("train.steps=3", *still, "restore.optimizer=false", dtype="bfloat16")
    warm = tiny_config("train.steps=1", *still, dtype="bfloat16", adapter=str(saved.path / STEP_2))
    launch(1, lambda: [run_training(resumed, copy), run_training(warm, tmp_path / "warm")])
    expected = whole_tensors(saved.path / STEP_2, "adapter")
    assert all(tensor.any() for tensor in expected.values())
    assert equal(whole_tensors(copy / "checkpoints/step-00000003", "adapter"), expected)
    assert equal(whole_tensors(tmp_path / "warm/checkpoints/step-00000001", "adapter"), expected)


def test_a_run_that_left_its_optimizer_behind_once_is_resumed_with_the_new_one(
    saved: SavedRun, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """From then on Adam's count is not the step: after one step without the old moments it is 1."""
    copy = as_of_step_2(saved.path, tmp_path / "run")
    common = ["lora.dropout=0.1", "optimizer.schedule=constant"]
    without = tiny_config(*common, "train.steps=3", "restore.optimizer=false", dtype="bfloat16")
    config = tiny_config(*common, "train.steps=4", dtype="bfloat16")
    [result] = launch(1, lambda: [run_training(one, copy) for one in (without, config)][-1])
    assert (result.plan.kind, result.plan.step) == ("Resume", 3)
    counts = [open_checkpoint(copy / f"checkpoints/step-0000000{n}").manifest.optimizer["step"] for n in (2, 3, 4)]
    assert counts == [2, 1, 2]


@pytest.mark.parametrize("missing", ["a moment", "a read", "rows"])
def test_a_restore_that_is_not_whole_stops_before_the_first_step(
    missing: str, saved: SavedRun, tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that the checkpoint lacks, one that was not read, a data position that is not that of the step."""
    copy = as_of_step_2(saved.path, tmp_path / "run")
    load_tensors = restore_module.load_tensors
    if missing == "rows":
        change_manifest(copy / STEP_2, lambda document: document.update(consumed_samples=12))
    if missing == "a read":
        monkeypatch.setattr(
            restore_module, "load_tensors", lambda state, path: load_tensors(dict([*state.items()][1:]), path)
        )
    if missing == "a moment":

        def without(start: Any) -> Any:
            manifest = start.checkpoint.manifest
            lost = next(name for name in manifest.tensors if "exp_avg_sq" in name)
            tensors = {name: entry for name, entry in manifest.tensors.items() if name != lost}
            return attrs.evolve(
                start, checkpoint=attrs.evolve(start.checkpoint, manifest=attrs.evolve(manifest, tensors=tensors))
            )

        monkeypatch.setattr(run_module, "decide_start", lambda *found, **how: without(decide_start(*found, **how)))
    expected = {
        "a moment": "exp_avg_sq.* is not in it",
        "a read": "rank 0 read 30 tensors of 32",
        "rows": "the next step begins at row 8, expected 12",
    }
    config = tiny_config(*SAVED, dtype="bfloat16")
    with pytest.raises(RestoreMismatch, match=expected[missing]):
        launch(1, lambda: run_training(config, copy))
    lines = [orjson.loads(line) for line in (copy / "metrics.jsonl").read_bytes().splitlines()]
    assert max(line["step"] for line in lines) == 2


@pytest.mark.parametrize(
    "name",
    [
        "load=/elsewhere",
        "finetune=false",
        "resume_from_checkpoint=/elsewhere",
        "train.resume_from_checkpoint=/elsewhere",
        "no_load_optim=true",
        "restore.no_load_rng=true",
        "override_opt_param_scheduler=true",
    ],
)
def test_no_name_of_another_trainer_is_passed_over_at_a_resume(name: str, saved: SavedRun) -> None:
    """The run would start somewhere else than its user believes."""
    with pytest.raises(ConfigError, match=r"unknown (key|section)"):
        api.resume(saved.path, [name])


@pytest.mark.parametrize("method", ["xavier", "kaiming", "normal"])
def test_initial_adapters_have_the_scale_that_torch_gives_the_whole_matrix(method: str) -> None:
    """Not that of a shard of it; each shard of all layouts is cut out of this one."""
    drawn = draw_matrix(method, (256, 1024), "decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight", seed=1)
    fill = {
        "xavier": torch.nn.init.xavier_normal_,
        "kaiming": partial(torch.nn.init.kaiming_uniform_, a=5**0.5),
        "normal": partial(torch.nn.init.normal_, std=0.2),
    }
    expected = fill[method](torch.empty(256, 1024), generator=torch.Generator().manual_seed(0))
    assert float(drawn.std()) == pytest.approx(float(expected.std()), rel=0.01)


def test_a_tensor_parallel_checkpoint_is_the_same_model_under_any_tensor_parallelism(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Saved by two ranks, each tensor is there whole on 1, 2 and 4, and so is the validation loss."""
    common = ["train.steps=2", "lora.lora_B_init_method=normal"]
    [result, _] = launch(2, lambda: run_training(tiny_config(*common, "parallel.tensor=2"), tmp_path))
    there = whole_tensors(tmp_path / STEP_2, "adapter", "optimizer")

    def look(setup: ModelSetup, survey: Survey) -> tuple[float | None, int]:
        assert all(is_restored(setup, there, kind) for kind in ("adapter", *MOMENTS))
        held = sum(piece.data.numel() for _, piece in pieces(setup, "adapter") if piece.is_main)
        return validation_loss(setup, set_up_data(survey)), held

    for tensor in (1, 2, 4):
        longer = tiny_config(*common, "train.steps=3", f"parallel.tensor={tensor}")
        found = launch(tensor, lambda longer=longer: restored(longer, tmp_path, look))
        assert [loss for loss, _ in found] == pytest.approx([result.val_loss_after] * tensor, abs=1e-6)
        assert sum(held for _, held in found) == sum(
            value.numel() for name, value in there.items() if not name.startswith("optimizer.")
        )


def test_ranks_that_share_a_key_value_head_train_the_model_of_one_process(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """One key-value head on two tensor parallel ranks: the fused layer is cut where no head ends."""
    base = str(write_llama(tmp_path / "base", num_key_value_heads=1))
    common = ["train.steps=3", "checkpoint.every_steps=1", "optimizer.warmup_steps=1", "lora.lora_B_init_method=normal"]
    for count in (1, 2):
        config = tiny_config(*common, f"parallel.tensor={count}", pretrained=base)
        launch(count, lambda config=config, count=count: run_training(config, tmp_path / str(count)))
    first = "checkpoints/step-00000001"  # of the step whose rate is 0, so these are the initial adapters
    assert equal(whole_tensors(tmp_path / "2" / first, "adapter"), whole_tensors(tmp_path / "1" / first, "adapter"))
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), abs=1e-5)


@pytest.mark.parametrize(
    "targets",
    ["['*.layers.3.*','*.layers.0.mlp.*']", "['*.layers.0.*']", "['*.layers.3.*']"],
    ids=["other ones", "the first stage alone", "the last stage alone"],
)
def test_stages_that_hold_different_adapters_go_on_to_the_same_bits(
    targets: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Two pipeline stages whose parameter lists differ in length, down to none at all."""
    config = tiny_config("train.steps=2", "parallel.pipeline=2", f"lora.target_modules={targets}", "lora.dropout=0.1")
    launch(2, lambda: run_straight_and_in_two(config, tmp_path))
    assert_same_end(tmp_path)
    assert open_checkpoint(tmp_path / "straight" / STEP_2).manifest.optimizer == {"step": 2}


def test_experts_go_on_to_the_same_bits(experts: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    """On two data parallel ranks; each expert has moments of its own, and none of them starts anew."""
    config = tiny_config("train.steps=2", "lora.dropout=0.1", pretrained=experts)
    launch(2, lambda: run_straight_and_in_two(config, tmp_path))
    assert_same_end(tmp_path)
    moments = whole_tensors(tmp_path / "straight" / STEP_2, "optimizer")
    of_experts = [tensor for name, tensor in moments.items() if ".experts." in name and ".linear_out." in name]
    assert [tensor.shape[:2] for tensor in of_experts] == [(2, 4)] * 4, "layers, experts"
    assert all(tensor.flatten(2).any(dim=2).all() for tensor in of_experts)


def test_every_optimizer_of_a_chain_is_restored() -> None:
    """megatron-core may step experts by an optimizer of their own, and has an empty one where nothing is to step."""
    dense, expert = (torch.optim.AdamW([torch.zeros(3)]) for _ in range(2))
    chain = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner) for inner in (dense, None, expert)])
    assert len(adam_states(chain)) == 2
    set_step_count(chain, 7)
    assert step_count(chain) == 7
    assert {int(state["step"]) for inner in (dense, expert) for state in inner.state.values()} == {7}
    set_step_count(SimpleNamespace(optimizer=expert), 8)
    with pytest.raises(RuntimeError, match=r"disagree on the number of steps: \[7, 8\]"):
        step_count(chain)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.expert=2"], "parallel.expert=2: expert parallel training has not been compared"),
        (["parallel.tensor=2"], "parallel.tensor=2 with experts needs sequence parallelism"),
        (["parallel.tensor=2", "parallel.sequence=true"], "not for Transformer Engine's; set model.backend=local"),
    ],
)
def test_experts_are_spread_over_no_ranks(
    overrides: list[str], expected: str, experts: str, tiny_config: MakeConfig
) -> None:
    """Their adapters go wrong in silence where expert or tensor parallelism cuts them, so that is refused."""
    with pytest.raises(ConfigError) as caught:
        survey_run(tiny_config(*overrides, pretrained=experts), 2)
    assert any(expected in problem for problem in caught.value.problems)


def test_experts_learn_the_same_in_stages_and_in_other_micro_batches(
    experts: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Neither the padding that stages need nor the cut of a global batch may enter what is learnt."""
    layouts: dict[str, tuple[int, list[str]]] = {
        "alone": (1, []),
        "stages": (2, ["parallel.pipeline=2"]),
        "micro-batches": (1, ["train.micro_batch_size=2"]),
    }
    for name, (count, overrides) in layouts.items():
        config = tiny_config("train.steps=6", "checkpoint.every_steps=9", *overrides, pretrained=experts)
        launch(count, lambda config=config, name=name: run_training(config, tmp_path / name))
    for name in ("stages", "micro-batches"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "alone"), abs=5e-6)
