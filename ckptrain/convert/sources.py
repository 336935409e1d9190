"""What adapter does a path mean? A checkpoint of ckptrain, a Hugging Face PEFT adapter, or another trainer's."""

from __future__ import annotations

from pathlib import Path

from ckptrain.checkpoint.resolve import resolve_checkpoint
from ckptrain.config.base import locate_base
from ckptrain.config.schema import ModelConfig
from ckptrain.config.shape import ModelShape, read_shape
from ckptrain.convert.checkpoint_source import CheckpointSource
from ckptrain.convert.megatron_source import looks_like_megatron, open_megatron
from ckptrain.convert.peft_files import PEFT_CONFIG
from ckptrain.convert.peft_source import open_peft
from ckptrain.convert.source import AdapterSource, BaseReference
from ckptrain.errors import ConfigError


def open_source(
    path: Path, *, base: str | None = None, shape: ModelShape | None = None, kind: str = "auto"
) -> AdapterSource:
    """Return the adapter at `path`, after the checks that cost no reading of its matrices.

    Args:
        path: a checkpoint of ckptrain or a run, of which the newest is taken; a directory that PEFT has saved;
            a LoRA checkpoint of Megatron-Bridge or NeMo-RL, or the directory that holds its iterations.
        base: the base model, as `model.pretrained` names it, where the adapter is not to say it.
        shape: the dimensions of the base, where they are known already.
        kind: what it is to be read as, where it can be read as several: lora, canonical, dora, or auto.

    Raises:
        CheckpointNotFound: it is none of these; the message says what it looks like.
        CheckpointDamaged: it is one, and not whole.
        ConfigError: it cannot be used with ckptrain, or with this base, with every reason; or the base is not here.
    """
    path = path.resolve()

    def base_of(said: str | None, revision: str | None) -> tuple[BaseReference, ModelShape]:
        return _base(path, base or said, None if base else revision, shape)

    if (path / PEFT_CONFIG).is_file():
        return open_peft(path, base_of, kind)
    if looks_like_megatron(path):
        return open_megatron(path, base_of, kind)
    return CheckpointSource(checkpoint=resolve_checkpoint(path))


def _base(
    adapter: Path, name: str | None, revision: str | None, shape: ModelShape | None
) -> tuple[BaseReference, ModelShape]:
    """Return the base of an adapter and its dimensions.

    Raises:
        ConfigError: it is not on this machine.
    """
    if name is None and shape is None:
        raise ConfigError(f"cannot use {adapter}", ["it does not say which base it is for: name it with --base"])
    found = BaseReference(pretrained=name or "", name=name or "", revision=revision)
    if shape is not None:
        return found, shape
    try:
        return found, read_shape(locate_base(ModelConfig(pretrained=found.pretrained, revision=revision)))
    except ConfigError as error:
        problems = [*error.problems, "if the base lies elsewhere on this machine, name it with --base"]
        raise ConfigError(f"cannot use {adapter}, whose base is {name}", problems) from error
