"""What users write: `make lint` runs mypy and pyright on it, and nothing runs it.
`assert_type` fails where a result is wider than it says, such as Any."""

import asyncio
from collections.abc import Mapping
from typing import assert_type

import torch
from torch import Tensor

import megatron_hybrid as mh
from megatron_hybrid.cache.explain import Explanation
from megatron_hybrid.cache.tree_view import EdgeView, TreeChanges
from megatron_hybrid.inference.cache_calls import CacheSaved
from megatron_hybrid.inference.metrics.prometheus import Stats
from megatron_hybrid.inference.requests.view import RequestView
from megatron_hybrid.text.tokenizer import Tokenizer


class Bytes:
    """A tokenizer of one's own, with the two methods that an engine needs."""

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def load() -> tuple[mh.HybridModel, Tokenizer]:
    model, tokenizer = mh.load_pretrained("demo", dtype=torch.bfloat16, sliding_window=128)
    assert_type(model, mh.HybridModel)
    assert_type(tokenizer, Tokenizer | None)
    if tokenizer is None:
        raise SystemExit("the folder has no tokenizer")
    return model, tokenizer


def make_engine(model: mh.HybridModel, tokenizer: Tokenizer) -> mh.DynamicInferenceEngine:
    config = mh.InferenceConfig(
        prefix_caching="restore",
        block_size_tokens=16,
        max_requests=64,
        max_tokens=2048,
        max_sequence_length=8192,
        host_cache_bytes=1 << 30,
        cache_dir="cache",
        kv_cache_dtype=torch.float32,
    )
    engine = mh.DynamicInferenceEngine(model, tokenizer, config)
    assert_type(engine.config, mh.InferenceConfig)
    assert_type(engine.model, mh.HybridModel)
    assert_type(engine.epoch, int)
    return engine


def read_result(result: mh.GenerationResult) -> None:
    print(result)
    assert_type(result.text, str | None)
    assert_type(result.token_ids, list[int])
    assert_type(result.log_probs, list[float] | None)
    assert_type(result.top_n_logprobs, list[dict[int, float]] | None)
    assert_type(result.samples, list[mh.GenerationResult])
    assert_type(result.prefix.skipped_tokens, int)
    assert_type(result.prefix.miss_reason, mh.MissReason | None)


def generate(engine: mh.DynamicInferenceEngine) -> None:
    params = mh.SamplingParams(num_tokens_to_generate=32, seed=1, stop_words=["end", "stop"])
    results = engine.generate(["Once upon a time"], params)
    assert_type(results, list[mh.GenerationResult])
    read_result(results[0])
    engine.generate("Once upon a time", [params], [mh.RequestOptions(salt="a", n=4, priority=1)])
    engine.generate([[1, 2], [3]], mh.SamplingParams(logit_bias={3: -1.5}, stop_token_ids=[7]))
    engine.generate(torch.tensor([[1, 2, 3]]), options=mh.RequestOptions(cache_breakpoints=[2]))
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Hi"}]
    engine.generate([messages])


def guides(engine: mh.DynamicInferenceEngine) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 150}}}
    guide = assert_type(mh.Guide.json_schema(schema), mh.Guide)
    engine.generate(["The child is "], options=mh.RequestOptions(guide=guide))
    engine.generate(
        ["One", "Two"], options=[mh.RequestOptions(guide=mh.Guide.regex("[a-z]+")), None]
    )
    engine.generate(
        ["Yes or no? "], options=mh.RequestOptions(guide=mh.Guide.choices(["yes", "no"]))
    )
    engine.generate(["An object: "], options=mh.RequestOptions(guide=mh.Guide.json_object()))


def stream(engine: mh.DynamicInferenceEngine) -> None:
    for output in engine.stream("Once upon a time", mh.SamplingParams(top_k=1)):
        assert_type(output, mh.RequestOutput)
        print(output.text, end="", flush=True)
    with engine.stream("Once upon a time") as outputs:
        output = next(outputs)
        assert_type(output.token_ids, list[int])
        assert_type(output.prefix, mh.PrefixReport)
        assert_type(output.result, mh.GenerationResult | None)
        assert_type(output.finish_reason, str | None)


def step(engine: mh.DynamicInferenceEngine) -> None:
    request = assert_type(
        engine.add_request("Once", options=mh.RequestOptions(salt="tenant", n=2)), mh.Request
    )
    try:
        while not request.done:
            assert_type(engine.step(), list[mh.RequestOutput])
    except mh.EngineBusyError:
        engine.cancel(request)
    read_result(request.result())


