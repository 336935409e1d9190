"""What training saves, exported without Megatron, is what Megatron-Bridge exports from the live model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.launch import launch
from torch import Tensor

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.config.layout import Layout
from ckptrain.config.load import load_config, unflatten
from ckptrain.config.targets import Targets
from ckptrain.convert.parity import huggingface_logits, megatron_logits, probe_batch
from ckptrain.convert.to_peft import export_adapter
from ckptrain.megatron.world import close_model_parallel, open_model_parallel, open_process_group

BaseOf = Callable[[str], Any]
Save = Callable[..., CommittedCheckpoint]

_ONE_PROCESS = Layout(tensor=1, pipeline=1, context=1, expert=1, data=1)
_PREFIX = "base_model.model."


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_export_equals_bridge(base_of: BaseOf, save: Save, tmp_path: Path, family: str) -> None:
    """Names and bits are those of Bridge's export; PEFT's logits are those of the adapted Megatron model."""
    base = base_of(family)
    launch(1, lambda: compare_with_bridge(base, save, tmp_path))


def compare_with_bridge(base: Any, save: Save, tmp_path: Path) -> None:
    """Do so on a rank of its own."""
    with open_process_group():
        open_model_parallel(_ONE_PROCESS, seed=1)
        try:
            compare(base, save, tmp_path)
        finally:
            close_model_parallel()


def compare(base: Any, save: Save, tmp_path: Path) -> None:
    """Export both ways and compare."""
    from peft import PeftModel

    from ckptrain.megatron.adapters import adapter_parameters, attach_adapters
    from ckptrain.megatron.model import build_model, load_base_weights, open_bridge
    from ckptrain.megatron.state import AdapterStore, HostCopy

    manifest = save(base, step=1).manifest  # for its configuration and modules
    config = load_config(unflatten(manifest.config))
    bridge = open_bridge(base.path, base.shape.architecture)
    model = build_model(bridge, config, _ONE_PROCESS, "local")
    load_base_weights(bridge, model)
    attach_adapters(model, config.lora, Targets(modules=manifest.lora.modules))
    adapters = adapter_parameters(model)
    for adapter in adapters:
        torch.nn.init.normal_(adapter.parameter, std=0.1)

    copy = HostCopy(AdapterStore(adapters, base.shape.num_layers).adapters())
    copy.take()()
    checkpoint = save(base, step=2, change=lambda _: copy.state)
    export_adapter(checkpoint.path, tmp_path / "out")

    ours = load_file(tmp_path / "out" / "adapter_model.safetensors")
    theirs: dict[str, Tensor] = {
        _PREFIX + weight.param_name: weight.weight.detach()
        for weight in bridge.export_adapter_weights([model], show_progress=False)
    }
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []

    batch = probe_batch(base.shape.vocab_size)
    adapted = huggingface_logits(PeftModel.from_pretrained(base.load(), tmp_path / "out"), batch)
    largest = adapted.abs().max().item()
    assert (adapted - huggingface_logits(base.load(), batch)).abs().max().item() > 1e-2 * largest
    torch.testing.assert_close(
        megatron_logits(model, batch, base.shape.vocab_size), adapted, rtol=0.0, atol=1e-5 * largest
    )
