"""Importing this enters Megatron; modules that import `megatron.*` import it first, so that none is too early."""

from ckptrain.megatron.bridge import enter_megatron

enter_megatron()
