"""Megatron-Bridge's own `finetune()` on mock data, as a contestant of bench_gpu.py.

Of what it imports, some is for other kinds of training and may be missing: modules that have any name stand in for it.
The base is the Hugging Face directory that the others load, which `pretrained_checkpoint` takes too.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import itertools
import os
import socket
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from gpu_shapes import ALPHA, CLIP_GRAD, LR, RANK, Shape, memory, reset_memory

_STAND_INS = ("megatron.energon", "pulp", "scipy")


class _AnyName(types.ModuleType):
    """A module in which every name is a class that nobody makes an instance of."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that stand in for missing ones."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        """Return what makes such a module."""
        stands_in = any(name == missing or name.startswith(missing + ".") for missing in _STAND_INS)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if stands_in else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make it."""
        return _AnyName(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: it is whole."""


def enter_bridge() -> None:
    """Import Megatron-Bridge with its training, on a CPU too, for a launch of one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sys.meta_path.append(_StandIns())  # the last to be asked, so only for what is missing
    if not torch.cuda.is_available():
        importlib.import_module("ckptrain.megatron.entered")  # the parts of it that fail without Transformer Engine
        for bare in ("megatron.bridge.models", "megatron.bridge"):
            del sys.modules[bare]
    importlib.import_module("megatron.bridge")
    # The wheel has it built, and what builds it calls a compiler.
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None


def run(shape: Shape, base: str, scratch: Path, micro_batch: int, warm_up_steps: int, steps: int) -> dict[str, Any]:
    """Fine-tune for some steps; returns their seconds, the loss and the most memory."""
    enter_bridge()
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step

    class Watch(Callback):
        """Notes when each step ended, its logging included, and its loss."""

        def __init__(self) -> None:
            self.ended: list[float] = []
            self.loss = 0.0

        def on_train_step_end(self, context: Any) -> None:
            """Note it."""
            if not self.ended:
                reset_memory()
            self.loss = float(next(iter(context.loss_dict.values())).flatten()[0])
            self.ended.append(time.perf_counter())

    watch = Watch()
    finetune(configuration(shape, base, scratch, micro_batch, warm_up_steps + steps), forward_step, callbacks=[watch])
    ended = watch.ended[warm_up_steps - 1 :]
    seconds = [after - before for before, after in itertools.pairwise(ended)]
    settings = {"data": "mock", "between": "ends of steps"}
    return {"step_s": seconds, "loss": watch.loss, **memory(), "settings": settings}


def configuration(shape: Shape, base: str, scratch: Path, micro_batch: int, steps: int) -> Any:
    """Return what Bridge's recipes for LoRA say, with one GPU, full rows and no saves."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training import config as settings
    from megatron.core.datasets import gpt_dataset

    on_gpu = torch.cuda.is_available()
    # Mock ids count up to this, which a tiny vocabulary has not.
    mock: Any = gpt_dataset.MockGPTLowLevelDataset
    mock.max_sequence_length = min(mock.max_sequence_length, shape.vocab_size - 2)
    return settings.ConfigContainer(
        model=provider(AutoBridge.from_hf_pretrained(base), shape, on_gpu=on_gpu),
        train=settings.TrainingConfig(train_iters=steps, global_batch_size=micro_batch, micro_batch_size=micro_batch),
        validation=settings.ValidationConfig(eval_interval=None, eval_iters=0),
        optimizer=settings.OptimizerConfig(
            optimizer="adam",
            lr=LR,
            min_lr=LR,
            weight_decay=0.0,
            clip_grad=CLIP_GRAD,
            bf16=on_gpu,
            params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        ),
        scheduler=settings.SchedulerConfig(
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            weight_decay_incr_style="constant",
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_warmup_init=0.0,
            lr_decay_iters=steps,
            override_opt_param_scheduler=True,
        ),
        ddp=settings.DistributedDataParallelConfig(check_for_nan_in_grad=True, grad_reduce_in_fp32=True),
        dataset=settings.MockGPTDatasetConfig(
            seq_length=shape.sequence_length,
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_dataset_builder_threads=1,
            split="1,0,0",
            data_sharding=True,
            dataloader_type="single",
            num_workers=1,
            skip_getting_attention_mask_from_dataset=True,
            path_to_cache=str(scratch / "bridge-data"),
        ),
        logger=settings.LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=settings.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=shape.vocab_size - 1),
        checkpoint=settings.CheckpointConfig(pretrained_checkpoint=base, save=None, load=None, save_interval=None),
        rng=settings.RNGConfig(seed=1234),
        mixed_precision="bf16_mixed" if on_gpu else None,
        peft=LoRA(dim=RANK, alpha=ALPHA),
    )


def provider(bridge: Any, shape: Shape, *, on_gpu: bool) -> Any:
    """Return Bridge's own settings of the model; without Transformer Engine, megatron-core's layers and no fusions."""
    model = bridge.to_megatron_provider(load_weights=False)
    model.seq_length = shape.sequence_length
    model.gradient_accumulation_fusion = False  # a kernel of Apex
    if not on_gpu:
        model.transformer_layer_spec = importlib.import_module("megatron.bridge.models.gpt_provider").local_layer_spec
        model.bf16, model.params_dtype, model.pipeline_dtype = False, torch.float32, torch.float32
        for name in ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion"):
            setattr(model, name, False)
        model.persist_layer_norm = model.cross_entropy_loss_fusion = False
    return model
