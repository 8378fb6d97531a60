"""What the page reads: the requests, the tree and the last day, for the operator alone."""

import json
import logging
import re

from http_server import running_server

from megatron_hybrid.serving.history import SPANS
from megatron_hybrid.serving.service import Service

SECRET = "Rumpelstiltskin"
POLLED = ("/requests", "/cache/tree", "/cache/history")


def test_the_page_and_its_files_load_nothing_from_elsewhere(server):
    for page in (server.call("/"), server.call("/docs")):
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
        files = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
        texts = [server.call(f"/{file}").text.replace("http://www.w3.org/", "") for file in files]
        assert len(texts) > 1 and not any("http" in text or not text for text in texts)
    assert server.call("/page/../app.py").status_code == 404
    assert server.call("/page/%2e%2e/app.py").status_code == 404


def test_the_routes_tell_what_the_engine_tells(server):
    usage = server.complete(f"{SECRET} is my name, and")["usage"]
    row = server.call("/requests").json()["requests"][0]
    assert (row["prompt_tokens"], row["status"]) == (usage["prompt_tokens"], "length")
    assert row["edge"] == server.told("requests")[0].edge > 0
    tree, told = server.call("/cache/tree").json(), server.told("cache_tree")
    assert sorted(tree["numbers"]) == sorted(edge.number for edge in told)
    states = [list(state) for edge in told for state in edge.states]
    assert sorted(tree["states"]) == sorted(states) != []
    assert tree["since"] is None and tree["num_edges"] == len(told)
    stats = server.told("stats")
    for span in SPANS:
        history = server.call(f"/cache/history?seconds={span}").json()
        assert len({len(column) for column in history.values()}) == 1
        assert history["time"] == sorted(history["time"])
        assert history["requests"][-1] - history["requests"][0] > 0  # whatever the samples saw
        for key in history.keys() & stats.keys() - {"requests_running"}:  # that is a peak
            assert history[key][-1] == stats[key]


def test_the_tree_is_sent_as_changes(server):
    server.complete([f"{start * 37} goats went over the bridge" for start in range(12)])
    version = server.call("/cache/tree").json()["version"]
    nothing = server.call(f"/cache/tree?since={version}").json()
    assert (nothing["since"], nothing["numbers"], nothing["removed"]) == (version, [], [])
    server.complete("Nothing that has been told before")
    more = server.call(f"/cache/tree?since={version}").json()
    assert 0 < len(more["numbers"]) < 5 and more["version"] != version
    for other in ("", "a-1-1", f"{version}0", "\u0661", "-".join("999")):
        assert server.call(f"/cache/tree?since={other}").json()["since"] is None


def test_the_model_tells_its_defaults_of_sampling_as_its_file_has_them(server, monkeypatch):
    tokenizer = server.service.tokenizer
    monkeypatch.setattr(tokenizer, "generation_config", {"temperature": 0.3, "top_k": 7})
    service = Service(
        server.service.engine, tokenizer, server.service.engine_config, server.service.config
    )
    told = service.sampling_defaults
    assert (told["temperature"], told["top_k"]) == (0.3, 7)
    model = server.call("/v1/models").json()["data"][0]
    assert model["sampling_defaults"]["temperature"] == 1.0
    assert model["has_chat_template"] is True and model["root"] == model["id"]


def test_texts_of_prompts_are_shown_only_if_allowed(server):
    with running_server(shows_prompts=True) as showing:
        for each, shows in ((server, False), (showing, True)):
            each.complete(f"My name is {SECRET}")
            assert [SECRET in each.call(path).text for path in POLLED[:2]] == [shows, shows]


def test_the_routes_are_the_operator_s_and_the_page_is_open(caplog):
    """What is polled leaves no line in the log unless it is refused."""
    keys = {"api_keys": ("a", "b"), "admin_keys": ("root",)}
    with running_server(**keys) as server, caplog.at_level(logging.INFO):
        for path in POLLED:
            statuses = [server.call(path, key=key or None).status_code for key in ("", "a", "root")]
            assert statuses == [401, 403, 200]
        lines = [r.getMessage() for r in caplog.records if r.name.endswith(".access")]
        logged = [json.loads(line)["status"] for line in lines]
        assert logged == [401, 403] * len(POLLED)
        assert server.call("/").status_code == server.call("/page/main.js").status_code == 200
