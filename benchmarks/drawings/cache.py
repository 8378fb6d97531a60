"""Drawings of the cache: why blocks miss, a tree with a junction, pages and pool."""

from __future__ import annotations

from benchmarks.drawings.svg import Sheet


def idea() -> str:
    """A prompt that comes twice, and the next turn, under both rules of where states are saved."""
    sheet = Sheet("States at any token let a prompt be skipped whole", 434)
    sheet.title("A recurrent layer resumes only at a saved state")
    sheet.box(16, 42, 14, 14, "grey")
    sheet.text(36, 54, "computed", colour="faint")
    sheet.box(106, 42, 14, 14, "green")
    sheet.text(126, 54, "skipped", colour="faint")
    sheet.state(193, 49)
    sheet.text(206, 54, "saved state", colour="faint")
    sheet.text(290, 54, "each bar: blocks of 16 tokens", colour="faint")
    left, per_token = 16, 0.84

    def prompt(y: float, what: str, result: str, skipped: int, tokens: int) -> None:
        sheet.text(left, y, what)
        sheet.text(left + 484, y, result, anchor="end")
        sheet.blocks(left, y + 9, skipped, "green", per_token)
        start = left + skipped * per_token
        sheet.blocks(start, y + 9, tokens - skipped, "grey", per_token)

    sheet.text(16, 86, "States at the ends of blocks of 528 tokens", 14, bold=True)
    for y in (106, 150):
        sheet.box(left - 3, y + 6, 528 * per_token + 4, 22, None, "line", dashed=True)
    prompt(106, "479 tokens", "the block is not full: no state", 0, 479)
    prompt(150, "the same again", "0 skipped", 0, 479)
    prompt(194, "answer and next turn: 552 tokens", "0 skipped", 0, 552)
    sheet.state(left + 528 * per_token, 211)

    sheet.text(16, 260, "States at any token (megatron_hybrid)", 14, bold=True)
    prompt(280, "479 tokens", "a state at the prompt's end", 0, 479)
    sheet.state(left + 479 * per_token, 297)
    prompt(324, "the same again", "479 skipped: no prefill", 479, 479)
    sheet.state(left + 479 * per_token, 341)
    prompt(368, "answer and next turn: 552 tokens", "519 skipped", 519, 552)
    sheet.state(left + 519 * per_token, 385)
    sheet.state(left + 552 * per_token, 385)
    sheet.text(16, 420, "The answer of 40 tokens left a state at 519.", colour="faint")
    return sheet.svg()


def tree() -> str:
    """Two cached chats after one system prompt, and a prompt that leaves one of them."""
    sheet = Sheet("A tree of cached prefixes with states, ghost entries and a junction", 356)
    sheet.title("The tree: tokens, KV blocks, states")
    left, per_token = 20, 0.75

    def at(position: int) -> float:
        return left + position * per_token

    def chat(y: float, label: float, start: int, end: int, states: dict[int, bool]) -> None:
        sheet.blocks(at(start), y - 8, end - start, "grey", per_token)
        for position, ghost in states.items():
            sheet.state(at(position), y, ghost)
            sheet.text(at(position), y + label, str(position), colour="faint", anchor="middle")

    sheet.text(at(350) - 8, 66, "a new prompt of 440 tokens", bold=True)
    sheet.line([(at(350), 132), (at(350), 86)], "green")
    for start in range(350, 440, 16):
        width = min(16, 440 - start) * per_token - 1.5
        sheet.box(at(start), 78, width, 16, "soft green", "green")
    sheet.state(at(350), 86)
    sheet.state(at(440), 86)
    sheet.text(at(440) + 14, 91, "what it adds", colour="faint")
    sheet.line([(at(160), 141), (at(160), 216)])
    sheet.text(left, 126, "system prompt", colour="faint")
    chat(141, -15, 0, 640, {160: False, 240: True, 320: False, 480: False, 640: False})
    sheet.text(at(375), 126, "first chat", colour="faint")
    sheet.text(at(160) - 8, 182, "junction", 13, "orange", bold=True, anchor="end")
    chat(208, 27, 160, 400, {240: True, 320: False, 400: False})
    sheet.text(at(415), 213, "second chat", colour="faint")

    sheet.box(16, 252, 14, 14, "grey")
    sheet.text(36, 264, "KV block of 16 tokens", colour="faint")
    sheet.state(199, 259)
    sheet.text(212, 264, "state", colour="faint")
    sheet.state(265, 259, ghost=True)
    sheet.text(278, 264, "ghost entry: its state was evicted", colour="faint")
    sheet.text(16, 294, "The new prompt leaves the first chat at 350, inside a block. It shares")
    sheet.text(16, 313, "the KV of 350 tokens (q), resumes at the state at 320 (p), computes 30")
    sheet.text(16, 332, "tokens again and the 90 new ones. It saves states at 350 and at its end.")
    return sheet.svg()


