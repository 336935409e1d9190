"""What lies on disk?

The manifest (what a checkpoint says it is), integrity (whether that is so), the store (scan, stage, commit, quarantine,
prune), and the tensors themselves. Only the last imports torch, so that status, plan and verify answer at once.
convert, training and cli may import it; it imports lifecycle, config and errors.
"""
