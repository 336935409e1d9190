"""tools/bench_gpu.py measures what it says, as far as a CPU can tell: who runs, what is counted, what is kept."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import bench_gpu
import gpu_contestants
import pytest
import torch
from bench_gpu import ask, main, parser, specs
from forked import launch
from gpu_contestants import CONTESTANTS, ERRANDS, OVERRIDES, Spec, measure, packed_chats, run_config
from gpu_shapes import PROJECTIONS, RANK, SHAPES, random_tokens, write_texts
from gpu_tables import goals, newest, tflops

from ckptrain.config.base import locate_base
from ckptrain.config.load import load_config
from ckptrain.data.dataset import Dataset, build_datasets
from ckptrain.training.tokens import tokenisation


def in_fork(command: list[str], answers: Path, limit_s: float, *, env: dict[str, str], cwd: Path) -> Iterator[Any]:
    """Do what a process of the benchmark does, in a fork that need not import anything."""

    def act() -> list[Any]:
        os.environ |= env
        spec = Spec(**json.loads(command[2]))
        return list({**CONTESTANTS, **ERRANDS}[spec.contestant](spec))

    yield from launch(1, act)[0]


def test_contestants_train_the_same_task_and_all_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights know nothing of random letters: every loss is about the logarithm of the vocabulary's size."""
    monkeypatch.setattr(bench_gpu, "ask", in_fork)
    out = tmp_path / "out.json"
    few = ["--models", "tiny", "--steps", "2", "--warm-up-steps", "1", "--directory", str(tmp_path), "--json", str(out)]
    asked = [*few, "--micro-batches", "1", "2", "--save-every", "1"]
    assert main([*asked, "--contestants", "hf", "megatron", "ckptrain"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["contestant"] for row in rows} == {"hf", "megatron", "ckptrain"}
    (saving,) = (row for row in rows if "save_every" in row)
    assert saving["tokens_per_s_with"] > 0 < saving["tokens_per_s_without"]
    for row in (row for row in rows if row is not saving):
        rates = [row["micro_batch"] * 128 / seconds for seconds in row["step_s"]]
        assert row["tokens_per_s"] == pytest.approx(statistics.median(rates))
        assert row["loss"] == pytest.approx(math.log(SHAPES["tiny"].vocab_size), abs=0.1)

    assert main([*few, "--micro-batches", "1", "--contestants", "unsloth"]) == 1
    report = json.loads(out.read_text())
    assert report["rows"][: len(rows)] == rows
    assert [visit["device"] for visit in report["visits"]] == ["CPU", "CPU"]
    assert report["rows"][-1]["error"] == "not run"
    capsys.readouterr()
    assert main(["--table", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "give --unsloth-site" in shown
    assert "megatron" in shown


def test_a_token_costs_what_torch_counts() -> None:
    """Every matrix product of a step of Hugging Face PEFT, by torch's own counter; attention is counted as it is."""
    counted = launch(1, _counted_flops)[0]
    shape = SHAPES["tiny"]
    tokens = 2 * shape.sequence_length
    # The embedding is frozen, so the first layer's input needs no gradient, neither through its weights nor through A.
    queries = [shape.projections[name] for name in PROJECTIONS[:3]]
    unneeded = sum(2 * inputs * outputs + 2 * RANK * inputs for inputs, outputs in queries)
    linear = 4 * shape.multiplied_parameters + 6 * shape.adapter_parameters()
    assert counted["linear"] == tokens * (linear - unneeded)
    # Without a fused kernel the half that is masked is computed too, and nothing is computed again.
    attention = (shape.flops_per_token() - linear) / 3.5
    angles = 2 * shape.head_dim // 2 * shape.sequence_length  # of the rotary embedding, one product for all rows
    assert counted["attention"] == tokens * 2 * attention * 3 + angles


def _counted_flops() -> dict[str, int]:
    from peft import LoraConfig, get_peft_model
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES["tiny"]
    base = LlamaForCausalLM._from_config(LlamaConfig(**shape.config), attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(r=RANK, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"))
    ids = random_tokens(shape, 2)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    counts = {str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()}
    products = counts.pop("aten.bmm")
    return {"attention": products, "linear": sum(counts.values())}


def test_parameters_are_those_of_the_model() -> None:
    """Of Llama-3.2-1B and Llama-3.1-8B, as Hugging Face and PEFT count them."""
    assert SHAPES["1b"].multiplied_parameters == 1_235_814_400 - 33 * 2048
    assert SHAPES["8b"].multiplied_parameters == 8_030_261_248 - 65 * 4096 - 128_256 * 4096
    assert SHAPES["1b"].adapter_parameters() == 11_272_192
    assert SHAPES["8b"].adapter_parameters() == 41_943_040


@pytest.fixture
def tiny(tmp_path: Path, tiny_llama: Path) -> Spec:
    """Return a spec on a tiny model, which has the tokenizer of all."""
    return Spec(contestant="ckptrain", model="tiny", base=str(tiny_llama), scratch=str(tmp_path), steps=3)


def dataset(spec: Spec) -> Dataset:
    """Return what ckptrain trains on."""
    config = load_config(run_config(spec, 1, 1))
    how = tokenisation(locate_base(config.model), config.data)
    return build_datasets(config.data, how, seed=config.train.seed).train


def test_texts_fill_their_rows(tiny: Spec) -> None:
    """One text a row, of exactly as many tokens as a row has, and all of them learnt but the first."""
    write_texts(tiny.shape, 5, Path(tiny.scratch) / "texts.jsonl")
    data = dataset(tiny)
    assert data.row_tokens.tolist() == [tiny.shape.sequence_length] * 5
    assert data.summary.learnt_tokens == 5 * (tiny.shape.sequence_length - 1)


def test_chats_are_those_that_ckptrain_trains_on(tiny: Spec, chats: tuple[Path, Path]) -> None:
    """As many rows, tokens and learnt tokens; a label is the token at its place."""
    spec = Spec(contestant="hf", model="tiny-chats", base=tiny.base, scratch=tiny.scratch, chats=str(chats[0]))
    ids, labels, sizes = packed_chats(spec)
    summary = dataset(spec).summary
    assert (len(ids), int(sizes.sum())) == (summary.rows, summary.tokens)
    learnt = labels != -100
    assert int(learnt.sum()) == summary.learnt_tokens
    assert torch.equal(labels[learnt], ids[learnt])


@pytest.mark.parametrize("name", OVERRIDES)
def test_contestants_of_ckptrain_say_what_it_knows(name: str, tiny: Spec) -> None:
    """Each of their overrides is a key, with a value that it takes."""
    load_config(run_config(tiny, 1, 1), ["model.dtype=bfloat16", *OVERRIDES[name]], check_inputs=False)


def test_larger_micro_batches_are_tried_until_throughput_falls(tiny: Spec) -> None:
    """Twice the rows in four times the time."""
    spec = Spec(contestant="hf", model="tiny", micro_batches=(1, 2, 4), steps=3, warm_up_steps=1)

    def step(batch: gpu_contestants.Batch) -> torch.Tensor:
        time.sleep(0.05 * len(batch.ids) ** 2)
        return torch.zeros(())

    found = list(measure(spec, step, {}))
    assert [row["micro_batch"] for row in found] == [1, 2]
    assert found[1]["tokens_per_s"] < found[0]["tokens_per_s"] <= 128 / 0.05


def test_memory_that_is_out_ends_a_contestant_and_another_error_is_raised(tiny: Spec) -> None:
    """What was measured before is kept."""
    spec = Spec(contestant="hf", model="tiny", micro_batches=(1, 2, 4), steps=1, warm_up_steps=1)

    def failing(error: Exception) -> list[Any]:
        def step(batch: gpu_contestants.Batch) -> torch.Tensor:
            if len(batch.ids) == 2:
                raise error
            return torch.zeros(())

        return list(measure(spec, step, {}))

    found = failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"))
    assert [row.get("error") for row in found] == [None, "out of memory"]
    with pytest.raises(RuntimeError, match="no kernel"):
        failing(RuntimeError("no kernel"))


def child(tmp_path: Path, code: str) -> tuple[list[str], Path]:
    """Return the command of a process that writes answers, and where."""
    script = tmp_path / "child.py"
    script.write_text(f"import os, sys, time\ndef tell(text): open(sys.argv[1], 'a').write(text)\n{code}\n")
    return [sys.executable, str(script), str(tmp_path / "answers")], tmp_path / "answers"


def test_a_process_that_dies_leaves_what_it_found_and_says_why(tmp_path: Path) -> None:
    """Its last lines are told."""
    found = list(ask(*child(tmp_path, "tell('{\"a\": 1}\\n'); raise ValueError('no such kernel')"), limit_s=60))
    assert found[0] == {"a": 1}
    assert found[1]["error"] == "ended with status 1"
    assert "no such kernel" in found[1]["message"]
    assert len(found) == 2


def test_a_process_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """Nobody waits for it longer than the limit, and what it found is kept."""
    command, answers = child(tmp_path, "os.fork() or tell('{\"a\": %d}\\n' % os.getpid()); time.sleep(600)")
    started = time.monotonic()
    found = list(ask(command, answers, limit_s=3))
    assert time.monotonic() - started < 30
    assert found[1]["error"] == "not done in 3 s"
    for _ in range(100):
        state = Path(f"/proc/{found[0]['a']}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child's child lives on")


def asked(*arguments: str) -> argparse.Namespace:
    """Return a command line, read."""
    return parser().parse_args(arguments)


def test_who_trains_what() -> None:
    """Bridge a model and a process for each micro-batch; chats are for those that pack them."""
    (of_bridge,) = specs(asked(), "bridge", "1b")
    assert of_bridge.micro_batches == (4,)
    assert [spec.micro_batches for spec in specs(asked("--micro-batches", "1", "2"), "bridge", "1b")] == [(1,), (2,)]
    assert list(specs(asked(), "bridge", "8b")) == []
    (of_hf,) = specs(asked("--save-every", "5"), "hf", "8b")
    assert (of_hf.micro_batches, of_hf.save_every) == ((1, 2, 4, 8), None)
    with_chats = asked("--gsm8k", "chats.jsonl")
    assert [list(specs(asked(), name, "smollm2")) for name in ("hf", "megatron")] == [[], []]
    assert [len(list(specs(with_chats, name, "smollm2"))) for name in ("hf", "ckptrain", "megatron")] == [1, 1, 0]


def row(contestant: str, model: str, tokens_per_s: float, micro_batch: int = 1, visit: int = 0) -> dict[str, Any]:
    """Return what is known of a micro-batch."""
    return {
        "contestant": contestant,
        "model": model,
        "micro_batch": micro_batch,
        "tokens_per_s": tokens_per_s,
        "visit": visit,
    }


@pytest.mark.parametrize(("ours", "met"), [(120.0, True), (119.0, False), (None, None)])
def test_goals_compare_the_best_of_each(ours: float | None, met: bool | None) -> None:
    """1.2 times Unsloth at 1B; what was not measured is neither met nor missed."""
    rows = [row("unsloth", "1b", 90.0), row("unsloth", "1b", 100.0, micro_batch=2), row("ckptrain", "8b", 1.0)]
    if ours is not None:
        rows += [row("ckptrain", "1b", ours, micro_batch=4), row("ckptrain", "1b", 1.0, micro_batch=8)]
    assert next(goals(rows))["met"] is met


def test_goals_compare_within_one_visit() -> None:
    """Machines differ: what was measured again alone is not held against a rival's earlier figure."""
    first = [row("unsloth", "1b", 100.0), row("ckptrain", "1b", 119.0)]
    again = row("ckptrain", "1b", 121.0, visit=1)
    assert next(goals([*first, again]))["met"] is False
    assert next(goals([*first, again, row("unsloth", "1b", 100.0, visit=1)]))["met"] is True
    apart = next(goals([first[0], again]))
    assert apart["found"].endswith("not in one visit")


def test_unsloth_has_what_the_benchmark_itself_needs(tmp_path: Path) -> None:
    """Its process finds the project beside the other site, and lacks nothing but Unsloth, which CI has not."""
    spec = Spec(contestant="unsloth", model="tiny", base=str(tmp_path), scratch=str(tmp_path))
    answers, site = tmp_path / "answers.jsonl", tmp_path / "site"
    script = Path(bench_gpu.__file__).with_name("gpu_contestants.py")
    command = [sys.executable, str(script), json.dumps(attrs.asdict(spec)), str(answers)]
    [found] = ask(command, answers, 60, env=bench_gpu.environment_of("unsloth", tmp_path, site), cwd=tmp_path)
    assert found["message"].splitlines()[-1] == "ModuleNotFoundError: No module named 'unsloth'"


def test_a_later_visit_counts_and_errors_of_an_earlier_one_do_not() -> None:
    """An error after a measurement does not take it away."""
    failed = {"contestant": "hf", "model": "1b", "error": "ended with status 1", "visit": 0}
    rows = [failed, row("hf", "1b", 1.0, visit=0), row("hf", "1b", 2.0, visit=1), {**failed, "contestant": "liger"}]
    assert newest({"rows": rows}) == [rows[2], rows[3]]
    out = {**failed, "micro_batch": 1, "error": "out of memory", "visit": 2}
    assert newest({"rows": [rows[2], out]}) == [rows[2]]


def test_throughput_is_told_in_operations() -> None:
    """14,900 tokens/s of Llama-3.1-8B are about half a petaflop a second; packed sequences have no such number."""
    assert tflops(row("megatron", "8b", 14_900.0)) == pytest.approx(507.0, rel=0.01)
    assert tflops(row("hf", "smollm2", 1.0)) is None


def test_a_step_alone_is_measured_in_each_variant(tmp_path: Path) -> None:
    """In one process, with the kernels of the last step; fused and plain layers have the same loss."""
    tools, out = Path(bench_gpu.__file__).parent, tmp_path / "steps.json"
    variants = ["fused:2:lora.fused=always", "plain:2:lora.fused=never"]
    command = [
        sys.executable,
        str(tools / "step_gpu.py"),
        "tiny",
        *variants,
        "--steps",
        "2",
        "--profile",
        "--json",
        str(out),
    ]
    environment = {**os.environ, "PYTHONPATH": str(tools.parent), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    fused, plain = json.loads(out.read_text())["variants"]
    assert (fused["fused"], plain["fused"]) == (True, False)
    assert abs(fused["loss"] - plain["loss"]) < 1e-4
    assert fused["kernels"][0]["ms"] > 0
