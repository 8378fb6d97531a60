"""Tensor parallelism on two CUDA devices; `torchrun --nproc-per-node 2 -m pytest THIS_FILE`."""

import os

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from reference import full_logits, greedy, random_tokens, tiny_engine, tiny_model
from state_dicts import load_state

from megatron_hybrid.cache.matching import PREFIX_CACHING_MODES
from megatron_hybrid.checkpoints.model_tensors import full_state_dict
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model

pytestmark = pytest.mark.gpu

RANKS = 2
BASE = random_tokens(150)
PROMPTS = [BASE, BASE, BASE[:100] + random_tokens(20, seed=1), BASE[:100] + random_tokens(9)]


@pytest.fixture(scope="module")
def whole():
    """The whole model on the CPU of each rank; its process groups are gone when it is used."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = tiny_model(mamba_num_groups=2, linear_num_key_heads=2, linear_num_value_heads=4)
    parallel_state.destroy_model_parallel()
    return model


@pytest.fixture(params=["local", "transformer_engine"])
def sharded(request, whole):
    """This rank's half of `whole` on its GPU."""
    if request.param != "local":
        pytest.importorskip(request.param)
    config = HybridConfig.from_dict(
        whole.config.to_dict(), layer_spec=request.param, tensor_model_parallel_size=RANKS
    )
    with torch.device("cuda"):
        model = build_hybrid_model(config).eval()
    load_state(model, full_state_dict(whole))
    yield model
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("mode", PREFIX_CACHING_MODES)
def test_two_ranks_answer_as_the_whole_model(whole, sharded, mode):
    engine = tiny_engine(sharded, prefix_caching=mode, max_tokens=64, verify_ranks=True)
    params = greedy(8, return_log_probs=True, skip_prompt_log_probs=True)
    results = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
    for prompt, result in zip(PROMPTS, results):
        logits_TV = full_logits(whole, prompt + result.token_ids)
        rows = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
        assert rows.argmax(-1).tolist() == result.token_ids
        expected = rows.amax(-1)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-3, rtol=0)
    assert (results[1].prefix.skipped_tokens == len(BASE)) == (mode == "restore")
    engine.check_integrity()
    answers = [(r.token_ids, r.log_probs, r.prefix.skipped_tokens) for r in results]
    by_rank = [None] * RANKS
    dist.all_gather_object(by_rank, answers)
    assert by_rank[0] == by_rank[1]
