"""What is installed that ckptrain does not bring along, which versions is it tested with, and what if one is missing?

The wheel asks pip for light packages only, so that it changes nothing in a container that holds torch and Megatron
already. What is missing is said here, where it is needed, with the command that installs it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Mapping

from packaging.version import InvalidVersion, Version

from ckptrain.errors import PackageMissing

TESTED: Mapping[str, str] = {
    "torch": "2.11.0",
    "megatron-core": "0.19.2",
    "megatron-bridge": "0.6.2",
    "transformers": "5.12.1",
    "peft": "0.21.2",
    "safetensors": "0.8.0",
    "datasets": "5.2.0",
    "numpy": "2.5.5",
    "transformer-engine": "2.20.2",
}
"""The versions whose numbers and files the tests have seen; `pyproject.toml` pins the same."""

LOWEST: Mapping[str, str] = {"torch": "2.6.0", "transformers": "5.8"}
"""What does not work below: megatron-core 0.19 and Megatron-Bridge 0.6 ask for as much."""

EVERYTHING = (
    "pip install 'ckptrain[megatron]', then pip install --no-deps"
    f" megatron-bridge=={TESTED['megatron-bridge']} (in a checkout of ckptrain: uv sync)"
)
"""What to do where there is no torch and no Megatron yet."""

TORCH = ("torch",)
MEGATRON = ("torch", "megatron-core", "megatron-bridge", "transformers")

_MODULES = {"megatron-core": "megatron.core", "megatron-bridge": "megatron.bridge"}
_OPTIONS = {"megatron-bridge": "--no-deps "}  # it asks for packages that do not install on an ordinary machine


def require(packages: tuple[str, ...], purpose: str) -> None:
    """Make sure that packages are here, without importing them.

    Raises:
        PackageMissing: one is not, or is of a version that is known not to work; every one is named, with its cure.
    """
    problems = [problem for package in packages if (problem := _problem(package))]
    if problems:
        raise PackageMissing(
            f"{purpose} needs {_listed(packages)}, and this Python cannot offer that",
            [*problems, f"or all that is tested: {EVERYTHING}; `ckptrain doctor` shows what is there"],
        )


def is_installed(package: str) -> bool:
    """Tell whether a package can be imported, without importing it."""
    module = _MODULES.get(package, package.replace("-", "_"))
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its parent is not there; it is a stand-in in sys.modules
        return False


def install_command(package: str) -> str:
    """Return the command that installs the tested version of a package."""
    return f"pip install {_OPTIONS.get(package, '')}{package}=={TESTED[package]}"


@functools.cache
def version_of(package: str) -> str | None:
    """Return the version of an installed package by its metadata; looked up once, as every save asks."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def untested() -> dict[str, str]:
    """Return the installed packages whose version is not the tested one, with theirs."""
    found = {package: version_of(package) for package in TESTED}
    return {package: there for package, there in found.items() if there and not _same(there, TESTED[package])}


def untested_text(versions: Mapping[str, str]) -> str:
    """Say what is untested and what that means."""
    listed = ", ".join(f"{package} {there} ({TESTED[package]})" for package, there in versions.items())
    return (
        f"versions that ckptrain was not tested with (the tested ones in brackets): {listed}; if something fails in"
        " them, that is the first thing to look at"
    )


def _problem(package: str) -> str | None:
    if not is_installed(package):
        return f"{package} is not installed: {install_command(package)}"
    there, lowest = version_of(package), LOWEST.get(package)
    if there is not None and lowest is not None and _version(there) < Version(lowest):
        return f"{package} is {there}, and nothing below {lowest} works: {install_command(package)}"
    return None


def _same(there: str, tested: str) -> bool:
    """Compare without what a builder has added (2.11.0+cu130)."""
    return _version(there).public == Version(tested).public


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def _listed(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
