"""How does a person ask? Commands, what they print, and their exit status.

The only room that prints or exits, and nothing may import it. Each command gathers an answer in plain values and says
how to show it, so that a page of text and `--json` cannot differ. Heavy imports are made by the commands that need
them.
"""
