"""Importing this enters Megatron; the modules that import `megatron.*` import it first, so that none can be too early."""

from ckptrain.megatron.bridge import enter_megatron

enter_megatron()
