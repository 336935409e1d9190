"""The job files of examples/ say what ckptrain's exit statuses mean, and ask for starts that there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptrain import errors
from ckptrain.cli.main import cli

EXAMPLES = Path(__file__).parents[2] / "examples"


def documents(name: str) -> list[dict[str, Any]]:
    """Return the documents of an example."""
    return list(yaml.safe_load_all((EXAMPLES / "clusters" / name).read_text()))


def job(name: str) -> dict[str, Any]:
    """Return what a Job of Kubernetes is to be."""
    [found] = [each for each in documents(name) if each["kind"] == "Job"]
    return dict(found["spec"])


def pod(name: str) -> dict[str, Any]:
    """Return what its pods are to be."""
    return dict(job(name)["template"]["spec"])


def started(asked: list[str]) -> dict[str, Any]:
    """Return what `ckptrain` is asked by these words, which must be ones that it knows."""
    name, *arguments = asked
    with cli.commands[name].make_context(name, arguments) as inner:
        assert (EXAMPLES.parent / str(inner.params["config"])).is_file()
        return inner.params


def words(name: str) -> list[str]:
    """Return the command of a job."""
    if name == "skypilot.yaml":
        return str(documents(name)[0]["run"]).split()
    return list(pod(name)["containers"][0]["command"])


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes_nodes.yaml", "skypilot.yaml"])
def test_a_job_starts_a_run_that_can_be_started(name: str) -> None:
    """Its words are read by the command line itself, and its config is there."""
    program = next(number for number, word in enumerate(words(name)) if word in ("ckptrain", "ckptrain.cli"))
    params = started(words(name)[program + 1 :])
    assert str(params["run_dir"]).startswith("$RUNS/" if name == "skypilot.yaml" else "/runs/")
    if name != "kubernetes_nodes.yaml":  # torchrun starts the processes there
        assert params["num_processes"] == 8


def test_every_status_has_one_meaning_to_kubernetes() -> None:
    """Stopped early is gone on with, and what a person has to look at ends the job; all others may be tried again."""
    actions: dict[int, str] = {}
    for rule in job("kubernetes.yaml")["podFailurePolicy"]["rules"]:
        for status in rule.get("onExitCodes", {}).get("values", []):
            assert actions.setdefault(status, rule["action"]) == rule["action"]
    statuses = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert actions.pop(errors.EXIT_STOPPED_EARLY) == "Ignore"
    assert set(actions.values()) == {"FailJob"}
    assert set(actions) == statuses - {errors.EXIT_DONE, errors.EXIT_FAILURE, errors.EXIT_STOPPED_EARLY}


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes_nodes.yaml"])
def test_a_pod_that_is_taken_away_is_not_a_failure(name: str) -> None:
    """A policy is only heard where pods are not restarted in their place; a container has the volumes that it mounts."""
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]} in job(name)["podFailurePolicy"][
        "rules"
    ]
    assert pod(name)["restartPolicy"] == "Never"
    assert job(name)["podReplacementPolicy"] == "Failed", "the next pod would find the run directory held"
    [container] = pod(name)["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod(name)["volumes"]}
    assert {"/dev/shm", "/runs"} == {each["mountPath"] for each in container["volumeMounts"]}


def test_agents_on_kubernetes_find_pod_0() -> None:
    """The name that they meet at is that of the service's first pod, and there are as many pods as nodes at most."""
    [service] = [each for each in documents("kubernetes_nodes.yaml") if each["kind"] == "Service"]
    [named] = [each["metadata"]["name"] for each in documents("kubernetes_nodes.yaml") if each["kind"] == "Job"]
    command = words("kubernetes_nodes.yaml")
    host, subdomain = f"{named}-0", service["metadata"]["name"]
    assert f"--rdzv-endpoint={host}.{subdomain}:29500" in command
    assert pod("kubernetes_nodes.yaml")["subdomain"] == subdomain
    assert service["spec"]["selector"] == {"job-name": named}
    assert f"--nnodes=1:{job('kubernetes_nodes.yaml')['parallelism']}" in command
    environment = pod("kubernetes_nodes.yaml")["containers"][0]["env"]
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in environment


def test_skypilot_recovers_a_run_that_stopped_early() -> None:
    """By its status; every other one ends the job."""
    [task] = documents("skypilot.yaml")
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [errors.EXIT_STOPPED_EARLY]}
    assert task["run"].startswith("exec "), "so that the signals reach it"
    assert task["envs"]["RUNS"].startswith("s3://")
