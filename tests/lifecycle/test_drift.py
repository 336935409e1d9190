"""Which keys may change at a resume."""

import typing
from typing import Any

import attrs
import pytest

from ckptrain.config.load import flatten
from ckptrain.config.schema import RunConfig
from ckptrain.lifecycle.drift import RULES, SCHEDULE_KEYS, Kind, differences


def schema_keys() -> list[str]:
    """Return every dotted key of the schema, read from the classes themselves."""
    sections = typing.get_type_hints(RunConfig)
    return [f"{section}.{field.name}" for section, cls in sections.items() for field in attrs.fields(cls)]


def test_every_key_of_the_schema_is_classified_and_no_other() -> None:
    """A new key is a decision about resuming, made when it is added; in the schema's order, to be read beside it."""
    assert list(RULES) == schema_keys()


def test_flattened_configurations_have_the_keys_of_the_table(config: RunConfig) -> None:
    """What is compared is what is classified."""
    assert list(flatten(config)) == list(RULES)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (Kind.IDENTITY, "model.dtype lora.kind lora.dim lora.alpha lora.lora_dtype lora.enabled data.loss_on"),
        (
            Kind.ORDER,
            "train.global_batch_size train.seed data.packing data.sequence_length data.format data.on_too_long"
            " data.split_validation_size",
        ),
    ],
)
def test_the_refused_keys_are_exactly_these(kind: Kind, keys: str) -> None:
    """Written out apart from the table: moving a key out of here silently would let a run become another."""
    assert {key for key, rule in RULES.items() if rule.kind is kind} == set(keys.split())


def test_the_learning_rate_and_the_layout_are_noted() -> None:
    """They may change, and are told."""
    noted = [*SCHEDULE_KEYS, *(key for key in RULES if key.startswith(("parallel.", "optimizer.")))]
    assert {RULES[key].kind for key in noted} == {Kind.NOTED}


def test_equal_configurations_have_no_differences(config: RunConfig) -> None:
    """Lists and tuples are the same: one side comes from JSON."""
    flat = flatten(config)
    as_tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in flat.items()}
    assert differences(flat, as_tuples) == []


@pytest.mark.parametrize("key", list(RULES))
def test_each_changed_key_is_found_with_both_values(config: RunConfig, key: str) -> None:
    """And only that key."""
    old: dict[str, Any] = flatten(config)
    new = {**old, key: "something else"}
    [difference] = differences(old, new)
    assert (difference.key, difference.new, difference.rule) == (key, "something else", RULES[key])
    assert difference.refused == (RULES[key].kind in (Kind.IDENTITY, Kind.ORDER))


def test_values_are_shown_as_they_are_typed() -> None:
    """The remedy can be pasted as an override."""
    [packing, betas] = differences(
        {"data.packing": True, "optimizer.betas": [0.9, 0.95]}, {"data.packing": False, "optimizer.betas": None}
    )
    assert str(packing) == "data.packing is true there and false in the config"
    assert packing.remedy == "set data.packing=true or use a new --run-dir"
    assert str(betas) == "optimizer.betas is [0.9, 0.95] there and null in the config"


@pytest.mark.parametrize("key", ["lora.dim", "train.novelty"])
def test_a_key_that_only_one_version_knows_is_noted(key: str) -> None:
    """It is not silently dropped, and does not stop a run after an upgrade."""
    for old, new in (({key: 1}, {}), ({}, {key: 1})):
        [difference] = differences(old, new)
        assert difference.rule.kind is Kind.NOTED
        assert "not a key there" in str(difference)
