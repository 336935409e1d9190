"""Runs that live in an S3 store: as on a disk they end, resume after a kill, and outlast a store that fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest
from support.files import data_files
from support.launch import Ranks, launch
from support.object_store import KEY, SECRET, Fault, ObjectStore, objects
from support.processes import wait_until

from ckptrain import api
from ckptrain.checkpoint.object_files import ObjectPath
from ckptrain.checkpoint.resolve import resolve_checkpoint
from ckptrain.checkpoint.working_copy import local_path
from ckptrain.config.schema import RunConfig
from ckptrain.errors import CkptrainError
from ckptrain.lifecycle.journal import parse_lines

if TYPE_CHECKING:
    from ckptrain.training.run import RunResult


def run_at(config: RunConfig, url: str, disks: Path | None = None) -> RunResult:
    """Run as a program that embeds ckptrain does; with `disks` every process is a host with one of its own."""
    if disks is not None:
        os.environ |= {"CKPTRAIN_CACHE": str(disks / f"host-{os.environ['RANK']}"), "LOCAL_RANK": "0"}
    return api.run(config, run_dir=url)


def committed(url: str) -> set[str]:
    """Return the names of the checkpoints that have a manifest."""
    found = ObjectPath.parse(url).list_below()
    return {name.split("/")[1] for name in found if name.endswith("/manifest.json")}


def losses(metrics: bytes) -> dict[int, float]:
    """Return the training loss of every step."""
    return {line["step"]: line["loss"] for line in parse_lines(metrics) if "loss" in line}


@pytest.mark.parametrize(
    ("world_size", "hung", "left"),
    [
        pytest.param(1, "^PUT /[^/]*/runs/a/checkpoints/step-00000004/.*distcp", 0, id="in the upload"),
        pytest.param(2, "^PUT /[^/]*/runs/a/checkpoints/step-00000004/manifest.json", 4, id="before the manifest"),
    ],
)
def test_a_killed_run_goes_on_from_an_empty_machine_to_the_same_bits(
    world_size: int,
    hung: str,
    left: int,
    tiny_config: Callable[..., RunConfig],
    tmp_path: Path,
    store: ObjectStore,
    bucket: str,
) -> None:
    """Kill -9 in the second save; what it wrote counts for nothing, and the resume ends as the run on a disk did.

    Every process has a disk of its own, and every start new ones.
    """
    config = tiny_config("train.steps=4", "checkpoint.every_steps=2", "lora.dropout=0.1", "data.validation=null")
    expected, url = tmp_path / "straight", f"{bucket}/runs/a"
    launch(world_size, lambda: api.run(config, run_dir=expected))
    store.faults(Fault(request=hung, wait_s=600))
    ranks = Ranks(world_size, lambda: run_at(config, url, tmp_path / "killed"))
    wait_until(lambda: bool(store.seen(hung)))
    ranks.kill()
    assert committed(url) == {"step-00000002"}
    assert sum("step-00000004" in name for name in objects(url)) >= left
    store.faults()

    results = launch(world_size, lambda: run_at(config, url, tmp_path / "new"))

    assert results[0].plan.kind == "Resume"
    assert results[0].plan.first_step == 3
    assert losses(objects(url)["metrics.jsonl"]) == losses((expected / "metrics.jsonl").read_bytes())
    found = data_files(resolve_checkpoint(local_path(url)).path)
    assert found == data_files(expected / "checkpoints/step-00000004")
    secret = (KEY, SECRET, str(tmp_path / "new"))  # where the working copy was is nobody's business either
    assert not [name for name, data in objects(url).items() if any(word.encode() in data for word in secret)]
    assert orjson.loads(objects(url)["result.json"])["last_checkpoint"] == f"{url}/checkpoints/step-00000004"


def test_a_store_that_fails_during_a_save_is_told_and_harms_nothing(
    tiny_config: Callable[..., RunConfig], store: ObjectStore, bucket: str
) -> None:
    """The save of step 4 fails; the run goes on, step 2 stays as it was, step 6 is saved; a slow store stalls no step."""
    url = f"{bucket}/runs/a"
    config = tiny_config("train.steps=6", "checkpoint.every_steps=2", "data.validation=null")
    store.faults(
        Fault(request="^PUT .*/step-00000004/.*distcp", status=503),
        Fault(request="^PUT .*/step-00000002/.*distcp", wait_s=1),
    )
    [result] = launch(1, lambda: run_at(config, url))
    assert result.status == "finished"
    assert committed(url) == {"step-00000002", "step-00000006"}
    assert not [name for name in objects(url) if "step-00000004" in name]
    journal = parse_lines(objects(url)["journal.jsonl"])
    [failed] = [entry for entry in journal if entry["event"] == "save_failed"]
    assert failed["step"] == 4
    assert "reduce your request rate" in failed["message"]
    assert "untouched" in failed["message"]
    stalls = [entry["stall_s"] for entry in journal if "stall_s" in entry]
    assert stalls[0] < 0.5


def test_a_run_starts_from_the_adapter_of_one_in_a_store(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, run_url: str
) -> None:
    """Of its newest checkpoint or of one by name; on two hosts, of which each fetches it; then it is a run of its own."""
    expected = {}
    for step in (2, 4):
        url = run_url if step == 4 else f"{run_url}/checkpoints/step-00000002"
        config = tiny_config(f"model.adapter={url}", "train.steps=1", "data.validation=null")
        assert config.model.adapter == url
        run_dir = tmp_path / str(step)
        [first, _] = launch(2, lambda config=config, run_dir=run_dir: on_hosts(config, run_dir, tmp_path / "disks"))
        assert first.plan.kind == "WarmStart"
        [entry] = [
            line for line in parse_lines((run_dir / "journal.jsonl").read_bytes()) if line["event"] == "warm_start"
        ]
        assert entry["adapter"] == f"{run_url}/checkpoints/step-{step:08d}"
        fetched = fetch_all(url, tmp_path / f"fetched-{step}")
        there = tiny_config(f"model.adapter={fetched}", "train.steps=1", "data.validation=null")
        launch(1, lambda there=there, step=step: api.run(there, run_dir=tmp_path / f"here-{step}"))
        expected[step] = losses((tmp_path / f"here-{step}/metrics.jsonl").read_bytes())
        assert losses((run_dir / "metrics.jsonl").read_bytes())[1] == pytest.approx(expected[step][1], abs=1e-6)
    assert expected[2] != expected[4]


def on_hosts(config: RunConfig, run_dir: Path, disks: Path) -> RunResult:
    """Run as a process on a host of its own, whose caches no other sees."""
    os.environ |= {"CKPTRAIN_CACHE": str(disks / f"host-{os.environ['RANK']}"), "LOCAL_RANK": "0"}
    return api.run(config, run_dir=run_dir)


def fetch_all(url: str, into: Path) -> Path:
    """Return a PEFT directory of what a URL means, which a start from this disk can be compared with."""
    launch(1, lambda: api.export(url, into, verify=False))
    return into


def test_an_adapter_that_is_not_in_the_store_is_refused(tiny_config: Callable[..., RunConfig], bucket: str) -> None:
    """By the URL, before anything is computed."""
    url = f"{bucket}/runs/none"
    with pytest.raises(CkptrainError, match=rf"the run {url} has no checkpoint yet"):
        api.plan(tiny_config(f"model.adapter={url}"), run_dir="unused")
