"""Runs the blocks of one page in this process and folder: `python run_page.py PAGE`.

Python blocks share one namespace. Each line `== LINE SECONDS` tells how long a block took.
"""

import subprocess
import sys
import time
from pathlib import Path

from doc_blocks import blocks


def main(page: Path) -> None:
    """Run the blocks in order; the first that fails ends it."""
    names = vars(sys.modules["__main__"])  # so that "__main__:Name" is found, as in a script
    for block in blocks(page):
        if not block.runs:
            continue
        began = time.monotonic()
        print(f"\n== {page.name}:{block.line} ({block.kind})", flush=True)
        if block.kind == "python":
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(page), "exec"), names)
        else:
            subprocess.run(["bash", "-e", "-c", block.code], check=True, stdin=subprocess.DEVNULL)
        print(f"\n== {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
