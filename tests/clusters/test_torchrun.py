"""Runs under torchrun's agents, as on several hosts: one of them stops, is lost, or comes back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.launch import launch, run_training
from support.processes import children_of, wait_until
from support.records import apart, column, journal

from ckptrain.config.load import dump_config
from ckptrain.config.schema import RunConfig

EVERY_STEPS = 5
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Hosts:
    """torchrun's agents of one job, each with one process, that share a run directory."""

    def __init__(self, directory: Path, config: Path, nodes: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.run_dir, self._directory = directory / "run", directory
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--local-addr=127.0.0.1"),
            *("--max-restarts=3", "--monitor-interval=0.1"),
            *("-m", "ckptrain.cli", "run", str(config), "--run-dir", str(self.run_dir)),
        ]
        self.agents: list[subprocess.Popen[bytes]] = []

    def add(self) -> subprocess.Popen[bytes]:
        """Start an agent."""
        # The first keeps what the agents agree on: it is the one that must not be lost.
        host = f"--rdzv-conf=is_host={not self.agents},last_call_timeout=1,keep_alive_interval=1"
        command = [*self._command[:3], host, *self._command[3:]]
        with (self._directory / f"agent-{len(self.agents)}.txt").open("wb") as log:
            self.agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT))
        return self.agents[-1]

    def said(self, number: int) -> str:
        """Return what an agent and its process wrote."""
        return (self._directory / f"agent-{number}.txt").read_text()

    def wait_for(self, event: str, count: int) -> list[dict[str, Any]]:
        """Wait until the journal has so many entries of a kind."""

        def is_there() -> bool:
            return (self.run_dir / "journal.jsonl").exists() and len(journal(self.run_dir, event)) >= count

        wait_until(is_there)
        return journal(self.run_dir, event)

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        """Let a host be gone at once, with all that runs on it."""
        for pid in (*children_of(agent.pid), agent.pid):
            os.kill(pid, signal.SIGKILL)
        agent.wait()


@pytest.fixture
def hosts(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """Return a maker of agents; none is left."""
    made: list[Hosts] = []

    def make(nodes: str, *overrides: str) -> Hosts:
        config = tmp_path / "config.yaml"
        config.write_text(dump_config(tiny_config(*overrides)))
        made.append(Hosts(tmp_path, config, nodes))
        return made[-1]

    yield make
    for each in made:
        for agent in each.agents:
            if agent.poll() is None:
                each.lose(agent)


def test_a_run_goes_on_without_a_host_that_is_lost_and_with_one_that_comes(
    hosts: Callable[..., Hosts], tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """From its newest checkpoint each time, on as many processes as there are; asked to stop, it is not started again.

    In the end two agents of a fixed number finish it, and its losses are those of one process that nobody disturbed.
    """
    common = ["optimizer.schedule=constant", "optimizer.lr=1e-3", f"checkpoint.every_steps={EVERY_STEPS}"]
    job = hosts("1:2", *common, "train.steps=100000")
    job.add()
    lost = job.add()
    job.wait_for("saved", 1)
    job.lose(lost)
    job.wait_for("plan", 2)
    saved = len(job.wait_for("saved", 2))
    job.add()
    job.wait_for("plan", 3)
    job.wait_for("saved", saved + 2)
    (job.run_dir / "stop").touch()
    statuses = [job.agents[number].wait(60) for number in (0, 2)]
    assert statuses == [1, 1], "torchrun has no other for a run that is not finished"

    plans = [(plan["plan"], plan["world_size"]) for plan in journal(job.run_dir, "plan")]
    assert plans == [("FreshStart", 2), ("Resume", 1), ("Resume", 2)]
    reasons = [entry["reason"] for entry in journal(job.run_dir, "stop_requested")]
    assert reasons[0] == "signal SIGTERM", "of the agent that makes room for another"
    assert reasons[1].endswith("asks for it")
    assert "stopped" in job.said(0)

    steps = len(column(job.run_dir, "loss")) + EVERY_STEPS
    static = hosts("2", *common, f"train.steps={steps}")
    agents = [static.add(), static.add()]
    assert [agent.wait(120) for agent in agents] == [0, 0]
    losses = column(job.run_dir, "loss")
    config = tiny_config(*common, f"train.steps={steps}")
    launch(1, lambda: run_training(config, tmp_path / "straight"))
    assert apart(losses, column(tmp_path / "straight", "loss")) < 1e-4
