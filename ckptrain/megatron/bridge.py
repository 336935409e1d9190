"""Import what is needed of Megatron-Bridge: conversion for one architecture, and its LoRA, with or without TE.

`import megatron.bridge` imports every model family it knows. Here the two packages on the way are entered as bare
packages (a `__path__` and nothing else), so that only the modules asked for are imported: 3 s become 1 s, and what does
not install on an ordinary machine is never touched.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ckptrain.megatron.platform import enter_platform, has_transformer_engine

_torch_compile = torch.compile

# Hugging Face architecture -> the module of Megatron-Bridge that registers its conversion; others are registered here.
_FAMILY_MODULES = {
    "LlamaForCausalLM": "megatron.bridge.models.llama.llama_bridge",
    "MistralForCausalLM": "megatron.bridge.models.mistral.mistral_bridge",
    "Qwen2ForCausalLM": "megatron.bridge.models.qwen.qwen2_bridge",
    "Qwen3ForCausalLM": "megatron.bridge.models.qwen.qwen3_bridge",
    "Qwen3MoeForCausalLM": "megatron.bridge.models.qwen.qwen3_moe_bridge",
    "GptOssForCausalLM": "megatron.bridge.models.gpt_oss.gpt_oss_bridge",
}
_OWN_FAMILIES = "ckptrain.megatron.families"


def _enter_bare_package(name: str) -> None:
    """Put a package into sys.modules without running its `__init__`."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{name} is not an installed package")
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, package)


@contextlib.contextmanager
def _stand_in_transformer_engine() -> Iterator[None]:
    """Give `import transformer_engine.pytorch` something to find.

    Megatron-Bridge's lora_layers imports it unconditionally and uses three names in isinstance checks only. The
    stand-ins are taken out again, or other modules would believe that Transformer Engine is there.
    """
    never = type("NeverInstantiated", (), {})
    pytorch: Any = types.ModuleType("transformer_engine.pytorch")
    pytorch.Linear = pytorch.LayerNormLinear = never
    pytorch.ops = types.SimpleNamespace(Sequential=never)
    package: Any = types.ModuleType("transformer_engine")
    package.pytorch = pytorch
    names = {"transformer_engine": package, "transformer_engine.pytorch": pytorch}
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(hidden)


def _compiled_when_called(model: Any = None, **options: Any) -> Any:
    """Take the place of torch.compile as a decorator: what is never called is never compiled."""
    if model is None:
        return functools.partial(_compiled_when_called, **options)
    compiled = functools.cache(lambda: _torch_compile(model, **options))

    @functools.wraps(model)
    def call(*given: Any, **named: Any) -> Any:
        return compiled()(*given, **named)

    return call


@contextlib.contextmanager
def _compilers_left_alone() -> Iterator[None]:
    """Keep megatron-core's decorators from importing torch's compiler, a seventh of all that is imported for a run.

    Thirty functions of it are decorated with torch.compile, which imports the compiler at once; most are never called.
    """
    torch.compile = _compiled_when_called
    try:
        yield
    finally:
        torch.compile = _torch_compile


@functools.cache
def enter_megatron() -> None:
    """Import megatron-core and prepare Megatron-Bridge's packages and its LoRA, once in a process."""
    with warnings.catch_warnings(), _compilers_left_alone():
        # Megatron warns of every optional package that it does without, and lists its buffers and settings.
        warnings.simplefilter("ignore")
        enter_platform()  # imports a part of megatron-core where there is no GPU
        logging.getLogger("megatron").setLevel(logging.ERROR)
        importlib.import_module("megatron.core")
        _enter_bare_package("megatron.bridge")
        # This module sets its own level and handler; what it would tell is that Transformer Engine is absent.
        importlib.import_module("megatron.bridge.utils.import_utils").logger.setLevel(logging.ERROR)
        if has_transformer_engine():
            importlib.import_module("megatron.bridge.peft.lora_layers")
        else:
            with _stand_in_transformer_engine():
                importlib.import_module("megatron.bridge.peft.lora_layers")
            # It finds Transformer Engine's class names, bound to None, and would pass them to isinstance.
            for name, flag in (("utils", "HAVE_TE"), ("module_matcher", "HAVE_TE_COL_LINEAR")):
                setattr(importlib.import_module(f"megatron.bridge.peft.{name}"), flag, False)
        importlib.import_module("megatron.bridge.peft.lora")
        _enter_bare_package("megatron.bridge.models")
        importlib.import_module("megatron.bridge.models.conversion.auto_bridge")


def auto_bridge(architecture: str) -> Any:
    """Return Megatron-Bridge's AutoBridge class, with the conversion of one Hugging Face architecture registered."""
    enter_megatron()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(_OWN_FAMILIES).register()
        if architecture in _FAMILY_MODULES:
            importlib.import_module(_FAMILY_MODULES[architecture])
    return importlib.import_module("megatron.bridge.models.conversion.auto_bridge").AutoBridge
