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
    if is_module and (why := _why_not_run(script)):
        sys.exit(f"{script} is no module that runs: {why}; name one after -m")
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


def _why_not_run(module: str) -> str:
    """Return why Python cannot run a module or package, "" if it can."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            module += ".__main__"
            spec = importlib.util.find_spec(module)
        runs = spec is not None and spec.loader.get_code(module) is not None
        return "" if runs else f"there is no code of {module!r}"
    except (ImportError, ValueError) as error:  # of the packages that it is in, too
        return str(error)


if __name__ == "__main__":
    main(sys.argv[1:])
