"""MegatronLLM and MegatronAsyncLLM serve one replica in this process."""

import asyncio
import socket
import threading

import httpx
import pytest
import torch
from commands import free_port
from door import MIB, LetterTokenizer, door_config, fail_forwards, greedy_params
from forks import in_fork
from megatron.core.tokenizers import MegatronTokenizer
from reference import is_greedy, random_tokens, tiny_model
from waiting import LIMIT_S, wait_until

from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.megatron import (
    DynamicInferenceRequest,
    EngineState,
    GPTInferenceWrapper,
    MegatronAsyncLLM,
    MegatronLLM,
    ServeConfig,
)

PROMPT = random_tokens(40, vocab_size=95)


def arguments(**fields):
    config = door_config(prefix_caching_mamba_gb=16 * MIB)
    given = {"model": tiny_model(), "tokenizer": LetterTokenizer(), "inference_config": config}
    return {**given, **fields}


@pytest.mark.parametrize("use_coordinator", [True, False])
def test_generate_answers_one_prompt_or_several(use_coordinator):
    with MegatronLLM(**arguments(use_coordinator=use_coordinator)) as llm:
        assert llm.is_primary_rank and llm.engine.context is llm.context
        text = LetterTokenizer().detokenize(PROMPT)
        for prompts, count in ((PROMPT, 1), (text, 1), ([PROMPT, PROMPT[:9]], 2), ([text], 1)):
            answers = llm.generate(prompts, greedy_params(4))
            assert len(answers) == count
            for request in answers:
                assert isinstance(request, DynamicInferenceRequest)
                tokens = request.prompt_tokens.tolist()
                assert is_greedy(tiny_model(), tokens, request.generated_tokens)
        assert llm.generate([]) == []
        assert answers[0].num_cached_tokens == len(PROMPT)
        assert llm.controller.tokenizer.eod == 95


@pytest.mark.parametrize("prompts", [5, (1, 2), [1, "a"], [None], [1.5]])
def test_prompts_of_another_type_are_refused(prompts):
    with MegatronLLM(**arguments()) as llm, pytest.raises(TypeError, match="prompts must be"):
        llm.generate(prompts)


def test_the_life_of_a_replica():
    llm = MegatronLLM(**arguments())
    first = llm.generate(PROMPT, greedy_params(3))[0]
    llm.pause()
    assert llm.engine.state is EngineState.PAUSED
    with pytest.raises(RuntimeError, match="PAUSED"):
        llm.generate(PROMPT)
    llm.engine.resume()  # no effect: it is not suspended
    llm.engine.reset()
    assert llm.engine.state is EngineState.PAUSED
    llm.suspend()
    with pytest.raises(RuntimeError, match="resume"):
        llm.unpause()
    llm.resume()
    assert llm.engine.state is EngineState.RESUMED
    llm.unpause()
    again = llm.generate(PROMPT, greedy_params(3))[0]
    assert again.generated_tokens == first.generated_tokens
    waits = threading.Thread(target=llm.wait_for_shutdown)
    waits.start()
    llm.shutdown()
    llm.shutdown()
    waits.join(LIMIT_S)
    assert not waits.is_alive() and llm.engine.state is EngineState.STOPPED
    with pytest.raises(RuntimeError):
        llm.generate(PROMPT)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_is_told_at_once():
    llm = MegatronLLM(**arguments())
    calls = (llm.pause, llm.unpause, llm.suspend, llm.resume, llm.wait_for_shutdown)

    def check():
        for call in (*calls, lambda: llm.generate(PROMPT)):
            with pytest.raises(RuntimeError, match="is a fork: make an engine of its own in each"):
                call()
        llm.shutdown()

    assert in_fork(check) == 0
    assert llm.engine.state is EngineState.RUNNING
    llm.shutdown()


def test_direct_mode_has_no_life_cycle():
    llm = MegatronLLM(**arguments(use_coordinator=False))
    for call in (llm.pause, llm.unpause, llm.suspend, llm.resume):
        with pytest.raises(RuntimeError, match="requires use_coordinator=True"):
            call()
    llm.wait_for_shutdown()
    llm.shutdown()
    with pytest.raises(ValueError, match="coordinator_port requires"):
        MegatronLLM(**arguments(use_coordinator=False, coordinator_port=1))


def test_arguments_of_a_coordinator_warn_and_other_wrappers_are_refused():
    with pytest.warns(UserWarning, match="coordinator_host"):
        MegatronLLM(**arguments(coordinator_host="node1")).shutdown()
    with pytest.raises(ValueError, match="inference_wrapper_cls"):
        MegatronLLM(**arguments(inference_wrapper_cls=dict))
    MegatronLLM(**arguments(inference_wrapper_cls=GPTInferenceWrapper)).shutdown()


def test_a_model_that_cannot_be_served_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(TypeError, match="model is of type str, but from_megatron takes"):
        MegatronLLM(**arguments(model="x"))
    assert threading.active_count() <= before + 1


def test_a_request_that_three_steps_fail_with_gets_the_error_and_others_are_served(monkeypatch):
    with MegatronLLM(**arguments()) as llm:
        fail_forwards(monkeypatch, llm.engine, 3)
        with pytest.raises(ArithmeticError, match="broken"):
            llm.generate(PROMPT, greedy_params(3))
        wait_until(lambda: not llm.engine.requests)  # the thread removes it after it has told
        request = llm.generate(PROMPT, greedy_params(3))[0]
        assert is_greedy(tiny_model(), PROMPT, request.generated_tokens)


