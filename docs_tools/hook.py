"""MkDocs calls these while it builds the site."""

import logging
import re
import tomllib
from pathlib import Path
from typing import Any

from docs_tools.reference import expand

_CODE = re.compile(r"(`+).+?\1")
_TAG = re.compile(r"(<[^>]+>)")
_PAGE = re.compile(r"(?<![\w/])docs/([\w/]+\.md)\b")
_LOG = logging.getLogger("mkdocs.hooks.docs_tools")


def on_config(config: Any, **_: Any) -> Any:
    """The config, with the addresses of pyproject.toml."""
    project = tomllib.loads(Path(config.config_file_path).with_name("pyproject.toml").read_text())
    addresses = project["tool"]["addresses"]
    config.site_url = addresses["site"] or None
    config.repo_url = addresses["repository"] or None
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page, with its generated parts. In code in a table's cell GitHub asks for `\\|`; MkDocs
    takes `|`, and would show both characters."""
    lines = expand(markdown).split("\n")
    shown = (
        _CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line[:1] == "|" else line
        for line in lines
    )
    return "\n".join(shown)


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """The page, with links where a docstring or a help says `docs/index.md`."""

    def link(found: re.Match) -> str:
        target = files.get_file_from_path(found[1])
        if target is None:
            _LOG.warning("%s names docs/%s, which is no page", page.file.src_path, found[1])
            return found[0]
        return f'<a href="{target.url_relative_to(page.file)}">{target.page.title or found[1]}</a>'

    parts = _TAG.split(html)
    is_link = False
    for place, part in enumerate(parts):
        if place % 2:
            is_link = part.startswith("<a ") or (is_link and part != "</a>")
        elif not is_link:
            parts[place] = _PAGE.sub(link, part)
    return "".join(parts)