def look_inside(engine: mh.DynamicInferenceEngine) -> None:
    explanation = assert_type(engine.explain("Once upon a time"), Explanation)
    print(explanation)
    assert_type(explanation.reason, mh.MissReason | None)
    assert_type(explanation.held_tokens, int)
    stats = assert_type(engine.stats(), Stats)
    assert_type(stats["hit_rate"], float)
    assert_type(engine.metrics(), str)
    assert_type(engine.requests(num_tokens=8), list[RequestView])
    assert_type(engine.cache_tree(max_edges=10), list[EdgeView])
    assert_type(engine.cache_changes(limit=10), TreeChanges)
    engine.check_integrity()


def keep_cache(engine: mh.DynamicInferenceEngine) -> None:
    saved = assert_type(engine.save_cache("folder"), CacheSaved)
    assert_type(saved.num_bytes, int)
    engine.clear_cache()
    engine.suspend("host")
    engine.resume()


def new_weights(engine: mh.DynamicInferenceEngine, tensors: Mapping[str, Tensor]) -> None:
    engine.update_weights()
    engine.load_weights(tensors)
    engine.load_weights((name, tensor) for name, tensor in tensors.items())


async def serve(model: mh.HybridModel, tokenizer: Tokenizer) -> None:
    async with mh.AsyncEngine(model, tokenizer, mh.InferenceConfig(max_requests=8)) as engine:
        assert_type(engine, mh.AsyncEngine)
        answers = asyncio.gather(
            *(engine.generate(f"Chapter {i}", options=mh.RequestOptions(n=2)) for i in range(8))
        )
        async for output in engine.stream("Once upon a time", mh.SamplingParams(top_k=1)):
            assert_type(output, mh.RequestOutput)
        async with engine.stream(
            "Once", options=mh.RequestOptions(guide=mh.Guide.regex("[a-z]+"))
        ) as outputs:
            assert_type(await anext(outputs), mh.RequestOutput)
        for result in await answers:
            assert_type(result, mh.GenerationResult)
        assert_type(await engine.generate([1, 2], queue_seconds=0.5), mh.GenerationResult)
        assert_type(await engine.stats(), Stats)
        assert_type(await engine.explain("Once", salt="tenant"), Explanation)
        assert_type(await engine.metrics(), str)
        assert_type(await engine.requests(8), list[RequestView])
        assert_type(await engine.save_cache("folder"), CacheSaved)
        await engine.clear_cache()
        await engine.update_weights()
        await engine.check_integrity()


def chat(engine: mh.DynamicInferenceEngine, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert_type(tokenizer.apply_chat_template(messages), list[int])
    tool: dict[str, object] = {"type": "function", "function": {"name": "look", "parameters": {}}}
    tokens, forks = tokenizer.chat_prompt(messages, tools=[tool])
    engine.generate([tokens], options=mh.RequestOptions(cache_breakpoints=forks))


def save_and_convert(model: mh.HybridModel, tokenizer: Tokenizer) -> None:
    mh.save_checkpoint(model, "folder")
    mh.save_huggingface(model, "folder")
    tokenizer.save("folder")
    try:
        assert_type(mh.load_megatron("checkpoints/my_run", device="cpu"), mh.HybridModel)
    except mh.CheckpointError as error:
        print(error)


def serve_megatron(module: torch.nn.Module) -> None:
    """Of Megatron's training loop: wrapped, bare, or in a list of one."""
    assert_type(mh.from_megatron(module), mh.HybridModel)
    mh.DynamicInferenceEngine(module, Bytes())
    mh.DynamicInferenceEngine([module])


def train() -> None:
    config = mh.HybridConfig(
        layer_pattern="MG*-W-",
        hidden_size=256,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=4096,
        sliding_window=128,
    )
    model = mh.build_hybrid_model(config)
    assert_type(model, mh.HybridModel)
    assert_type(model.config, mh.HybridConfig)
    assert_type(model.config.vocab_size, int)
    tokens = torch.randint(config.vocab_size, (2, 65))
    losses = model.train()(tokens[:, :-1], labels=tokens[:, 1:])
    assert_type(losses, Tensor)
    assert_type(next(model.parameters()), torch.nn.Parameter)
    assert_type(model.eval(), mh.HybridModel)
