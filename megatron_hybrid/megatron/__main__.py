"""`python -m megatron_hybrid.megatron SCRIPT ...`: runs a script of Megatron's dynamic engine,
unchanged, on ours."""

from __future__ import annotations

import atexit
import importlib.util
import runpy
import sys
from pathlib import Path

USAGE = """usage: python -m megatron_hybrid.megatron SCRIPT [ARGUMENT ...]
       python -m megatron_hybrid.megatron -m MODULE [ARGUMENT ...]

Runs a script of Megatron's dynamic engine, unchanged, on megatron_hybrid's: what it
imports from megatron.core.inference is this package's.
docs/guides/from_megatron.md says what differs.
With torchrun: torchrun ... -m megatron_hybrid.megatron SCRIPT ...
"""


def main(arguments: list[str]) -> None:
    """Run the script with the arguments after it."""
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(USAGE, end="")
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    is_module = arguments[0] == "-m"
    script, *rest = arguments[is_module:]
    if not (is_module or Path(script).is_file()):
        sys.exit(f"{script} is no file: name the script to run, or -m and a module")
    try:
        found = not is_module or importlib.util.find_spec(script) is not None
    except ImportError:
        found = False
    if not found:
        sys.exit(f"{script} is no module of this Python: name one that can be imported after -m")
    from megatron_hybrid.megatron.stand_in import install
    from megatron_hybrid.models.sharding.parallel_setup import destroy_distributed

    atexit.register(destroy_distributed)  # Megatron's scripts leave their process groups
    install()
    sys.argv = [script, *rest]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(str(Path(script).resolve()), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
