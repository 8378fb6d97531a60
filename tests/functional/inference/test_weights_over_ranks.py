"""`load_weights` on two ranks, in every layout: they answer as one rank on the new weights. What
happens after a fault is in `test_weight_faults.py`."""

import pytest
import torch
import torch.distributed as dist
from rank_processes import join_ranks, run_ranks
from reference import greedy, random_tokens
from split_models import assert_same_answers, load, save_old_and_new

from megatron_hybrid.compat import parallel_state
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine

RANKS = 2
MODEL = dict(
    layer_pattern="M*|E-",
    mamba_num_groups=2,
    num_moe_experts=4,
    moe_router_topk=4,
    moe_ffn_hidden_size=24,
    share_embeddings_and_output_weights=True,
)
LAYOUTS = {
    "TP 2": dict(tensor_model_parallel_size=2),
    "EP 2": dict(expert_model_parallel_size=2),
    "PP 2": dict(pipeline_model_parallel_size=2),
}
CONFIG = dict(cache_bytes=1 << 20, max_requests=4, max_sequence_length=160, verify_ranks=True)
PROMPTS = [random_tokens(60, seed=seed) for seed in range(2)]
LOGGED = greedy(4, return_log_probs=True, skip_prompt_log_probs=True)


def answers(engine):
    results = [engine.generate([prompt], LOGGED)[0] for prompt in (*PROMPTS, *PROMPTS)]
    return [(r.generated_tokens, r.log_probs, r.prefix.skipped_tokens) for r in results]


def received(state):
    """Tensors of rank 0, by a collective for each, in a buffer for all."""
    buffer = torch.empty(max(tensor.numel() for tensor in state.values()))
    for name, tensor in state.items():
        view = buffer[: tensor.numel()].view(tensor.shape)
        dist.broadcast(view.copy_(tensor) if dist.get_rank() == 0 else view.zero_(), 0)
        yield name, view


def run_layout(rank, folder, sizes):
    """Answers with the new weights and epochs, by how they came."""
    model = load(folder / "old", **sizes)
    old, new = torch.load(folder / "old.pt"), torch.load(folder / "new.pt")
    given = {}
    with DynamicInferenceEngine(model.eval(), None, InferenceConfig(**CONFIG)) as engine:
        given["at first"] = answers(engine)
        # All ranks make the same calls.
        engine.load_weights(received(new))
        given["stream"] = answers(engine)
        engine.load_weights(old)
        given["back"] = answers(engine)
        engine.load_weights(new)
        given["again"] = answers(engine)
        # The first rank alone.
        if rank == 0:
            with engine.lead():
                engine.load_weights(old)
                given["led"] = answers(engine)
                engine.load_weights(iter(new.items()))
                given["led stream"] = answers(engine)
        else:
            engine.follow()
        assert engine.epoch == 5
        engine.check_integrity()
    return given


def run_rank(rank, folder):
    join_ranks(rank, RANKS, f"{folder}/rendezvous")
    given = {}
    for name, sizes in LAYOUTS.items():
        given[name] = run_layout(rank, folder, sizes)
        parallel_state.destroy_model_parallel()
    torch.save(given, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.matrix
def test_ranks_answer_with_new_weights_as_one(tmp_path):
    expected = {}
    for name, model in save_old_and_new(tmp_path, **MODEL).items():
        with DynamicInferenceEngine(model, None, InferenceConfig(**CONFIG)) as engine:
            expected[name] = answers(engine)
    run_ranks(run_rank, (tmp_path,), RANKS)
    given = torch.load(tmp_path / "0.pt")
    weights = {
        "at first": "old",
        "stream": "new",
        "back": "old",
        "again": "new",
        "led": "old",
        "led stream": "new",
    }
    for layout in LAYOUTS:
        assert given[layout].keys() == weights.keys()
        for how, rows in given[layout].items():
            assert_same_answers(rows, expected[weights[how]])
