"""The quick start's data is what its script makes, and fits what the quick start says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from ckptrain.config.schema import SourceConfig
from ckptrain.data.chat import encode
from ckptrain.data.records import Conversation
from ckptrain.data.sources import iterate, locate

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = ("tickets_train.jsonl", "tickets_val.jsonl")


def tickets(name: str) -> list[Conversation]:
    """Read one of the shipped files."""
    located = locate(SourceConfig(path=str(EXAMPLES / "data" / name)), "train")
    return [record for record in iterate(located, "auto", {}) if isinstance(record, Conversation)]


def test_the_script_makes_the_shipped_files_byte_for_byte(tmp_path: Path) -> None:
    """Whoever changes the script ships what it makes."""
    subprocess.run([sys.executable, EXAMPLES / "make_tickets.py", tmp_path], check=True)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (EXAMPLES / "data" / name).read_bytes()


def test_no_validation_message_is_trained_on() -> None:
    """Not even in other letter case."""
    train, validation = ({t.messages[1].content.lower() for t in tickets(name)} for name in FILES)
    assert (len(train), len(validation)) == (400, 16)
    assert not train & validation


@pytest.mark.parametrize("name", FILES)
def test_a_message_says_what_its_ticket_says(name: str) -> None:
    """Product and order number are quoted from the message, so that a right answer can be found in it."""
    for ticket in tickets(name):
        message, answer = ticket.messages[1].content, json.loads(ticket.messages[2].content)
        assert list(answer) == ["product", "issue", "order", "priority", "refund"]
        assert answer["product"] in message.lower()
        assert (answer["order"] or "") in message
        assert (answer["order"] is None) == (not any(character.isdigit() for character in message))


@pytest.mark.parametrize("name", FILES)
def test_a_ticket_is_short(smollm2: PreTrainedTokenizerBase, name: str) -> None:
    """At most 112 tokens, the row length that a quick run on a laptop uses without packing."""
    assert max(encode(ticket, smollm2, "assistant").num_tokens for ticket in tickets(name)) <= 112
