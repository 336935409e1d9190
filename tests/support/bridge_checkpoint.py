"""LoRA checkpoints as Megatron-Bridge saves them, made by Bridge's own LoRA and megatron-core's own save; on ranks."""

from __future__ import annotations

import hashlib
import queue
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attrs
import torch
import yaml
from torch import Tensor

from ckptrain.config.layout import Layout
from ckptrain.config.load import load_config
from ckptrain.convert.parity import megatron_logits, probe_batch
from ckptrain.megatron.world import close_model_parallel, open_model_parallel, open_process_group

_ITERATION = 10
_ONE_PROCESS = Layout(tensor=1, pipeline=1, context=1, expert=1, data=1)
_AS_SAVED: Mapping[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
_LOCAL_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def lora(**settings: Any) -> Any:
    """Return Megatron-Bridge's LoRA."""
    from megatron.bridge.peft.lora import LoRA

    return LoRA(**{"dim": 4, "alpha": 12, **settings})


def canonical(**settings: Any) -> Any:
    """Return Megatron-Bridge's CanonicalLoRA."""
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA

    return CanonicalLoRA(**{"dim": 4, "alpha": 12, **settings})


@attrs.frozen(kw_only=True)
class Live:
    """What one rank held."""

    parameters: Mapping[str, Tensor]
    """The adapter's, by their names with global numbers of layers and experts."""
    tensor_rank: int
    logits: Tensor | None


@attrs.frozen(kw_only=True)
class Run:
    """A LoRA training under Megatron-Bridge, as far as its checkpoint depends on it."""

    base: Any
    """A small base model, by its path and shape."""
    layout: Layout = _ONE_PROCESS
    peft: Callable[[], Any] = lora
    metadata: Mapping[str, Any] = _AS_SAVED
    """By which megatron-core lays out the state."""
    dtype: str = "float32"
    keeps_extra_state: bool = False
    """As older versions did."""
    spoilt: tuple[str, float] | None = None
    """A part of a parameter's name, and what its first number is to be."""

    @property
    def ranks(self) -> int:
        """How many processes it takes."""
        return self.layout.tensor * self.layout.pipeline * max(self.layout.data, self.layout.expert)

    def save(self, root: Path, *, logits: bool = False) -> Live:
        """Build the adapted model with random adapters, and save it into `root`; on every rank."""
        with open_process_group():
            open_model_parallel(self.layout, seed=1)
            try:
                model, peft = self.adapted_model()
                fill(model, self.spoilt)
                save(self, model, peft, root)
                batch = probe_batch(self.base.shape.vocab_size)
                found = megatron_logits(model, batch, self.base.shape.vocab_size) if logits else None
                return live(model, found)
            finally:
                close_model_parallel()

    def load(self, iteration: Path) -> Live:
        """Build the adapted model, and load it with megatron-core as Megatron-Bridge does; on every rank."""
        from megatron.core import dist_checkpointing

        with open_process_group():
            open_model_parallel(self.layout, seed=1)
            try:
                model, peft = self.adapted_model()
                common = dist_checkpointing.load_common_state_dict(str(iteration))
                content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
                state = {"model": adapter_state(model, peft, content, keeps_extra_state=False)}
                loaded = dist_checkpointing.load(state, str(iteration))
                unexpected = model.load_state_dict(loaded["model"], strict=False).unexpected_keys
                assert (loaded["iteration"], unexpected) == (common["iteration"], [])
                return live(model, None)
            finally:
                close_model_parallel()

    def adapted_model(self) -> tuple[Any, Any]:
        """Return the base under Megatron with Megatron-Bridge's adapters, and what made them."""
        from ckptrain.megatron.model import build_model, load_base_weights, open_bridge

        layout = self.layout
        config = load_config(
            {
                "model": {"pretrained": str(self.base.path), "dtype": self.dtype},
                "data": {"train": str(self.base.path / "config.json"), "sequence_length": 128},  # not read
                "parallel": {"tensor": layout.tensor, "pipeline": layout.pipeline, "expert": layout.expert},
            }
        )
        bridge = open_bridge(self.base.path, self.base.shape.architecture)
        model = build_model(bridge, config, layout, "local")
        load_base_weights(bridge, model)
        peft = self.peft()
        peft(model, training=True)
        peft.set_params_to_save(model)
        return model, peft


@torch.no_grad()
def fill(model: Any, spoilt: tuple[str, float] | None) -> None:
    """Draw every adapter weight from its global name and the tensor parallel rank."""
    rank = _rank()
    for name, parameter in _adapters(model):
        digest = hashlib.sha256(f"{name}/{rank}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        if spoilt is not None and spoilt[0] in name:
            parameter[0, 0] = spoilt[1]


def live(model: Any, logits: Tensor | None) -> Live:
    """Return copies of what this rank holds."""
    return Live(
        parameters={name: parameter.detach().clone() for name, parameter in _adapters(model)},
        tensor_rank=_rank(),
        logits=logits,
    )


def adapter_state(model: Any, peft: Any, metadata: Mapping[str, Any], *, keeps_extra_state: bool) -> dict[str, Any]:
    """Return the sharded state of the adapters, as Megatron-Bridge's apply_peft_adapter_filter_to_state_dict does."""
    from megatron.core import parallel_state

    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = model.sharded_state_dict(metadata={**metadata, **groups})
    return {
        name: value
        for name, value in state.items()
        if peft.adapter_key_filter(name) and (keeps_extra_state or "_extra_state" not in name)
    }


def save(run: Run, model: Any, peft: Any, root: Path) -> None:
    """Save as Megatron-Bridge's save_checkpoint does, in this process: megatron-core's queue would start another."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    filesystem_async._results_queue = queue.Queue()
    directory = root / f"iter_{_ITERATION:07d}"
    if torch.distributed.get_rank() == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    tensor, pipeline = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    state = {
        "checkpoint_version": 3.0,
        "iteration": _ITERATION,
        "model": adapter_state(model, peft, run.metadata, keeps_extra_state=run.keeps_extra_state),
        "rng_state": ShardedObject(
            "rng_state",
            [{"torch_rng_state": torch.get_rng_state()}],
            (run.layout.pipeline, run.layout.tensor),
            (pipeline, tensor),
            replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        ),
    }
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2), group)
    dist_checkpointing.save(
        state, str(directory), strategy, async_strategy="mcore", content_metadata=dict(run.metadata)
    )
    if torch.distributed.get_rank() == 0:
        write_run_config(run, peft, root, directory)
    torch.distributed.barrier()


def write_run_config(run: Run, peft: Any, root: Path, directory: Path) -> None:
    """Write what is beside the tensors: run_config.yaml by Megatron-Bridge's own conversion, and the trackers."""
    from megatron.bridge.training.utils.config_utils import _ConfigContainerBase
    from megatron.training.config.yaml_utils import safe_yaml_representers

    from ckptrain.megatron.model import open_bridge

    @dataclass(kw_only=True)
    class ConfigContainer(_ConfigContainerBase):
        model: Any
        peft: Any
        checkpoint: Any
        tokenizer: Any

    provider = open_bridge(run.base.path, run.base.shape.architecture).to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size = run.layout.tensor
    provider.pipeline_model_parallel_size = run.layout.pipeline
    provider.expert_model_parallel_size = run.layout.expert
    provider.expert_tensor_parallel_size = 1
    config = ConfigContainer(
        model=provider,
        peft=peft,
        checkpoint={"save": str(root), "pretrained_checkpoint": "megatron/base", "ckpt_format": "torch_dist"},
        tokenizer={"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(run.base.path)},
    )
    with safe_yaml_representers():
        (directory / "run_config.yaml").write_text(yaml.safe_dump(config.to_dict(), default_flow_style=False))
    torch.save({"step": torch.tensor(_ITERATION)}, directory / "train_state.pt")
    shutil.copy(directory / "train_state.pt", root / "latest_train_state.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(_ITERATION))


def whole_matrices(ranks: list[Live]) -> dict[str, Tensor]:
    """Put the parameters of all ranks together, as Megatron's layers are cut; those of experts one by one."""
    shards: dict[str, dict[int, Tensor]] = {}
    for rank in ranks:
        for name, parameter in rank.parameters.items():
            shards.setdefault(name, {})[rank.tensor_rank] = parameter
    return {name: _join(name, [parts[rank] for rank in sorted(parts)]) for name, parts in shards.items()}


def _join(name: str, parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if re.search(r"\.linear_(proj|fc2)\.adapter\.linear_in\.", name):
        return torch.cat(parts, dim=1)
    if ".linear_fc1.adapter.linear_out." in name:  # gate and up are cut apart
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(parts)


def _adapters(model: Any) -> list[tuple[str, Any]]:
    from megatron.core import parallel_state

    first_layer = model.decoder.layers[0].layer_number - 1
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    experts = (model.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()

    def named(local: str) -> str:
        name = _LOCAL_LAYER.sub(lambda found: str(int(found[0]) + first_layer), local)
        return _LOCAL_EXPERT.sub(lambda found: str(int(found[0]) + expert_rank * experts), name)

    return [(named(name), parameter) for name, parameter in model.named_parameters() if ".adapter." in name]


def _rank() -> int:
    from megatron.core import parallel_state

    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return rank
