"""An inference script as Megatron's users write it: every import path, call and read of stock
scripts. Only the model and the tokenizer are from this project's tests. Prints JSON."""

import asyncio
import json
import sys

import torch
from door import LetterTokenizer
from megatron.core.inference import config as config_module
from megatron.core.inference.apis import MegatronAsyncLLM, MegatronLLM, ServeConfig
from megatron.core.inference.config import (
    InferenceConfig,
    KVCacheManagementMode,
    MambaInferenceStateConfig,
    PrefixCachingCoordinatorPolicy,
    PrefixCachingEvictionPolicy,
)
from megatron.core.inference.contexts import DynamicInferenceContext as ContextOfPackage
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine as EngineOfPackage
from megatron.core.inference.engines.dynamic_engine import (
    DynamicInferenceEngine,
    EngineState,
    EngineSuspendedError,
)
from megatron.core.inference.engines.static_engine import StaticInferenceEngine
from megatron.core.inference.inference_client import InferenceClient
from megatron.core.inference.inference_request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
)
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from reference import random_tokens, tiny_model

PROMPT = random_tokens(48, vocab_size=95)
GB = 4 / 1024

model, tokenizer = tiny_model("M*-M*-"), LetterTokenizer()
out = {"argv": sys.argv[1:], "name": __name__}

inference_config = InferenceConfig(
    block_size_tokens=16,
    buffer_size_gb=GB,
    mamba_inference_state_config=MambaInferenceStateConfig.from_model(model),
    max_requests=8,
    max_tokens=64,
    max_sequence_length=256,
    enable_prefix_caching=True,
    prefix_caching_mamba_gb=GB,
    prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.REF_ZERO,
    prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy.LOAD_BALANCED,
    enable_chunked_prefill=True,
    materialize_only_last_token_logits=False,
    kv_cache_management_mode=KVCacheManagementMode.OFFLOAD,
    track_generated_token_events=True,
    logprobs_mode="processed_logprobs",
)
assert config_module.InferenceConfig is InferenceConfig
context = DynamicInferenceContext(model.config, inference_config)
wrapped_model = GPTInferenceWrapper(model, context)
controller = TextGenerationController(inference_wrapped_model=wrapped_model, tokenizer=tokenizer)
engine = DynamicInferenceEngine(controller, context)
assert isinstance(engine, EngineOfPackage) and isinstance(context, ContextOfPackage)
engine.reset()

params = SamplingParams(
    temperature=1.0,
    top_k=1,
    top_p=0.0,
    return_log_probs=True,
    skip_prompt_log_probs=False,
    num_tokens_to_generate=None,
    num_tokens_total=60,
    termination_id=-1,
    top_n_logprobs=2,
    add_BOS=False,
    stop_words=None,
    detokenize_stop_sequence=False,
    return_prompt_tokens=True,
    return_segments=False,
    return_prompt_top_n_logprobs=False,
    streaming=False,
    streaming_interval=1,
    do_kv_handoff=False,
)
assert params.return_prompt_top_n_logprobs  # follows from the others
params.add_attributes({"min_length": 1})
assert SamplingParams.deserialize(params.serialize()).min_length == 1

# The loop of Megatron's examples ------------------------------------------------------------------
requests = {20: PROMPT, 10: torch.tensor(PROMPT[:30]), 30: tokenizer.detokenize(PROMPT[5:])}
for request_id, prompt in requests.items():
    future = engine.add_request(request_id, prompt, params, precomputed_block_hashes=None)
records, decodes, times = {}, 0, []
while engine.has_unfinished_requests():
    try:
        result = engine.step_modern()
    except EngineSuspendedError:
        raise SystemExit("suspended") from None
    assert set(result["active_request_ids"]) <= set(requests)
    for request_id in result["active_request_ids"]:
        assert engine.get_request(request_id).request_id == request_id
    decodes += bool(engine.decode_only.launched and engine.decode_only.consumed)
    decodes += bool(engine.is_decode_only)
    times.append(result["step_time"])
    assert result["cuda_graph_request_count"] is None
    for record in result["finished_request_records"]:
        assert isinstance(record, DynamicInferenceRequestRecord)
        records[record.request_id] = record
