"""The page at `/` in a real browser, beside what the engine says."""

import re
from itertools import product
from pathlib import Path

import pytest
from http_server import running_server
from playwright.sync_api import Page, expect
from waiting import wait_until

SHOTS = Path("runs/page")
STORY = "Once upon a time there lived in a small house at the edge of a dark forest an old miller. "
SECRET = "Rumpelstiltskin"
SLOW = 60_000
"""Milliseconds, for answers on a busy machine."""


@pytest.fixture(scope="module")
def server():
    with running_server(
        {"cache_bytes": 3 << 20, "host_cache_bytes": 1 << 20}, description="It tells stories."
    ) as server:
        yield server


def set_tokens(page: Page, number: int) -> None:
    """Let answers have at most so many tokens."""
    page.click("#settings summary")
    page.fill("#max-tokens", str(number))


def say(page: Page, text: str, turns: int) -> None:
    """Send a message, and wait for the answer, after which there are so many items in the chat."""
    page.fill("#chat-text", text)
    page.press("#chat-text", "Enter")
    expect(page.locator("#turns > li")).to_have_count(turns)
    expect(page.locator("#turns > li").last.locator("small")).not_to_be_empty(timeout=SLOW)
    expect(page.locator("#chat-send")).to_be_enabled()


def test_an_answer_grows_and_says_what_was_reused(server, page):
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text("demo")
    expect(page.locator("#note")).to_have_text("It tells stories.")
    page.evaluate(
        """() => {
          window.lengths = [];
          new MutationObserver(() => lengths.push(turns.textContent.length)).observe(
            turns, {childList: true, subtree: true, characterData: true});
        }"""
    )
    say(page, STORY, 2)
    assert len(set(page.evaluate("lengths"))) > 5  # it came in pieces
    say(page, "And then?", 4)
    note = page.locator("#turns > li").last.locator("small").text_content()
    skipped, prompt = map(int, re.match(r"(\d+) of (\d+) prompt tokens skipped", note).groups())
    seen = server.told("requests")[0]
    assert (skipped, prompt) == (seen.skipped_tokens, seen.prompt_tokens) and skipped > 0
    page.click("#chat-new")
    expect(page.locator("#turns > li")).to_have_count(0)


def test_an_answer_can_be_stopped(server, page):
    page.goto(server.url)
    set_tokens(page, 900)
    page.fill("#chat-text", STORY)
    page.press("#chat-text", "Enter")
    expect(page.locator("#turns > li").last.locator(".said")).not_to_be_empty(timeout=SLOW)
    page.click("#chat-stop")
    expect(page.locator("#turns > li").last.locator("small")).to_have_text("stopped")
    wait_until(lambda: server.told("stats")["requests_running"] == 0)
    assert server.told("requests")[0].status == "cancelled"


def test_requests_are_seen_while_they_run_and_their_path_is_lit(server, page):
    page.goto(server.url)
    set_tokens(page, 200)
    page.fill("#chat-text", STORY * 2)
    page.press("#chat-text", "Enter")
    newest = page.locator("#request-rows .row").first
    expect(newest.locator(".text")).to_contain_text("decode", timeout=SLOW)
    expect(page.locator("#chat-send")).to_be_enabled(timeout=SLOW)
    expect(newest).to_have_class("row ended")
    expect(newest).to_have_attribute("aria-pressed", "true")  # the answer's own
    number = server.told("requests")[0].request_id
    assert newest.locator("span").first.text_content() == f"#{number}"
    lit = "() => [...document.querySelectorAll('#tree-canvas')].map((c) => c.toDataURL())[0]"
    before = page.evaluate(lit)
    newest.click()  # off
    expect(newest).to_have_attribute("aria-pressed", "false")
    assert page.evaluate(lit) != before


def test_the_tree_grows_and_can_be_enlarged(server, page):
    page.goto(server.url)
    summary = page.locator("#tree-summary")
    server.complete(f"{STORY}His name was Jack, and")
    server.complete(f"{STORY}His daughter's name was Mary, and")
    tree = server.told("cache_tree")
    expect(summary).to_contain_text(f"{len(tree)} pieces")
    stored = sum(state.tier == "pool" for edge in tree for state in edge.states)
    expect(summary).to_contain_text(f"{stored} states in the pool")
    server.complete("A quite different beginning:")
    expect(summary).to_contain_text(f"{len(server.told('cache_tree'))} pieces")
    page.hover("#tree-canvas", position={"x": 8, "y": 8})
    expect(page.locator("#tree-detail")).to_contain_text("tokens 0 to")
    page.click("#tree-canvas", position={"x": 8, "y": 8})
    expect(page.locator("#tree-whole")).to_be_visible()
    page.click("#tree-whole")
    expect(page.locator("#tree-whole")).to_be_hidden()
    # What has come as changes is drawn as what comes as a whole.
    drawn = "document.querySelector('#tree-canvas').toDataURL()"
    before, text = page.evaluate(drawn), summary.text_content()
    page.reload()
    expect(summary).to_have_text(text)
    assert page.evaluate(drawn) == before


