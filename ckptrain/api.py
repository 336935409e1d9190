"""The verbs of ckptrain as functions; the command line and other programs call the same ones.

A configuration may be given as a path to YAML or JSON, a mapping, or a `RunConfig`. Errors are `ckptrain.errors`'; each
message is complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptrain.checkpoint.remote_store import store_of
from ckptrain.checkpoint.store import JOURNAL
from ckptrain.checkpoint.working_copy import local_path, run_of, to_look_at
from ckptrain.config.load import load_config, unflatten
from ckptrain.config.schema import RunConfig
from ckptrain.errors import CheckpointNotFound, CkptrainError
from ckptrain.installed import MEGATRON, TORCH, require
from ckptrain.lifecycle.journal import Journal

if TYPE_CHECKING:
    from ckptrain.convert.from_peft import Import
    from ckptrain.convert.merge import Merge
    from ckptrain.convert.to_megatron import MegatronExport
    from ckptrain.convert.to_peft import Export
    from ckptrain.training.observers import Observer
    from ckptrain.training.run import RunResult
    from ckptrain.training.start import Start, Survey
    from ckptrain.training.startup import StartClock

Source = str | os.PathLike[str] | Mapping[str, Any] | RunConfig


def default_run_dir(source: Source) -> Path:
    """Return the run directory of a configuration file where none is named: runs/NAME below the working directory.

    Raises:
        ValueError: the configuration is not a file, so a run directory must be named.
    """
    if isinstance(source, str | os.PathLike):
        return Path("runs") / Path(source).stem
    raise ValueError("give run_dir: a configuration that is not a file has no name to make one from")


def run(
    config: Source,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | os.PathLike[str] | None = None,
    observers: Iterable[Observer] = (),
    clock: StartClock | None = None,
) -> RunResult:
    """Start a run, or go on with the one in `run_dir`; in every process of a launch, or in a single one.

    What the start takes is told from here on, or from where `clock` began: the command line's begins with the process.

    Raises:
        CkptrainError: one of its kinds for whatever is refused or fails.
    """
    require(MEGATRON, "training")
    from ckptrain.training.startup import IMPORTS, StartClock, without_collection

    clock = clock or StartClock()
    clock.mark(IMPORTS)
    directory = (local_path(run_dir) if run_dir is not None else default_run_dir(config)).absolute()
    from ckptrain.training.result import refusals_told
    from ckptrain.training.start import decide_start, survey_run

    with refusals_told(directory):
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        survey = survey_run(read_config(config, overrides, directory), num_processes, directory)
        if num_processes == 1:
            # What would be refused is refused before torch is loaded; the run decides again when it holds the
            # directory.
            decide_start(survey, directory, read_contents=False)
    clock.mark("plan")
    with without_collection(for_good=clock.owns_process):
        from ckptrain.training.run import run_training
    clock.mark(IMPORTS)
    return run_training(survey, directory, observers, clock)


def resume(
    run_dir: str | os.PathLike[str], overrides: Sequence[str] = (), *, observers: Iterable[Observer] = ()
) -> RunResult:
    """Go on with a run as it was last asked to be.

    Raises:
        CheckpointNotFound: `run_dir` is not a run directory.
        CkptrainError: one of its kinds for whatever is refused or fails.
    """
    return run(config_of_run(local_path(run_dir)), overrides, run_dir=run_dir, observers=observers)


def read_config(source: Source, overrides: Sequence[str], run_dir: Path) -> RunConfig:
    """Read a configuration for a start in `run_dir`.

    Rank, scale and targets that it does not say are those of `model.adapter`, where it names one.

    Raises:
        CkptrainError: the configuration or the adapter cannot be used.
    """
    config = load_config(source, overrides)
    if config.model.adapter is None:
        return config
    from ckptrain.training.start import lora_at_start

    return load_config(source, overrides, defaults={"lora": lora_at_start(config, run_dir)})


def config_of_run(run_dir: Path, *, check_inputs: bool = True) -> RunConfig:
    """Return what a run was last asked to be: RUN/run.yaml, or where that is lost what its newest checkpoint says.

    `check_inputs=False` leaves out whether its data is there, for whoever does not train.

    Raises:
        CheckpointNotFound: the directory is not that of a run.
    """
    run_dir = to_look_at(run_dir)
    if (run_dir / "run.yaml").is_file():
        return load_config(run_dir / "run.yaml", check_inputs=check_inputs)
    newest = store_of(run_dir).newest()
    if newest is None:
        raise CheckpointNotFound(
            f"{run_dir} is not a run directory: expected run.yaml or checkpoints/ in it; start one with `ckptrain run"
            f" CONFIG --run-dir {run_dir}`"
        )
    return load_config(unflatten(newest.manifest.config), check_inputs=check_inputs)


def plan(
    config: Source,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | os.PathLike[str] | None = None,
    world_size: int = 1,
) -> tuple[Survey, Start]:
    """Return what `run` would do, changing nothing; loads no torch.

    Raises:
        CkptrainError: what `run` would refuse.
    """
    directory = local_path(run_dir) if run_dir is not None else default_run_dir(config)
    loaded = read_config(config, overrides, directory)
    from ckptrain.training.start import decide_start, survey_run

    survey = survey_run(loaded, world_size, directory.absolute())
    return survey, decide_start(survey, directory.absolute(), read_contents=False)


def describe_data(config: Source, overrides: Sequence[str] = (), *, num_shown: int = 0) -> dict[str, Any]:
    """Return what a run would learn from, in JSON's types; loads the tokenizer and no Megatron.

    It has `train` and `validation` (or None), each with its counts, percentiles of the samples' lengths, how full the
    rows are, and the first `num_shown` samples in the order of training, in pieces that are learnt or not. Samples that
    are too long are counted, and told, where a run would be refused for them.

    Raises:
        CkptrainError: the data cannot be read or tokenised.
    """
    require(TORCH, "reading data as a run does")
    from ckptrain.training.data import report_data

    return report_data(load_config(config, overrides), num_shown)


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    overwrite: bool = False,
    verify: bool | None = None,
    base: str | os.PathLike[str] | None = None,
    layout: str = "peft",
) -> Export:
    """Write the adapter of a checkpoint (or of a run's newest one) as a Hugging Face PEFT directory.

    With `verify` its logits under Hugging Face are compared with those under Megatron first; None does so where the
    base is on this machine and small. `base` is for what does not say its base, or names one that lies elsewhere.
    `layout="vllm"` refuses what vLLM would not load.

    Raises:
        AdapterMismatch: the logits differ; nothing is written.
        CkptrainError: the path is no checkpoint, it is damaged, or `out` exists and `overwrite` is false.
    """
    require(TORCH, "an export")
    from ckptrain.convert.to_peft import export_adapter

    written = export_adapter(
        local_path(checkpoint),
        Path(out),
        dtype=dtype,
        overwrite=overwrite,
        verify=verify,
        base=_str(base),
        layout=layout,
    )
    _record_export("PEFT adapter", checkpoint, written.path)
    return written


def export_megatron(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    base: str | os.PathLike[str] | None = None,
) -> MegatronExport:
    """Write the adapter of a checkpoint (or of a run's newest one) as a LoRA checkpoint that Megatron-Bridge loads.

    Raises:
        CkptrainError: the path is no adapter, it is damaged, Megatron-Bridge would compute something else with it, or
            `out` exists and `overwrite` is false.
    """
    require(TORCH, "an export")
    from ckptrain.convert.to_megatron import export_megatron as write

    written = write(local_path(checkpoint), Path(out), overwrite=overwrite, base=_str(base))
    _record_export("Megatron-Bridge checkpoint", checkpoint, written.path)
    return written


def merge(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool | None = None,
    base: str | os.PathLike[str] | None = None,
) -> Merge:
    """Write the base with the adapter of a checkpoint (or of a run's newest one) in its weights.

    Raises:
        AdapterMismatch: with `verify`, the merged model does not compute what was trained; nothing is written.
        CkptrainError: the path is no checkpoint, the base is not here, or `out` exists and `overwrite` is false.
    """
    require(TORCH, "a merge")
    from ckptrain.convert.merge import merge_adapter

    written = merge_adapter(
        local_path(checkpoint), Path(out), dtype=dtype, overwrite=overwrite, verify=verify, base=_str(base)
    )
    _record_export("merged model", checkpoint, written.path)
    return written


def import_adapter(
    peft: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    kind: str = "auto",
) -> Import:
    """Write a Hugging Face PEFT adapter as a checkpoint, which a run can start from.

    `base` is the base model where the adapter names none, or one that is not on this machine; `kind` as `lora.kind`.

    Raises:
        ConfigError: the adapter cannot be held, or does not fit the base, every reason is listed; or that is not here.
        CkptrainError: it is damaged, or `out` exists.
    """
    require(TORCH, "an import")
    from ckptrain.convert.from_peft import import_adapter as write

    return write(Path(peft), Path(out), base=_str(base), kind=kind)


def _record_export(form: str, source: str | os.PathLike[str], out: Path) -> None:
    """Tell the journal of the run that an export was made from, for its reports; where it has none, nobody is told.

    A run directory that may only be read is exported from as well.
    """
    path = local_path(source).resolve()
    if run_of(path) is not None:  # what a store has is changed by the run alone
        return
    for run_dir in (path, *path.parents[:3]):
        if (run_dir / JOURNAL).is_file():
            with contextlib.suppress(CkptrainError):
                Journal(run_dir / JOURNAL).record("exported", form=form, source=path.name, out=str(out.resolve()))
            return


def _str(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)
