"""Sequence parallelism: tensor parallel processes have a slice of the positions each, and the run is that of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from families import write_family
from support.launch import launch, run_training
from support.models import assert_alike, logits_of_each, packed, packed_logits, with_model
from support.records import apart, assert_same_run, column, exported
from torch import Tensor

from ckptrain.config.schema import RunConfig
from ckptrain.data.batches import MicroBatch
from ckptrain.errors import ConfigError
from ckptrain.lifecycle.journal import read_journal
from ckptrain.training.start import survey_run

if TYPE_CHECKING:
    from ckptrain.training.setup import ModelSetup

LOCAL = "model.backend=local"
RUNS = {
    "TP=2": (2, "lora", ["parallel.tensor=2"]),
    "TP=4, canonical": (4, "canonical", ["parallel.tensor=4"]),
    "TP=2, DoRA": (2, "dora", ["parallel.tensor=2"]),
    "TP=2 x CP=2, DoRA": (4, "dora", ["parallel.tensor=2", "parallel.context=2"]),
    "TP=2 x PP=2, canonical": (4, "canonical", ["parallel.tensor=2", "parallel.pipeline=2"]),
    "TP=2 x DP=2, DoRA": (4, "dora", ["parallel.tensor=2"]),
}
SEQUENCE = "parallel.sequence=true"
# Not one a multiple of two, and their sum is none of four: a slice begins inside of a sequence, and the row is padded.
LENGTHS = (5, 41, 1, 33, 27, 15)
GRADIENTS = 1e-5
"""Largest difference of two gradients as a share of the largest of the weight's, float32."""


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where runs of one process are kept, by the kind of their adapters."""
    return tmp_path_factory.mktemp("one-process")


@pytest.mark.parametrize("name", RUNS)
def test_processes_with_slices_train_the_run_of_one(
    name: str, tiny_config: Callable[..., RunConfig], one_process: Path, tmp_path: Path
) -> None:
    """Losses, gradient norms, validation and what was trained within rounding; the same answers, the same tokens."""
    num_ranks, kind, layout = RUNS[name]
    common = [
        LOCAL,
        f"lora.kind={kind}",
        "model.verify=always",
        "train.steps=6",
        "train.eval_every_steps=2",
        # Adam divides by a gradient that is all rounding where it is nearly nothing.
        "optimizer.lr=1e-3",
        "log.sample_tokens=4",
    ]
    single = one_process / kind
    if not single.exists():
        launch(1, lambda: run_training(tiny_config(*common), single))
    run_dir = tmp_path / "run"
    results = launch(num_ranks, lambda: run_training(tiny_config(*common, *layout, SEQUENCE), run_dir))

    assert_same_run(run_dir, single)
    assert len({result.loss for result in results}) == 1, "every rank knows the same"
    [loaded] = [entry for entry in read_journal(run_dir / "journal.jsonl") if "parity" in entry]
    assert loaded["parity"]["checked"], "and the base computes what Hugging Face computes"


@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "kind"),
    [
        (["parallel.tensor=2", SEQUENCE], ["parallel.tensor=2"], "dora"),
        (["parallel.tensor=2"], ["parallel.tensor=2", SEQUENCE], "canonical"),
        (["parallel.tensor=2", SEQUENCE], [], "lora"),
    ],
    ids=["slices to whole", "whole to slices", "slices to one process"],
)
def test_a_checkpoint_goes_on_with_and_without_slices(
    saved_by: list[str], resumed_by: list[str], kind: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The losses, and in the end the weights, are those of the run that was not moved."""
    common = [LOCAL, f"lora.kind={kind}", "train.steps=6", "checkpoint.every_steps=3", "optimizer.lr=1e-3"]
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    launch(2 if saved_by else 1, lambda: run_training(tiny_config(*common, *saved_by), straight))
    (moved / "checkpoints").mkdir(parents=True)
    name = "checkpoints/step-00000003"
    (straight / name).rename(moved / name)

    config = tiny_config(*common, *resumed_by)
    [*_, result] = launch(2 if resumed_by else 1, lambda: run_training(config, moved))
    assert result.plan.kind == "Resume"
    assert any("parallel.sequence is" in note for note in result.plan.notes)
    assert apart(column(moved, "loss"), column(straight, "loss")[3:]) < 1e-5
    found, expected = exported(moved, tmp_path / "found"), exported(straight, tmp_path / "expected")
    assert max((found[key] - expected[key]).abs().max().item() for key in expected) < 1e-5


