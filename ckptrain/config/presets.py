"""Where on the Hub are the datasets whose rows ckptrain knows by name?"""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class HubHome:
    """A dataset on the Hub: its id, its configuration, and what its splits for training and validation are called."""

    path: str
    name: str | None = None
    train: str = "train"
    validation: str | None = "validation"


HUB_HOMES: Mapping[str, HubHome] = {
    "squad": HubHome(path="rajpurkar/squad"),
    "tulu3_sft_mixture": HubHome(path="allenai/tulu-3-sft-mixture", validation=None),
    "openmathinstruct2": HubHome(path="nvidia/OpenMathInstruct-2", train="train_1M", validation=None),
    "gsm8k": HubHome(path="openai/gsm8k", name="main", validation="test"),
}
