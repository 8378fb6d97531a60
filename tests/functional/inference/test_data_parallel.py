"""Data-parallel replicas in one job: they answer as one engine does, and share the work."""

from concurrent.futures import CancelledError
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forks import in_fork
from megatron.core import parallel_state
from rank_processes import join_ranks, run_ranks
from reference import greedy, random_tokens, tiny_model

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, read_config, save_checkpoint
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.replicas import Replicas
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.models.hybrid_model import build_hybrid_model

MODEL = dict(layer_pattern="M*S-", mamba_num_groups=2)
CONFIG = dict(cache_bytes=1 << 20, max_requests=4, max_sequence_length=400, verify_ranks=True)
LAYOUTS = {"2 replicas": (2, 1), "2 replicas of TP 2": (4, 2)}
HOT = random_tokens(300)
CHATS = [random_tokens(120, seed=seed) for seed in range(1, 5)]
SAMPLED = SamplingParams(num_tokens_to_generate=8, temperature=0.8, top_p=0.9)


def second_turns(results):
    return [
        [*chat, *result.generated_tokens, *random_tokens(10, seed=50)]
        for chat, result in zip(CHATS, results)
    ]


def converse(front):
    """Two turns of chats side by side, sampled answers, and a hot prefix."""
    first = front.generate(CHATS, greedy(6))
    second = front.generate(second_turns(first), greedy(6))
    sampled = front.generate(CHATS, SAMPLED, n=2)
    hot = front.generate([[*HOT, *random_tokens(20, seed=seed)] for seed in range(12)], greedy(4))
    return first, second, sampled, hot


def tokens(results):
    return [[sample.generated_tokens for sample in result.samples] for result in results]


def failing_step():
    raise KeyError("a tokenizer's error")


def serve(replicas):
    with replicas.lead() as front:
        given = converse(front)
        gone = front.submit(CHATS[0][:50], greedy(200))
        assert gone.cancel()
        with pytest.raises(CancelledError):
            gone.result()
        with pytest.raises(ValueError, match="vocabulary"):
            front.submit([10**6])
    with pytest.raises(RuntimeError, match=r"lead\(\) has ended"):
        front.submit(CHATS[0])
        with pytest.raises(ValueError, match="vocabulary"):
            front.generate([CHATS[0], [10**6]])
    replicas.engine.update_weights()
    with replicas.lead() as front:
        again = front.generate(CHATS, greedy(6))
        drawn = [front.generate([CHATS[0]], SAMPLED)[0].generated_tokens]
    with replicas.lead() as front:  # an error of one step ends its own requests
        drawn += [front.generate([CHATS[0]], SAMPLED)[0].generated_tokens]
        step, replicas.engine.step = replicas.engine.step, failing_step
        failed = [front.submit(random_tokens(40, seed=60 + i), greedy(2)) for i in range(4)]
        errors = [repr(future.exception()) for future in failed]
        replicas.engine.step = step
        after = front.generate(CHATS, greedy(6))
    return {
        "drawn": drawn,
        "errors": errors,
        "after": tokens(after),
        "tokens": [tokens(results) for results in given],
        "skipped": [[r.prefix.skipped_tokens for r in results] for results in given],
        "again": tokens(again),
        "skipped again": [result.prefix.skipped_tokens for result in again],
        "epochs": [result.epochs for result in again],
    }


def run_rank(rank, size, tp_size, folder):
    join_ranks(rank, size, f"{folder}/rendezvous{size}")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_size)
    model = build_hybrid_model(read_config(folder, tensor_model_parallel_size=tp_size))
    load_checkpoint(model, folder)
    with Replicas(model.eval(), None, InferenceConfig(**CONFIG)) as replicas:
        given = {}
        if rank == 0:
            given = serve(replicas)
        else:
            replicas.follow()
            replicas.engine.update_weights()
            replicas.follow()
            replicas.follow()
        stats = replicas.engine.stats()
        given |= {key: stats[key] for key in ("leases", "prompt_tokens", "forward_tokens")}
        given["replica"] = replicas.number, replicas.size
        replicas.engine.check_integrity()
    torch.save(given, f"{folder}/{size}.{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    save_checkpoint(tiny_model(**MODEL), folder)
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def by_rank(request, folder):
    size, tp_size = LAYOUTS[request.param]
    run_ranks(run_rank, (size, tp_size, str(folder)), size)
    return [torch.load(folder / f"{size}.{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def alone():
    engine = DynamicInferenceEngine(tiny_model(**MODEL), None, InferenceConfig(**CONFIG))
    return [tokens(results) for results in converse(engine)]


def test_replicas_answer_and_draw_as_one_engine(by_rank, alone):
    assert by_rank[0]["tokens"] == alone
    assert by_rank[0]["again"] == alone[0]


def test_a_second_turn_goes_where_the_first_one_is(by_rank):
    assert all(skipped >= 120 for skipped in by_rank[0]["skipped"][1])


def test_a_hot_prefix_keeps_no_replica_idle(by_rank):
    """Its requests run on both, and most of them skip the prefix."""
    size = len(by_rank)
    first, other = by_rank[0]["prompt_tokens"], by_rank[size // 2]["prompt_tokens"]
    assert min(first, other) > 0.25 * max(first, other)
    assert sum(skipped >= 256 for skipped in by_rank[0]["skipped"][3]) >= 6


def test_new_weights_leave_nothing_to_skip(by_rank):
    assert by_rank[0]["skipped again"] == [0] * 4
    assert by_rank[0]["epochs"] == [[(1, 0)]] * 4


def test_replicas_are_numbered_and_end_clean(by_rank):
    per_replica = len(by_rank) // 2
    assert [rank["replica"] for rank in by_rank] == [
        (index // per_replica, 2) for index in range(len(by_rank))
    ]
    assert all(rank["leases"] == 0 for rank in by_rank)


def test_draws_go_on_where_an_earlier_lead_has_ended(by_rank):
    first, second = by_rank[0]["drawn"]
    assert first != second


def test_a_step_that_fails_ends_its_own_requests(by_rank):
    assert set(by_rank[0]["errors"]) <= {'KeyError("a tokenizer\'s error")', "None"}
    assert by_rank[0]["after"] == by_rank[0]["again"]


def refused_in_a_fork(replicas, front):
    for call in (lambda: front.submit(CHATS[0]), replicas.follow, replicas.lead().__enter__):
        with pytest.raises(RuntimeError, match="is a fork: make replicas of its own"):
            call()
    front.close()
    replicas.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_one_replica_needs_no_other_process():
    model = tiny_model(**MODEL)
    with Replicas(model, None, InferenceConfig(**CONFIG)) as replicas:
        with replicas.lead() as front:
            (result,) = front.generate(CHATS[:1], greedy(6))
            assert front.sent_to == {}
            assert in_fork(partial(refused_in_a_fork, replicas, front)) == 0
        (expected,) = replicas.engine.generate(CHATS[:1], greedy(6))
    assert result.generated_tokens == expected.generated_tokens
    assert np.isclose(result.prefix.skipped_tokens, 0)