@pytest.mark.parametrize("num_ranks", [2, 4], ids=["TP=2", "TP=2 x DP=2"])
def test_experts_are_whole_on_every_process(
    num_ranks: int, experts: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """What they learnt, each process from its slice, is what one process learns; and it goes on there."""
    common = [LOCAL, "train.steps=4", "optimizer.lr=1e-3", "checkpoint.keep_last=9"]
    config = tiny_config(*common, "parallel.tensor=2", SEQUENCE, pretrained=experts)
    single, run_dir, moved = tmp_path / "one", tmp_path / "run", tmp_path / "moved"
    launch(1, lambda: run_training(tiny_config(*common, pretrained=experts), single))
    launch(num_ranks, lambda: run_training(config, run_dir))
    (moved / "checkpoints").mkdir(parents=True)
    name = "checkpoints/step-00000002"
    (run_dir / name).rename(moved / name)
    launch(1, lambda: run_training(tiny_config(*common, pretrained=experts), moved))
    expected = exported(single, tmp_path / "expected")
    for path, steps in ((run_dir, slice(0, 4)), (moved, slice(2, 4))):
        for key in ("loss", "grad_norm"):
            assert apart(column(path, key), column(single, key)[steps]) < 1e-5
        found = exported(path, tmp_path / f"found-{path.name}")
        assert found.keys() == expected.keys()
        assert sum(".experts." in key for key in found) == 2 * 4 * 3 * 2  # layers, experts, projections, A and B
        assert max((found[key] - expected[key]).abs().max().item() for key in expected) < 1e-5


def gradients(batch: MicroBatch, setup: ModelSetup) -> dict[tuple[str, tuple[int, ...]], tuple[Any, ...]]:
    """Take a step; return every piece of a gradient that this process has: by name and offset, its place, its values."""
    from ckptrain.megatron.step import train_step

    train_step(setup.model, setup.optimizer, [batch])
    return {
        (each.name, piece.offset): (piece.shape, piece.place, piece.data.clone())
        for each in setup.adapters
        for piece in each.cut(each.parameter.main_grad)
    }


def whole_gradients(ranks: list[dict[Any, Any]]) -> dict[str, Tensor]:
    """Put the pieces of all processes together; those that several have must be the same."""
    whole: dict[str, Tensor] = {}
    for pieces in ranks:
        for (name, _), (shape, place, data) in pieces.items():
            there = whole.setdefault(name, torch.full(shape, torch.nan))[place]
            assert there.isnan().all() or (there - data).abs().max() <= 1e-6 * data.abs().max(), name
            there.copy_(data)
    return whole


def gradients_apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, as a share of the largest gradient of the weight."""
    assert found.keys() == expected.keys()
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    return max(((found[key] - expected[key]).abs().max() / expected[key].abs().max()).item() for key in expected)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Llama, longrope", "lora"),
        ("Mistral, sliding window", "lora"),
        ("Qwen2", "dora"),  # projections with a bias
        ("Qwen3", "canonical"),  # norms of q and k
        ("Gemma 2", "lora"),
        ("Gemma 3", "dora"),  # norms behind the layers that split their input
        ("Qwen3-MoE", "lora"),
        ("Qwen3-MoE", "canonical"),
        ("GPT-OSS", "lora"),
    ],
)
def test_every_family_computes_and_learns_what_one_process_does(
    name: str, kind: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Hugging Face's logits, and the gradients of one process; experts are whole in each, and see its slice alone."""
    directory, batch = write_family(tmp_path / "model", name), packed(LENGTHS)
    targets = ["lora.target_modules=[linear_qkv, linear_proj]"] if name == "GPT-OSS" else []
    common = [LOCAL, f"lora.kind={kind}", "lora.lora_B_init_method=xavier", *targets]
    split = ["parallel.tensor=2", SEQUENCE]
    of_one = with_model(tiny_config(*common, pretrained=str(directory)), partial(gradients, batch))
    of_two = with_model(tiny_config(*common, *split, pretrained=str(directory)), partial(gradients, batch), 2)
    assert gradients_apart(whole_gradients(of_two), whole_gradients(of_one)) < GRADIENTS
    fresh = tiny_config(LOCAL, *targets, *split, pretrained=str(directory))  # B is zero
    for logits in with_model(fresh, partial(packed_logits, batch), 2):
        assert_alike(logits, logits_of_each(directory, batch))


class _Gathered(torch.autograd.Function):
    """All slices, of whose gradient nothing goes back: so it is with what Transformer Engine's layers gather."""

    @staticmethod
    def forward(_: Any, inputs: Tensor, group: Any) -> Tensor:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        return gather_from_sequence_parallel_region(inputs, group=group)

    @staticmethod
    def backward(_: Any, __: Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


def stand_in_for_transformer_engine(patch: pytest.MonkeyPatch) -> None:
    """Make the local layers behind a norm hand out what they were given, as Transformer Engine's do that fuse it."""
    import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

    # isort: split
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.peft import utils
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from ckptrain.megatron import model

    class HandsOutItsInput(ColumnParallelLinear):
        return_layernorm_output = False
        return_layernorm_output_gathered = False

        @property
        def in_features(self) -> int:
            return self.input_size

        @property
        def out_features(self) -> int:
            return self.output_size_per_partition

        def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
            output, bias = super().forward(inputs, *args, **kwargs)
            gathered = self.return_layernorm_output_gathered
            given = _Gathered.apply(inputs, self.tp_group) if gathered else inputs
            return ((output, given), bias) if self.return_layernorm_output else (output, bias)

    AutoMapping.register_module_type(HandsOutItsInput.__name__, "column")
    made = model.local_layers

    def layers(*of: Any) -> Callable[[Any], Any]:
        def build(provider: Any) -> Any:
            spec = made(*of)(provider)
            spec.submodules.self_attention.submodules.linear_qkv = HandsOutItsInput
            spec.submodules.mlp.keywords["submodules"].linear_fc1 = HandsOutItsInput
            return spec

        return build

    patch.setattr(model, "local_layers", layers)
    never = type("Never", (), {})
    for name, value in {
        "HAVE_TE": True,
        "TELayerNormColumnParallelLinear": HandsOutItsInput,
        "TECL": (HandsOutItsInput,),
        "TERL": (),
        "TELinear": never,
        "version": lambda _: "2.20.2",
    }.items():
        patch.setattr(utils, name, value)


@pytest.mark.parametrize("kind", ["lora", "canonical", "dora"])
def test_no_gradient_is_lost_where_transformer_engine_drops_one(
    kind: str, tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Megatron-Bridge's own choice, to take what its layers gathered, gradients of the layers below are wrong."""
    import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

    # isort: split
    from megatron.bridge.peft.utils import get_adapter_attributes_from_linear

    from ckptrain.megatron import adapters, dora, split_lora

    common = [LOCAL, f"lora.kind={kind}", "lora.lora_B_init_method=xavier"]
    split, act = tiny_config(*common, "parallel.tensor=2", SEQUENCE), partial(gradients, packed(LENGTHS))
    expected = whole_gradients(with_model(tiny_config(*common), act))
    stand_in_for_transformer_engine(monkeypatch)
    assert gradients_apart(whole_gradients(with_model(split, act, 2)), expected) < GRADIENTS

    monkeypatch.setattr(adapters, "SelectedLoRA", partial(_with_bridges_choice, adapters.SelectedLoRA))
    for where in (split_lora, dora):
        monkeypatch.setattr(where, "adapter_attributes", get_adapter_attributes_from_linear)
    assert gradients_apart(whole_gradients(with_model(split, act, 2)), expected) > 0.01


def _with_bridges_choice(made: Any, **settings: Any) -> Any:
    """Make what attaches LoRA as Megatron-Bridge does where nothing is said."""
    return made(**{key: value for key, value in settings.items() if key != "sequence_parallel_input_regather"})


@pytest.mark.parametrize("backend", ["auto", "transformer_engine"])
def test_other_layers_are_refused(backend: str, tiny_config: Callable[..., RunConfig]) -> None:
    """What no test has shown to be the run of one process is not run; the message says what is."""
    split = ["parallel.tensor=2", SEQUENCE]
    with pytest.raises(ConfigError) as caught:
        survey_run(tiny_config(f"model.backend={backend}", *split, "model.dtype=bfloat16"), 2)
    [problem] = caught.value.problems
    assert "set model.backend=local, or parallel.sequence=false" in problem
    assert survey_run(tiny_config(LOCAL, *split), 2).layout.tensor == 2


def test_another_exchange_between_slices_is_refused(tiny_config: Callable[..., RunConfig]) -> None:
    """Gloo has no all-to-all, so no test can show that it is right; without slices nothing is exchanged."""
    exchange = [LOCAL, "parallel.tensor=2", "lora.a2a_experimental=true"]
    with pytest.raises(ConfigError, match=r"set lora\.a2a_experimental=false"):
        survey_run(tiny_config(*exchange, SEQUENCE), 2)
    assert survey_run(tiny_config(*exchange), 2).layout.tensor == 2
