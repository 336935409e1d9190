"""Who saves in bench_checkpoint.py: each saves the state of one LoRA run and restores it, in its own way.

They hold the same numbers. Hugging Face's base is a Phi-3, whose layers are fused as Megatron's are.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, override

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import attrs
import torch
from checkpoint_state import WEIGHT, LoraState, buffer_of, draw
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Phi3Config, Phi3ForCausalLM

from ckptrain.checkpoint.integrity import open_checkpoint, verify_files
from ckptrain.checkpoint.ranks import rank
from ckptrain.checkpoint.sharded import load_tensors
from ckptrain.checkpoint.store import CHECKPOINTS, checkpoint_name
from ckptrain.checkpoint.writer import Saved
from ckptrain.megatron.optimizer import MOMENTS
from ckptrain.megatron.state import AdapterStore
from ckptrain.training.saving import ADAPTER_DIRECTORY, OPTIMIZER_DIRECTORY, Position, Saver
from ckptrain.training.setup import set_up_data
from ckptrain.training.start import Survey

FUSED_NAMES = {
    "self_attention.linear_qkv": "self_attn.qkv_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.linear_fc1": "mlp.gate_up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}
"""Megatron's name of a linear layer, and that of Hugging Face's Phi-3."""


class Contestant(ABC):
    """One way to save, on one rank; all ranks have the same contestants and call them together."""

    name: ClassVar[str]
    keeps: ClassVar[str]
    """What is done for the bytes besides writing them."""
    asynchronous: ClassVar[bool] = False
    asked_every_s: ClassVar[float] = 0.001
    """How often it is asked whether a save has ended."""
    restores: ClassVar[bool] = True
    """Whether its restore is measured: once where two write the same files."""

    def __init__(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        self._directory = directory
        self.tensors = tensors
        """What this rank's saves hold and its restores fill."""
        self.parts: dict[str, float] = {}
        """Seconds of the last save and restore by what they were spent on, where that is known."""

    def place(self, step: int) -> Path:
        """Return the directory of one save, which nothing else is in."""
        return self._directory / str(step)

    def prepare(self, step: int) -> None:
        """Make room for a save, on rank 0; not measured."""
        self.place(step).mkdir(parents=True)

    @abstractmethod
    def begin(self, step: int) -> None:
        """Save, or begin to; returns when the training could go on."""

    def ended(self) -> bool:
        """Tell whether the save is committed, and do what that takes; a training asks after every step."""
        return True

    @abstractmethod
    def restore(self, step: int) -> None:
        """Read a save back into `tensors`."""

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        """Let go of what was opened."""


class Ckptrain(Contestant):
    """What a run of this project calls."""

    name = "ckptrain, in the background"
    keeps = "fsync, SHA-256, read back, rename"
    asynchronous = True
    _stacked = True

    def __init__(self, directory: Path, state: LoraState) -> None:
        super().__init__(directory, state.tensors)
        survey, setup = state.survey, state.setup
        if not self._stacked:
            # As in a model with one more layer that has no adapters: no weight is then one that all layers have.
            store = AdapterStore(setup.adapters, survey.shape.num_layers + 1)
            setup = attrs.evolve(setup, store=store)
        options = attrs.evolve(survey.config.checkpoint, asynchronous=self.asynchronous)
        survey = attrs.evolve(survey, config=attrs.evolve(survey.config, checkpoint=options))
        self._setup = setup
        self._saver = Saver(survey, set_up_data(survey), setup, directory, "benchmark")
        self._saver.__enter__()

    @override
    def place(self, step: int) -> Path:
        return self._directory / CHECKPOINTS / checkpoint_name(step)

    @override
    def prepare(self, step: int) -> None:
        """Do nothing: the store makes its own directories."""

    @override
    def begin(self, step: int) -> None:
        self._saver.begin(Position(step=step, consumed_samples=0, consumed_tokens=0), {})

    @override
    def ended(self) -> bool:
        outcome = self._saver.ended()
        if outcome is not None and not isinstance(outcome, Saved):
            raise outcome.error
        return outcome is not None

    @override
    def restore(self, step: int) -> None:
        checkpoint = open_checkpoint(self.place(step))
        if rank() == 0 and (problems := verify_files(checkpoint)):  # as a start does
            raise RuntimeError(f"{checkpoint.path} is damaged: {problems}")
        store, optimizer = self._setup.store, self._setup.optimizer
        for view, part in ((store.adapters(), ADAPTER_DIRECTORY), (store.optimizer(optimizer), OPTIMIZER_DIRECTORY)):
            buffers = view.to_load()
            load_tensors(buffers, checkpoint.path / part)
            view.take(buffers)

    @override
    def close(self) -> None:
        self._saver.__exit__(None, None, None)


