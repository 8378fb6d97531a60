"""The code blocks of a page of the docs."""

import re
from dataclasses import dataclass
from pathlib import Path

NOT_RUN = re.compile(r"<!-- not run: (\S.*?) -->")
KINDS = ("python", "bash", "yaml", "json", "text", "diff")


@dataclass(frozen=True)
class Block:
    """One block. line: that of its first line of code, from 1; not_run: why it is not run, None:
    it is."""

    kind: str
    code: str
    line: int
    not_run: str | None

    @property
    def runs(self) -> bool:
        return self.kind in ("python", "bash") and self.not_run is None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page.

    Raises:
        ValueError: a block of another kind, or without an end; or a reason with no block below.
    """
    lines = page.read_text(encoding="utf-8").split("\n")
    found, reason, place = [], None, 0
    while place < len(lines):
        line = lines[place]
        if mark := NOT_RUN.fullmatch(line.strip()):
            reason = mark[1]
        elif fence := re.match(r"( *)(`{3,})(.*)", line):
            kind = fence[3].strip().partition(" ")[0]
            if kind not in KINDS:
                raise ValueError(f"{page}:{place + 1}: a block of {kind!r}; use one of {KINDS}")
            end = next(
                (at for at in range(place + 1, len(lines)) if lines[at].strip() == fence[2]), None
            )
            if end is None:
                raise ValueError(f"{page}:{place + 1}: the block has no end")
            code = "\n".join(each.removeprefix(fence[1]) for each in lines[place + 1 : end])
            found.append(Block(kind, code + "\n", place + 2, reason))
            reason, place = None, end
        elif line.strip() and reason is not None:
            raise ValueError(f"{page}:{place + 1}: 'not run' stands just above a block")
        place += 1
    return found
