"""What the page does with answers, charts and trees that tests make up, in a real browser."""

import json
import re
import time
from collections.abc import Iterator

import pytest
from http_server import run_apart, running_server
from playwright.sync_api import Page, Route, expect
from simulated_day import simulated_day

SLOW = 60_000
NASTY = """**bold** and `code`, <b onclick="alert(1)">html</b>

<img src="http://elsewhere.example/a.png" onerror="alert(1)">
<script>alert(1)</script> <style>*{display:none}</style>

![a picture](http://elsewhere.example/b.png) [bad](javascript:alert(1)) [good](https://good.example)

| a | b |
| --- | ---: |
| 1 | 2 |

```js
<iframe src="http://elsewhere.example"></iframe>
```
"""


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


class Answers:
    """Stands for the server's answers. `bodies` are the requests."""

    def __init__(self, page: Page, path: str = "**/v1/chat/completions"):
        self.bodies: list[dict] = []
        self.pieces = ["Hello ", "there"]
        page.route(path, self.answer)

    def answer(self, route: Route) -> None:
        self.bodies.append(route.request.post_data_json)
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": len(self.pieces),
            "prefix": {"skipped_tokens": 3, "miss_reason": None},
        }
        chunks = [{"choices": [{"delta": {"content": piece}}]} for piece in self.pieces]
        events = [*chunks, {"choices": [], "usage": usage}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(body=f"{body}data: [DONE]\n\n", content_type="text/event-stream")

    def said(self) -> list[tuple[str, str]]:
        """Roles and texts of the last request."""
        return [(each["role"], each["content"]) for each in self.bodies[-1]["messages"]]


def send(page: Page, text: str, turns: int) -> None:
    page.fill("#chat-text", text)
    page.press("#chat-text", "Enter")
    answered(page, turns)


def answered(page: Page, turns: int) -> None:
    expect(page.locator("#turns > li")).to_have_count(turns, timeout=SLOW)
    expect(page.locator("#chat-send")).to_be_visible(timeout=SLOW)


def test_answers_are_markdown_and_run_and_load_nothing(server, page):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answers = Answers(page)
    answers.pieces = [NASTY[i : i + 3] for i in range(0, len(NASTY), 3)]
    page.goto(server.url)
    send(page, "Show me", 2)
    said = page.locator("#turns > li").last.locator(".said")
    expect(said.locator("strong")).to_have_text("bold")
    expect(said.locator("td").last).to_have_attribute("align", "right")
    expect(said.locator("pre code")).to_contain_text("<iframe")
    expect(said).to_contain_text('<b onclick="alert(1)">html</b>')
    expect(said).to_contain_text("[image: a picture]")
    assert said.locator("img, script, style, iframe, [onclick], [onerror]").count() == 0
    links = said.locator("a").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
    assert links == [None, "https://good.example"]
    assert all(url.startswith((server.url, "data:")) for url in asked)


def test_ten_thousand_pieces_take_no_seconds(server, page):
    answers = Answers(page)
    # Also a long paragraph whose signs are not closed, for which a search each would take minutes.
    answers.pieces = [
        "word **" if number > 5000 else f"word **{number}**\n\n" for number in range(10_000)
    ]
    page.goto(server.url)
    page.evaluate(
        """() => {
          window.drawn = 0;
          new MutationObserver(() => drawn++).observe(turns, {childList: true, subtree: true});
          window.busy = 0;
          new PerformanceObserver((list) => list.getEntries().forEach((e) => (busy += e.duration)))
            .observe({entryTypes: ['longtask']});
        }"""
    )
    began = time.perf_counter()
    send(page, "Go on", 2)
    took, drawn, busy = time.perf_counter() - began, *page.evaluate("[drawn, busy]")
    print(f"10,000 pieces: {took:.1f} s, {drawn} renderings, {busy:.0f} ms in long tasks")
    assert drawn <= 10 * took + 8  # and the turns' own elements
    assert busy < 15_000  # milliseconds, of a machine that does much else
    text = page.locator("#turns > li").last.locator(".said").text_content()
    assert "word 4999" in text and text.count("word") == 10_000


def test_a_message_can_be_edited_and_an_answer_regenerated_and_copied(server, page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answers = Answers(page)
    page.goto(server.url)
    send(page, "first", 2)
    send(page, "second", 4)
    items = page.locator("#turns > li")
    items.nth(3).locator("text=Regenerate").click()
    answered(page, 4)
    assert answers.bodies[-1] == answers.bodies[-2]
    items.nth(3).locator("text=Copy").click()
    expect(items.nth(3).locator("text=Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "Hello there"
    items.nth(0).locator("text=Edit").click()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("another")
    page.keyboard.press("Enter")
    answered(page, 2)
    assert answers.said() == [("user", "another")]


def test_only_changed_settings_are_sent_and_a_system_prompt_comes_first(server, page):
    answers = Answers(page)
    page.goto(server.url)
    page.click("#settings summary")
    expect(page.locator("#temperature")).to_have_value("1")  # the model's
    send(page, "plain", 2)
    assert not answers.bodies[-1].keys() & {"temperature", "top_p", "top_k", "min_p"}
    page.fill("#temperature", "0.2")
    page.fill("#system", "Be brief.")
    send(page, "changed", 4)
    assert answers.bodies[-1]["temperature"] == 0.2
    assert answers.said()[0] == ("system", "Be brief.")
    expect(page.locator("#settings-now")).to_have_text("a system prompt, temperature 0.2")
    page.click("#sampling-reset")
    expect(page.locator("#temperature")).to_have_value("1")


def test_a_chat_survives_a_reload_and_what_is_kept_is_bounded(server, page):
    answers = Answers(page)
    page.goto(server.url)
    page.click("#settings summary")
    page.fill("#temperature", "0.3")
    send(page, "remember", 2)
    page.reload()
    expect(page.locator("#turns > li")).to_have_count(2)
    expect(page.locator("#turns > li").last).to_contain_text("3 of 9 prompt tokens skipped")
    expect(page.locator("#settings-now")).to_have_text("temperature 0.3")
    answers.pieces = ["x" * 400_000]
    for turns in (4, 6, 8):
        send(page, "long", turns)
    kept = page.evaluate("localStorage.getItem('megatron-hybrid-chat')")
    assert len(kept) < 1_010_000
    roles = [turn["role"] for turn in json.loads(kept)["turns"]]
    assert roles == ["user", "assistant"] * 2
    page.click("#chat-new")
    assert json.loads(page.evaluate("localStorage.getItem('megatron-hybrid-chat')"))["turns"] == []


def test_without_a_template_the_page_continues_texts_and_says_so(server, page):
    answers = Answers(page, "**/v1/completions")
    with_template = {"id": "bare", "has_chat_template": False, "sampling_defaults": {}}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [with_template]}))
    page.goto(server.url)
    expect(page.locator("#no-template")).to_contain_text("--chat-template FILE")
    send(page, "Once", 2)
    assert answers.bodies[-1]["prompt"] == "Once" and "messages" not in answers.bodies[-1]


def test_an_empty_page_explains_itself(page):
    with running_server() as fresh:
        page.goto(fresh.url)
        for name in ("chat-empty", "no-requests", "tree-empty"):
            expect(page.locator(f"#{name}")).to_be_visible()
        expect(page.locator("#tokens .empty")).to_have_text("No token was computed in this time.")
        expect(page.locator("#tree-box")).to_be_hidden()
        page.locator("#chat-empty button").first.click()
        expect(page.locator("#chat-text")).to_have_value(re.compile("^Once upon"))


def family(number: int) -> Iterator[tuple[int, int]]:
    """Pieces of a tree, and their parents."""
    return ((each, each // 3) for each in range(1, number + 1))


def test_every_piece_of_the_tree_is_reached_by_keyboard(server, page):
    parents = dict(family(30))
    depth = {0: 0}
    for each, parent in parents.items():
        depth[each] = depth[parent] + 1
    columns = {
        "numbers": [*parents],
        "parents": [*parents.values()],
        "starts": [100 * depth[parent] for parent in parents.values()],
        "ends": [100 * depth[each] for each in parents],
        "held_ends": [100 * depth[each] for each in parents],
        "states": [[30, 100 * depth[30], "disk", "prompt_end", 1, 4096]],
        **{"num_edges": 30, "tick": 1, "last_uses": [0] * 30},
        **{"version": "a-1-0", "since": None, "removed": []},
    }
    page.route("**/cache/tree*", lambda route: route.fulfill(json=columns))
    page.goto(server.url)
    expect(page.get_by_role("tree", name="Cached prefixes")).to_be_visible()
    item = "document.activeElement"
    page.get_by_role("treeitem").focus()
    seen: dict[int, str] = {}
    key = "ArrowRight"
    page.keyboard.press("Home")
    while True:
        number, level, label = page.evaluate(
            f"[+{item}.dataset.edge, +{item}.ariaLevel, {item}.ariaLabel]"
        )
        if number in seen and key == "ArrowDown":
            break
        assert level == depth[number] and label.startswith("tokens ")
        key = "ArrowDown" if number in seen else "ArrowRight"
        seen[number] = label
        if all(parent != number for parent in parents.values()):
            key = "ArrowDown"
        page.keyboard.press(key)
    assert seen.keys() == parents.keys()
    assert "disk" in seen[30]
    page.keyboard.press("Enter")
    expect(page.locator("#tree-whole")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#tree-whole")).to_be_hidden()
    page.keyboard.press("End")
    assert page.evaluate(f"+{item}.dataset.edge") == 26  # the last one of the last branch
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(f"+{item}.dataset.edge") == parents[26]


def test_charts_say_what_the_history_says(server, page):
    history = simulated_day(time.time())

    def answer(route: Route) -> None:
        span = int(route.request.url.partition("seconds=")[2])
        route.fulfill(json=run_apart(history.columns(span)))

    page.route("**/cache/history*", answer)
    page.goto(server.url)
    for name, span in (("5 minutes", 300), ("1 hour", 3600), ("1 day", 86400)):
        page.locator("#span label", has_text=name).click()
        columns = run_apart(history.columns(span))
        values = columns["inter_token_latency_seconds_p99"]
        last = next(value for value in reversed(values) if value is not None)
        told = f"p99 {1000 * last:.{0 if last >= 0.01 else 1}f} ms"
        expect(page.locator("#between-now")).to_contain_text(told)
        assert page.locator("#tokens path").count() == 2
        assert page.locator("#first path").count() == 3
        skipped, prompt = (
            columns[f"{n}_tokens"][-1] - columns[f"{n}_tokens"][0] for n in ("skipped", "prompt")
        )
        told = f"{100 * skipped / prompt:.1f} %"  # one figure, in two places
        expect(page.locator("#rate-now")).to_have_text(told)
        expect(page.locator("#skipped")).to_have_text(re.compile(f"^{told} of .* in {name}$"))
        expect(page.locator("#queue-now")).to_contain_text("started")
    page.hover("#queue", position={"x": 60, "y": 40})
    expect(page.locator("#queue-now span").first).to_have_text(re.compile(r"\d\d:\d\d"))


def test_charts_count_requests_that_no_sample_saw_and_show_lone_values(server, page):
    """One request of ten milliseconds, in an hour of points."""
    sampled = run_apart(simulated_day(time.time()).columns(3600))
    columns = {key: [0] * 120 for key in sampled} | {"time": sampled["time"][-120:]}
    for key in columns:
        if "latency" in key or "first_token" in key:
            columns[key] = [None] * 120
            columns[key][80] = 0.01
    columns["requests"] = [0] * 80 + [1] * 40
    columns["prompt_tokens"] = [0] * 80 + [9] * 40  # none of which was skipped
    page.route("**/cache/history*", lambda route: route.fulfill(json=columns))
    page.goto(server.url)
    expect(page.locator("#queue-now")).to_contain_text("started")
    assert page.locator("#rate-now").text_content() == "0.0 %"
    assert page.locator("#tokens").text_content().endswith("No token was computed in this time.")
    empty = page.locator("#queue .empty, #rate .empty, #first .empty, #between .empty")
    assert empty.count() == 0
    for chart in ("first", "between"):
        dots = page.locator(f"#{chart} circle").all()
        assert len(dots) == 3 and min(d.bounding_box()["width"] for d in dots) >= 5
    at = page.locator("#first circle").last.bounding_box()
    page.mouse.move(at["x"] + 40, at["y"])  # the nearest point that has a value
    expect(page.locator("#first-now")).to_contain_text("p50 10 ms")
