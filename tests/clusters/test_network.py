"""Two hosts, each a network of its own with one cable between them, which is pulled out in training.

Nothing is told to anybody then: no connection is closed, as when a switch or a host loses its power.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.launch import launch, run_training
from support.processes import wait_until
from support.records import apart, column, journal

from ckptrain.config.load import dump_config
from ckptrain.config.schema import RunConfig

ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = "29400"
"""Free: nobody else is in these networks."""


def ip(*words: str) -> bool:
    """Change the networks of this machine, and tell whether that was allowed."""
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


class Networks:
    """Two namespaces with a pair of interfaces, `cable`, between them."""

    def __init__(self) -> None:
        self.names = [f"ckptrain-{os.getpid()}-{number}" for number in range(2)]
        self._cable = [f"ck{os.getpid()}-{number}" for number in range(2)]

    def open(self) -> bool:
        """Make them; tell whether this machine lets us."""
        made = all(ip("netns", "add", name) for name in self.names)
        made = made and ip("link", "add", self._cable[0], "type", "veth", "peer", "name", self._cable[1])
        for name, end, address in zip(self.names, self._cable, ADDRESSES, strict=True):
            made = made and ip("link", "set", end, "netns", name, "name", "cable")
            made = made and ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            made = made and all(ip("-n", name, "link", "set", each, "up") for each in ("lo", "cable"))
        return made

    def close(self) -> None:
        """Take them away, and the cable with them."""
        ip("link", "delete", self._cable[0])
        for name in self.names:
            ip("netns", "delete", name)

    def plug(self, how: str) -> None:
        """Pull the cable out (`down`) or put it back (`up`)."""
        assert ip("-n", self.names[1], "link", "set", "cable", how)


@pytest.fixture
def networks() -> Iterator[Networks]:
    """Return two networks; skipped where this user may not make any."""
    made = Networks()
    try:
        if not made.open():
            pytest.skip("this user may not make network namespaces (root may)")
        yield made
    finally:
        made.close()


class Host:
    """One process of a launch, in a network of its own."""

    def __init__(self, networks: Networks, rank: int, config: Path, run_dir: Path) -> None:
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": "cable",
            "OMP_NUM_THREADS": "1",
        }
        run = [sys.executable, "-m", "ckptrain.cli", "run", str(config), "--run-dir", str(run_dir)]
        self._log = run_dir.parent / f"host-{rank}.txt"
        with self._log.open("ab") as log:
            command = ["ip", "netns", "exec", networks.names[rank], *run]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)

    def ends(self) -> tuple[int, str]:
        """Wait for its end; return its status and all that it said."""
        return self.process.wait(120), self._log.read_text()


@pytest.fixture
def start(
    networks: Networks, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> Iterator[Callable[..., list[Host]]]:
    """Return what starts a process in either network; none is left."""
    started: list[Host] = []

    def both(*overrides: str) -> list[Host]:
        config = tmp_path / "config.yaml"
        config.write_text(dump_config(tiny_config(*overrides)))
        started.extend(Host(networks, rank, config, tmp_path / "run") for rank in range(2))
        return started[-2:]

    yield both
    for host in started:
        host.process.kill()
        host.process.wait()


def test_a_cable_that_is_pulled_out_ends_both_hosts_and_the_run_goes_on_when_it_is_back(
    networks: Networks, start: Callable[..., list[Host]], tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """After the time-out each says whom it does not hear; the losses of all steps are those of one host."""
    run_dir = tmp_path / "run"
    common = ["optimizer.schedule=constant", "data.validation=null", "checkpoint.every_steps=2"]
    hosts = start(*common, "train.steps=100000", "train.timeout_minutes=0.1")
    wait_until(lambda: (run_dir / "journal.jsonl").exists() and len(journal(run_dir, "saved")) >= 2)
    networks.plug("down")
    (status, said), (other_status, other_said) = (host.ends() for host in hosts)
    assert (status, other_status) == (1, 1)
    assert f"rank 1 (process {hosts[1].process.pid} on " in said
    assert "has said nothing for" in said
    assert "the store of the launch does not answer" in other_said
    [error] = journal(run_dir, "error")
    assert error["kind"] == "RankLost"

    networks.plug("up")
    done = journal(run_dir, "saved")[-1]["step"]
    steps = done + 2
    assert [host.ends()[0] for host in start(*common, f"train.steps={steps}")] == [0, 0]
    [receipt] = journal(run_dir, "receipt")
    assert receipt["optimizer_step"] == done
    config = tiny_config(*common, f"train.steps={steps}")
    launch(1, lambda: run_training(config, tmp_path / "straight"))
    last = dict(zip(column(run_dir, "step"), column(run_dir, "loss"), strict=True))  # of steps made again the second
    assert apart([last[step] for step in sorted(last)], column(tmp_path / "straight", "loss")) < 1e-4