def test_explain_says_what_the_engine_says(server, page):
    page.goto(server.url)
    server.complete(STORY.strip())  # whose tokens the prompt begins with
    prompt = f"{STORY}But his wife"
    page.fill("#explain-text", prompt)
    page.click("#explain-form button")
    told = server.told("explain", server.service.tokenizer.tokenize(prompt))
    expect(page.locator("#explain-answer")).to_have_text(str(told))
    share = page.locator("#explain-bar .skipped").evaluate("e => parseFloat(e.style.width)")
    assert share == pytest.approx(100 * told.match.skipped_tokens / told.match.prompt_tokens, 0.01)


def test_explain_of_a_chat_s_next_message_is_of_all_its_turns(server, page):
    page.goto(server.url)
    say(page, STORY, 2)
    page.fill("#explain-text", "And his wife?")
    page.check("#explain-chat")
    page.click("#explain-form button")
    text = page.locator("#explain-answer")
    expect(text).to_contain_text("prompt tokens are skipped")
    skipped, prompt = map(int, re.match(r"(\d+) of (\d+)", text.text_content()).groups())
    say(page, "And his wife?", 4)
    seen = server.told("requests")[0]
    assert (seen.skipped_tokens, seen.prompt_tokens) == (skipped, prompt)


@pytest.mark.parametrize("shows", [False, True])
def test_prompts_are_shown_only_if_allowed(browser, page, shows):
    with running_server(shows_prompts=shows) as server:
        server.complete(f"{SECRET} is my name, and")
        bodies = []
        page.on("response", lambda response: bodies.append(response.text()))
        page.goto(server.url)
        expect(page.locator("#request-rows .row")).to_have_count(1)
        expect(page.locator("#tree-summary")).to_contain_text("piece")
        page.wait_for_timeout(1000)
        assert (SECRET in page.content()) == shows == any(SECRET in body for body in bodies)


def test_with_keys_the_page_asks_for_one(browser):
    page = browser.new_page()  # its console tells of the refusals
    with running_server(api_keys=("a", "b"), admin_keys=("root",)) as server:
        page.goto(server.url)
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key", "a")  # no operator: chats, and sees nothing of others
        page.click("#key-form button")
        expect(page.locator("#model")).to_have_text("demo")
        expect(page.locator("#problem")).to_contain_text("admin key")
        say(page, STORY, 2)
        page.fill("#key", "root")
        page.click("#key-form button")
        expect(page.locator("#problem")).to_be_hidden()
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#request-rows .row")).to_have_count(1)
        page.check("#explain-chat")  # of the client's chat: its prefixes are not the operator's
        for key, share in (("", "0 of"), ("a", "[1-9]\\d* of")):
            page.fill("#explain-key", key)
            page.fill("#explain-text", "And then?")
            page.click("#explain-form button")
            expect(page.locator("#explain-answer")).to_have_text(re.compile(f"^{share}"))
    page.close()


def test_nothing_is_cut_off(server, page):
    page.goto(server.url)
    for number in range(30):  # more than the pool has room for
        server.complete(f"{STORY * (number % 3)}{number} times {'he ran and she sang, ' * number}")
    say(page, STORY, 2)
    page.click("#settings summary")
    page.fill("#explain-text", f"{STORY}{STORY}7 times he ran")
    page.click("#explain-form button")
    expect(page.locator("#explain-answer")).to_be_visible()
    expect(page.locator("#lost dd").first).not_to_be_empty(timeout=SLOW)
    expect(page.locator("#evictions-now b")).to_have_text(re.compile("[1-9]"), timeout=SLOW)
    SHOTS.mkdir(parents=True, exist_ok=True)
    for scheme, width in product(("light", "dark"), (390, 768, 1280, 2560)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(300)
        page.screenshot(path=SHOTS / f"{width}_{scheme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        cut = page.evaluate(
            """() => [...document.querySelectorAll(
                'h2, p, label, dt, dd, button, output, summary, svg, '
                + (innerWidth < 760 ? '.text' : 'h2'))]
              .filter((e) => e.getClientRects().length && !e.classList.contains('unseen'))
              .filter((e) => e.getBoundingClientRect().right > innerWidth
                             || e.clientWidth && e.scrollWidth > e.clientWidth + 1)
              .map((e) => e.outerHTML.slice(0, 80))"""
        )
        assert cut == []


def test_a_server_that_has_gone_is_told(browser):
    page = browser.new_page()
    with running_server() as server:
        page.goto(server.url)
        expect(page.locator("#skipped")).not_to_be_empty()
    expect(page.locator("#problem")).to_have_text("The server does not answer.", timeout=SLOW)
    page.close()


def test_the_routes_are_shown_with_the_meaning_of_each_field(server, page):
    described = server.call("/openapi.json").json()
    page.goto(f"{server.url}/docs")
    chats = page.locator("#routes section", has_text="POST /v1/chat/completions").first
    row = chats.locator("tr", has=page.get_by_text("temperature", exact=True))
    fields = described["components"]["schemas"]["ChatFields"]["properties"]
    expect(row.locator("td").last).to_have_text(fields["temperature"]["description"])
    special = chats.locator("tr", has=page.get_by_text("skip_special_tokens", exact=True))
    expect(special.locator("td").nth(2)).to_have_text("true")
    expect(chats.get_by_text("Refused, unless they ask for nothing: ")).to_contain_text("suffix")
    expect(page.locator("#objects section", has_text="ResponseFormat").first).to_be_visible()
