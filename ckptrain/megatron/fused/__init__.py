"""Transformer layers with LoRA computed as one: the adapters' products inside the base's, and little kept for backward.

`layer` replaces the forward pass of megatron-core's dense layers, `weight` holds a frozen weight and its adapter in one
matrix, `loss` is the output layer and the cross-entropy in portions, `kernels` are the passes over memory between the
products.
"""
