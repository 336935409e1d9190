"""The loss curve is that of an independent implementation: Hugging Face PEFT with torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.launch import launch, run_training
from transformers import AutoModelForCausalLM

from ckptrain.config.base import locate_base
from ckptrain.config.schedule import learning_rate
from ckptrain.config.schema import RunConfig
from ckptrain.convert.to_peft import export_adapter
from ckptrain.data.batches import BatchLayout, BatchSource
from ckptrain.data.dataset import build_datasets
from ckptrain.training.tokens import tokenisation


def train_with_peft(config: RunConfig, base_directory: Path, adapter: Path, trained: Path) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of ten steps, and save what was trained.

    In a process of its own, since a fork cannot inherit autograd's threads.
    """
    base = AutoModelForCausalLM.from_pretrained(base_directory, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        trainable, lr=0.0, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
    )
    how = tokenisation(locate_base(config.model), config.data)
    data = build_datasets(config.data, how, config.train.seed).train
    source = BatchSource(
        dataset=data, seed=config.train.seed, global_batch_size=4, layout=BatchLayout(micro_batch_size=4)
    )
    expected = []
    for step in range(1, 11):
        [batch] = source.micro_batches(step - 1)
        total = torch.zeros(())
        for index in batch.sample_ids:
            sample = data.samples[index]
            ids = torch.from_numpy(sample.token_ids).long()
            logits = model(input_ids=ids[None]).logits[0, :-1]
            learnt = torch.from_numpy(sample.learnt[1:])
            total = total + torch.nn.functional.cross_entropy(logits[learnt], ids[1:][learnt], reduction="sum")
        loss = total / batch.num_learnt
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable, options.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, 10, step)
        optimizer.step()
        expected.append((float(loss.detach()), float(norm)))
    model.save_pretrained(trained)
    return expected


@pytest.mark.parametrize(
    "adapted",
    [
        ("lora.kind=lora", "lora.target_modules=[o_proj, down_proj]"),
        ("lora.kind=canonical", "lora.target_modules=[all-linear]"),
        ("lora.kind=canonical", "lora.target_modules=[q_proj, v_proj, up_proj]"),
        ("lora.kind=dora", "lora.target_modules=[all-linear]"),
        ("lora.kind=dora", "lora.target_modules=[k_proj, o_proj, gate_proj]"),
    ],
    ids=["not fused", "canonical", "parts of fused layers", "DoRA", "DoRA of parts"],
)
def test_losses_and_gradient_norms_follow_peft(
    adapted: tuple[str, ...], tiny_config: Callable[..., RunConfig], tiny_llama: Path, tmp_path: Path
) -> None:
    """Ten steps with clipping, weight decay and a cosine.

    Layers that Megatron does not fuse under any kind, and all layers where each part has an A of its own, as PEFT has
    it, and magnitudes where that is so. In the end what was trained is the same, number for number.
    """
    config = tiny_config(
        "train.steps=10",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=99",
        *adapted,
        "lora.lora_B_init_method=normal",
        "optimizer.warmup_steps=1",
        "optimizer.weight_decay=0.1",
        "optimizer.clip_grad=0.5",
        "train.micro_batch_size=2",
    )
    run_dir = tmp_path / "run"
    launch(1, lambda: run_training(config, run_dir))
    lines = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    found = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]

    # The first step has rate 0, so its checkpoint holds what both start from.
    export_adapter(run_dir / "checkpoints/step-00000001", tmp_path / "start")
    [expected] = launch(1, lambda: train_with_peft(config, tiny_llama, tmp_path / "start", tmp_path / "theirs"))
    export_adapter(run_dir, tmp_path / "ours")

    assert len(found) == 10
    assert max(norm for _, norm in expected) > config.optimizer.clip_grad, "the gradient is clipped"
    assert expected[-1][0] < expected[1][0] - 0.01, "something is learnt"
    for step, ((loss, norm), (expected_loss, expected_norm)) in enumerate(zip(found, expected, strict=True), start=1):
        # Rounding grows from step to step, and where it begins differs from machine to machine.
        assert abs(loss - expected_loss) < (1e-5 if step <= 5 else 1e-4)
        assert abs(norm - expected_norm) < 1e-3 * expected_norm
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():  # weight decay takes 5e-3 of a number
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-3)
