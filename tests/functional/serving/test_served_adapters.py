"""Adapters over HTTP: listed, chosen as a model, loaded and dropped at run time."""

import pytest
import torch
from http_server import running_server
from small_models import fill_adapters

from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.training.lora import LoraFields, add_adapters, save_adapters

BODY = {"prompt": "Once upon a time there was a", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    model, _ = load_pretrained("demo", device="cpu", dtype=torch.float32)
    add_adapters(model, LoraFields(rank=2))
    fill_adapters(model, std=1.0)
    save_adapters(model, folder)
    return folder


def test_adapters_are_models_that_come_and_go(folder):
    with running_server({"max_adapters": 1}) as server:

        def completion(model):
            return server.call("/v1/completions", {**BODY, "model": model})

        plain = completion("demo").json()["choices"][0]["text"]
        assert completion("story").status_code == 404
        asked = {"lora_name": "story", "lora_path": str(folder)}
        for change, words in (
            ({"lora_path": "/nowhere"}, "has no adapters to read"),
            ({"lora_name": "demo"}, "use a name of its own"),
        ):
            answer = server.call("/v1/load_lora_adapter", asked | change)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        assert server.call("/v1/load_lora_adapter", asked).json() == {"lora_name": "story"}
        assert server.call("/v1/load_lora_adapter", asked).status_code == 400  # it is there
        listed = {each["id"]: each for each in server.call("/v1/models").json()["data"]}
        assert [*listed] == ["demo", "story"]
        assert listed["story"]["parent"] == "demo" and listed["story"]["root"] == "demo"
        assert server.call("/v1/models/story").json() == listed["story"]
        answer = completion("story").json()
        assert answer["model"] == "story" and answer["choices"][0]["text"] != plain
        assert completion("demo").json()["choices"][0]["text"] == plain
        explained = {"prompt": BODY["prompt"], "model": "story"}
        assert server.call("/cache/explain", explained).json()["known_tokens"] > 0
        assert server.call("/v1/unload_lora_adapter", {"lora_name": "story"}).status_code == 200
        for name in ("story", "demo"):
            assert server.call("/v1/unload_lora_adapter", {"lora_name": name}).status_code == 404
        assert completion("story").status_code == 404
