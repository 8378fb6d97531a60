"""Two processes on gloo, tensor- and pipeline-parallel, give what one process gives.

The weights come from one checkpoint that a single process wrote.
"""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rank_processes import run_ranks
from sharded_tensors import pieces, whole
from split_models import assert_same_gradients, batch, load, logits_loss_gradients, single_process

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, read_config, save_checkpoint
from megatron_hybrid.checkpoints.model_tensors import full_state_dict
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model

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


def run_pipeline_parallel(folder):
    parallel_state.initialize_model_parallel(1, RANKS)
    first = dist.get_rank() == 0
    config = read_config(folder, pipeline_model_parallel_size=RANKS)
    model = build_hybrid_model(config, pre_process=first, post_process=not first)
    load_checkpoint(model, folder)
    inputs, _ = batch()
    with torch.no_grad():
        if first:
            hidden = model(inputs)
            dist.send(hidden, 1)
            logits = None
        else:
            hidden = torch.empty(inputs.shape[1], inputs.shape[0], config.hidden_size)
            dist.recv(hidden, 0)
            model.set_input_tensor([hidden])
            logits = model(inputs)
    return {
        "logits": logits,
        "state": full_state_dict(model),
        "hidden_shape": tuple(hidden.shape),
        "pieces": pieces(model.sharded_state_dict()),
    }


UNSUPPORTED_GROUPS = {
    "cp": {"context_parallel_size": RANKS},
}


def refusals():
    """What each of the groups above, set up by the caller, is answered with."""
    messages = {}
    for name, sizes in UNSUPPORTED_GROUPS.items():
        parallel_state.initialize_model_parallel(**sizes)
        try:
            build_hybrid_model(HybridConfig.from_dict(CONFIG.to_dict()))
        except ValueError as error:
            messages[name] = str(error)
        parallel_state.destroy_model_parallel()
    return messages


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
    results["stages"]["pipeline"] = run_pipeline_parallel(folder / "stages")
    parallel_state.destroy_model_parallel()
    results["stages"]["refusals"] = refusals()
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


@pytest.fixture
def outcome(outcomes):
    """Of the model that runs in stages too."""
    return outcomes["stages"]


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


def test_groups_that_split_what_is_not_supported_are_refused(outcome):
    _, ranks, _ = outcome
    for rank in ranks:
        assert rank["refusals"].keys() == UNSUPPORTED_GROUPS.keys()
        for name, message in rank["refusals"].items():
            assert (
                f"the process group {name} has {RANKS} ranks, but HybridModel supports" in message
            )


def test_pipeline_parallel_forward(outcome):
    single, (first, last), _ = outcome
    assert first["pipeline"]["hidden_shape"] == (30, 2, 48)
    torch.testing.assert_close(last["pipeline"]["logits"], single["logits"], atol=1e-5, rtol=0)


def test_pipeline_stages_together_are_the_model(outcome):
    _, (first, last), folder = outcome
    model = build_hybrid_model(read_config(folder))
    load_checkpoint(model, folder)
    expected = full_state_dict(model)
    assert last["pipeline"]["state"] is None
    state = first["pipeline"]["state"]
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize(
    ("model", "way"), [("stages", "tensor"), ("stages", "pipeline"), ("one_stage", "tensor")]
)
def test_distributed_checkpoint_of_two_ranks_is_that_of_one(outcomes, model, way):
    single, ranks, _ = outcomes[model]
    expected = whole(single["pieces"])
    joined = whole(*(rank[way]["pieces"] for rank in ranks))
    assert joined.keys() == expected.keys()
    for key, tensor in expected.items():
        rows = len(tensor)  # two ranks pad the vocabulary
        assert torch.equal(joined[key][:rows], tensor), key
