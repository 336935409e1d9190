"""The manifest: what it says comes back, and nothing else is accepted."""

import contextlib
import hashlib
import json
import math
import operator
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptrain.checkpoint.manifest import Manifest, WrittenByNewer, parse_manifest, path_problem
from ckptrain.config.load import config_digest, load_config
from ckptrain.errors import CheckpointDamaged
from ckptrain.lifecycle.facts import ProgramParts

Document = dict[str, Any]


def rewritten(manifest: Manifest, change: Callable[[Document], object]) -> bytes:
    """Return the manifest's JSON after `change`, with a digest that fits, so that the change alone is at fault."""
    document = json.loads(manifest.to_json())
    del document["digest"]
    change(document)
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps(document).encode()


def problems_of(data: bytes) -> str:
    """Return the message that reading `data` as a manifest gives."""
    with pytest.raises(CheckpointDamaged) as caught:
        parse_manifest(data, "RUN/manifest.json")
    assert "RUN/manifest.json" in str(caught.value)
    return "\n".join(caught.value.problems)


def test_a_manifest_comes_back_equal_and_writes_the_same_bytes_again(manifest: Manifest) -> None:
    """Two saves of the same state have the same manifest."""
    data = manifest.to_json()
    again = parse_manifest(data, "m")
    assert again == manifest
    assert again.to_json() == data


def test_an_imported_adapter_without_tokenizer_data_and_optimizer_comes_back_equal(manifest: Manifest) -> None:
    """What an adapter from elsewhere cannot know is null, not made up."""
    adapter = {name: tensor for name, tensor in manifest.tensors.items() if tensor.group == "adapter"}
    imported = attrs.evolve(manifest, tokenizer_fingerprint=None, data=None, optimizer={}, step=0, tensors=adapter)
    assert parse_manifest(imported.to_json(), "m") == imported


def test_a_manifest_of_the_first_version_is_of_fused_adapters(manifest: Manifest) -> None:
    """It had no kind, and is not damage for that: its digest is of what is written in it."""

    def as_of_version_1(document: Document) -> None:
        document["schema_version"] = 1
        del document["lora"]["settings"]["kind"], document["program"], document["callbacks"]

    lora = attrs.evolve(manifest.lora, settings=attrs.evolve(manifest.lora.settings, kind="lora"))
    expected = attrs.evolve(manifest, lora=lora, program=ProgramParts(), callbacks={})
    assert parse_manifest(rewritten(manifest, as_of_version_1), "m") == expected


def test_a_manifest_of_the_second_version_has_nothing_of_a_program(manifest: Manifest) -> None:
    """A run that such a checkpoint is of was trained by cross-entropy, and no callback had a state."""

    def as_of_version_2(document: Document) -> None:
        document["schema_version"] = 2
        del document["program"], document["callbacks"]

    expected = attrs.evolve(manifest, program=ProgramParts(), callbacks={})
    assert expected != manifest
    assert parse_manifest(rewritten(manifest, as_of_version_2), "m") == expected


def test_a_layout_that_was_reformatted_is_still_the_same_manifest(manifest: Manifest) -> None:
    """The digest is of the values, not of the white space."""
    pretty = json.dumps(json.loads(manifest.to_json()), indent=4).encode()
    assert parse_manifest(pretty, "m") == manifest


def test_tensors_files_and_config_keys_have_a_line_each(manifest: Manifest) -> None:
    """`diff` and `grep` work on it."""
    lines = manifest.to_json().decode().splitlines()
    for name in [*manifest.tensors, *manifest.files, *manifest.config]:
        assert sum(line.startswith(f'"{name}":') for line in lines) == 1


def test_the_config_digest_is_that_of_the_configuration(manifest: Manifest) -> None:
    """A manifest can be found by the configuration it was written under."""
    nested: dict[str, dict[str, Any]] = {}
    for key, value in manifest.config.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    assert manifest.config_digest == config_digest(load_config(nested))


def test_metrics_that_are_not_finite_are_left_out(manifest: Manifest) -> None:
    """A validation loss that is not a number must not fail the save, nor win as the best."""
    odd = attrs.evolve(manifest, metrics={"val_loss": math.nan, "loss": math.inf, "lr": 0.5})
    assert dict(parse_manifest(odd.to_json(), "m").metrics) == {"lr": 0.5}


