"""`make test-megatron MEGATRON_LM=PATH`: what main of a clone of Megatron-LM does over ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import megatron.core
import megatron.rl
import pytest
from commands import free_port
from reference import greedy_tokens
from waiting import LIMIT_S, wait_until

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.megatron.torch_dist import save_megatron

HERE = Path(__file__).parent
CLONE = Path(megatron.rl.__file__).parents[2]
PROMPTS = ["Once upon a time", "Once upon a time there was a king"]
MODELS = {"hybrid": "M*-", "gpt": "*-*-"}
ADVANCED = "advanced/gpt_dynamic_inference"


def command(*arguments: str) -> dict:
    return {
        "args": [sys.executable, "-m", "megatron_hybrid.megatron", *arguments],
        "env": {**os.environ, "OMP_NUM_THREADS": "1"},
        "text": True,
    }


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(**command(*arguments), capture_output=True, timeout=4 * LIMIT_S)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model, tokenizer and folder of each provider, with random weights."""
    found, tokenizer = {}, mh.load_pretrained("demo", device="cpu")[1]
    for provider, pattern in MODELS.items():
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "init_method_std": 0.3}
        config = mh.HybridConfig(
            layer_pattern=pattern, vocab_size=tokenizer.vocab_size, **sizes, num_query_groups=4
        )
        model = mh.build_hybrid_model(config).eval()
        folder = tmp_path_factory.mktemp(provider)
        save_megatron(model, folder)
        tokenizer.save(folder)
        found[provider] = model, tokenizer, folder
    return found


def of_script(script: str, provider: str, folder: Path, *arguments: str) -> list[str]:
    """The arguments of an inference script of the clone, on the CPU."""
    given = {
        "load": folder,
        "tokenizer-type": "HuggingFaceTokenizer",
        "tokenizer-model": folder,
        "model-provider": provider,
        "hidden-size": 64,
        "num-attention-heads": 4,
        "seq-length": 128,
        "max-position-embeddings": 128,
        "micro-batch-size": 1,
        "inference-dynamic-batching-buffer-size-gb": 0.25,
    }
    given |= {"hybrid-layer-pattern": "M*-"} if provider == "hybrid" else {"num-layers": 2}
    options = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    path = CLONE / "examples" / "inference" / script
    return [str(HERE / "cpu_shim.py"), str(path), *options, *arguments]


def test_this_is_the_clone():
    assert Path(megatron.core.__file__).parents[2] == CLONE


@pytest.mark.parametrize(
    ("script", "provider", "options"),
    [
        ("offline_inference.py", "hybrid", []),
        ("offline_inference.py", "gpt", ["--use-coordinator"]),
        ("offline_inference.py", "hybrid", ["--use-coordinator", "--async-mode"]),
        (f"{ADVANCED}.py", "hybrid", ["--suspend-resume-interval", "4"]),
        (f"{ADVANCED}.py", "gpt", []),
        (f"{ADVANCED}_with_coordinator.py", "hybrid", []),
    ],
)
def test_a_script_answers_as_the_model_does(models, script, provider, options, tmp_path):
    model, tokenizer, folder = models[provider]
    output = tmp_path / "out.json"
    options = [*options, "--output-path", str(output), "--num-tokens-to-generate", "8"]
    options += ["--incoming-requests-per-sec", "-1", "--prompts", *PROMPTS]
    result = run(*of_script(script, provider, folder, *options))
    assert result.returncode == 0, result.stderr
    found = json.loads(output.read_text())
    for number, prompt in enumerate(PROMPTS):
        expected = greedy_tokens(model, tokenizer.tokenize(prompt), 8)
        assert found[str(number)]["generated_tokens"] == expected


def test_the_server_script_answers(models, tmp_path):
    model, tokenizer, folder = models["hybrid"]
    address = {"host": "127.0.0.1", "port": str(free_port())}
    options = [text for name, value in address.items() for text in (f"--{name}", value)]
    script = of_script("launch_inference_server.py", "hybrid", folder, *options)
    prompt = tokenizer.tokenize(PROMPTS[0])
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(**command(*script), stdout=log, stderr=log)
    try:
        wait_until(lambda: "Application startup complete" in (tmp_path / "log").read_text())
        url = f"http://127.0.0.1:{address['port']}/v1/completions"
        answer = httpx.post(url, json=body, timeout=LIMIT_S)
        (choice,) = answer.json()["choices"]
        assert choice["token_ids"] == greedy_tokens(model, prompt, 5)
    finally:
        server.terminate()
        server.wait(LIMIT_S)


def test_rollouts_of_an_environment_and_their_ledger():
    """Each answer is in the ledger once, with the epoch of its weights."""
    result = run(str(HERE / "rl_rollouts.py"), str(free_port()))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["epochs"] == [[1], [2]] and found["lag"] == 3
    for epoch in (1, 2):
        rollouts = found[f"rollouts {epoch}"]
        assert len(rollouts) == 4
        for num_turns, reward, num_in_ledger in rollouts:
            assert (num_turns, num_in_ledger) == (1, 4) and 0 <= reward <= 1


def test_the_static_script_is_refused_with_what_to_call(models):
    folder = models["gpt"][2]
    script = of_script("advanced/gpt_static_inference.py", "gpt", folder, "--prompts", *PROMPTS)
    result = run(*script)
    assert result.returncode == 1 and "StaticInferenceContext is not supported" in result.stderr
    assert "DynamicInferenceEngine(controller, context).generate(" in result.stderr
