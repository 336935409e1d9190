"""docs/reference/manifest.md and run-files.md: what a checkpoint and a run directory say, field by field."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reference_fields import cell, code, fields_of, table

import ckptrain
from ckptrain.checkpoint.manifest import ITEM_SIZES, SCHEMA_VERSION, FileDigest, Manifest, TensorEntry
from ckptrain.config.identity import BaseIdentity
from ckptrain.config.layout import Layout
from ckptrain.config.schema import LoraConfig
from ckptrain.config.shape import ModelShape
from ckptrain.lifecycle.facts import DataIdentity, LoraSpec, ProgramParts
from ckptrain.lifecycle.phases import TRANSITIONS
from ckptrain.training.observers import StepRecord

PARTS = (BaseIdentity, ModelShape, DataIdentity, LoraSpec, Layout, FileDigest, TensorEntry, ProgramParts)
MANIFEST_HEAD = f"""# The manifest

`manifest.json` is what a checkpoint says it is. It is written last, so that its presence says that the rest is there.
It is JSON, with a line for each tensor, file and config key; two manifests can be compared by `diff`. It is read
strictly: no unknown or missing key, no duplicate, no NaN, no path out of the directory.

`schema_version` is {SCHEMA_VERSION}. A manifest of an earlier version is read as what it was then. One of a later
version is refused, and left alone.
"""
MANIFEST_TAIL = f"""
## Derived members

| member | |
|---|---|
| `schema_version` | {SCHEMA_VERSION} |
| `layout.world_size` | the product of the sizes of `layout` but `expert` |
| `config_digest` | SHA-256 of `config` in canonical JSON |
| `digest` | SHA-256 of everything before it in canonical JSON: a changed digit is damage like any other |

## Tensors

`adapter/` and `optimizer/` are directories of torch's distributed checkpoint, with tensors only. A weight that every
layer has is one tensor, `[layers, out, in]`. Types are {", ".join(f"`{name}`" for name in ITEM_SIZES)}. Groups:

| group | names | what |
|---|---|---|
| `adapter` | `...adapter.linear_in.weight`, `...adapter.linear_out.weight` | A and B, in the type that was trained |
| `optimizer` | `optimizer.state.exp_avg.NAME`, `optimizer.state.exp_avg_sq.NAME` | AdamW's moments, float32 |
| | and a third, where the adapter is bfloat16 | its float32 master |
| `rng` | `rng.states` | process by process the states of its random generators, in the order of their names |

See it of a checkpoint of yours: `ckptrain inspect CKPT`. Why it is so:
[why the format is as it is](../explanation/format.md).
"""
EVENTS: Mapping[str, str] = {
    "plan": "What this start is, and why: `plan`, `reason`, `notes`, `first_step`, `finetune` (what Megatron would call"
    " it), what the plan restores, `run_id`, `world_size`, `host`, `pid`.",
    "config": "`values`: the config of this start by dotted key, defaults included.",
    "phase": "`from` and `to`, with the facts of that change, such as `step`, `val_loss` or `stall_s`.",
    "data": "What is learnt from (`train`, `validation`): samples, rows, tokens, how full the rows are.",
    "receipt": "What a resume took back, counted in memory: tensors of each process, the optimizer's step, the next"
    " learning rate, the next row, random generators.",
    "warm_start": "The adapter that a WarmStart began from.",
    "startup": "Seconds of each part of the start, and their sum.",
    "first_step": "Seconds of the first step of a start, beside the median of the three after it.",
    "sample": "The sample question with the answer that is wanted and the model's.",
    "saved": "A checkpoint is committed: `step`, `checkpoint`, bytes and seconds.",
    "save_failed": "One could not be written; the one before it is untouched.",
    "save_waited": "Training waited for a save before the next one could begin.",
    "pruned": "Checkpoints that need not be kept were removed.",
    "quarantined": "A damaged checkpoint was moved to `quarantine/`, with its problems.",
    "cleaned": "What saves that were cut short have left was removed.",
    "straggler": "A process has computed for longer than the others, step after step: which, and the seconds of both.",
    "profile": "Where a trace and a table of the profiled steps are (`train.profile`).",
    "stop_requested": "The run was asked to stop, and by what.",
    "error": "The error that ended it: `kind`, `message`.",
}
MEANINGS: Mapping[str, str] = {
    "Manifest.run_id": "Of the run: drawn at its first start, the same in all of its checkpoints.",
    "Manifest.consumed_tokens": "Tokens computed in those steps, padding included.",
    "Manifest.base": "Which base model the adapter belongs to.",
    "Manifest.tokenizer_fingerprint": "Of the tokenizer's files and the chat template; null for an imported adapter.",
    "Manifest.data": "Which samples were learnt from; null for an imported adapter.",
    "Manifest.lora": "What the adapters are.",
    "Manifest.metrics": "What was measured at this step: `loss`, and `val_loss` where a validation fell on it.",
    "Manifest.versions": "Of ckptrain and the libraries that decide numbers and formats.",
    "Manifest.program": "What was trained with that is in no configuration.",
    "BaseIdentity.fingerprint": "SHA-256 of the config and of samples of the weights.",
    "BaseIdentity.name": "As `model.pretrained` named it.",
    "BaseIdentity.revision": "The commit of a Hub model.",
    "BaseIdentity.num_bytes": "Size of the weight files.",
    "ModelShape.architecture": "As config.json names it.",
    "ModelShape.num_layers": "Decoder layers.",
    "ModelShape.hidden_size": "Width of the hidden states.",
    "ModelShape.ffn_hidden_size": "Width of a dense MLP.",
    "ModelShape.num_heads": "Attention heads.",
    "ModelShape.num_kv_heads": "Heads of keys and values.",
    "ModelShape.head_dim": "Width of a head.",
    "ModelShape.vocab_size": "Tokens that the embedding knows.",
    "ModelShape.max_positions": "Positions that the model was made for.",
    "ModelShape.tied_embeddings": "Whether the output layer is the embedding.",
    "ModelShape.gated_mlp": "Whether an MLP has a gate beside its up projection.",
    "ModelShape.qkv_bias": "Whether q, k and v have biases.",
    "ModelShape.qk_norm": "Whether q and k are normed.",
    "ModelShape.num_experts": "Experts of a layer.",
    "ModelShape.moe_ffn_hidden_size": "Width of an expert.",
    "ModelShape.experts_per_token": "Experts that a token is sent to.",
    "DataIdentity.fingerprint": "SHA-256 of the training rows, and of what decides how they become samples.",
    "DataIdentity.validation_fingerprint": "The same of the validation rows; null without any.",
    "DataIdentity.num_samples": "Training samples.",
    "DataIdentity.num_rows": "Rows that they were packed into.",
    "LoraSpec.settings": "The keys of the section `lora`, as they were.",
    "LoraSpec.modules": "Full names of the adapted modules.",
    "Layout.tensor": "Tensor parallel size.",
    "Layout.pipeline": "Pipeline stages.",
    "Layout.context": "Context parallel size.",
    "Layout.expert": "Expert parallel size.",
    "Layout.data": "Data parallel size.",
    "FileDigest.num_bytes": "Its size.",
    "FileDigest.sha256": "64 hexadecimal digits.",
    "TensorEntry.shape": "Of the whole tensor.",
    "TensorEntry.group": "What it is: see below.",
    "StepRecord.step": "Optimizer step, from 1.",
    "StepRecord.lr": "Learning rate of the step.",
    "StepRecord.grad_norm": "Norm of all gradients together, before clipping.",
    "StepRecord.learnt_tokens": "Those of `tokens` that are learnt.",
    "StepRecord.tokens_per_s": "`tokens` by `seconds`.",
    "StepRecord.seconds": "Wall time of the step.",
}
"""Of the fields that their names say enough of to whoever reads the code, and that have no docstring there."""
FILES_HEAD = """# Journal and metrics