def test_a_number_that_is_not_finite_is_not_written_as_null(manifest: Manifest) -> None:
    """Anywhere but in the metrics it is a fault, and told as one."""
    with pytest.raises(ValueError, match="Out of range float"):
        attrs.evolve(manifest, optimizer={"lr": math.nan}).to_json()


def test_every_missing_key_is_named(manifest: Manifest) -> None:
    """Nothing is filled in by a default."""
    for key in json.loads(manifest.to_json()):
        if key not in {"digest", "schema_version", "config_digest"}:
            without = rewritten(manifest, operator.methodcaller("pop", key))
            assert f"{key} is missing" in problems_of(without)
    assert "lora.settings.alpha is missing" in problems_of(
        rewritten(manifest, lambda document: document["lora"]["settings"].pop("alpha"))
    )


def test_unknown_keys_are_named_at_every_level(manifest: Manifest) -> None:
    """What this version does not know it does not ignore."""

    def change(document: Document) -> None:
        document["extra"] = 1
        document["base"]["extra"] = 1
        document["files"]["state.json"]["extra"] = 1

    problems = problems_of(rewritten(manifest, change))
    for key in ("extra", "base.extra", "files[state.json].extra"):
        assert f"{key} is not a key of this format" in problems


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("step",), True, "step is true, expected a whole number from 0"),
        (("step",), -1, "step is -1, expected a whole number from 0"),
        (("step",), 1.0, "step is 1.0, expected a whole number from 0"),
        (("step",), "100", 'step is "100", expected a whole number from 0'),
        (("step",), 2**63, "expected a whole number from 0"),
        (("consumed_samples",), None, "consumed_samples is null, expected a whole number from 0"),
        (("run_id",), 7, "run_id is 7, expected text"),
        (("created",), "yesterday", 'created is "yesterday", expected a UTC time'),
        (("created",), "2026-11-30T12:00:00", "expected a UTC time"),
        (("created",), "2026-11-30T12:00:00+02:00", "expected a UTC time"),
        (("base",), None, "base is null, expected an object"),
        (("base", "fingerprint"), None, "base.fingerprint is null, expected text"),
        (("tensors",), [], "tensors is [], expected an object"),
        (("tensors", "rng.rank0", "shape"), 5056, "tensors[rng.rank0].shape is 5056, expected a list"),
        (("tensors", "rng.rank0", "shape"), [8, True], "tensors[rng.rank0].shape[1] is true"),
        (("tensors", "rng.rank0", "group"), "model", 'is "model", expected one of adapter, optimizer, rng'),
        (("tensors", "rng.rank0", "shape"), [2**20, 2**20], "its tensors have 10995"),
        (("tensors", "rng.rank0", "shape"), [1] * 6, "tensors[rng.rank0] has 6 dimensions, expected up to 5"),
        (
            ("tensors", "rng.rank0", "dtype"),
            "float8",
            'tensors[rng.rank0].dtype is "float8", expected one of bfloat16, ',
        ),
        (("optimizer", "step"), "7", 'optimizer.step is "7", expected a whole number'),
        (("optimizer", "lr"), 10**400, "it has the number 1000000"),
        (("config", "train.seed"), [[[[[[[[[[[[[0]]]]]]]]]]]]], "it is nested more than 12 levels deep"),
        (("files", "state.json", "num_bytes"), -3, "files[state.json].num_bytes is -3"),
        (("files", "state.json", "sha256"), "XYZ", 'files[state.json].sha256 is "XYZ", expected 64 hexadecimal digits'),
        (("metrics", "val_loss"), "low", 'metrics[val_loss] is "low", expected a number'),
        (("metrics", "val_loss"), False, "metrics[val_loss] is false, expected a number"),
        (("lora", "settings", "enabled"), 1, "lora.settings.enabled is 1, expected true or false"),
        (("lora", "settings", "dropout_position"), "mid", "expected one of pre, post"),
        (("lora", "settings", "alpha"), 0, "lora.settings.alpha is 0"),
        (("layout", "data"), 8, "layout.world_size is 8, and 16 follows from the rest"),
        (("layout", "world_size"), True, "layout.world_size is true"),
        (("config", "lora.alpha"), 64, "config_digest"),
        (("schema_version",), "1", 'schema_version is "1"'),
        (("schema_version",), True, "schema_version is true"),
        (("schema_version",), 0, "schema_version is 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(
    manifest: Manifest, path: tuple[str, ...], value: object, expected: str
) -> None:
    """Where, what was found, what was expected; True is not 1."""

    def change(document: Document) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    assert expected in problems_of(rewritten(manifest, change))


