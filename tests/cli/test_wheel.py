"""The wheel, installed by pip beside torch, megatron-core and Megatron-Bridge, and where one of them is missing.

The environment is a new one whose packages are links to those that the tests run with.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from packaging.requirements import Requirement

from ckptrain.installed import TESTED

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "megatron-core", "megatron-bridge", "peft", "accelerate", "transformer-engine", "triton"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel."""
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "uv is not on PATH, and builds the wheel"
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([uv, "build", "-q", "--wheel", "--python", sys.executable, "-o", out, ROOT], check=True)
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site-packages of an environment that holds everything but ckptrain, with the wheel put in by pip."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    site = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("ckptrain", "_editable_impl_ckptrain", "megatron")) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    for entry in Path(sysconfig.get_paths()["purelib"]).glob("megatron*"):
        if entry.name != "megatron":
            (site / entry.name).symlink_to(entry)
            continue
        (site / "megatron").mkdir()  # so that one of its packages can be taken out
        for package in entry.iterdir():
            (site / "megatron" / package.name).symlink_to(package)
    before = installed(site)
    # No index and nothing else to take packages from: pip can change nothing here but for what is in the wheel.
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python"]
    done = subprocess.run(
        [*pip, "install", "--no-index", "--no-cache-dir", "--no-compile", wheel],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(PIP_CONFIG_FILE=os.devnull),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"Successfully installed {wheel.name.rpartition('-py3')[0]}"
    assert installed(site) == before | {"ckptrain": importlib.metadata.version("ckptrain")}
    return site


def installed(site: Path) -> dict[str, str]:
    """Return what is installed in an environment, by name."""
    found = importlib.metadata.distributions(path=[str(site)])
    return {distribution.metadata["Name"]: distribution.version for distribution in found}


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment without what would let other packages in."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))} | more


@pytest.fixture
def ckptrain(site: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the installed command."""
    script = site.parents[2] / "bin/ckptrain"

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [script, *map(str, arguments)]
        where = clean_environment(CKPTRAIN_CACHE=str(tmp_path / "cache"), OMP_NUM_THREADS="1")
        return subprocess.run(command, capture_output=True, text=True, check=False, env=where, cwd=tmp_path)

    return run


@pytest.fixture
def without(site: Path) -> Iterator[Callable[[str], None]]:
    """Return a function that takes a package out of the environment, until the end of the test."""
    taken: list[tuple[Path, Path]] = []

    def take(name: str) -> None:
        link = site / name
        taken.append((link, link.readlink()))
        link.unlink()

    yield take
    for link, target in taken:
        link.symlink_to(target)


def test_the_wheel_asks_for_nothing_that_pip_would_replace_torch_for(wheel: Path) -> None:
    """Without an extra: light packages, bounded from below only; what decides numbers is pinned in `megatron` alone."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().partition("\n\n")[0].splitlines()
    found = [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist: ")]
    plain = [requirement for requirement in found if requirement.marker is None]
    assert len(plain) > 10
    assert not HEAVY & {requirement.name for requirement in plain}
    assert {specifier.operator for requirement in plain for specifier in requirement.specifier} == {">="}
    for requirement in found:  # an extra adds to what is there: it must not contradict it
        assert requirement.marker is None or "extra" in str(requirement.marker)


def test_the_versions_that_are_called_tested_are_those_of_the_lock_of_this_project() -> None:
    """`pyproject.toml` pins what `ckptrain.installed` says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    pinned = [Requirement(text) for text in (*extras["megatron"], *extras["te"], *groups["megatron"])]
    versions = {one.name: str(one.specifier).removeprefix("==") for one in pinned if "==" in str(one.specifier)}
    assert {package: versions[package] for package in TESTED} == TESTED
    assert "megatron" in project["tool"]["uv"]["default-groups"]


def test_doctor_passes_where_the_wheel_was_installed_beside_torch_and_megatron(
    ckptrain: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """A model is trained, killed and resumed by what pip has installed."""
    done = ckptrain("doctor", "--json")
    report = orjson.loads(done.stdout)
    assert (done.returncode, report["works"]) == (0, True), report["checks"]
    assert report["self_test"]["differing"] == []


@pytest.mark.parametrize(
    ("missing", "cure"),
    [
        (["megatron/bridge"], "megatron-bridge is not installed: pip install --no-deps megatron-bridge=="),
        (["megatron/core"], "megatron-core is not installed: pip install megatron-core=="),
        (["torch", "torchgen", "functorch"], "torch is not installed: pip install torch=="),
    ],
    ids=["megatron-bridge", "megatron-core", "torch"],
)
def test_where_a_package_is_missing_the_error_says_how_to_install_it(
    missing: list[str],
    cure: str,
    ckptrain: Callable[..., subprocess.CompletedProcess[str]],
    without: Callable[[str], None],
    config_file: Path,
    run_dir: Path,
) -> None:
    """For a run on one process and on two; what needs no Megatron goes on working."""
    for name in missing:
        without(name)
    for arguments in ([], ["--nproc-per-node", "2"]):
        done = ckptrain("run", config_file, "--run-dir", "new", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert cure in done.stderr
        assert "Traceback" not in done.stderr
    for arguments in (["plan", config_file], ["status", run_dir], ["explain", "lora"]):
        assert ckptrain(*arguments).returncode == 0, arguments


def test_what_needs_torch_alone_says_so(
    ckptrain: Callable[..., subprocess.CompletedProcess[str]],
    without: Callable[[str], None],
    run_dir: Path,
    save: Callable[..., Any],
) -> None:
    """An export, and looks at the numbers in a checkpoint; what reads the manifest alone does not need it."""
    path = save(5).path
    without("torch")
    for arguments in (["export", run_dir, "out"], ["merge", run_dir, "out"], ["inspect", path, "--norms"]):
        done = ckptrain(*arguments)
        assert done.returncode == 1
        assert "torch is not installed: pip install torch==" in done.stderr
    for arguments in (["inspect", path], ["verify", run_dir], ["prune", run_dir, "--dry-run"]):
        assert ckptrain(*arguments).returncode == 0, arguments
