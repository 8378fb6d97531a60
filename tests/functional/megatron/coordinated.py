"""A script of Megatron's with data-parallel replicas behind its coordinator: the calls of stock
scripts, NeMo-RL and megatron/rl. Only the model and the tokenizer are from this project's tests.
Each rank prints JSON."""

import asyncio
import json
import os
import sys

import torch
import torch.distributed as dist
from door import MIB, LetterTokenizer
from megatron.core import parallel_state
from megatron.core.inference.apis import MegatronLLM
from megatron.core.inference.config import InferenceConfig, PrefixCachingCoordinatorPolicy
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineState
from megatron.core.inference.inference_client import InferenceClient
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from reference import random_tokens, tiny_model

PROMPTS = [random_tokens(40, seed=seed, vocab_size=95) for seed in range(6)]
SHORT = SamplingParams(top_k=1, num_tokens_to_generate=6, termination_id=-1, return_log_probs=True)
SHORT.add_attributes({"skip_prompt_log_probs": True})


def config_of() -> InferenceConfig:
    return InferenceConfig(
        block_size_tokens=16,
        buffer_size_gb=4 * MIB,
        max_requests=8,
        max_sequence_length=256,
        enable_prefix_caching=True,
        prefix_caching_mamba_gb=4 * MIB,
        prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
        prefix_caching_routing_alpha=0.9,
    )


def row(request) -> dict:
    return {
        "tokens": request.generated_tokens,
        "text": request.generated_text,
        "log_probs": request.generated_log_probs,
        "status": request.status.name,
        "cached": request.num_cached_tokens,
        "policy_epoch": request.policy_epoch,
        "prompt_length": request.prompt_length,
    }


async def coordinated(model, schedule: str) -> dict:
    context = DynamicInferenceContext(model.config, config_of())
    controller = TextGenerationController(GPTInferenceWrapper(model, context), LetterTokenizer())
    engine = DynamicInferenceEngine(controller, context)
    address = await engine.start_listening_to_data_parallel_coordinator(
        inference_coordinator_port=None,
        launch_inference_coordinator=True,
        coordinator_schedule_output_path=schedule,
    )
    assert engine.use_coordinator or engine.state is EngineState.RUNNING
    await engine.wait_until(EngineState.RUNNING)
    out = {"address": address}
    if dist.get_rank() == 0:
        client = InferenceClient(address, deserialize=True)
        client.start()
        ask = [client.add_request(prompt, SHORT) for prompt in (*PROMPTS, "Hello there")]
        out["first"] = [row(each) for each in await asyncio.gather(*ask)]
        again = [await client.add_request(prompt, SHORT) for prompt in PROMPTS]
        out["again"] = [row(each) for each in again]
        failed = await client.add_request(PROMPTS[0] * 10, SHORT)
        out["failed"] = [failed.status.name, type(failed.events[-2].payload).__name__]
        empty = await client.add_request([], SHORT)
        out["empty"] = [empty.status.name, str(empty.events[-2].payload)]
        client.pause_engines()
    await engine.wait_until(EngineState.PAUSED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.25)  # unseen by the engine
    if dist.get_rank() == 0:
        waits = client.add_request(PROMPTS[0], SHORT)
        client.suspend_engines()
    await engine.wait_until(EngineState.SUSPENDED)
    if dist.get_rank() == 0:
        client.set_generation_epoch(7)
        client.resume_engines()
    await engine.wait_until(EngineState.RESUMED)
    if dist.get_rank() == 0:
        assert not waits.done()
        client.unpause_engines()
        out["new weights"] = row(await waits)
        client.pause_engines()
    await engine.wait_until(EngineState.PAUSED)
    if dist.get_rank() == 0:
        client.stop_engines()
    await engine.wait_until(EngineState.STOPPED)
    await engine.engine_loop_task
    if dist.get_rank() == 0:
        client.shutdown_coordinator()
        await asyncio.sleep(0.2)
        client.stop()
    out["steps"] = engine.engine.num_steps
    engine.engine.close()
    return out


def high_level(model) -> dict:
    llm = MegatronLLM(model=model, tokenizer=LetterTokenizer(), inference_config=config_of())
    out = {"is_primary": llm.is_primary_rank}
    if llm.is_primary_rank:
        out["answers"] = [request.generated_tokens for request in llm.generate(PROMPTS, SHORT)]
    for call in (llm.pause, llm.suspend, llm.resume, llm.unpause):
        call()
    if llm.is_primary_rank:
        out["again"] = [request.generated_tokens for request in llm.generate(PROMPTS[:1], SHORT)]
    llm.shutdown()
    llm.wait_for_shutdown()
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    parallel_state.initialize_model_parallel()
    out = {"high level": high_level(tiny_model("M*-"))}
    out["coordinator"] = asyncio.run(coordinated(tiny_model("M*-"), sys.argv[1]))
    print(json.dumps(out), flush=True)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
