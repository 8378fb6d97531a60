"""MkDocs calls these while it builds the site."""

from docs_tools.reference import expand


def on_page_markdown(markdown: str, **_) -> str:
    """The page, with its generated parts."""
    return expand(markdown)
