"""MkDocs calls these while it builds the site."""

import re

from docs_tools.reference import expand

_CODE = re.compile(r"(`+).+?\1")


def on_page_markdown(markdown: str, **_) -> str:
    """The page, with its generated parts. In code in a table's cell GitHub asks for `\\|`; MkDocs
    takes `|`, and would show both characters."""
    lines = expand(markdown).split("\n")
    shown = (
        _CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line[:1] == "|" else line
        for line in lines
    )
    return "\n".join(shown)