def test_requests_that_the_caller_added_to_the_engine_disturb_nobody():
    with MegatronLLM(**arguments()) as llm:
        llm.engine.add_request(100, PROMPT[:9], greedy_params(2))
        request = llm.generate(PROMPT, greedy_params(4))[0]
        assert is_greedy(tiny_model(), PROMPT, request.generated_tokens)
        assert not llm.engine.has_unfinished_requests()


async def test_coroutines_share_one_engine():
    async with MegatronAsyncLLM(**arguments()) as llm:
        single = llm.generate(PROMPT, greedy_params(4))
        several = llm.generate([PROMPT[:9], PROMPT[3:]], greedy_params(4))
        single, several = await asyncio.gather(single, several)
        assert await llm.generate([]) == []
    for request in (single, *several):
        assert is_greedy(tiny_model(), request.prompt_tokens.tolist(), request.generated_tokens)


async def test_paused_requests_wait_and_cancelled_ones_leave():
    llm = MegatronAsyncLLM(**arguments())
    await llm.pause()
    stays = asyncio.create_task(llm.generate(PROMPT, greedy_params(3)))
    leaves = asyncio.create_task(llm.generate([PROMPT[:7], PROMPT[:5]], greedy_params(3)))
    while len(llm.engine.requests) < 3:
        await asyncio.sleep(0.001)
    assert not stays.done()
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    await llm.suspend()
    await llm.resume()
    await llm.unpause()
    request = await stays
    assert is_greedy(tiny_model(), PROMPT, request.generated_tokens)
    assert not llm.engine.requests
    await llm.pause()
    late = asyncio.create_task(llm.generate(PROMPT, greedy_params(3)))
    while not llm.engine.requests:
        await asyncio.sleep(0.001)
    waits = asyncio.create_task(llm.wait_for_shutdown())
    await llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        await late
    await waits


async def test_a_cancelled_task_disturbs_no_other_in_its_last_step(monkeypatch):
    """Its answer comes while the cancellation is on its way."""
    async with MegatronAsyncLLM(**arguments()) as llm:
        entered, leave = threading.Event(), threading.Event()
        step = llm.engine.step_modern

        def slow():
            result = step()
            if result["finished_request_records"]:
                entered.set()
                leave.wait(LIMIT_S)
            return result

        monkeypatch.setattr(llm.engine, "step_modern", slow)
        leaves = asyncio.create_task(llm.generate(PROMPT[:9], greedy_params(2)))
        stays = asyncio.create_task(llm.generate(PROMPT, greedy_params(6)))
        await asyncio.to_thread(entered.wait, LIMIT_S)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        leave.set()
        request = await asyncio.wait_for(stays, LIMIT_S)
        assert is_greedy(tiny_model(), PROMPT, request.generated_tokens)


async def test_a_shutdown_whose_caller_gives_up_goes_on():
    llm = MegatronAsyncLLM(**arguments())
    blocks = threading.Event()
    llm._replica.submit(lambda: blocks.wait(LIMIT_S))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(llm.shutdown(), 0.05)
    with pytest.raises(RuntimeError):
        await llm.generate(PROMPT)
    blocks.set()
    await asyncio.wait_for(llm.shutdown(), LIMIT_S)
    await asyncio.wait_for(llm.wait_for_shutdown(), LIMIT_S)


async def test_what_the_async_class_does_not_do_is_refused():
    with pytest.raises(ValueError, match="use_coordinator=True"):
        MegatronAsyncLLM(**arguments(use_coordinator=False))
    direct = MegatronLLM(**arguments(use_coordinator=False))
    with pytest.raises(ValueError, match="requires use_coordinator=True"):
        direct.serve(ServeConfig())
    with pytest.raises(ValueError, match="multi_modal_data"):
        direct.generate(PROMPT, greedy_params(1), multi_modal_data={"image": b""})
    assert direct.generate(PROMPT, greedy_params(1), multi_modal_data=None)[0].succeeded()
    async with MegatronAsyncLLM(**arguments()) as llm:
        with pytest.raises(ValueError, match="the bytes of tokens, which LetterTokenizer does"):
            await llm.serve(ServeConfig(port=1))


def test_serve_is_our_server(tmp_path):
    """Also with Megatron's own tokenizer, and without asyncio, on a socket of the caller's."""
    model, tokenizer = load_pretrained("demo", device="cpu", dtype=torch.float32)
    prompt = tokenizer.tokenize("Once upon a time there was a king")
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    tokenizer.save(tmp_path)
    megatrons = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(tmp_path), metadata_path={"library": "huggingface"}
    )

    def serve_here(expected: list[int], text: str) -> None:
        with MegatronLLM(**arguments(model=model, tokenizer=megatrons)) as llm:
            bound = socket.create_server(("127.0.0.1", 0))
            llm.serve(ServeConfig(host="127.0.0.1", sock=bound), blocking=False)
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            answer = httpx.post(
                f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=LIMIT_S
            )
            (choice,) = answer.json()["choices"]
            assert (choice["token_ids"], choice["text"]) == (expected, text)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)

    async def serve() -> None:
        async with MegatronAsyncLLM(**arguments(model=model, tokenizer=tokenizer)) as llm:
            expected = (await llm.generate(prompt, greedy_params(6))).generated_tokens
            config = ServeConfig(host="127.0.0.1", port=free_port())
            await llm.serve(config, blocking=False)
            with pytest.raises(RuntimeError, match="shut down"):
                await llm.generate(prompt, greedy_params(6))
            url = f"http://127.0.0.1:{config.port}"
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
                answer = await client.post(
                    "/v1/completions", json=body | {"return_token_ids": True}
                )
            (choice,) = answer.json()["choices"]
            assert choice["token_ids"] == expected
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
        return expected, choice["text"]

    serve_here(*asyncio.run(serve()))
