"""What lies on disk?

The manifest (what a checkpoint says it is), integrity (whether that is so), the store (scan, stage, commit, quarantine,
prune), who works in a run directory, and the tensors themselves. Only `writer`, `sharded`, `tensors` and `ranks` import
torch, so that status, plan and verify answer at once. convert, training and cli may import it; it imports lifecycle,
config and errors.
"""
