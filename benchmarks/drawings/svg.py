"""Sheet: an SVG drawing of boxes, lines, circles and text, for light and dark pages."""

from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 520
"""Units across a drawing. Text of 13 is 10 pixels high on a screen of 400."""
SHOWN = 640
"""Pixels across a drawing where a page is wider."""
FONT = "Helvetica, Arial, sans-serif"
COLOURS = {
    "paper": ("#ffffff", "#1e2129"),
    "ink": ("#1f2328", "#e9edf2"),
    "faint": ("#57606a", "#b1bac4"),
    "line": ("#6e7781", "#8b949e"),
    "grey": ("#afb8c1", "#59636e"),
    "green": ("#2da44e", "#3fb950"),
    "orange": ("#d4762c", "#f0883e"),
    "blue": ("#218bff", "#58a6ff"),
    "soft grey": ("#eef1f4", "#2d323c"),
    "soft green": ("#d5f0dc", "#20432e"),
    "soft orange": ("#fbe3cf", "#53371f"),
    "soft blue": ("#dcecfd", "#1f3b5f"),
}
"""By name: the colour on a light page, and the one on a dark page."""


def dark_style(colours: Iterable[tuple[str, str]]) -> str:
    """Return the style by which a light drawing has dark colours where its page, or its reader's
    system, is dark: a picture then needs no second file. colours: pairs of light and dark."""
    rules = "".join(
        f"[{part}='{light}'],[style*='{part}: {light}']{{{part}:{dark}!important}}"
        for light, dark in colours
        for part in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"


class Sheet:
    """One drawing. Colours are names of COLOURS; y runs down; text has its baseline at y."""

    def __init__(self, title: str, height: int) -> None:
        self._colours = {name: light for name, (light, _) in COLOURS.items()}
        self._height = height
        self._parts = [f"<title>{escape(title)}</title>", dark_style(COLOURS.values())]
        self.box(0, 0, WIDTH, height, "paper", radius=6)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 13,
        colour: str = "ink",
        bold: bool = False,
        anchor: str = "start",
    ) -> None:
        """A line of text; anchor is start, middle or end."""
        weight = " font-weight='bold'" if bold else ""
        self._parts.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{self._colours[colour]}'"
            f"{weight} text-anchor='{anchor}'>{escape(words)}</text>"
        )

    def title(self, words: str) -> None:
        """The heading of the drawing, as text that is read."""
        self.text(16, 28, words, 16, bold=True)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str | None,
        edge: str | None = None,
        radius: int = 2,
        dashed: bool = False,
    ) -> None:
        """A rectangle, filled, outlined or both."""
        dash = " stroke-dasharray='4 3'" if dashed else ""
        stroke = f" stroke='{self._colours[edge]}' stroke-width='1.5'{dash}" if edge else ""
        colour = self._colours[fill] if fill else "none"
        self._parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{radius}'"
            f" fill='{colour}'{stroke}/>"
        )

    def state(self, x: float, y: float, ghost: bool = False) -> None:
        """A saved state, or a position whose state is gone."""
        fill, edge = ("paper", "orange") if ghost else ("orange", "paper")
        self._parts.append(
            f"<circle cx='{x:g}' cy='{y:g}' r='7' fill='{self._colours[fill]}'"
            f" stroke='{self._colours[edge]}' stroke-width='2.5'/>"
        )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = "line", dashed: bool = False
    ) -> None:
        """A line through points."""
        dash = " stroke-dasharray='5 4'" if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(
            f"<polyline points='{path}' fill='none' stroke='{self._colours[colour]}'"
            f" stroke-width='2'{dash}/>"
        )

    def arrow(
        self, points: Sequence[tuple[float, float]], colour: str = "line", dashed: bool = False
    ) -> None:
        """A line through points with a head at its end; its last piece is straight along x or y."""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        back = (x1 - 8 * dx, y1 - 8 * dy)
        self.line([*points[:-1], back], colour, dashed)
        sides = [(back[0] + 5 * s * dy, back[1] + 5 * s * dx) for s in (1, -1)]
        head = " ".join(f"{x:g},{y:g}" for x, y in [(x1, y1), *sides])
        self._parts.append(f"<polygon points='{head}' fill='{self._colours[colour]}'/>")

    def blocks(self, x: float, y: float, tokens: int, fill: str, per_token: float) -> None:
        """Tokens as blocks of KV, of 16 tokens each."""
        for start in range(0, tokens, 16):
            width = min(16, tokens - start) * per_token - 1.5
            self.box(round(x + start * per_token, 1), y, round(width, 1), 16, fill)

    def svg(self) -> str:
        """The file."""
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {self._height}'"
            f" width='{SHOWN}' role='img' font-family='{FONT}'>"
        )
        return "\n".join([head, *self._parts, "</svg>\n"])