All of a run is in its directory; [Architecture](../architecture.md#the-run-directory) lists the files. Two of them are
for reading by programs: JSON, an object a line, in UTF-8.

## metrics.jsonl

Two kinds of lines: one for each `log.every_steps` steps, and `{"step": ..., "val_loss": ...}` for each validation. A
step is there once, however often the run was killed: what a lost stretch wrote is moved by the next start to
`metrics.lost.jsonl`, with `stretch` (its number), `resumed_from` (the step of the checkpoint) and `lost_at`.
TensorBoard, Weights & Biases and MLflow get the same values, as `train/NAME` and `val/loss`.

"""
JOURNAL_HEAD = """
## journal.jsonl

Every line has `time` (UTC, milliseconds) and `event`. Lines are appended and never changed, so the file read from the
top is the story of the run. A crash can tear the last line only; readers pass over it. Other keys may be added.

"""


def manifest_page() -> str:
    """Return the page on the manifest."""
    parts = [MANIFEST_HEAD, "\n## Members\n\n", table(("member", "type", "meaning"), _rows(Manifest))]
    for cls in PARTS:
        parts += [f"\n### {cls.__name__}\n\n{_docstring(cls)}\n\n", table(("key", "type", "meaning"), _rows(cls))]
        if cls is LoraSpec:
            parts.append(f"\n`settings` ({LoraConfig.__name__}) has the keys of [lora](config.md#lora).\n")
    return "".join([*parts, MANIFEST_TAIL])


def files_page() -> str:
    """Return the page on the journal and the metrics."""
    assert EVENTS.keys() == events(), f"not the events that are recorded: {sorted(EVENTS.keys() ^ events())}"
    rows = [(code(name), meaning) for name, meaning in EVENTS.items()]
    phases = [(code(phase.value), ", ".join(code(to.value) for to in after)) for phase, after in TRANSITIONS.items()]
    return "".join(
        [
            FILES_HEAD,
            table(("key", "type", "meaning"), _rows(StepRecord)),
            JOURNAL_HEAD,
            table(("event", "what it tells"), rows),
            "\n### Phases\n\nThe changes that `phase` can tell of:\n\n",
            table(("from", "to"), phases),
        ]
    )


def events() -> set[str]:
    """Return the events that the code records in the journal."""
    found = {"phase"}  # Lifecycle tells it to its listener, which is Journal.record
    for path in (Path(ckptrain.__file__).parent / "training").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "record"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(str(node.args[0].value))
    return found


def _rows(cls: type[Any]) -> list[tuple[str, ...]]:
    fields = [(field, field.meaning or MEANINGS.get(f"{cls.__name__}.{field.name}", "")) for field in fields_of(cls)]
    assert all(meaning for _, meaning in fields), f"{cls.__name__}: say in MEANINGS what each field is"
    return [(code(field.name), _type(field.type), cell(meaning)) for field, meaning in fields]


def _docstring(cls: type[Any]) -> str:
    return "\n".join(line.strip() for line in (cls.__doc__ or "").strip().splitlines())


def _type(annotation: str) -> str:
    """Return a type as JSON has it: there is null, and a tuple is a list."""
    return code(annotation.replace(" | None", " or null").replace("tuple[", "list[").replace("Mapping[", "object["))
