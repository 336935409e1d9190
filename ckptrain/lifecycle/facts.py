"""What a start is decided from: what this run is asked to be, and what lies on disk already.

Plain values, gathered by others (the disk is read in checkpoint, the base in config, the data in data), so that the
decision itself is a pure function and every case of it can be written down in a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ckptrain.config.identity import BaseIdentity
from ckptrain.config.layout import Layout
from ckptrain.config.schema import LoraConfig


@attrs.frozen(kw_only=True)
class DataIdentity:
    """Which samples a run learns from.

    The counts are known once the data has been tokenised, so they are in every checkpoint but not in a plan made
    without a tokenizer. Where both sides have them they are compared: another version may pack rows in another way.
    """

    fingerprint: str
    validation_fingerprint: str | None = None
    num_samples: int | None = None
    num_rows: int | None = None


@attrs.frozen(kw_only=True)
class ProgramParts:
    """What a program brings to a run that no configuration can say; functions are known by the names that it gives."""

    loss: str | None = None
    """Of its loss function; null is cross-entropy."""
    samples: str | None = None
    """Of the function that makes the samples of each step; null is what data.train names."""


@attrs.frozen(kw_only=True)
class LoraSpec:
    """What the adapters are: the LoRA keys as configured, and the full names of the modules that they select."""

    settings: LoraConfig
    modules: tuple[str, ...]


@attrs.frozen(kw_only=True)
class AdapterFacts:
    """What an adapter that a run may start from says about itself, whoever wrote it."""

    path: Path
    form: str
    """What it is, in words: a checkpoint of ckptrain, a Hugging Face PEFT adapter."""
    base_name: str | None
    base_fingerprint: str | None
    """None where only the name of the base is known: then names and shapes are all there is to go by."""
    tokenizer_fingerprint: str | None
    lora: LoraSpec
    """Its settings as far as they make the adapter: kind, dim, alpha; and its modules."""
    dtype: str
    """Of its matrices A and B, as torch names it: bfloat16, float32."""
    notes: tuple[str, ...] = ()
    """What is worth knowing of how it was read."""


@attrs.frozen(kw_only=True)
class CheckpointFacts:
    """What a committed checkpoint of this run says about itself, as far as a start depends on it.

    An adapter that was imported from elsewhere has no tokenizer, no data and no optimizer: it can start a run, and no
    run can be resumed from it.
    """

    path: Path
    run_id: str
    step: int
    consumed_samples: int
    consumed_tokens: int
    base: BaseIdentity
    tokenizer_fingerprint: str | None
    data: DataIdentity | None
    lora: LoraSpec
    layout: Layout
    has_optimizer: bool
    has_rng: bool
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    program: ProgramParts = ProgramParts()


@attrs.frozen(kw_only=True)
class DamageFacts:
    """A checkpoint directory of this run that is not what its manifest says."""

    name: str
    step: int
    problems: tuple[str, ...]


@attrs.frozen(kw_only=True)
class RunFacts:
    """The run as it is asked to be now, and what its directory holds."""

    run_dir: Path
    base: BaseIdentity
    tokenizer_fingerprint: str
    data: DataIdentity
    lora: LoraSpec
    layout: Layout
    checkpoint: CheckpointFacts | None = None
    """The newest committed checkpoint of this run."""
    warm_start: AdapterFacts | None = None
    """What `model.adapter` leads to; needed only where this run has no checkpoint of its own."""
    damaged: tuple[DamageFacts, ...] = ()
    versions: Mapping[str, str] = attrs.field(factory=dict)
    adapter_dtype: str = "float32"
    """Type that adapters are trained in."""
    program: ProgramParts = ProgramParts()