assert engine.capture_stats is None and engine.controller.tokenizer is tokenizer
assert decodes and sum(times) > 0
for request_id, record in records.items():
    request = record.merge()
    assert isinstance(request, DynamicInferenceRequest)
    out[str(request_id)] = {
        "prompt": request.prompt,
        "prompt_tokens": request.prompt_tokens.tolist(),
        "prompt_length": request.prompt_length,
        "generated_tokens": request.generated_tokens,
        "generated_text": request.generated_text,
        "prompt_log_probs": request.prompt_log_probs,
        "generated_log_probs": request.generated_log_probs,
        "generated_top_n_logprobs": request.generated_top_n_logprobs,
        "prompt_top_n_logprobs": len(request.prompt_top_n_logprobs),
        "top_k": request.sampling_params.top_k,
        "events": [event.type.name for event in request.events],
        "event": sorted(request.events[0].serialize()),
        "times": request.ttft > 0 and request.latency > 0 and len(request.tpot) > 0,
        "status": request.status.name,
        "num_cached_tokens": request.num_cached_tokens,
        "routing_indices": request.routing_indices,
        "uid": request.uid,
    }
    assert request.serialize()["request_id"] == request_id

# Counters ----------------------------------------------------------------------------------------
blocks = engine.context.kv_block_allocator
out["context"] = {
    "step_count": engine.context.step_count,
    "lifetime_prefill_token_count": engine.context.lifetime_prefill_token_count,
    "async": engine.context.async_sched_step_count
    + engine.context.async_sched_compaction_step_count,
    "max_tokens": engine.context.max_tokens,
    "max_requests": engine.context.max_requests,
    "max_sequence_length": engine.context.max_sequence_length,
    "unified_memory_level": engine.context.unified_memory_level,
    "graphs": len(engine.context.cuda_graph_batch_dimensions_list),
    "blocks": blocks.pool_size - 1 == blocks.active_count,
    "block_size_tokens": engine.context.block_size_tokens,
    "enable_prefix_caching": engine.context.enable_prefix_caching,
}

# Other entries -----------------------------------------------------------------------------------
short = SamplingParams(top_k=1, num_tokens_to_generate=4, termination_id=-1)
engine.suspend()
try:
    engine.step_modern()
except EngineSuspendedError:
    out["suspended"] = engine.state is EngineState.SUSPENDED
engine.resume()
records = engine.generate([PROMPT, PROMPT[:20]], short)
out["generate"] = [record.merge().generated_tokens for record in records]
out["cached"] = records[0].merge().num_cached_tokens
engine.add_request(1, PROMPT, short)
active, finished, _ = engine.step(short)
out["legacy"] = [len(active), len(finished)]
while engine.has_unfinished_requests():
    engine.step_modern()
failed = engine.generate([[]], short)[0].merge()
out["failed"] = [failed.status.name, failed.events[-1].type.name]

refused = []
for call in (
    lambda: asyncio.run(engine.wait_until(EngineState.PAUSED)),
    lambda: engine.engine_loop_task,
    lambda: GPTInferenceWrapper(model, StaticInferenceContext(4, 64)),
    lambda: StaticInferenceEngine(controller, max_batch_size=4),
):
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        refused.append(str(error))
out["refused"] = refused
assert callable(InferenceClient) and callable(engine.start_listening_to_data_parallel_coordinator)
assert not engine.use_coordinator and engine.pg_collection.dp.size() == 1

with MegatronLLM(model=model, tokenizer=tokenizer, inference_config=inference_config) as llm:
    assert llm.is_primary_rank
    out["llm"] = [request.generated_tokens for request in llm.generate([PROMPT], short)]
    llm.pause(), llm.suspend(), llm.resume(), llm.unpause()


async def ask() -> list[int]:
    async with MegatronAsyncLLM(
        model=model, tokenizer=tokenizer, inference_config=inference_config
    ) as llm:
        assert ServeConfig().port == 5000
        return (await llm.generate(PROMPT, short)).generated_tokens


out["async_llm"] = asyncio.run(ask())
print(json.dumps(out))
