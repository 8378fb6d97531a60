"""MegatronLLM and MegatronAsyncLLM over two ranks on gloo: the first one takes requests, and
answers as one rank does."""

import asyncio

import pytest
import torch.distributed as dist
from door import LetterTokenizer, door_config, greedy_params
from matrix import matrix_rows
from megatron.core import parallel_state
from rank_processes import on_ranks
from reference import random_tokens, tiny_model
from split_models import load

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.megatron import EngineState, MegatronAsyncLLM, MegatronLLM

MODEL = dict(layer_pattern="M*E", mamba_num_groups=2, num_moe_experts=4, moe_router_topk=2)
LAYOUTS = {
    "TP 2": dict(tensor_model_parallel_size=2),
    "EP 2": dict(expert_model_parallel_size=2),
}
LONG = random_tokens(50, vocab_size=95)
PROMPTS = [LONG, [*LONG[:40], 3, 4], LONG[:9]]


def arguments(model):
    config = door_config(kv_cache_management_mode="recompute")
    return {"model": model, "tokenizer": LetterTokenizer(), "inference_config": config}


def rows(answers):
    return [(each.generated_tokens, each.num_cached_tokens) for each in answers]


def sync_answers(model):
    """Before and after a suspension."""
    with MegatronLLM(**arguments(model)) as llm:
        if not llm.is_primary_rank:
            llm.wait_for_shutdown()
            return llm.engine.state is EngineState.STOPPED
        found = rows(llm.generate(PROMPTS, greedy_params(6)))
        found += rows(llm.generate(PROMPTS, greedy_params(6)))
        for call in (llm.pause, llm.suspend, llm.resume, llm.unpause):
            call()
        return found + rows(llm.generate(PROMPTS, greedy_params(6)))


def async_answers(model):
    """Beside one that its task gives up; others wait for the end alone."""

    async def ask():
        async with MegatronAsyncLLM(**arguments(model)) as llm:
            if not llm.is_primary_rank:
                with pytest.raises(RuntimeError, match="rank 1 of the model, which follows rank 0"):
                    await llm.generate(LONG)
                return None
            await llm.pause()
            leaves = asyncio.create_task(llm.generate(LONG[5:], greedy_params(6)))
            while not llm.engine.requests:
                await asyncio.sleep(0.001)
            leaves.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaves
            await llm.unpause()
            answers = [llm.generate(prompt, greedy_params(6)) for prompt in PROMPTS]
            return rows(await asyncio.gather(*answers))

    return asyncio.run(ask())


def refusals(model):
    """Messages of a rank that is not the primary one."""
    with MegatronLLM(**arguments(model)) as llm:
        assert llm.is_primary_rank == (dist.get_rank() == 0)
        if llm.is_primary_rank:
            return []
        found = []
        for call in (lambda: llm.generate(LONG), llm.pause, llm.unpause, llm.suspend, llm.resume):
            with pytest.raises(RuntimeError) as raised:
                call()
            found.append(str(raised.value))
        return found


def run_all(folder, layout):
    model = load(folder, **layout)
    given = {work.__name__: work(model) for work in (sync_answers, async_answers, refusals)}
    parallel_state.destroy_model_parallel()
    return given


@pytest.mark.parametrize("layout", matrix_rows(LAYOUTS, "TP 2"))
def test_the_primary_rank_answers_as_one_rank_and_others_wait(tmp_path, layout):
    save_checkpoint(tiny_model(**MODEL), tmp_path)
    first, second = on_ranks(run_all, 2, tmp_path, tmp_path, LAYOUTS[layout])
    for work in (sync_answers, async_answers):
        assert first[work.__name__] == work(tiny_model(**MODEL))
    assert second["sync_answers"] is True
    assert not first["refusals"] and len(second["refusals"]) == 5
    assert all("rank 1 of the model, which follows rank 0" in m for m in second["refusals"])
