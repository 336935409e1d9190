"""How does Megatron do it?

The only room that imports `megatron.*`: the platform it runs on, the model with its adapters, the optimizer, the step,
and its state as named, sharded tensors. `convert` and `training` stand on it; it knows nothing of runs or journals.
"""
