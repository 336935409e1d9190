"""The data room: which tokens, in which order?

JSONL records become tokens with a mask of what is learnt, samples become rows, and rows become the micro-batches of an
optimizer step as a pure function of (seed, step). The training room imports it; `records` needs the standard library
only, so the planner may read and fingerprint a data file too.
"""
