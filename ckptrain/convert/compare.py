"""Does an adapter do under Hugging Face what it did under Megatron? Logits of a probe on both, and of the base alone.

Names and shapes can be right and the numbers wrong: rows of another order, an alpha that was lost, keys that PEFT
passes over with a warning, a layer that it does not adapt. Only a forward pass tells.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from ckptrain.checkpoint.dcp_metadata import ADAPTER_DIRECTORY
from ckptrain.checkpoint.sharded import load_tensors
from ckptrain.config.layout import Layout
from ckptrain.config.load import load_config
from ckptrain.config.schema import RunConfig
from ckptrain.config.targets import Targets
from ckptrain.convert.checkpoint_source import CheckpointSource
from ckptrain.convert.gate import Gate
from ckptrain.convert.parity import huggingface_logits, load_huggingface, megatron_logits, probe_batch
from ckptrain.convert.source import AdapterSource
from ckptrain.data.batches import MicroBatch
from ckptrain.errors import AdapterMismatch

if TYPE_CHECKING:
    from ckptrain.megatron.state import StateView

# Largest difference of two logits as a share of the largest one, by the type of the weights. Both sides compute in
# float32 and differ by the order of their sums (4e-7 was the most that was seen), and by what weights were rounded to.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
# A difference of logits below this share of the largest one is rounding, not an effect.
_ROUNDING = 1e-6
_ONE_PROCESS = Layout(tensor=1, pipeline=1, context=1, expert=1, data=1)


def check_adapter(
    source: AdapterSource, base: Path, adapter: Path, *, rounded_to: torch.dtype, has_effect: bool
) -> Gate:
    """Compare an adapter under Megatron with the PEFT directory that was made of it.

    Args:
        source: what was exported.
        base: the base as a Hugging Face directory.
        adapter: the PEFT directory.
        rounded_to: the type that its weights have lost digits to; float32 where none were lost.
        has_effect: whether the adapter's matrices are such that logits must change.

    Raises:
        AdapterMismatch: PEFT dropped a key, the logits differ, or there is no effect where there should be one.
    """
    batch = probe_batch(source.shape.vocab_size)
    alone, adapted = peft_logits(base, adapter, batch)
    return _judge(source, base, batch, alone, adapted, dtype=rounded_to, has_effect=has_effect)


def check_merged(source: AdapterSource, base: Path, merged: Path, *, dtype: torch.dtype, has_effect: bool) -> Gate:
    """Compare an adapter under Megatron with the model that it was merged into, as `check_adapter` does.

    Merged weights are rounded to the base's type, once; in 16 bits that alone moves logits by a per cent or so.

    Raises:
        AdapterMismatch: the logits differ by more than that, or there is no effect where there should be one.
    """
    batch = probe_batch(source.shape.vocab_size)
    cpu = torch.device("cpu")
    alone = huggingface_logits(load_huggingface(base, torch.float32, cpu), batch)
    adapted = huggingface_logits(load_huggingface(merged, torch.float32, cpu), batch)
    return _judge(source, base, batch, alone, adapted, dtype=dtype, has_effect=has_effect)


def peft_logits(base: Path, adapter: Path, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the logits of the base alone and with an adapter, [tokens, vocab] each.

    Raises:
        AdapterMismatch: PEFT did not take every key of the adapter, or has tensors that the adapter lacks.
    """
    from peft import PeftConfig, PeftModel

    model = load_huggingface(base, torch.float32, torch.device("cpu"))
    alone = huggingface_logits(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is looked at below
        adapted = PeftModel(model, PeftConfig.from_pretrained(str(adapter)), "default")
        loaded = adapted.load_adapter(str(adapter), "default")
    problems = [f"{key} was dropped by PEFT" for key in loaded.unexpected_keys]
    problems += [f"{key} is a tensor that PEFT has and the adapter lacks" for key in loaded.missing_keys]
    if problems:
        raise AdapterMismatch("the adapter does not fit the base under PEFT", problems[:20])
    return alone, huggingface_logits(adapted, batch)


def _judge(
    source: AdapterSource,
    base: Path,
    batch: MicroBatch,
    alone: Tensor,
    adapted: Tensor,
    *,
    dtype: torch.dtype,
    has_effect: bool,
) -> Gate:
    trained = adapted_megatron_logits(source, base, batch)
    largest = max(trained.abs().max().item(), 1.0)
    gate = Gate(
        difference=(trained - adapted).abs().max().item(),
        allowed=TOLERANCE[dtype] * largest,
        effect=(adapted - alone).abs().max().item(),
        tokens=batch.tokens.shape[1],
    )
    problems = []
    if not gate.difference <= gate.allowed:  # a NaN is a mismatch too
        problems.append(
            f"logits of a probe of {gate.tokens} tokens differ by {gate.difference:.3g} from those under Megatron,"
            f" expected at most {gate.allowed:.3g}"
        )
    if has_effect and not gate.effect > _ROUNDING * largest:
        problems.append(
            f"it changes the base's logits by {gate.effect:.3g}, which is nothing, and its matrices are not zero"
        )
    if problems:
        raise AdapterMismatch(
            f"what was made of {source.path} does not do under Hugging Face what it does under Megatron", problems
        )
    return gate


def adapted_megatron_logits(source: AdapterSource, base: Path, batch: MicroBatch) -> Tensor:
    """Return the logits of the base with an adapter under Megatron, [tokens, vocab], in this process."""
    from ckptrain.megatron.adapters import adapter_parameters, attach_adapters, fill_adapters
    from ckptrain.megatron.model import build_model, load_base_weights, open_bridge
    from ckptrain.megatron.state import AdapterStore

    shape, lora = source.shape, source.facts.lora
    with _one_process():
        bridge = open_bridge(base, shape.architecture)
        model = build_model(bridge, _probe_config(base), _ONE_PROCESS, "local")
        load_base_weights(bridge, model)
        attach_adapters(model, attrs.evolve(lora.settings, dropout=0.0), Targets(modules=lora.modules))
        adapters = adapter_parameters(model)
        if isinstance(source, CheckpointSource):
            # As a resume reads them: what is compared shares nothing with what was exported but the files.
            _restore(AdapterStore(adapters, shape.num_layers).adapters(), source)
        else:
            with source.layers() as read:
                fill_adapters(adapters, read)
        return megatron_logits(model, batch, shape.vocab_size)


def _restore(view: StateView, source: CheckpointSource) -> None:
    """Read a checkpoint's adapter through DCP.

    Raises:
        AdapterMismatch: a tensor of the model is not in it whole.
    """
    buffers = view.to_load()
    load_tensors(buffers, source.path / ADAPTER_DIRECTORY, alone=True)
    if (filled := view.take(buffers)) != len(view.shapes):
        raise AdapterMismatch(
            f"cannot put {source.path} under Megatron",
            [f"{filled} of {len(view.shapes)} adapter tensors were read, the others hold NaN"],
        )


def _probe_config(base: Path) -> RunConfig:
    """Return a configuration that builds the base in float32 on one process, whatever it was trained by."""
    model = {"pretrained": str(base), "dtype": "float32"}
    return load_config({"model": model, "data": {"train": ""}}, check_inputs=False)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    from ckptrain.megatron.world import close_model_parallel, open_model_parallel, open_process_group

    with open_process_group():
        open_model_parallel(_ONE_PROCESS, seed=0)
        try:
            yield
        finally:
            close_model_parallel()
