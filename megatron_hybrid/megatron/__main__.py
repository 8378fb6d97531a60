"""`python -m megatron_hybrid.megatron SCRIPT ...`: runs an inference script of Megatron, unchanged,
on our engine."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

USAGE = """usage: python -m megatron_hybrid.megatron SCRIPT [ARGUMENT ...]

Runs an inference script of Megatron, unchanged, on megatron_hybrid's engine: what it
imports from megatron.core.inference is this package's. docs/from_megatron.md says what
differs. With torchrun: torchrun ... -m megatron_hybrid.megatron SCRIPT ...
"""


def main(arguments: list[str]) -> None:
    """Run the script with the arguments behind it."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        sys.exit(0 if arguments else 2)
    script, *rest = arguments
    if not Path(script).is_file():
        sys.exit(f"{script} is no file: name the script to run")
    from megatron_hybrid.megatron.stand_in import install

    install()
    sys.argv = [script, *rest]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
