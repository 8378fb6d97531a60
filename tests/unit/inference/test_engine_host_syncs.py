"""No step waits for its device before all of it is queued: layout, forward, draws, saves."""

import pytest
import torch
from host_syncs import HostSyncError, no_host_syncs
from reference import finish, greedy, is_greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.worker.sampler import HostCopy
from megatron_hybrid.ops import slot_states
from megatron_hybrid.ops.state_codec import codec


def engine_without_syncs(monkeypatch, model, **fields):
    """An engine whose steps wait once at most. Returns it, and the number of waits in each step."""
    engine = tiny_engine(model, **fields)
    wait, waits = HostCopy.wait, []

    def without_syncs(method):
        def checked(*args):
            waits.append(0)
            with no_host_syncs():
                return method(*args)

        monkeypatch.setattr(engine.runner, method.__name__, checked)

    def counted(copy):
        waits[-1] += 1
        with torch._C.DisableTorchFunction():
            return wait(copy)

    runner = engine.runner
    for method in (runner.launch, runner.launch_ahead, runner.launch_rest, runner.collect):
        without_syncs(method)
    monkeypatch.setattr(HostCopy, "wait", counted)
    return engine, waits


@pytest.mark.parametrize("encoding", ["exact", "bf16", "int8"])
@pytest.mark.parametrize("pattern", ["M*S-W+GK", "CHZL-*QRU"])
def test_a_step_waits_for_its_device_once_when_all_of_it_is_queued(monkeypatch, pattern, encoding):
    """Also the step that is launched ahead: before the wait for the one before it."""
    monkeypatch.setattr(codec, "_is_free_to_read", lambda x: False)
    monkeypatch.setattr(slot_states, "_are_steps_in_place", lambda *_: False)
    model = tiny_model(pattern)
    fields = {"max_tokens": 48, "state_encoding": encoding, "async_scheduling": True}
    if encoding == "bf16":
        fields["logprobs_mode"] = "processed_logprobs"
    engine, waits = engine_without_syncs(monkeypatch, model, **fields)
    shared = random_tokens(70)
    prompts = [shared, random_tokens(9, seed=1), [*shared[:50], 1, 2], random_tokens(33, seed=2)]
    kinds = (
        greedy(4),
        SamplingParams(seed=1, num_tokens_to_generate=4, return_log_probs=True, top_n_logprobs=2),
        SamplingParams(top_k=9, top_p=0.8, temperature=0.7, num_tokens_to_generate=3),
        SamplingParams(
            min_p=0.1,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            logit_bias={4: 2},
            min_tokens=2,
            stop_token_ids=[5],
            num_tokens_to_generate=3,
        ),
    )
    for turn in range(2):  # then from states, and without a forward
        requests = [
            engine.add_request(prompt, kinds[(i + turn) % 4], RequestOptions(n=1 + (i == 2)))
            for i, prompt in enumerate(prompts)
        ]
        finish(engine)
        for prompt, request in zip(prompts, requests):
            if request.params.is_greedy and encoding == "exact":
                assert is_greedy(model, prompt, request.result().token_ids)
    stats = engine.stats()
    assert stats["skipped_tokens"] > 0 and stats["checkpoints"] > 0
    assert max(waits) == 1 and sum(waits) >= 8 and stats["steps_ahead"] > 0


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: range(x[0]),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 1),
        lambda x: x.unique(),
        lambda x: x[x > 1],
        lambda x: x[[0, 1]],
        lambda x: x.__setitem__(x > 1, 0),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: x.to(device="cpu"),
        lambda x: x.repeat_interleave(x),
        lambda x: torch.equal(x, x),
    ],
)
def test_what_waits_for_a_device_is_found(operation):
    x = torch.arange(3)
    operation(x)
    with pytest.raises(HostSyncError), no_host_syncs():
        operation(x)
