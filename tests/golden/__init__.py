"""Plan files of every format, which must load and run for ever. Never written anew: a change of
the format or of the code inside adds files.

`python -m tests.golden FORMAT` writes the network's plans for a new format.
"""
