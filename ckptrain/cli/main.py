"""The commands and their options; what each does is imported when it is called, so that `--help` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import click

import ckptrain
from ckptrain.cli.group import Commands
from ckptrain.cli.options import (
    PlacePath,
    base_option,
    complete_section,
    json_option,
    overrides,
    overwrite_option,
    processes_option,
    quiet_option,
    run_argument,
    run_dir_option,
    verify_option,
)
from ckptrain.cli.outcome import Answer


@click.group(
    "ckptrain",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit status: 0 done; 2 usage; 78 bad config; 65 damaged checkpoint; 69 refused, the plan says why;"
    " 75 stopped early but saved, run it again; 1 anything else.",
)
@click.version_option(ckptrain.__version__, prog_name="ckptrain")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def cli() -> None:
    """Fine-tune with LoRA under Megatron, and never be in doubt about what a start means."""


@cli.command()
@click.argument("config", type=click.Path(path_type=Path))
@overrides
@run_dir_option
@processes_option
@quiet_option
@json_option(exposed=True)
def run(
    config: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    num_processes: int,
    *,
    quiet: bool,
    as_json: bool,
) -> Answer:
    """Start a run, or go on with the one in the run directory.

    CONFIG is a YAML or JSON file; key=value changes single keys, such as train.steps=200.
    """
    from ckptrain.cli.train import run_config

    return run_config(config, overrides, run_dir, num_processes, as_json=as_json, quiet=quiet)


@cli.command()
@run_argument
@overrides
@processes_option
@quiet_option
@json_option(exposed=True)
def resume(run_dir: Path, overrides: tuple[str, ...], num_processes: int, *, quiet: bool, as_json: bool) -> Answer:
    """Go on with a run as it was last asked to be."""
    from ckptrain.cli.train import resume_run

    return resume_run(run_dir, overrides, num_processes, as_json=as_json, quiet=quiet)


@cli.command()
@click.argument("source", metavar="CONFIG|RUN", type=PlacePath())
@overrides
@run_dir_option
@processes_option
@json_option()
def plan(source: Path, overrides: tuple[str, ...], run_dir: Path | None, num_processes: int) -> Answer:
    """Tell what a start would do, changing nothing.

    With the layout, the size of a checkpoint and an estimate of the memory that it takes.
    """
    from ckptrain.cli.plan import plan_answer

    return plan_answer(source, overrides, run_dir, num_processes)


@cli.command()
@click.argument("source", metavar="CONFIG|RUN", type=PlacePath())
@overrides
@click.option("--show", type=click.IntRange(min=0), default=0, metavar="N", help="Print the first N samples, coloured.")
@json_option()
def data(source: Path, overrides: tuple[str, ...], show: int) -> Answer:
    """Tell what a run learns from.

    Lengths, what is too long or has nothing to learn, how full the rows are; with --show, samples as the model sees
    them, with the tokens that are learnt in colour. What is tokenised for it is kept for the run.
    """
    from ckptrain.cli.data import data_answer

    return data_answer(source, overrides, show)


@cli.command()
@run_argument
@json_option()
def status(run_dir: Path) -> Answer:
    """Tell how far a run is and what comes next.

    Its checkpoints are judged by names and sizes; `verify` reads them.
    """
    from ckptrain.cli.status import status_answer

    return status_answer(run_dir)


@cli.command()
@click.argument("run_dirs", metavar="RUN...", nargs=-1, required=True, type=PlacePath())
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The HTML file; report.html if left out: in the run directory, and here where there are several.",
)
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the curves as a picture, too.")
@json_option()
def report(run_dirs: tuple[Path, ...], out: Path | None, png: Path | None) -> Answer:
    """Write a page on what a run did.

    Curves with every restart, what its starts spent their time on, whether its resumes went on where they were, what
    changed: one HTML file that needs no network. Several runs are laid over each other. The run may be at work
    meanwhile; nothing else is written.
    """
    from ckptrain.cli.report.answer import report_answer

    return report_answer(run_dirs, out, png)


@cli.command()
@click.argument("path", metavar="CKPT|RUN", type=PlacePath())
@click.option("--norms", is_flag=True, help="Read the tensors: norms, largest values, and what is NaN or infinite.")
@base_option
@json_option()
def inspect(path: Path, base: str | None, *, norms: bool) -> Answer:
    """Tell what is in a checkpoint.

    Of a run it is the newest; a PEFT adapter or a checkpoint of Megatron-Bridge is told as far as it says. Everything
    but --norms comes from the manifest, at once; those take torch, and the memory of the largest tensor.
    """
    from ckptrain.cli.inspect import inspect_answer

    return inspect_answer(path, norms=norms, base=base)


@cli.command()
@click.argument("a", metavar="A", type=PlacePath())
@click.argument("b", metavar="B", type=PlacePath())
@click.option("--no-tensors", is_flag=True, help="Do not compare the numbers in the tensors, which takes torch.")
@json_option()
def diff(a: Path, b: Path, *, no_tensors: bool) -> Answer:
    """Tell what two checkpoints differ in.

    A and B are checkpoints, or runs, whose newest are taken. Differing config keys come with what a resume from A with
    the config of B would say to them. The exit status is 0 whether they differ or not.
    """
    from ckptrain.cli.diff import diff_answer

    return diff_answer(a, b, tensors=not no_tensors)


@cli.command()
@click.argument("path", metavar="CKPT|RUN", type=PlacePath())
@json_option()
def verify(path: Path) -> Answer:
    """Compare every file with its digest.

    Of one checkpoint, or of all that a run has; exit status 65 where one is damaged.
    """
    from ckptrain.cli.verify import verify_answer

    return verify_answer(path)


@cli.command()
@run_argument
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="So many of the newest.")
@click.option(
    "--keep-every", type=click.IntRange(min=0), metavar="N", help="Those of every Nth step as well; 0 for none."
)
@click.option("--keep-best", type=click.IntRange(min=0), metavar="N", help="So many of the best as well.")
@click.option("--metric", type=click.Choice(["val_loss", "loss"]), help="What the best go by; lower is better.")
@click.option("--dry-run", is_flag=True, help="Tell what would be removed, and remove nothing.")
@json_option()
def prune(
    run_dir: Path,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    metric: str | None,
    *,
    dry_run: bool,
) -> Answer:
    """Remove checkpoints that a run need not keep.

    What is not given is as the run's config has it. The newest is never removed, nor is one that is being read; the
    run may be at work meanwhile.
    """
    from ckptrain.cli.prune import prune_answer

    given = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best, "metric": metric}
    wanted: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if keep_every == 0:
        wanted["keep_every"] = None
    return prune_answer(run_dir, wanted, dry_run=dry_run)


@cli.command()
@click.argument("checkpoint", metavar="CKPT", type=PlacePath())
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Type of the weights written.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["peft", "megatron"]),
    default="peft",
    show_default=True,
    help="megatron: a LoRA checkpoint for Megatron-Bridge and NeMo-RL, of the type that was trained.",
)
@click.option(
    "--layout",
    type=click.Choice(["peft", "vllm"]),
    default="peft",
    show_default=True,
    help="vllm refuses what vLLM would not load; what it loads has the names that PEFT's has.",
)
@base_option
@overwrite_option
@verify_option
@json_option()
def export(
    checkpoint: Path,
    out: Path,
    dtype: str,
    form: str,
    layout: str,
    base: str | None,
    *,
    overwrite: bool,
    verify: bool | None,
) -> Answer:
    """Write an adapter for Hugging Face PEFT.

    CKPT is a checkpoint, or a run, whose newest is taken, or a LoRA checkpoint of Megatron-Bridge; the base model is
    needed for --verify only.
    """
    from ckptrain.cli.export import export_answer, megatron_answer

    if form == "megatron":
        if verify or dtype != "float32" or layout != "peft":
            raise click.UsageError("--dtype, --layout and --verify are for --format peft")
        return megatron_answer(checkpoint, out, base=base, overwrite=overwrite)
    return export_answer(checkpoint, out, dtype=dtype, layout=layout, base=base, overwrite=overwrite, verify=verify)


@cli.command()
@click.argument("checkpoint", metavar="CKPT", type=PlacePath())
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the weights written; left out, each keeps that of the base.",
)
@base_option
@overwrite_option
@verify_option
@json_option()
def merge(
    checkpoint: Path, out: Path, dtype: str | None, base: str | None, *, overwrite: bool, verify: bool | None
) -> Answer:
    """Write the base model with an adapter in its weights.

    CKPT is a checkpoint, a run, whose newest is taken, or a PEFT directory. OUT is a Hugging Face model with tokenizer.
    """
    from ckptrain.cli.export import merge_answer

    return merge_answer(checkpoint, out, dtype=dtype, base=base, overwrite=overwrite, verify=verify)


@cli.command("import-adapter")
@click.argument("peft", metavar="PEFT_DIR", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--kind",
    type=click.Choice(["auto", "lora", "canonical", "dora"]),
    default="auto",
    show_default=True,
    help="What it is read as, as lora.kind; auto is what it is, and lora where the parts of fused layers share an A.",
)
@base_option
@json_option()
def import_adapter(peft: Path, out: Path, kind: str, base: str | None) -> Answer:
    """Make a checkpoint of a Hugging Face PEFT adapter.

    A run starts from OUT, or from PEFT_DIR itself, by model.adapter.
    """
    from ckptrain.cli.export import import_answer

    return import_answer(peft, out, kind=kind, base=base)


@cli.command("import-config")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write it here; left out, it is printed.")
@overwrite_option
@json_option()
def import_config(file: Path, out: Path | None, *, overwrite: bool) -> Answer:
    """Turn a config of NeMo-RL or Megatron-Bridge into one of ckptrain.

    FILE is an sft.yaml of NeMo-RL, with LoRA under policy.megatron_cfg.peft or the older lora_cfg, or a run_config.yaml
    of Megatron-Bridge. Told are the keys that are to be given, what means something else here, and what has no
    counterpart.
    """
    from ckptrain.cli.import_config import import_config_answer

    return import_config_answer(file, out, overwrite=overwrite)


@cli.command()
@click.argument("section", required=False, shell_complete=complete_section)
@json_option()
def explain(section: str | None) -> Answer:
    """List what a config may say.

    Keys, types, defaults and meanings of one SECTION, or of all.
    """
    from ckptrain.cli.explain import explain_answer

    return explain_answer(section)


@cli.command()
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Measure the disk there; else in the working directory."
)
@click.option("--self-test/--no-self-test", default=True, help="Train, kill and resume a tiny model: some 10 seconds.")
@json_option()
def doctor(run_dir: Path | None, *, self_test: bool) -> Answer:
    """Tell what is installed and whether it works.

    What a run would use and what is missing, how fast the disk is, and whether a run that is killed goes on exactly. It
    is what a bug report needs (--json), and holds no names of users, hosts or directories.
    """
    from ckptrain.cli.doctor import doctor_answer

    return doctor_answer(run_dir, self_test=self_test)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option()
def completion(shell: str) -> Answer:
    """Print what teaches a shell to complete commands, keys and values.

    For good, in ~/.bashrc or ~/.zshrc: eval "$(ckptrain completion bash)", or zsh. For fish: ckptrain completion fish >
    ~/.config/fish/completions/ckptrain.fish
    """
    from ckptrain.cli.completion import completion_answer

    return completion_answer(shell, cli)


def main() -> NoReturn:
    """Run the command line; the entry point of the `ckptrain` script."""
    cli.main()
