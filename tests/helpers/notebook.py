"""Run a notebook's cells of code, one behind the other: `python tests/helpers/notebook.py FILE`."""

import json
import sys
from pathlib import Path


def main(path: str) -> None:
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, f"{path}, cell {number}", "exec"), names)


if __name__ == "__main__":
    main(sys.argv[1])
