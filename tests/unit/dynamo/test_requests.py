"""Dynamo's requests ask the engine for what the same body over HTTP asks for; chunks, cards."""

import json
import runpy
import shutil
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from http_server import DEMO
from safetensors.torch import load_file, save_file

from megatron_hybrid import cli
from megatron_hybrid.cache.report import PrefixReport
from megatron_hybrid.dynamo import model_card
from megatron_hybrid.dynamo.model_card import card_folder
from megatron_hybrid.dynamo.requests import GROUPS, Chunks, read_request
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.requests.request import GenerationResult, RequestOutput
from megatron_hybrid.inference.sampling_params import ThinkingBudget
from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.parsers.choice import style_of
from megatron_hybrid.serving.protocols.fields import CompletionFields
from megatron_hybrid.serving.protocols.request_mapping import guide_of, sampling_params
from megatron_hybrid.serving.request_middleware import Origins
from megatron_hybrid.text.tokenizer import Tokenizer

ROOM = 100
PROMPT = [5, 6, 7, 8]
STYLE = style_of("<think>")
ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "dynamo"
VALUES = {
    "sampling_options": {
        **{"n": 2, "best_of": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 12, "min_p": 0.05},
        **{"presence_penalty": 0.1, "frequency_penalty": -0.2, "repetition_penalty": 1.3},
        **{"seed": 7, "logit_bias": {"9": 2.5}, "use_beam_search": False, "length_penalty": 1},
        **{"include_stop_str_in_output": True, "allowed_token_ids": [4, 9]},
        "guided_decoding": {"choice": ["yes", "no"]},
    },
    "stop_conditions": {
        **{"max_tokens": 9, "min_tokens": 2, "stop": ["x", "yz"], "ignore_eos": True},
        "stop_token_ids": [11],
    },
    "output_options": {"logprobs": 3, "prompt_logprobs": 2, "skip_special_tokens": False},
}
"""A value of each field, other than the one that counts without it."""
CALLS = [("f", None, True), ("fg", True, True), ("fg", False, False)]
"""Tools, whether Dynamo stops after the first call, and whether the guide does."""


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(DEMO)


@pytest.mark.parametrize(
    ("style", "names", "once", "most_calls"),
    [({}, "f", None, None), *(({"style": "json"}, *each) for each in CALLS)],
)
def test_calls_that_must_come_are_all_of_the_answer(tokenizer, style, names, once, most_calls):
    """A caller's own tag, without a style, lets text follow."""
    content = {"type": "json_schema", "json_schema": {"type": "object"}, **style}
    tags = [
        {"type": "tag", "begin": f"<call>{name}", "content": content, "end": "</call>"}
        for name in names
    ]
    form = {"type": "triggered_tags", "triggers": ["<call>"], "tags": tags, "at_least_one": True}
    form |= {"stop_after_first": once} if once is not None else {}
    given = {"structural_tag": {"type": "structural_tag", "format": form}}
    guide, _ = asked(tokenizer, sampling_options={"guided_decoding": given}).guide
    found = json.loads(guide.source)["format"]
    assert found.get("stop_after_first") is most_calls and (found == form) is not bool(style)


def with_template(source):
    other = Tokenizer.from_folder(DEMO)
    other.set_chat_template(source)
    return other


def asked(tokenizer, style=STYLE, **request):
    return read_request({"token_ids": PROMPT, **request}, tokenizer, style, ROOM)


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in GROUPS.items() for name in names]
)
def test_each_field_asks_for_what_it_asks_over_http(tokenizer, group, name):
    value = VALUES[group][name]
    found = asked(tokenizer, **{group: {name: value}})
    body = {"prompt": PROMPT, "max_tokens": ROOM - len(PROMPT)} | {GROUPS[group][name]: value}
    fields = CompletionFields.model_validate(body)
    assert found.params == sampling_params(tokenizer, fields, fields.max_tokens)
    assert found.guide == guide_of(fields, STYLE) and found.fields.n == fields.n
    assert found.fields.prompt == PROMPT and found.salt == ""


def test_numbers_are_those_that_the_caller_wrote(tokenizer):
    found = asked(tokenizer, sampling_options={"temperature": 0.699999988079071, "top_p": 1.0})
    assert (found.params.temperature, found.params.top_p) == (0.7, 1.0)


def test_salts_are_marked_for_dynamo_s_reader_and_higher_priorities_come_first(tokenizer):
    routing = {"cache_salt": "tenant", "priority": 3}
    for request in ({"routing": routing}, {"extra_args": {"nvext": {"cache_salt": "tenant"}}}):
        assert asked(tokenizer, **request).salt == "dynamo-cache-salt:tenant"
    assert asked(tokenizer, routing=routing).fields.priority == -3


