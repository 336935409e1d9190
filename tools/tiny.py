"""The tiny random model of `ckptrain.convert.tiny`, by the short name that tools and tests use."""

from ckptrain.convert.tiny import LLAMA3_ROPE, VOCAB_SIZE, write_chats, write_llama, write_tokenizer

__all__ = ["LLAMA3_ROPE", "VOCAB_SIZE", "write_chats", "write_llama", "write_tokenizer"]
