"""Commands: one module for each command of `megatron-hybrid`.

A module has `HELP`, one sentence; `add_arguments(parser)`; and `run(options)`, which returns the
exit status. It imports what it runs inside of `run`: the parsers need no torch.
"""