class CkptrainInForeground(Ckptrain):
    """The same, waited for."""

    name = "ckptrain, synchronous"
    asynchronous = False
    restores = False


class CkptrainUnstacked(Ckptrain):
    """The same where no weight can be stored stacked over the layers: the worst case for many tensors."""

    name = "ckptrain, each tensor by itself"
    _stacked = False


class Megatron(Contestant):
    """megatron-core's `dist_checkpointing`, as its training loop calls it."""

    name = "megatron-core"
    keeps = "fsync"

    def __init__(self, directory: Path, state: LoraState) -> None:
        super().__init__(directory, state.tensors)
        self._state = state
        # It starts helper processes, which multiprocessing allows no daemon: what the ranks of this benchmark are.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]

    @override
    def begin(self, step: int) -> None:
        dist_checkpointing.save(self._sharded(), str(self.place(step)))

    @override
    def restore(self, step: int) -> None:
        loaded = dist_checkpointing.load(self._sharded(), str(self.place(step)))
        weights = dict(self._state.model.named_parameters())
        for name, tensor in loaded["model"].items():
            weights[name].data.copy_(tensor)
        for number, moments in self._state.setup.optimizer.state_dict()["state"].items():
            for name in MOMENTS:
                moments[name].copy_(loaded["optimizer"]["state"][number][name])

    def _sharded(self) -> dict[str, Any]:
        whole = self._state.model.sharded_state_dict()
        adapters = {
            name: entry
            for name, entry in whole.items()
            if ".adapter." in name and isinstance(entry, ShardedTensor | ShardedTensorFactory)
        }
        return {"model": adapters, "optimizer": self._state.setup.optimizer.sharded_state_dict(whole)}


class MegatronInBackground(Megatron):
    """Its asynchronous form: it plans, then a fork of the training writes, and the training commits after a step."""

    name = "megatron-core, in the background"
    asynchronous = True
    asked_every_s = 0.01  # the ranks agree on the answer each time, which takes the processor from the save
    restores = False

    def __init__(self, directory: Path, state: LoraState) -> None:
        super().__init__(directory, state)
        self._queue = AsyncCallsQueue()

    @override
    def begin(self, step: int) -> None:
        request = dist_checkpointing.save(
            self._sharded(), str(self.place(step)), async_sharded_save=True, async_strategy="mcore"
        )
        self._queue.schedule_async_request(request)

    @override
    def ended(self) -> bool:
        return bool(self._queue.maybe_finalize_async_calls())

    @override
    def close(self) -> None:
        self._queue.close()


