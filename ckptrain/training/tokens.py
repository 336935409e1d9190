"""How do the rows of a run become tokens? By its tokenizer and its chat template; nothing of Megatron is needed."""

from __future__ import annotations

from pathlib import Path

from ckptrain.config.base import Base
from ckptrain.config.identity import tokenizer_fingerprint
from ckptrain.config.schema import DataConfig
from ckptrain.convert.pretrained import load_tokenizer, local_directory
from ckptrain.data.template import with_chat_template
from ckptrain.data.tokenise import Tokenisation


def tokenisation(base: Base, data: DataConfig) -> Tokenisation:
    """Load the tokenizer of a base that has been fetched.

    Raises:
        ConfigError: the tokenizer or the chat template cannot be used.
    """
    tokenizer = load_tokenizer(local_directory(base))
    if data.chat_template is not None:
        tokenizer = with_chat_template(tokenizer, Path(data.chat_template).read_text(encoding="utf-8"))
    return Tokenisation(
        tokenizer=tokenizer,
        tokenizer_fingerprint=tokenizer_fingerprint(base, data.chat_template),
        loss_on=data.loss_on,
        workers=data.workers,
    )
