"""A run that starts from a Hugging Face PEFT adapter: the same bits under every layout, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from safetensors.torch import load_file
from support.launch import launch, run_training
from support.peft_adapters import EVERY, change_weights, same_tensors, share_a, write_peft
from tiny import write_chats
from transformers import AutoModelForCausalLM

from ckptrain.config.schema import RunConfig
from ckptrain.convert.to_peft import export_adapter
from ckptrain.errors import ProblemsError, StartRefused
from ckptrain.training.start import decide_start, survey_run

FITTING = ("lora.dim=4", "lora.alpha=12", f"lora.target_modules=[{','.join(EVERY)}]")
# The first step of a warm-up has rate 0: what is saved after it is what the run started from.
ONE_STEP = ("train.steps=4", "checkpoint.every_steps=1", "checkpoint.keep_last=9", "optimizer.warmup_steps=1")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[str, Path]:
    """Return adapters of all linear layers by kind: one A in each fused layer, an A for each part, and magnitudes too."""
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    directory = tmp_path_factory.mktemp("adapters")
    canonical = write_peft(directory / "canonical", base, EVERY)
    fused = change_weights(write_peft(directory / "lora", AutoModelForCausalLM.from_pretrained(tiny_llama)), share_a)
    dora = write_peft(directory / "dora", AutoModelForCausalLM.from_pretrained(tiny_llama), use_dora=True)
    return {"canonical": canonical, "lora": fused, "dora": dora}


@pytest.mark.parametrize("kind", ["canonical", "lora", "dora"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2)])
def test_an_adapter_goes_in_and_comes_out_as_it_was(
    kind: str,
    tensor: int,
    pipeline: int,
    tiny_config: Callable[..., RunConfig],
    adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    """Bit for bit, through a run of every layout; the kind is chosen by the adapter, and a resume keeps it."""
    layout = (f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}")
    config = tiny_config(*FITTING, *ONE_STEP, *layout, adapter=str(adapters[kind]))
    run_dir = tmp_path / "run"
    results = launch(tensor * pipeline, lambda: run_training(config, run_dir))
    assert {result.plan.kind for result in results} == {"WarmStart"}
    assert any(f"lora.kind is auto: {kind}" in note for note in results[0].plan.notes)
    export_adapter(run_dir / "checkpoints/step-00000001", tmp_path / "back")
    assert same_tensors(adapters[kind], tmp_path / "back")
    export_adapter(run_dir, tmp_path / "trained")
    assert not same_tensors(adapters[kind], tmp_path / "trained")

    # Without the adapter, which may be gone by then, and under another layout.
    longer = tiny_config(*FITTING, *ONE_STEP, "train.steps=5", f"parallel.tensor={2 if tensor == 1 else 1}")
    [resumed, *_] = launch(2 if tensor == 1 else 1, lambda: run_training(longer, run_dir))
    assert (resumed.plan.kind, resumed.plan.step) == ("Resume", 4)


@pytest.mark.parametrize("kind", ["canonical", "dora"])
def test_layouts_train_the_same_adapter(
    kind: str, tiny_config: Callable[..., RunConfig], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Losses and gradient norms agree at one process, TP=2, PP=2 and DP=2."""
    curves = []
    for name, (world, overrides) in {
        "one": (1, ()),
        "tensor": (2, ("parallel.tensor=2",)),
        "pipeline": (2, ("parallel.pipeline=2",)),
        "data": (2, ()),
    }.items():
        config = tiny_config(*FITTING, "train.steps=4", *overrides, adapter=str(adapters[kind]))
        launch(world, lambda config=config, name=name: run_training(config, tmp_path / name))
        lines = map(orjson.loads, (tmp_path / name / "metrics.jsonl").open("rb"))
        curves.append([line[key] for line in lines if "loss" in line for key in ("loss", "grad_norm")])
    for one, other in itertools.pairwise(curves):
        assert one == pytest.approx(other, rel=2e-4)