def test_end_tokens_of_the_frontend_are_stops_and_no_stop_reasons(tokenizer):
    stops = {"stop_token_ids": [11], "stop_token_ids_hidden": [12, tokenizer.eod]}
    found = asked(tokenizer, stop_conditions=stops)
    assert sorted(found.params.stop_token_ids) == [11, 12]
    outputs = [output(result=result(stop_reason=reason)) for reason in (12, 11, "x")]
    assert [Chunks(found, tokenizer).of(each).get("stop_reason") for each in outputs] == [
        *(None, 11, "x")
    ]


def test_a_request_that_was_moved_may_have_fewer_tokens_left_than_its_least(tokenizer):
    stops = {"max_tokens": 3, "min_tokens": 50, "stop": ["x"]}
    found = asked(tokenizer, stop_conditions=stops)
    assert (found.params.min_tokens, found.params.num_tokens_to_generate) == (3, 3)
    assert found.params.stop_words == ()  # the frontend finds them, behind the least


def test_options_that_only_dynamo_has(tokenizer):
    request = {"sampling_options": {"guided_decoding": {"regex": "a+", "backend": "xgrammar"}}}
    assert asked(tokenizer, **request).guide[0].source == "a+"
    request = {"extra_args": {"sampling_options": {"top_k": 4}}}
    assert asked(tokenizer, **request).params.top_k == 4
    request = {"sampling_options": {"bad_words_token_ids": [[3], [4, 5]]}}
    assert asked(tokenizer, **request).params.bad_words_ids == ((3,), (4, 5))


def test_reasoning_comes_before_the_guide_and_has_a_budget(tokenizer):
    guided = {"sampling_options": {"guided_decoding": {"regex": "a+"}}}
    (guide, _), (free, _) = (
        asked(tokenizer, **guided, require_reasoning=thinks).guide for thinks in (False, True)
    )
    assert guide.kind == "regex" and '"begin": "<think>"' in free.source
    opened = tokenizer.tokenize("<think>", add_special_tokens=False)
    prompt = {"token_ids": [*PROMPT, *opened], "require_reasoning": True}
    inside = read_request({**prompt, **guided}, tokenizer, STYLE, ROOM).guide[0]
    assert '"begin": ""' in inside.source
    with pytest.raises(ApiError, match="reasoning between two tokens"):
        asked(tokenizer, stop_conditions={"max_thinking_tokens": 4})


def test_a_thinking_budget_begins_where_the_prompt_ends(tokenizer, monkeypatch):
    ids = {"<think>": [100], "</think>": [101]}
    monkeypatch.setattr(tokenizer, "tokenize", lambda text, **_: ids[text])
    shown = {100: "<think>\n"}
    monkeypatch.setattr(
        tokenizer, "detokenize", lambda ids, **_: "".join(shown.get(id, "x") for id in ids)
    )
    for prompt, inside in ((PROMPT, False), ([*PROMPT, 100], True)):
        request = {"token_ids": prompt, "stop_conditions": {"max_thinking_tokens": 4}}
        found = read_request(request, tokenizer, STYLE, ROOM).params.thinking_budget
        assert found == ThinkingBudget(4, end=101, start=100, begins_inside=inside)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"prompt_embeds": "abc"}, "prompt_embeds"),
        ({"multi_modal_data": {"image_url": []}}, "multi_modal_data"),
        ({"prefill_result": {"disaggregated_params": {}}}, "prefill_result"),
        ({"routing": {"lora_name": "mine"}}, "lora_name"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": {"temperature": -1.0}}, "temperature"),
        ({"sampling_options": {"guided_decoding": {"json": {"type": 3}, "regex": "a"}}}, None),
        ({"sampling_options": {"guided_decoding": {"whitespace_pattern": " "}}}, None),
        ({"token_ids": []}, "prompt"),
        ({"output_options": {"logprobs": 21}}, "logprobs"),
    ],
)
def test_what_there_is_not_is_refused_by_name(tokenizer, request_, param):
    with pytest.raises(ApiError) as refused:
        asked(tokenizer, **request_)
    assert refused.value.status == 400
    assert refused.value.param == (param or "structured_outputs")


def result(**fields):
    return GenerationResult(0, PROMPT, [20, 21], "ab", "stop", None, **fields)


def output(**fields):
    given = {"request_id": 0, "sample_index": 0, "token_ids": [20], "text": "", "epoch": 0}
    given |= {"finish_reason": None, "result": None, "prefix": PrefixReport(4, 3, 2, None)}
    return RequestOutput(**(given | fields))


