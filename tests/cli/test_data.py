"""`ckptrain data`: what a run learns from, in text and JSON, against what transformers makes of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import Result
from support.data_runs import ROW_TOKENS, known_records, numbered_row, tiny_tokenizer, write_numbered

from ckptrain.config.load import dump_config, load_config

Ask = Callable[..., Result]
AskJson = Callable[..., dict[str, Any]]
WriteConfig = Callable[..., Path]

NUMBERS = range(10)
LEARNT, GIVEN = "\x1b[1;32m", "\x1b[2m"
"""Bold green, and dim."""


@pytest.fixture
def write_config(tiny_llama: Path, tmp_path: Path) -> WriteConfig:
    """Write the configuration of a run over ten numbered records, or over other data."""
    write_numbered(tmp_path / "train.jsonl", NUMBERS)

    def write(**data: Any) -> Path:
        path = tmp_path / "config.yaml"
        values = {
            "model": {"pretrained": str(tiny_llama)},
            "data": {"train": "train.jsonl", "sequence_length": ROW_TOKENS, **data},
            "train": {"steps": 3, "global_batch_size": 2},
        }
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def lengths(tiny_llama: Path) -> list[int]:
    """Return the tokens of each of the ten records, as transformers counts them."""
    return sorted(map(len, known_records(tiny_tokenizer(tiny_llama), NUMBERS)))


def flat(result: Result) -> str:
    """Return what was printed, without its layout."""
    assert result.exit_code == 0, result.stderr
    return " ".join(result.stdout.split())


def test_the_page_counts_what_a_run_learns_from(ask: Ask, write_config: WriteConfig, lengths: list[int]) -> None:
    """Records, samples, tokens, lengths, rows, and how many epochs the steps are."""
    text = flat(ask("data", write_config()))
    answers = sum(len(numbered_row(number)["messages"][1]["content"]) + 1 for number in NUMBERS)  # and the turn's end
    fill = sum(lengths) / (5 * ROW_TOKENS)
    assert "records 10 samples 10, none left out" in text
    assert f"tokens {sum(lengths)}, of which {answers} ({answers / sum(lengths):.1%}) are learnt" in text
    assert f"lengths shortest {lengths[0]}" in text
    assert f"longest {lengths[-1]}" in text
    assert f"rows 5 of {ROW_TOKENS} tokens, {fill:.2%} full ({1 - fill:.2%} would be padding)" in text
    assert "run 3 steps of 2 rows are 1.2 epochs" in text
    assert "validation" not in text
    assert "<|im_start|>" not in text


def test_json_has_the_same_with_the_samples_in_pieces(
    ask_json: AskJson, write_config: WriteConfig, tiny_llama: Path, lengths: list[int]
) -> None:
    """Joined they are what the chat template makes of the record; the learnt ones are its answers."""
    report = ask_json("data", write_config(), "--show", "10")
    train = report["train"]
    assert report["exit_status"] == 0
    assert (train["records"], train["samples"], train["rows"], train["rows_per_epoch"]) == (10, 10, 5, 5)
    assert (train["tokens"], train["longest_sample_tokens"]) == (sum(lengths), lengths[-1])
    assert train["length_percentiles"]["50"] == np.percentile(lengths, 50, method="nearest")
    assert report["epochs"] == 3 * 2 / 5
    assert report["validation"] is None
    tokenizer = tiny_tokenizer(tiny_llama)
    shown = {int(sample["where"].rpartition(":")[2]) - 1: sample for sample in train["shown"]}
    assert sorted(shown) == list(NUMBERS)
    for number, sample in shown.items():
        messages = numbered_row(number)["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert "".join(piece for _, piece in sample["pieces"]) == text
        assert [piece for learnt, piece in sample["pieces"] if learnt] == [f"{messages[1]['content']}<|im_end|>"]
        [num_tokens] = map(len, known_records(tokenizer, [number]))
        assert (sample["num_tokens"], sample["num_learnt"]) == (num_tokens, len(messages[1]["content"]) + 1)


def test_the_first_samples_are_those_of_the_first_step(
    ask_json: AskJson, write_config: WriteConfig, tmp_path: Path
) -> None:
    """In the order of training, which the seed decides, and no more of them than were asked for."""

    def first(*overrides: str) -> list[str]:
        report = ask_json("data", write_config(), *overrides, "--show", "2")
        return [sample["where"] for sample in report["train"]["shown"]]

    assert len(first()) == 2
    assert first() == first()
    assert len({tuple(first(f"train.seed={seed}")) for seed in range(4)}) > 1
    assert all(where.startswith(f"{tmp_path}/train.jsonl:") for where in first())


def test_learnt_tokens_are_coloured_on_a_terminal(
    ask: Ask, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer and the end of its turn stand out, the rest is dim; in a file there are no colours."""
    config = write_config()
    assert "\x1b" not in ask("data", config, "--show", "3").stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    text = ask("data", config, "--show", "3").stdout
    answers = re.findall(re.escape(LEARNT) + r"(x+<\|im_end\|>)\x1b\[0m", text)
    assert len(answers) == 3
    assert re.search(re.escape(GIVEN) + r"<\|im_start\|>user", text)
    assert not re.search(re.escape(LEARNT) + r"[^\x1b]*<\|im_start\|>", text)


