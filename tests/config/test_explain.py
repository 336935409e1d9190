"""What the documentation of the keys is made of."""

from __future__ import annotations

import yaml

from ckptrain.config.explain import explain
from ckptrain.config.load import flatten, load_config


def test_every_key_is_explained_in_order_with_a_full_sentence() -> None:
    """No key without words."""
    rows = explain()
    config = load_config({"model": {"pretrained": "a/b"}, "data": {"train": __file__}})
    assert [row[0] for row in rows] == list(flatten(config))
    assert all(row[3].endswith(".") for row in rows)


def test_the_defaults_shown_are_those_that_load_gives() -> None:
    """Read back as YAML, every text is the value."""
    shown = {key: default for key, _, default, _ in explain()}
    config = load_config({"model": {"pretrained": "a/b"}, "data": {"train": __file__}})
    for key, value in flatten(config).items():
        if shown[key] == "required":
            assert key in ("model.pretrained", "data.train")
        else:
            read = yaml.safe_load(shown[key])
            assert (float(read) if isinstance(value, float) else read) == value


def test_types_are_told_in_words() -> None:
    """As people say them, with their bounds."""
    types = {key: text for key, text, _, _ in explain()}
    assert types["train.steps"] == "a whole number, at least 1"
    assert types["lora.dropout"] == "a number, at least 0.0 and below 1.0"
    assert types["lora.lora_dtype"] == "bfloat16 | float32, or null"
    assert types["optimizer.betas"] == "a list of 2 numbers, at least 0.0 and below 1.0"
    assert types["log.wandb"] == "a mapping, or null"