def test_chunks_have_tokens_logprobs_and_counts(tokenizer):
    options = {"logprobs": 1, "prompt_logprobs": 0}
    chunks = Chunks(asked(tokenizer, output_options=options), tokenizer)
    minus = float("-inf")
    first = chunks.of(output(log_probs=[minus], top_n_logprobs=[{30: -0.5, 20: minus}]))
    text = tokenizer.shown_bytes(30)
    assert first == {
        "token_ids": [20],
        "index": 0,
        "log_probs": [-9999.0],
        "top_logprobs": [
            [
                {
                    **{"rank": 1, "token_id": 30, "token": text.decode(), "logprob": -0.5},
                    "bytes": list(text),
                }
            ]
        ],
    }
    last = chunks.of(
        output(
            sample_index=1,
            finish_reason="stop",
            log_probs=[-1.0],
            top_n_logprobs=[{30: -0.5}],
            result=result(prompt_log_probs=[-0.1, -0.2, -0.3]),
        )
    )
    assert (last["index"], last["finish_reason"]) == (1, "stop")
    assert last["completion_usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    shown = last["engine_data"]["prompt_logprobs"]
    assert shown[0] is None and [each[str(t)]["logprob"] for each, t in zip(shown[1:], PROMPT[1:])]
    json.dumps([first, last])
    few = Chunks(asked(tokenizer, output_options={"logprobs": 0}), tokenizer)
    assert few.of(output(log_probs=[-1.0]))["top_logprobs"] == [[]]  # Dynamo adds the drawn token


def card(folder, tokenizer, dtype="torch.float32"):
    return card_folder(folder, tokenizer, ROOM, dtype)


def test_a_card_has_what_the_frontend_reads_and_no_weights(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = card(DEMO, tokenizer)
    # Workers of one model have one path, and those of another template another one.
    assert card(DEMO, tokenizer) == made
    assert card(DEMO, with_template("{{ messages[0].content }}")) != made
    assert len(list(made.parent.iterdir())) == 2
    config = json.loads((made / "config.json").read_text())
    assert config["eos_token_id"] == list(tokenizer.end_tokens)
    assert config["max_position_embeddings"] == ROOM
    assert not list(made.glob("*.safetensors"))
    found = Tokenizer.from_folder(made)
    assert found.fingerprint == tokenizer.fingerprint
    assert found.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("is_large", [False, True])
def test_other_weights_have_another_card(is_large, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if is_large:
        monkeypatch.setattr(model_card, "_WHOLE_BYTES", 1 << 14)
        monkeypatch.setattr(model_card, "_STEP_BYTES", 1 << 14)
    own, same, trained = (tmp_path / name for name in ("own", "same", "trained"))
    for folder in (own, same, trained):
        shutil.copytree(DEMO, folder)
    assert card(own, tokenizer) == card(same, tokenizer) != card(own, tokenizer, "torch.bfloat16")
    weights = load_file(trained / "model.safetensors")
    save_file({name: 1.01 * each for name, each in weights.items()}, trained / "model.safetensors")
    assert card(trained, tokenizer) != card(own, tokenizer)


def test_manifests_leave_time_to_drain_and_name_the_flags_that_there_are():
    documents = {
        path.name: list(yaml.safe_load_all(path.read_text())) for path in EXAMPLES.glob("*.yaml")
    }
    (graph,) = documents["kubernetes.yaml"]
    frontend, worker = (each["podTemplate"]["spec"] for each in graph["spec"]["components"])
    container = worker["containers"][0]
    (gpus,) = container["resources"]["limits"].values()
    assert f"--tp={gpus}" in container["args"]
    assert container["command"][-1] == "megatron_hybrid.dynamo"
    assert container["livenessProbe"]["httpGet"]["path"] == "/engine/live"
    (services,) = (each["services"] for each in documents["etcd.yaml"])
    assert services["frontend"]["command"][3:] == frontend["containers"][0]["args"]
    server, *_ = documents["llm_d.yaml"]
    pod = server["spec"]["template"]["spec"]
    assert min(worker["terminationGracePeriodSeconds"], pod["terminationGracePeriodSeconds"]) > 30
    assert all(each["stop_grace_period"] == "60s" for name, each in services.items() if "w" in name)
    (ray,) = yaml.safe_load((ROOT / "examples/ray/ray_serve.yaml").read_text())["applications"]
    ingress, replicas = ray["deployments"]
    num_cpus = ingress["ray_actor_options"]["num_cpus"]
    assert num_cpus + replicas["num_replicas"] <= 2  # a small machine


SERVE, FRONTEND = ["megatron-hybrid", "serve"], ["python", "-m", "dynamo.frontend"]
WORKER = ["python", "-m", "megatron_hybrid.dynamo", "demo"]
PORTS = {"DYN_HTTP_PORT": "81", "DYN_SYSTEM_PORT": "9090"}


@pytest.mark.parametrize(
    ("words", "environ", "url"),
    [
        ([*SERVE, "--host", "0.0.0.0"], {"http_proxy": "http://proxy"}, "http://127.0.0.1:8000"),
        ([*SERVE, "m", "--port=8001", "--host=::"], PORTS, "http://::1:8001"),
        ([*SERVE, "--ssl-certfile", "c", "--host=10.1.1.1"], {}, "https://10.1.1.1:8000"),
        (FRONTEND, PORTS, "http://127.0.0.1:81"),
        (
            ["tini", "--", *FRONTEND, "--tls-cert-path=c", "--http-port=8"],
            {},
            "https://127.0.0.1:8",
        ),
        ([*WORKER, "--endpoint", "a.b.c"], PORTS, "http://127.0.0.1:9090"),
        (WORKER, PORTS | {"DYN_SYSTEM_HOST": "10.1.1.1"}, "http://10.1.1.1:9090"),
        (WORKER, {}, None),
    ],
)
def test_the_images_ask_the_port_that_the_program_serves(words, environ, url):
    asked = runpy.run_path(str(ROOT / "docker" / "health.py"))["connection"](words, environ)
    kinds = {443: "https", 80: "http"}
    assert url == (asked and f"{kinds[asked.default_port]}://{asked.host}:{asked.port}")


PICKER_FIELDS = {
    "apiVersion", "kind", "featureGates", "plugins", "schedulingProfiles", "dataLayer",
    "flowControl", "requestHandler",
}  # fmt: skip
"""Of a configuration of llm-d-router's picker, whose loader refuses others."""
PLUGINS = {
    "token-producer": {"modelName", "vllm", "udsTokenizerConfig", "estimate"},
    "precise-prefix-cache-producer": {
        "tokenProcessorConfig", "indexerConfig", "kvEventsConfig", "speculativeIndexing",
        "speculativeTTL",
    },
    "prefix-cache-scorer": {"prefixMatchInfoProducerName"},
    **{name: set() for name in ("metrics-data-source", "endpoint-notification-source")},
    **{name: set() for name in ("core-metrics-extractor", "queue-scorer", "max-score-picker")},
}  # fmt: skip
"""Types of plugins that llm-d-router registers, and the parameters that they take."""


def test_llm_d_s_manifest_loads_and_its_names_agree():
    server, service, picker = yaml.safe_load_all((EXAMPLES / "llm_d.yaml").read_text())
    template = server["spec"]["template"]
    (container,) = template["spec"]["containers"]
    options = cli.command_parser("serve").read(container["args"][1:])
    assert options.drain_seconds == 30
    labels, selector = template["metadata"]["labels"], service["spec"]["selector"]
    assert selector.items() <= labels.items() == server["spec"]["selector"]["matchLabels"].items()
    assert service["spec"]["ports"] == [{"port": options.port}]
    assert container["ports"] == [{"containerPort": options.port}]
    for kind, path in (("startup", "/health"), ("readiness", "/health"), ("liveness", "/live")):
        assert container[f"{kind}Probe"]["httpGet"] == {"path": path, "port": options.port}

    config = yaml.safe_load(picker["data"]["picker.yaml"])
    assert config.keys() <= PICKER_FIELDS
    plugins = {each.get("name", each["type"]): each for each in config["plugins"]}
    assert len(plugins) == len(config["plugins"])
    for plugin in plugins.values():
        assert plugin.keys() <= {"name", "type", "parameters"}
        assert plugin.get("parameters", {}).keys() <= PLUGINS[plugin["type"]]
    sources = config["dataLayer"]["sources"]
    wired = {each["pluginRef"]: [e["pluginRef"] for e in each["extractors"]] for each in sources}
    assert wired["endpoint-notification-source"] == ["precise-prefix-cache-producer"]
    assert wired["metrics-data-source"] == ["core-metrics-extractor"]
    (profile,) = config["schedulingProfiles"]
    chosen = {each["pluginRef"] for each in profile["plugins"]}
    assert {*wired, *chain.from_iterable(wired.values()), *chosen} <= plugins.keys()
    scorer = plugins["prefix-cache-scorer"]["parameters"]
    precise = plugins[scorer["prefixMatchInfoProducerName"]]["parameters"]

    events = precise["kvEventsConfig"]
    ports = events["podDiscoveryConfig"]
    assert options.kv_events_endpoint == f"tcp://*:{ports['socketPort']}"
    assert options.kv_events_replay_endpoint == f"tcp://*:{ports['replaySocketPort']}"
    assert options.kv_events_topic.startswith(events["topicFilter"])
    assert precise["tokenProcessorConfig"] == {
        "blockSizeTokens": InferenceConfig().block_size_tokens
    }
    producer = plugins["token-producer"]["parameters"]
    assert producer["modelName"] == options.model_name
    address = urlsplit(producer["vllm"]["url"])
    assert (address.hostname, address.port) == (service["metadata"]["name"], options.port)
    Origins((*options.allowed_hosts, options.host)).check(address.netloc, None)