class HuggingFace(Contestant):
    """PEFT's `save_pretrained` and `torch.save` of AdamW's state, on rank 0, which holds all as under DDP."""

    name = "Hugging Face"
    keeps = "nothing: in the page cache"

    def __init__(self, directory: Path, state: LoraState) -> None:
        super().__init__(directory, {})
        if rank() != 0:
            return
        self._model = _peft_model(state.survey)
        weights = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        self._optimizer = torch.optim.AdamW(weights.values())
        held: dict[str, Tensor] = {}
        for name, parameter in weights.items():
            megatron_name = _megatron_name(name)
            moments = {kind: draw(kind, megatron_name, tuple(parameter.shape)) for kind in MOMENTS}
            self._optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
            tensors = {WEIGHT: parameter.data, **moments}
            held |= {f"{kind}.{megatron_name}": tensor for kind, tensor in tensors.items()}
        self.tensors = held

    @override
    def begin(self, step: int) -> None:
        if rank() == 0:
            # Otherwise it looks on the Hub for the base's vocabulary.
            self._model.save_pretrained(self.place(step), save_embedding_layers=False)
            torch.save(self._optimizer.state_dict(), self.place(step) / "optimizer.pt")

    @override
    def restore(self, step: int) -> None:
        if rank() != 0:
            return
        set_peft_model_state_dict(self._model, load_file(self.place(step) / "adapter_model.safetensors"))
        loaded = torch.load(self.place(step) / "optimizer.pt")
        for number, moments in self._optimizer.state_dict()["state"].items():
            for name in MOMENTS:
                moments[name].copy_(loaded["state"][number][name])


def _peft_model(survey: Survey) -> Any:
    """Return a Phi-3 of this shape without memory, whose adapters have some."""
    shape = survey.shape
    with torch.device("meta"):
        base = Phi3ForCausalLM(
            Phi3Config(
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.ffn_hidden_size,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_kv_heads,
                pad_token_id=0,
            )
        )
        targets = [name.rpartition(".")[2] for name in FUSED_NAMES.values()]
        model = get_peft_model(base, LoraConfig(r=survey.config.lora.dim, target_modules=targets))
    for name, parameter in list(model.named_parameters()):
        if parameter.requires_grad:
            drawn = draw(WEIGHT, _megatron_name(name), tuple(parameter.shape))
            module, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(module), own_name, nn.Parameter(drawn))
    return model


def _megatron_name(name: str) -> str:
    """Return Megatron's name of a weight that PEFT calls `base_model.model.model.layers.3.mlp.down_proj.lora_A...`."""
    layer, _, rest = name.removeprefix("base_model.model.model.layers.").partition(".")
    module, _, matrix = rest.removesuffix(".default.weight").rpartition(".")
    fused = next(megatron for megatron, peft in FUSED_NAMES.items() if peft == module)
    own_name = {"lora_A": "linear_in", "lora_B": "linear_out"}[matrix]
    return f"decoder.layers.{layer}.{fused}.adapter.{own_name}.weight"


class Raw(Contestant):
    """The yardstick: every rank writes its bytes to a file, syncs it, and hashes them; a restore reads and hashes."""

    name = "plain write + SHA-256"
    keeps = "fsync, SHA-256"

    def __init__(self, directory: Path, state: LoraState) -> None:
        super().__init__(directory, state.tensors)

    @override
    def begin(self, step: int) -> None:
        started = time.perf_counter()
        with (self.place(step) / f"{rank()}.bin").open("xb") as file:
            for tensor in self.tensors.values():
                file.write(buffer_of(tensor))
            file.flush()
            os.fsync(file.fileno())
        self.parts["write_s"] = time.perf_counter() - started
        self._hash("hash_s")

    @override
    def restore(self, step: int) -> None:
        started = time.perf_counter()
        with (self.place(step) / f"{rank()}.bin").open("rb") as file:
            for tensor in self.tensors.values():
                file.readinto(buffer_of(tensor))
        self.parts["read_s"] = time.perf_counter() - started
        self._hash("hash_s")

    def _hash(self, part: str) -> None:
        started = time.perf_counter()
        digest = hashlib.sha256()
        for tensor in self.tensors.values():
            digest.update(buffer_of(tensor))
        self.parts[part] = time.perf_counter() - started


CONTESTANTS: tuple[type[Contestant], ...] = (
    Raw,
    Ckptrain,
    CkptrainInForeground,
    Megatron,
    MegatronInBackground,
    HuggingFace,
)
