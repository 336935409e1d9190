"""What does this start mean?

The plan of a start (a pure decision from facts), which configuration keys may change on the way, the state machine of
a run, and its journal. Nothing here imports torch, reads a checkpoint or looks at the model: checkpoint, data, convert,
training and cli may import it; it imports config and errors only.
"""
