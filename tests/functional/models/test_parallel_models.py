"""Two processes on gloo, tensor-parallel, give what one process gives.

The weights come from one checkpoint that a single process wrote.
"""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rank_processes import run_ranks
from sharded_tensors import pieces, whole
from split_models import assert_same_gradients, load, logits_loss_gradients, single_process

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.models.config.hybrid_config import HybridConfig

pytestmark = pytest.mark.matrix

RANKS = 2
CONFIG = HybridConfig(
    layer_pattern="MG*SK|+C-W-E",
    hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=61,  # odd: two ranks need a padded column
    ffn_hidden_size=80,
    sliding_window=7,
    qk_layernorm=True,
    layer_overrides={symbol: {"add_bias_linear": True} for symbol in "MG*SK+C-W"},  # not experts
    mamba_head_dim=16,
    mamba_state_dim=12,
    mamba_num_groups=2,
    mamba_chunk_size=8,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_chunk_size=8,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_head_dim=10,
    qk_pos_emb_head_dim=6,
    v_head_dim=14,
    mamba1_norm="weighted",
    mamba1_proj_bias=True,
    short_conv_bias=True,
    num_moe_experts=5,
    moe_router_topk=2,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_ffn_hidden_size=20,
    moe_latent_size=12,
    moe_shared_expert_intermediate_size=28,
    moe_shared_expert_gate=True,
    init_method_std=0.15,
)
# The other layer kinds and options, of which some keep to one pipeline stage.
ONE_STAGE = HybridConfig(
    layer_pattern="LH-P*BW*",
    hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=61,
    share_embeddings_and_output_weights=True,
    ffn_hidden_size=80,
    sliding_window=7,
    attention_chunk_size=9,
    norm_placement="sandwich",
    layer_overrides={
        "L": {"softmax_type": "learnable", "attention_output_gate": True, "qk_l2_norm": True},
        "H": {"add_bias_linear": True, "mamba_proj_bias": True},
        "-": {"mlp_gate_multiplier": 0.7, "mlp_output_multiplier": 1.3},
        "W": {"keys_as_values": True, "value_l2_norm": True},
        "B": {"layer_scalar": True},
        "8": {"kv_source_layer": 5},
    },
    mamba_head_dim=16,
    mamba_state_dim=12,
    mamba_num_groups=2,
    mamba_chunk_size=8,
    mamba_gated_norm="norm_first",
    mamba_section_multipliers=[0.5, 0.75, 1.5, 2.0, 1.25],
    attention_output_multiplier=0.8,
    mamba_input_multiplier=1.2,
    per_layer_input_size=10,
    num_moe_experts=5,
    moe_router_topk=2,
    moe_ffn_hidden_size=20,
    init_method_std=0.15,
)
MODELS = {"stages": CONFIG, "one_stage": ONE_STAGE}


def run_tensor_parallel(folder, **fields):
    model = load(folder, tensor_model_parallel_size=RANKS, **fields)
    save_checkpoint(model, folder / "from_two_ranks")
    return {"pieces": pieces(model.sharded_state_dict()), **logits_loss_gradients(model)}


def worker(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    results = {}
    for name in MODELS:
        results[name] = {
            "tensor": run_tensor_parallel(folder / name),
            "sequence": run_tensor_parallel(folder / name, sequence_parallel=True),
        }
        parallel_state.destroy_model_parallel()
    torch.save(results, folder / f"results{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """For each model (one process, [rank 0, rank 1], folder)."""
    folder = tmp_path_factory.mktemp("parallel")
    single = {name: single_process(config, folder / name) for name, config in MODELS.items()}
    run_ranks(worker, (folder,), RANKS)
    ranks = [torch.load(folder / f"results{rank}.pt") for rank in range(RANKS)]
    return {name: (single[name], [rank[name] for rank in ranks], folder / name) for name in MODELS}


@pytest.mark.parametrize("way", ["tensor", "sequence"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("what", ["logits", "packed", "loss"])
def test_tensor_parallel_forward(outcomes, model, what, way):
    single, ranks, _ = outcomes[model]
    for rank in ranks:
        torch.testing.assert_close(rank[way][what], single[what], atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", ["tensor", "sequence"])
@pytest.mark.parametrize("model", MODELS)
def test_tensor_parallel_gradients(outcomes, model, way):
    single, ranks, _ = outcomes[model]
    for rank in ranks:
        assert_same_gradients(rank[way]["gradients"], single["gradients"])


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_of_two_ranks_is_that_of_one(outcomes, model):
    _, _, folder = outcomes[model]
    for file in ("config.json", "model.safetensors"):
        assert (folder / file).read_bytes() == (folder / "from_two_ranks" / file).read_bytes()


@pytest.mark.parametrize("model", MODELS)
def test_distributed_checkpoint_of_two_ranks_is_that_of_one(outcomes, model):
    single, ranks, _ = outcomes[model]
    expected = whole(single["pieces"])
    joined = whole(*(rank["tensor"]["pieces"] for rank in ranks))
    assert joined.keys() == expected.keys()
    for key, tensor in expected.items():
        rows = len(tensor)  # two ranks pad the vocabulary
        assert torch.equal(joined[key][:rows], tensor), key
