"""The names and signatures that programs may rely on: a change of one is a change of this list, and of the version."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import ckptrain

FUNCTIONS = {
    "run": "config overrides=() *run_dir=None *observers=() *clock=None",
    "resume": "run_dir overrides=() *observers=()",
    "plan": "config overrides=() *run_dir=None *world_size=1",
    "describe_data": "config overrides=() *num_shown=0",
    "export": "checkpoint out *dtype='float32' *overwrite=False *verify=None *base=None *layout='peft'",
    "export_megatron": "checkpoint out *overwrite=False *base=None",
    "import_adapter": "peft out *base=None *kind='auto'",
    "merge": "checkpoint out *dtype=None *overwrite=False *verify=None *base=None",
}
METHODS = {
    "Trainer": {
        "__init__": "self config overrides=() *run_dir=None *callbacks=() *observers=() *loss=None"
        " *train=None *validation=None *samples=None",
        "plan": "self",
        "run": "self",
        "run_until": "self step",
        "save": "self",
        "export": "self out *dtype='float32' *overwrite=False *layout='peft'",
        "close": "self",
        "state": "",
    },
    "Callback": dict.fromkeys(
        ("on_plan", "on_restore", "on_step_end", "on_evaluate", "on_save", "on_stop", "on_error"),
        "self state control",
    )
    | {"state_dict": "self", "load_state_dict": "self state"},
    "Control": {
        "__init__": "self",
        "stop": "self reason='a callback asked for it'",
        "save": "self",
        "evaluate": "self",
        "take": "self",
    },
    "EarlyStopping": {
        "__init__": "self patience=3 min_delta=0.0",
        "on_evaluate": "self state control",
        "state_dict": "self",
        "load_state_dict": "self state",
    },
}
FIELDS = {
    "State": "phase step steps loss val_loss record last_checkpoint plan stop_reason error",
    "Loss": "function name",
    "Samples": "function name",
    "RunResult": "status run_dir plan step checkpoint loss val_loss_before val_loss_after samples stop_reason",
}


def signature(function: object) -> str:
    """Return a signature in short: names in their order, `*` before those by keyword, defaults."""
    if isinstance(function, property):
        return ""
    parts = []
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(f"{'*' if parameter.kind is parameter.KEYWORD_ONLY else ''}{parameter.name}{default}")
    return " ".join(parts)


def test_the_public_names_and_signatures_are_these() -> None:
    """Nothing is there that is not listed, nothing is listed that is not there."""
    assert set(ckptrain.__all__) == {*FUNCTIONS, *METHODS, *FIELDS}
    assert {name: signature(getattr(ckptrain, name)) for name in FUNCTIONS} == FUNCTIONS
    for name, methods in METHODS.items():
        own = vars(getattr(ckptrain, name))
        public = {key for key in own if not key.startswith("_") or (key == "__init__" and key in methods)}
        assert {key: signature(own[key]) for key in sorted(public)} == methods, name
    for name, fields in FIELDS.items():
        assert [field.name for field in getattr(ckptrain, name).__attrs_attrs__] == fields.split(), name


def test_a_program_that_uses_it_passes_mypy_strict(tmp_path: Path) -> None:
    """The examples that embed a run, checked as a user's own program would be; a wrong argument is found."""
    root = Path(__file__).parents[2]
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import ckptrain\n\nckptrain.Trainer('x.yaml', run_dir='r').run_until('3')\n")
    options = ["--strict", "--config-file", str(root / "pyproject.toml"), "--cache-dir", str(root / ".mypy_cache")]
    examples = [
        str(root / "examples" / name) for name in ("embed.py", "embed_trainer.py", "embed_own.py", "pipeline.py")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *examples, str(wrong)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert "wrong.py:3" in errors[0]
    assert 'expected "int"' in errors[0]
    assert (root / "ckptrain/py.typed").is_file()