def pages() -> str:
    """One pool of pages: who holds which, live slots next to it, tiers below it."""
    sheet = Sheet("Pages of one pool, live slots, and the tiers below", 466)
    sheet.title("One pool of uniform pages")
    for x, name, table, start in (
        (16, "request A", "blocks 1 2 3 4 5", "skipped 48 of 80 tokens"),
        (268, "request B", "blocks 1 2 3 12", "skipped 48 of 60 tokens"),
    ):
        sheet.box(x, 44, 236, 68, "soft grey", radius=6)
        sheet.text(x + 12, 65, name, bold=True)
        sheet.text(x + 224, 65, "lease", colour="faint", anchor="end")
        sheet.text(x + 12, 84, table)
        sheet.text(x + 12, 102, start, colour="faint")
        sheet.arrow([(x + 60, 112), (x + 60, 148)])

    holds = {
        **dict.fromkeys((1, 2, 3), "green"),
        **dict.fromkeys((4, 5, 12), "blue"),
        **dict.fromkeys((6, 7, 14, 15), "orange"),
        **dict.fromkeys((8, 9, 16), "grey"),
    }
    size = 49
    sheet.text(16, 170, "the pool", bold=True)
    for page in range(20):
        x, y = 16 + page % 10 * size, 180 + page // 10 * 44
        fill = holds.get(page)
        sheet.box(x, y, size - 5, 38, f"soft {fill}" if fill else None, fill or "line", 3, not fill)
        sheet.text(x + 22, y + 24, str(page), anchor="middle", bold=bool(fill))
    for x, name, one, two, fill in (
        (16, "live slots", "the states that", "kernels work on", "soft orange"),
        (188, "host memory", "what the pool", "evicts", "soft blue"),
        (360, "disk", "what host memory", "evicts or refuses", "soft blue"),
    ):
        sheet.box(x, 326, 144, 70, fill, radius=6)
        sheet.text(x + 12, 346, name, bold=True)
        sheet.text(x + 12, 366, one)
        sheet.text(x + 12, 384, two)
    for x, down, up in ((50, "restore,", "save"), (222, "evict,", "fetch")):
        sheet.arrow([(x, 268), (x, 324)])
        sheet.arrow([(x + 22, 326), (x + 22, 269)])
        sheet.text(x + 34, 292, down, colour="faint")
        sheet.text(x + 34, 310, up, colour="faint")
    sheet.arrow([(332, 361), (359, 361)])
    sheet.arrow([(416, 326), (416, 269)])
    sheet.text(428, 301, "fetch", colour="faint")

    for x, y, colour, words in (
        (16, 412, "green", "KV that A and B share"),
        (16, 436, "blue", "KV of one request"),
        (206, 412, "orange", "states (here of two pages)"),
        (206, 436, "grey", "KV that the tree alone holds"),
    ):
        sheet.box(x, y, 14, 14, f"soft {colour}", colour)
        sheet.text(x + 22, y + 12, words, colour="faint")
    sheet.text(416, 424, "dashed: free", colour="faint")
    sheet.text(416, 448, "0: null page", colour="faint")
    return sheet.svg()
