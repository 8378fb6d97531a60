"""The picture in docs/start/chat.md: a tree of the engine with states of all tiers, and the charts
of a simulated day. It is written to runs/page/page.png: copy it to docs/page.png."""

import random
import time
from pathlib import Path

from http_server import run_apart, running_server
from playwright.sync_api import Route, expect
from simulated_day import simulated_day

from megatron_hybrid.serving.history import SPANS

SHOTS = Path("runs/page")
SLOW = 60_000
BEGIN = "You tell old tales of kings and millers, of foxes and of talking birds, in plain words. "
PARTS = (
    "A fox met a crow at the edge of the wood, and the crow held a piece of cheese. ",
    "There was a miller who had three sons, and the youngest got nothing but a cat. ",
    "A king had a daughter who would not laugh, whatever was shown to her. ",
    "In the mill by the river the wheel turned all night, though nobody was there. ",
)


def test_the_picture_has_states_of_all_tiers_and_a_day(page, tmp_path):
    history, draw = simulated_day(time.time()), random.Random(5)
    columns = {span: run_apart(history.columns(span)) for span in SPANS}

    def answer(route: Route) -> None:
        span = int(route.request.url.partition("seconds=")[2])
        route.fulfill(json=columns[span])

    page.route("**/cache/history*", answer)
    fields = {"cache_bytes": 3 << 20, "host_cache_bytes": 1 << 20, "cache_dir": tmp_path}
    note = "The demo model was trained on old books alone: it continues stories."
    with running_server(fields, description=note) as server:
        for _ in range(60):
            prompt = BEGIN + "".join(draw.choices(PARTS, [4, 3, 2, 1], k=draw.randint(1, 5)))
            run_apart(server.service.engine.generate(prompt))
        tree = run_apart(server.service.engine.cache_tree())
        assert {state.tier for edge in tree for state in edge.states} >= {"pool", "host", "disk"}
        page.goto(server.url)
        page.fill("#chat-text", f"{BEGIN}{PARTS[1]}")
        page.press("#chat-text", "Enter")
        expect(page.locator("#turns > li").last.locator("small")).not_to_be_empty(timeout=SLOW)
        page.locator("#span label", has_text="1 day").click()
        page.fill("#explain-text", f"{BEGIN}{PARTS[1]}{PARTS[0]}")
        page.click("#explain-form button")
        expect(page.locator("#explain-answer")).to_be_visible(timeout=SLOW)
        expect(page.locator("#tokens path")).to_have_count(2, timeout=SLOW)
        page.wait_for_timeout(2500)
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / "page.png", full_page=True)
        page.goto("about:blank")  # it would ask on, and tell of a server that is gone
