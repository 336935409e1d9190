"""How do Hugging Face Transformers and PEFT train a case? With nothing of ckptrain: data, loss, schedule, optimizer.

The data are read and tokenised here, batches are padded and come from torch's DataLoader, the loss is the model's own,
the schedule is Transformers', and torch clips and steps. Whatever is called here runs in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compare_curves_case import SHARED_A, Case, Curve
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)
from transformers.utils.logging import disable_progress_bar

IGNORED = -100


def write_adapter(case: Case, directory: Path, seed: int, *, random_b: bool = False) -> Path:
    """Let PEFT make an adapter as it does by default (B is zero), or with a random B, and save it."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=case.rank,
        lora_alpha=case.alpha,
        lora_dropout=case.dropout,
        target_modules=list(case.targets),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(_base(case, torch.float32), config)
    if random_b:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    if case.kind == "lora":
        tie(model)
    model.save_pretrained(directory)
    return directory


def tie(model: Any) -> None:
    """Give the projections that Megatron computes as one a single A: one parameter, which all their gradients reach."""
    for layer in model.get_base_model().model.layers:
        for part, first in SHARED_A.items():
            of_attention = hasattr(layer.self_attn, part)
            block = layer.self_attn if of_attention else layer.mlp
            getattr(block, part).lora_A.default.weight = getattr(block, first).lora_A.default.weight


def train_theirs(case: Case, adapter: Path, order: Sequence[int], trained: Path | None = None) -> Curve:
    """Train a case on the lines of its file in their order, and save the adapter where one is asked for."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = _base(case, getattr(torch, case.dtype))
    model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True).to(device)
    if case.kind == "lora":
        tie(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=case.lr, betas=case.betas, eps=case.eps, weight_decay=case.weight_decay)
    if case.schedule == "cosine":
        scheduler = get_cosine_schedule_with_warmup(optimizer, case.warmup_steps, case.steps)
    else:
        scheduler = get_constant_schedule_with_warmup(optimizer, case.warmup_steps)
    collate = partial(_padded, device=device)
    train = DataLoader(_rows(case, case.train), case.samples_per_step, sampler=list(order), collate_fn=collate)
    validation = DataLoader(_rows(case, case.validation), case.samples_per_step, collate_fn=collate)
    curve = Curve(losses=[], grad_norms=[], learning_rates=[], learnt_tokens=[], validation={})
    curve.validation[0] = _validate(model, validation)
    for step, batch in enumerate(train, start=1):
        model.train()
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable, case.clip_grad or float("inf"))
        curve.learning_rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        curve.losses.append(float(loss.detach()))
        curve.grad_norms.append(float(norm))
        curve.learnt_tokens.append(_num_learnt(batch))
        if step % case.eval_every_steps == 0 or step == case.steps:
            curve.validation[step] = _validate(model, validation)
    if trained is not None:
        model.save_pretrained(trained)
    return curve


def num_positions(case: Case) -> int:
    """Return how many positions of the first line of a case's file there are that something learnt comes after."""
    return len(_rows(case, case.train)[0][0]) - 1


@torch.no_grad()
def _validate(model: Any, batches: DataLoader[Any]) -> float:
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        total += float(model(**batch).loss) * _num_learnt(batch)
        count += _num_learnt(batch)
    return total / count


def _base(case: Case, dtype: torch.dtype) -> Any:
    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(case.base, dtype=dtype)


def _rows(case: Case, path: Path) -> list[tuple[list[int], list[int]]]:
    """Return (token ids, labels) of every line of a file."""
    tokenizer = AutoTokenizer.from_pretrained(case.base)
    with path.open(encoding="utf-8") as file:
        return [_row(json.loads(line)["messages"], tokenizer) for line in file]


def _row(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Learn the last message with the token that ends it, and not the white space after that."""
    asked = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip()
    prompt, whole = (tokenizer(given, add_special_tokens=False)["input_ids"] for given in (asked, text))
    if whole[: len(prompt)] != prompt:
        raise ValueError(f"the tokens of a question change when its answer follows: {asked!r}")
    return whole, [IGNORED] * len(prompt) + whole[len(prompt) :]


def _padded(rows: list[tuple[list[int], list[int]]], device: str) -> dict[str, Tensor]:
    length = max(len(ids) for ids, _ in rows)
    filled = {
        "input_ids": [ids + [0] * (length - len(ids)) for ids, _ in rows],
        "attention_mask": [[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in rows],
        "labels": [labels + [IGNORED] * (length - len(labels)) for _, labels in rows],
    }
    return {name: torch.tensor(values, device=device) for name, values in filled.items()}


def _num_learnt(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] != IGNORED).sum())
