"""python examples/make_tickets.py [DIRECTORY].

Writes the data of the quick start: tickets_train.jsonl (400 conversations) and tickets_val.jsonl (16), into
examples/data unless told otherwise. A customer writes in, the answer is one line of JSON. An untrained chat model
answers with sympathy; one that has learnt the task answers with the ticket. Everything is made up, and the same on
every run: what a message says decides the ticket, so a validation message, none of which is in the training file, has
one right answer.

  issue     what went wrong: broken, late, wrong_item, missing_part, billing or question
  order     the order number as it is written, or null
  priority  high where the customer is in a hurry, low where there is no rush, otherwise normal
  refund    true where the money is wanted back
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path

SEED = 20240726
NUM_TRAIN = 400
NUM_VALIDATION = 16
SHARE_POWERED = 0.6
SHARE_WITH_ORDER = 0.65
SHARE_MONEY_BACK = 0.4
SHARE_SLOPPY = 0.15
SHARE_WITH_SLIP = 0.2
SYSTEM = "Turn the message into a JSON ticket."

POWERED = ("kettle", "desk lamp", "headset", "keyboard", "air fryer", "coffee maker", "smart watch", "blender")
PLAIN = ("backpack", "office chair", "water bottle", "tent", "suitcase", "bookshelf")

OPENINGS = ("", "", "", "Hi, ", "Hello, ", "Hi there, ", "Good morning, ", "Hey, ", "Dear team, ")

# {p} is the product. Each phrase says one issue and nothing about hurry or money.
BROKEN_POWERED = (
    "my {p} will not turn on any more.",
    "the {p} died after two weeks.",
    "the {p} I bought from you switches itself off all the time.",
    "there is a burning smell when I use the {p}.",
    "my new {p} stopped working yesterday.",
)
BROKEN_PLAIN = (
    "my {p} came with a big crack in it.",
    "the {p} fell apart after a week.",
    "the {p} was already damaged when I opened the box.",
    "one side of my {p} broke off on the first day.",
)
ISSUES = {
    "late": (
        "my {p} still has not arrived.",
        "the {p} was meant to be here last Tuesday and it is not.",
        "I have been waiting three weeks for my {p}.",
        "tracking for the {p} has not moved for nine days.",
        "where is the {p} I paid for?",
    ),
    "wrong_item": (
        "I ordered a {p} in blue and got a grey one.",
        "you sent me the wrong {p}.",
        "this is not the {p} I ordered, it is a smaller model.",
        "the box says {p} but there is something else inside.",
    ),
    "missing_part": (
        "one part of my {p} was not in the box.",
        "a piece is missing from the {p} you sent.",
        "there was no manual with the {p}.",
        "half of what belongs to the {p} did not come with it.",
    ),
    "billing": (
        "I was charged twice for the {p}.",
        "the discount on the {p} was not taken off my bill.",
        "my card was billed for a {p} I never ordered.",
        "the invoice for the {p} has the wrong amount.",
    ),
    "question": (
        "how do I clean the {p}?",
        "does the {p} come with a warranty?",
        "is the {p} also sold in green?",
        "can I use the {p} outdoors?",
    ),
}

ORDERS = (" Order {o}.", " My order number is {o}.", " It is order {o}.", " (order {o})", " Ref {o}.")
HURRY = (
    " I need this sorted today.",
    " This is urgent.",
    " Please hurry, we leave tomorrow.",
    " Answer me right away.",
)
NO_RUSH = (" No rush.", " There is no hurry.", " Take your time.", " Whenever you get to it.")
MONEY_BACK = (
    " I want my money back.",
    " Please refund me.",
    " Can I get a refund?",
    " Just return the money.",
)
NO_MONEY_BACK = ("", "", " Please put it right.", " What can we do?", " Could you look into it?")
CLOSINGS = ("", "", "", " Thanks!", " Thank you, {n}", " Regards, {n}", " {n}")
NAMES = ("Ana", "Tom", "Priya", "Lukas", "Mei", "Omar", "Julia", "Sam")


def make_conversation(draw: random.Random) -> dict[str, list[dict[str, str]]]:
    """Draw what happened first, and then words for it."""
    powered = draw.random() < SHARE_POWERED
    product = draw.choice(POWERED if powered else PLAIN)
    issue = draw.choice(("broken", *ISSUES))
    order = f"{draw.choice('ABCDEF')}{draw.randrange(1000, 10000)}" if draw.random() < SHARE_WITH_ORDER else None
    priority = draw.choice(("high", "normal", "low"))
    refund = issue != "question" and draw.random() < SHARE_MONEY_BACK
    ticket = {"product": product, "issue": issue, "order": order, "priority": priority, "refund": refund}
    phrases = ISSUES.get(issue, BROKEN_POWERED if powered else BROKEN_PLAIN)
    message = _in_a_mood(_compose(draw, ticket, phrases), draw)
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": message},
            {"role": "assistant", "content": json.dumps(ticket)},
        ]
    }


def _compose(draw: random.Random, ticket: Mapping[str, object], phrases: tuple[str, ...]) -> str:
    """Say what the ticket says; the order number and the urgency come in either order."""
    opening = draw.choice(OPENINGS)
    complaint = draw.choice(phrases).format(p=ticket["product"])
    if not opening:
        complaint = complaint[0].upper() + complaint[1:]
    order = draw.choice(ORDERS).format(o=ticket["order"]) if ticket["order"] else ""
    urgency = {"high": draw.choice(HURRY), "low": draw.choice(NO_RUSH), "normal": ""}[str(ticket["priority"])]
    parts = [order, urgency]
    draw.shuffle(parts)
    wish = draw.choice(MONEY_BACK if ticket["refund"] else NO_MONEY_BACK if ticket["issue"] != "question" else ("",))
    closing = draw.choice(CLOSINGS).format(n=draw.choice(NAMES))
    return opening + complaint + "".join(parts) + wish + closing


def _in_a_mood(message: str, draw: random.Random) -> str:
    """Write as people do: mostly neatly, sometimes in a hurry, sometimes with a slip of the finger."""
    mood = draw.random()
    if mood < SHARE_SLOPPY:
        words = message.rstrip(".!").split(" ")
        return " ".join(word if any(map(str.isdigit, word)) else word.lower() for word in words)
    if mood < SHARE_SLOPPY + SHARE_WITH_SLIP:
        return _with_slip(message, draw)
    return message


def _with_slip(message: str, draw: random.Random) -> str:
    """Swap two letters inside a word that the ticket does not quote."""
    words = message.split(" ")
    names = {word for product in (*POWERED, *PLAIN) for word in product.split()}
    long_words = [i for i, word in enumerate(words) if word[4:] and word.isalpha() and word not in names]
    if long_words:
        index = draw.choice(long_words)
        word = words[index]
        at = draw.randrange(1, len(word) - 2)
        words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def make_conversations() -> list[dict[str, list[dict[str, str]]]]:
    """Draw as many conversations as both files need, no two with the same message."""
    draw = random.Random(SEED)
    by_message: dict[str, dict[str, list[dict[str, str]]]] = {}
    while len(by_message) < NUM_TRAIN + NUM_VALIDATION:
        conversation = make_conversation(draw)
        by_message.setdefault(conversation["messages"][1]["content"].lower(), conversation)
    return list(by_message.values())


def main(directory: Path) -> None:
    """Write both files."""
    conversations = make_conversations()
    directory.mkdir(parents=True, exist_ok=True)
    parts = {"tickets_train.jsonl": conversations[:NUM_TRAIN], "tickets_val.jsonl": conversations[NUM_TRAIN:]}
    for name, part in parts.items():
        lines = [json.dumps(conversation, ensure_ascii=False) + "\n" for conversation in part]
        (directory / name).write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")