def test_a_sample_is_shown_as_it_is_and_does_nothing_to_the_terminal(
    ask: Ask, write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets are no markup, and what would move the cursor or set a title is made visible."""
    answer = "[bold]no[/bold] \x1b]0;title\x07\x1b[2J\r\x9b end"
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}
    (tmp_path / "odd.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setenv("COLUMNS", "200")
    text = ask("data", write_config(train="odd.jsonl", sequence_length=128), "--show", "1").stdout
    assert "[bold]no[/bold] \u241b]0;title\u2407\u241b[2J\u240d\ufffd end<|im_end|>" in text
    assert not set("\x1b\x07\r\x9b") & set(text)


def test_samples_that_are_too_long_are_told_and_nothing_fails(
    ask: Ask, ask_json: AskJson, write_config: WriteConfig, lengths: list[int]
) -> None:
    """A run would be refused for them, and the page says so; where it would leave them out or cut them, it does not."""
    config, limit = write_config(sequence_length=28), 28
    too_long = sum(length > limit for length in lengths)
    assert 0 < too_long < 10
    text = flat(ask("data", config))
    assert f"samples {10 - too_long}, left out: {too_long} too long" in text
    assert f"refused {too_long} samples are longer than data.sequence_length=28; raise it, or set" in text
    assert ask_json("data", config)["train"]["would_refuse"].endswith("data.on_too_long=drop or truncate")
    for choice in ("drop", "truncate"):
        report = ask_json("data", config, f"data.on_too_long={choice}")["train"]
        assert report["would_refuse"] is None
        assert (report["dropped_too_long"], report["truncated"]) == (
            (too_long, 0) if choice == "drop" else (0, too_long)
        )


def test_a_run_directory_stands_for_what_it_was_last_asked_to_be(
    ask_json: AskJson, write_config: WriteConfig, tmp_path: Path
) -> None:
    """With overrides, as for every command; where the config is moved away, too."""
    config = write_config(packing=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.yaml").write_text(dump_config(load_config(config)))
    expected = ask_json("data", config)
    config.unlink()
    assert ask_json("data", tmp_path / "run") == expected
    assert expected["train"]["rows"] == 10
    assert ask_json("data", tmp_path / "run", "data.packing=true")["train"]["rows"] == 5


def test_what_is_validated_with_is_told_as_well(ask: Ask, ask_json: AskJson, write_config: WriteConfig) -> None:
    """Also where it is kept from the training samples; the two are told apart."""
    report = ask_json("data", write_config(split_validation_size=3), "--show", "9")
    places = [{sample["where"] for sample in report[role]["shown"]} for role in ("train", "validation")]
    assert [len(of_role) for of_role in places] == [7, 3]
    assert not places[0] & places[1]
    text = flat(ask("data", write_config(split_validation_size=3), "--show", "1"))
    assert re.search(r"train records 10 samples 7,.* validation records 10 samples 3,", text)
    assert "train 1 " in text
    assert "validation 1 " in text


def test_an_epoch_of_weighted_sources_is_told(ask: Ask, write_config: WriteConfig, tmp_path: Path) -> None:
    """It has fewer rows than there are."""
    write_numbered(tmp_path / "few.jsonl", range(20, 24))
    sources = [{"path": "train.jsonl", "weight": 1}, {"path": "few.jsonl", "weight": 1}]
    text = flat(ask("data", write_config(train=sources, packing=False)))
    assert f"rows 14 of {ROW_TOKENS} tokens" in text
    assert "epoch 8 rows, by the weights of the sources" in text


@pytest.mark.parametrize(
    ("data", "status", "expected"),
    [
        ({"train": "nowhere.jsonl"}, 78, "nowhere.jsonl: there is no such file"),
        ({"train": "broken.jsonl"}, 78, "broken.jsonl:2: not JSON"),
        ({"sequence_length": 8}, 78, "leaves nothing to train on"),
        ({"chat_template": "nowhere.jinja"}, 78, "nowhere.jinja: there is no such file"),
    ],
)
def test_data_that_cannot_be_used_is_told_by_name(
    data: dict[str, Any], status: int, expected: str, ask: Ask, write_config: WriteConfig, tmp_path: Path
) -> None:
    """In one message, without a traceback, and as JSON where that is asked for."""
    (tmp_path / "broken.jsonl").write_text(json.dumps(numbered_row(1)) + '\n{"messages": \n')
    config = write_config(**data)
    result = ask("data", config)
    assert result.exit_code == status
    assert expected in result.stderr
    assert "Traceback" not in result.stderr
    failed = ask("data", config, "--json")
    assert expected in json.loads(failed.stdout)["error"]["message"]


@pytest.mark.parametrize(("arguments", "status"), [(["nowhere.yaml"], 78), (["."], 2), (["--show", "-1", "x.yaml"], 2)])
def test_an_argument_that_is_no_config_and_no_run_is_refused(
    arguments: list[str], status: int, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the status of what is wrong."""
    monkeypatch.chdir(tmp_path)
    assert ask("data", *arguments).exit_code == status
