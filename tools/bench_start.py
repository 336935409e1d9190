"""uv run python tools/bench_start.py --json OUT

What a start costs: the base's weights from the page cache into a model under Megatron, beside a plain copy of them and
beside Megatron-Bridge's own loader with the check that it needs (every parameter NaN before, and looked at after); and
the parts of whole starts, as the runs journal them.

The contestants take turns in one process, on one model; rounds after the first are told, since the first writes to
memory that the kernel has yet to give. Loading is in seconds of the processor, which do not count those of others.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny import write_chats, write_llama

from ckptrain.lifecycle.journal import read_journal

PLAIN, OURS, THEIRS = "plain copy", "ckptrain", "Megatron-Bridge"
_SHAPES = {
    "tiny": {},
    "1B": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}


def write_base(directory: Path, shape: str, dtype: str) -> Path:
    """Write a random Llama."""
    import torch

    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return write_llama(directory, **_SHAPES[shape])
    finally:
        torch.set_default_dtype(default)


def settings(base: Path, data: Path, dtype: str) -> dict[str, Any]:
    """Return the configuration of a short run."""
    return {
        "model": {"pretrained": str(base), "dtype": dtype, "verify": "never"},
        "data": {"train": str(data), "sequence_length": 128},
        "train": {"steps": 1, "global_batch_size": 1},
        "log": {"tensorboard": False},
    }


def measure_loading(config: dict[str, Any], rounds: int, threads: int) -> dict[str, Any]:
    """Load a base into one model again and again; returns bytes, and seconds of every contestant's rounds."""
    import torch

    from ckptrain.config.load import load_config
    from ckptrain.megatron.model import build_model, load_base_weights, open_bridge, torch_dtype
    from ckptrain.megatron.platform import choose_backend, enter_platform
    from ckptrain.megatron.world import open_process_group
    from ckptrain.training.setup import model_parallel
    from ckptrain.training.start import survey_run

    torch.set_num_threads(threads)
    loaded = load_config(config)
    survey, dtype = survey_run(loaded, 1), torch_dtype(loaded.model.dtype)
    directory = survey.base.path
    assert directory is not None
    with open_process_group(), model_parallel(survey):
        bridge = open_bridge(directory, survey.shape.architecture)
        backend, _ = choose_backend(loaded.model.backend, enter_platform(), loaded.model.dtype)
        model = build_model(bridge, loaded, survey.layout, backend)
        contestants: dict[str, Callable[[], object]] = {
            PLAIN: lambda: copy_plainly(directory, dtype, enter_platform().device),
            THEIRS: lambda: load_as_bridge_does(bridge, model),
            OURS: lambda: load_base_weights(bridge, model),
        }
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds + 1):
            for name, load in contestants.items():
                started = time.process_time()
                load()
                times[name].append(time.process_time() - started)
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return {"num_bytes": num_bytes, **{name: values[1:] for name, values in times.items()}}


def copy_plainly(directory: Path, dtype: Any, device: Any) -> dict[str, Any]:
    """Read every tensor of the safetensors files into memory of its own: no loader can do less."""
    from safetensors import safe_open

    tensors = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).to(device, dtype, copy=True) for name in file.keys()}  # noqa: SIM118
    return tensors


def load_as_bridge_does(bridge: Any, model: Any) -> None:
    """Load with Megatron-Bridge, and find out whether every parameter was filled, which it does not tell."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        bridge.load_hf_weights([model])
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def measure_starts(config: dict[str, Any], starts: int, threads: int) -> list[dict[str, Any]]:
    """Start whole runs in processes of their own; returns what each journaled of its start."""
    entries = []
    for _ in range(starts):
        with tempfile.TemporaryDirectory() as name:
            path, run_dir = Path(name) / "run.json", Path(name) / "run"
            path.write_text(json.dumps(config))
            command = [sys.executable, "-m", "ckptrain.cli", "run", str(path), "--run-dir", str(run_dir)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
            entries += [entry for entry in read_journal(run_dir / "journal.jsonl") if entry["event"] == "startup"]
    return entries


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="1B")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="of every contestant, after one that is not told")
    parser.add_argument("--starts", type=int, default=3, help="whole runs to start")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where the model lies meanwhile, some GB")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        base = write_base(Path(name) / "base", asked.shape, asked.dtype)
        data = write_chats(Path(name) / "train.jsonl", 16)
        config = settings(base, data, asked.dtype)
        starts = measure_starts(config, asked.starts, asked.threads)
        loading = measure_loading(config, asked.rounds, asked.threads)
    size = loading.pop("num_bytes")
    medians = {contestant: statistics.median(seconds) for contestant, seconds in loading.items()}
    print(
        f"\nWeights of {size / 1e9:.2f} GB ({asked.shape}, {asked.dtype}, {asked.threads} threads), processor seconds\n"
    )
    print(f"{'':18}{'s':>8}{'GB/s':>8}{'plain = 1':>11}")
    for contestant, seconds in medians.items():
        print(f"{contestant:18}{seconds:8.2f}{size / seconds / 1e9:8.2f}{seconds / medians[PLAIN]:11.2f}")
    if starts:
        print(f"\nFrom the command to the first step, wall seconds, median of {len(starts)}\n")
        for part in starts[0]["seconds"]:
            print(f"{part:18}{statistics.median(entry['seconds'][part] for entry in starts):8.2f}")
        print(f"{'sum':18}{statistics.median(entry['total_s'] for entry in starts):8.2f}")
    if asked.json:
        report = {
            "shape": asked.shape,
            "dtype": asked.dtype,
            "threads": asked.threads,
            "num_bytes": size,
            "loading_process_s": loading,
            "starts": [{"seconds": entry["seconds"], "total_s": entry["total_s"]} for entry in starts],
        }
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
