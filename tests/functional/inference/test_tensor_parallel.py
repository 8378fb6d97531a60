"""Two ranks on gloo answer as one process does, in every mode, and decide alike."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from reference import greedy, is_greedy, random_tokens, tiny_model

from megatron_hybrid.config import PREFIX_CACHING_MODES, InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.models.checkpoint import save_checkpoint
from megatron_hybrid.models.pretrained import load_pretrained

RANKS = 2
TWO_GROUPS = dict(mamba_num_groups=2, linear_num_key_heads=2, linear_num_value_heads=4)
BASE = random_tokens(150)
PROMPTS = [
    BASE,
    BASE,
    BASE[:100] + random_tokens(20, seed=1),
    BASE[:100] + random_tokens(20, seed=2),
    BASE[:100] + random_tokens(20, seed=3),
]


def answers(model, mode: str):
    """Tokens, log-probs and skipped tokens of prompts that come one by one and then together."""
    engine = DynamicInferenceEngine(
        model,
        None,
        InferenceConfig(
            prefix_caching=mode,
            cache_bytes=1 << 20,
            max_requests=4,
            max_tokens=64,
            max_sequence_length=256,
            verify_ranks=True,
        ),
    )
    params = greedy(6, return_log_probs=True, skip_prompt_log_probs=True)
    results = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
    results += engine.generate(PROMPTS, params, salt="together")
    engine.check_integrity()
    return [(r.generated_tokens, r.log_probs, r.prefix.skipped_tokens) for r in results]


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    model, _ = load_pretrained(folder, tensor_model_parallel_size=RANKS)
    given = {mode: answers(model, mode) for mode in PREFIX_CACHING_MODES}
    torch.save(given, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor_parallel")
    save_checkpoint(tiny_model(**TWO_GROUPS), folder)
    mp.spawn(run_rank, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("mode", PREFIX_CACHING_MODES)
def test_two_ranks_answer_as_one(by_rank, mode):
    model = tiny_model(**TWO_GROUPS)
    assert by_rank[0][mode] == by_rank[1][mode]
    alone = answers(model, mode)
    for given, expected, prompt in zip(by_rank[0][mode], alone, PROMPTS + PROMPTS):
        assert given[0] == expected[0]
        assert is_greedy(model, prompt, given[0])
        torch.testing.assert_close(
            torch.tensor(given[1]), torch.tensor(expected[1]), atol=1e-5, rtol=0
        )
        assert given[2] == expected[2]
    if mode == "restore":
        assert [row[2] for row in alone[:5]] == [0, 150, 0, 100, 100]