def test_float32_matrices_survive_in_the_masters_of_a_bfloat16_run(
    tiny_config: Callable[..., RunConfig], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """The adapter is rounded to the type that is trained in; the optimizer goes on from what was stored."""
    from support.restored import whole_tensors

    config = tiny_config(*FITTING, *ONE_STEP, dtype="bfloat16", adapter=str(adapters["canonical"]))
    [result] = launch(1, lambda: run_training(config, tmp_path))
    assert any("float32: they are converted to bfloat16" in note for note in result.plan.notes)
    held = whole_tensors(tmp_path / "checkpoints/step-00000001", "optimizer")
    stored = load_file(adapters["canonical"] / "adapter_model.safetensors")
    masters = held[
        "optimizer.state.fp32_param.decoder.layers.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight"
    ]
    for layer, master in enumerate(masters):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight"
        assert master.equal(stored[name])


def test_what_the_config_leaves_open_comes_from_the_adapter(
    adapters: dict[str, Path], tiny_llama: Path, tmp_path: Path
) -> None:
    """Rank, scale, kind and targets; whatever the adapter is, a start that says nothing of them fits it."""
    from ckptrain import api

    write_chats(tmp_path / "train.jsonl", 20)
    said = {
        "model": {"pretrained": str(tiny_llama), "adapter": str(adapters["canonical"]), "dtype": "float32"},
        "data": {"train": str(tmp_path / "train.jsonl"), "sequence_length": 128},
        "train": {"steps": 1},
    }
    survey, start = api.plan(said, run_dir=tmp_path / "run")
    assert start.plan.kind == "WarmStart"
    lora = survey.config.lora
    assert (lora.kind, lora.dim, lora.alpha, len(survey.targets.modules)) == ("canonical", 4, 12, 28)
    launch(1, lambda: api.run(said, run_dir=tmp_path / "run"))
    _, again = api.plan(said, ["train.steps=2"], run_dir=tmp_path / "run")
    assert again.plan.kind == "Resume"
    with pytest.raises(StartRefused, match=r"set lora\.dim=4"):
        api.plan(said, ["lora.dim=8"], run_dir=tmp_path / "other")


def test_a_config_that_contradicts_the_adapter_is_refused_with_what_to_set(
    tiny_config: Callable[..., RunConfig], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Rank, scale, modules: all at once, and nothing is written."""
    config = tiny_config("lora.dim=8", "lora.alpha=32", adapter=str(adapters["canonical"]))
    survey = survey_run(config, 1, tmp_path / "run")
    with pytest.raises(StartRefused) as caught:
        decide_start(survey, tmp_path / "run", read_contents=False)
    told = "\n".join(caught.value.problems)
    for words in ("set lora.dim=4", "set lora.alpha=12"):
        assert words in told
    assert not (tmp_path / "run").exists()


def test_asking_for_the_fused_kind_is_refused_where_it_cannot_hold_the_adapter(
    tiny_config: Callable[..., RunConfig], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """It names the first layer whose parts differ."""
    config = tiny_config(*FITTING, "lora.kind=lora", adapter=str(adapters["canonical"]))
    with pytest.raises(ProblemsError, match=r"have an A of their own; set lora\.kind=canonical, or auto"):
        decide_start(survey_run(config, 1), tmp_path / "run", read_contents=False)


@pytest.mark.parametrize(
    ("adapter", "asked", "words"),
    [
        ("dora", "canonical", r"only DoRA holds; set lora\.kind=dora, or auto"),
        ("dora", "lora", r"only DoRA holds; set lora\.kind=dora, or auto"),
        ("canonical", "dora", r"it has no magnitudes; set lora\.kind=canonical, or auto"),
    ],
)
def test_magnitudes_are_neither_left_out_nor_made_up(
    adapter: str,
    asked: str,
    words: str,
    tiny_config: Callable[..., RunConfig],
    adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    """A kind that contradicts the adapter is refused before anything is loaded."""
    config = tiny_config(*FITTING, f"lora.kind={asked}", adapter=str(adapters[adapter]))
    with pytest.raises(ProblemsError, match=words):
        decide_start(survey_run(config, 1), tmp_path / "run", read_contents=False)
