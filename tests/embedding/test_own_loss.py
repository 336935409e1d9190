"""A loss of the program's own: the same numbers as the one built in, those of PEFT, and never lost on a resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import orjson
import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from support.files import data_files
from support.launch import launch, run_training
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from ckptrain import Loss, Trainer, api
from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.cli.main import cli
from ckptrain.config.base import locate_base
from ckptrain.config.schema import RunConfig
from ckptrain.convert.to_peft import export_adapter
from ckptrain.data.batches import BatchLayout, BatchSource
from ckptrain.data.dataset import build_datasets
from ckptrain.errors import ConfigError, StartRefused
from ckptrain.training.tokens import tokenisation

Make = Callable[..., RunConfig]


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute what is computed anyway."""
    return cross_entropy(logits, labels, reduction="none")


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Smooth the labels by a tenth, written out: torch's own is what it is compared with."""
    logs = logits.log_softmax(-1)
    return -0.9 * logs.gather(1, labels[:, None])[:, 0] - 0.1 * logs.mean(1)


def train(config: RunConfig, run_dir: Path, loss: Loss | None) -> None:
    """Train on this rank to the end."""
    with Trainer(config, run_dir=run_dir, loss=loss) as trainer:
        trainer.run()


def measured(run_dir: Path) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of every step."""
    lines = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.parametrize(
    ("world", "overrides", "is_exact"),
    [
        (1, [], True),
        (2, [], True),
        (2, ["parallel.tensor=2", "parallel.sequence=true", "model.backend=local"], False),
        (2, ["parallel.pipeline=2"], True),
        (2, ["parallel.context=2", "model.backend=local"], True),
    ],
    ids=["alone", "data", "sequence", "pipeline", "context"],
)
def test_the_same_loss_written_by_a_program_gives_the_same_numbers(
    world: int, overrides: list[str], is_exact: bool, tiny_config: Make, tmp_path: Path
) -> None:
    """Losses, gradients and so checkpoints: to the last bit, but where tensor parallelism sums by another kernel."""
    config = tiny_config("train.steps=2", "data.validation=null", *overrides)
    launch(world, lambda: train(config, tmp_path / "own", Loss(plain, name="plain")))
    launch(world, lambda: run_training(config, tmp_path / "built-in"))
    own, built_in = measured(tmp_path / "own"), measured(tmp_path / "built-in")
    assert len(own) == 2
    if is_exact:
        assert own == built_in
        last = "checkpoints/step-00000002"
        assert data_files(tmp_path / "own" / last) == data_files(tmp_path / "built-in" / last)
    for found, expected in zip(own, built_in, strict=True):
        assert found == pytest.approx(expected, rel=2e-5)


def peft_step(config: RunConfig, base: Path, adapter: Path) -> tuple[float, float]:
    """Return (loss, gradient norm) of the second step under PEFT, with the labels smoothed by torch."""
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter), is_trainable=True
    )
    how = tokenisation(locate_base(config.model), config.data)
    data = build_datasets(config.data, how, config.train.seed).train
    source = BatchSource(
        dataset=data, seed=config.train.seed, global_batch_size=4, layout=BatchLayout(micro_batch_size=4)
    )
    [batch] = source.micro_batches(1)
    total = torch.zeros(())
    for index in batch.sample_ids:
        sample = data.samples[index]
        ids = torch.from_numpy(sample.token_ids).long()
        learnt = torch.from_numpy(sample.learnt[1:])
        logits = model(input_ids=ids[None]).logits[0, :-1][learnt]
        total = total + cross_entropy(logits, ids[1:][learnt], reduction="sum", label_smoothing=0.1)
    (total / batch.num_learnt).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(total.detach() / batch.num_learnt), float(torch.nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize(("world", "overrides"), [(1, []), (2, ["parallel.tensor=2"])], ids=["alone", "tensor"])
def test_smoothed_labels_are_those_of_torch_in_peft(
    world: int, overrides: list[str], tiny_config: Make, tiny_llama: Path, tmp_path: Path
) -> None:
    """The second step, whose B is not zero any more, has the loss and the gradient norm of an independent step."""
    config = tiny_config(
        "train.steps=2",
        "data.validation=null",
        "checkpoint.every_steps=1",
        "lora.kind=canonical",
        "optimizer.clip_grad=0",
        *overrides,
    )
    run_dir = tmp_path / "run"
    launch(world, lambda: train(config, run_dir, Loss(smoothed, name="smoothed-0.1")))
    export_adapter(run_dir / "checkpoints/step-00000001", tmp_path / "adapter")
    [expected] = launch(1, lambda: peft_step(config, tiny_llama, tmp_path / "adapter"))
    found = measured(run_dir)[1]
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-3)


def test_a_resume_needs_the_loss_of_the_same_name(tiny_config: Make, tmp_path: Path) -> None:
    """Without it, with another, or with one where there was none: refused, also by a plan; with it the run goes on."""
    config = tiny_config()
    run_dir, other = tmp_path / "run", tmp_path / "other"

    def stop(directory: Path, loss: Loss | None) -> None:
        with Trainer(config, run_dir=directory, loss=loss) as trainer:
            trainer.run_until(2)

    launch(1, lambda: stop(run_dir, Loss(smoothed, name="smoothed-0.1")))
    launch(1, lambda: stop(other, None))
    manifest = open_checkpoint(run_dir / "checkpoints/step-00000002").manifest
    assert manifest.program.loss == "smoothed-0.1"
    shown = CliRunner().invoke(cli, ["inspect", str(run_dir)]).output
    assert "loss 'smoothed-0.1'" in shown
    different = CliRunner().invoke(cli, ["diff", str(other), str(run_dir)]).output
    assert "smoothed-0.1" in different
    with pytest.raises(StartRefused, match=r"loss=ckptrain.Loss\(function, name='smoothed-0.1'\): the command line"):
        api.plan(config, run_dir=run_dir)
    with pytest.raises(StartRefused, match=r"the loss is 'smoothed-0.1' there, .* and 'focal' now"):
        Trainer(config, run_dir=run_dir, loss=Loss(plain, name="focal")).plan()
    with pytest.raises(StartRefused, match="the loss is cross-entropy there and 'focal' now"):
        Trainer(config, run_dir=other, loss=Loss(plain, name="focal")).plan()

    def go_on(directory: Path) -> tuple[str, str, float | None]:
        with Trainer(config, run_dir=directory, loss=Loss(smoothed, name="smoothed-0.1")) as trainer:
            start = trainer.plan()
            assert any("'smoothed-0.1', a function of this program" in note for note in start.plan.notes)
            result = trainer.run()
        return start.plan.kind, result.status, result.loss

    [(kind, status, loss)] = launch(1, partial(go_on, run_dir))
    [(_, _, straight)] = launch(1, partial(go_on, tmp_path / "straight"))
    assert (kind, status) == ("Resume", "finished")
    assert loss == straight


def test_the_validation_loss_stays_cross_entropy(tiny_config: Make, tmp_path: Path) -> None:
    """So that runs with different losses can be compared, and so that a look before training is the same."""
    config = tiny_config("train.steps=1")
    launch(1, lambda: train(config, tmp_path / "own", Loss(smoothed, name="smoothed-0.1")))
    launch(1, lambda: run_training(config, tmp_path / "built-in"))
    first = []
    for name in ("own", "built-in"):
        lines = [orjson.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_bytes().splitlines()]
        first.append(next(line["val_loss"] for line in lines if "val_loss" in line))
    assert first[0] == first[1]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (partial(cross_entropy, reduction="mean"), "neither their sum nor their mean"),
        (lambda logits, labels: plain(logits.detach(), labels), "what it returns has no gradient"),
        (lambda logits, labels: plain(logits - logits.mean(0), labels), "together and .* one by one"),
        (lambda logits, labels: 1.0, "it returned float"),
        (lambda logits: logits, "it raises TypeError"),
    ],
    ids=["mean", "no gradient", "of the others", "no tensor", "other arguments"],
)
def test_what_is_no_loss_of_tokens_is_refused_before_the_first_step(
    function: Callable[..., Tensor], said: str, tiny_config: Make, tmp_path: Path
) -> None:
    """On all ranks, with what it gave and what was expected."""
    config = tiny_config("data.validation=null")
    with pytest.raises(ConfigError, match=said):
        launch(1, lambda: train(config, tmp_path, Loss(function, name="wrong")))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 101])
def test_a_loss_without_a_name_is_refused(name: str) -> None:
    """The name is all that a checkpoint has of it."""
    with pytest.raises(ConfigError, match="expected 1 to 100 characters"):
        Loss(plain, name=name)
