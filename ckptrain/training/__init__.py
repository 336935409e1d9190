"""What happens each step?

A start is surveyed and decided (`start`), the model is set up and restored (`setup`, `restore`), steps are made
(`loop`), saved (`saving`) and told to whoever observes (`observers`). `run` ties them together; only `cli` is above it.
"""