def test_all_problems_are_told_at_once(manifest: Manifest) -> None:
    """One reading tells everything."""
    problems = problems_of(rewritten(manifest, lambda document: document.update(step=-1, run_id=None, extra=0)))
    assert len(problems.splitlines()) == 3


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "/etc/passwd",
        "../outside",
        "a/../../b",
        "a//b",
        "./a",
        "a/",
        "a/./b",
        "a\\b",
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "manifest.json",
        "x" * 256,
        "x/" * 600 + "x",
    ],
)
def test_a_file_path_that_is_not_inside_the_checkpoint_is_damage(manifest: Manifest, path: str) -> None:
    """A manifest cannot make anyone read or hash another file."""
    assert path_problem(path) is not None
    data = rewritten(manifest, lambda document: document["files"].update({path: {"num_bytes": 1, "sha256": "0" * 64}}))
    assert "files: " in problems_of(data)


def test_names_that_only_look_odd_are_allowed() -> None:
    """Dots inside a name lead nowhere."""
    assert [path_problem(path) for path in ("a..b", "..a/b", "...", "adapter/.metadata", "a b")] == [None] * 5


def test_a_newer_schema_is_told_apart_from_damage(manifest: Manifest) -> None:
    """Whatever else it holds, it must not be quarantined by an older version."""
    data = rewritten(manifest, lambda document: document.update(schema_version=4, novelty=[]))
    with pytest.raises(WrittenByNewer, match=r"written by a newer ckptrain .schema_version 4, this one reads up to 3"):
        parse_manifest(data, "m")


def test_duplicate_keys_are_damage(manifest: Manifest) -> None:
    """Parsers keep the first or the last, and two readers would disagree."""
    data = manifest.to_json().replace(b'"step":100', b'"step":100,"step":100')
    assert "'step' appears twice" in problems_of(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"7",
        b"\xff\xfe{}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b"\xef\xbb\xbf{}",
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 10_000,
        b"{}",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_not_a_manifest_at_all_is_damage(data: bytes) -> None:
    """Never another exception, however deep or odd."""
    assert problems_of(data)


def test_one_changed_digit_anywhere_is_damage(manifest: Manifest) -> None:
    """Where no other check sees it, the digest does."""
    data = manifest.to_json()
    places = [place for place, byte in enumerate(data) if chr(byte).isdigit()]
    for place in places:
        other = str((int(chr(data[place])) + 1) % 10).encode()
        with pytest.raises(CheckpointDamaged):
            parse_manifest(data[:place] + other + data[place + 1 :], "m")


def test_a_manifest_cut_at_any_place_is_damage(manifest: Manifest) -> None:
    """No prefix of it passes for the whole."""
    data = manifest.to_json().rstrip()
    for length in range(0, len(data), 7):
        assert problems_of(data[:length])


@given(st.binary(max_size=200))
def test_random_bytes_are_damage(data: bytes) -> None:
    """Whatever a disk returns."""
    assert problems_of(data)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(data=st.data())
def test_a_manifest_with_anything_replaced_is_read_or_is_damage(manifest: Manifest, data: st.DataObject) -> None:
    """A mutated document with a fitting digest either says something valid, which comes back, or is damage."""

    def change(document: Document) -> None:
        for _ in range(data.draw(st.integers(1, 4))):
            key = data.draw(st.sampled_from(sorted(document)))
            if isinstance(document[key], dict) and document[key] and data.draw(st.booleans()):
                document = document[key]
            else:
                document[key] = data.draw(_JSON)
                return

    try:
        read = parse_manifest(rewritten(manifest, change), "m")
    except CheckpointDamaged:
        return
    assert parse_manifest(read.to_json(), "m") == read


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.integers(0, 10**6), noise=st.binary(min_size=1, max_size=4))
def test_a_manifest_with_bytes_overwritten_is_unchanged_or_damage(manifest: Manifest, place: int, noise: bytes) -> None:
    """No error but CheckpointDamaged leaves the reader."""
    whole = manifest.to_json()
    place %= len(whole)
    with contextlib.suppress(CheckpointDamaged):
        assert parse_manifest(whole[:place] + noise + whole[place + len(noise) :], "m") == manifest
