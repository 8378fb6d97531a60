"""Four tensor-parallel ranks on gloo, some with copies of the same heads or groups, give what one
process gives.

The weights come from one checkpoint that a single process wrote.
"""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, apply_factories
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from sharded_tensors import pieces, whole
from split_models import load, logits_loss_gradients, single_process

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.models.config.hybrid_config import HybridConfig

RANKS = 4
SIZES = dict(
    hidden_size=32,
    num_attention_heads=8,
    kv_channels=8,
    vocab_size=61,
    ffn_hidden_size=48,
    sliding_window=7,
    mamba_head_dim=8,
    mamba_state_dim=6,
    mamba_chunk_size=8,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_chunk_size=8,
    qk_layernorm=True,
    init_method_std=0.15,
)
MODELS = {
    # Two groups or key heads, each on two ranks; and heads of latent attention.
    "two": HybridConfig(
        layer_pattern="M*GH+",
        num_query_groups=2,
        mamba_num_groups=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        add_qkv_bias=True,
        attention_output_gate=True,
        q_lora_rank=20,
        kv_lora_rank=24,
        qk_head_dim=10,
        qk_pos_emb_head_dim=6,
        v_head_dim=14,
        mamba_section_multipliers=[0.5, 0.75, 1.5, 2.0, 1.25],
        layer_overrides={"M": {"mamba_proj_bias": True}},
        **SIZES,
    ),
    # One group, on all ranks; norms over all heads; keys and values of another layer.
    "one": HybridConfig(
        layer_pattern="M*G-*W*",
        num_query_groups=1,
        mamba_num_groups=1,
        linear_num_key_heads=1,
        linear_num_value_heads=8,
        mamba_gated_norm="norm_first",
        qk_layernorm_scope="all_heads",
        share_embeddings_and_output_weights=True,
        layer_overrides={
            "W": {"keys_as_values": True, "softmax_type": "learnable"},
            "5": {"kv_source_layer": 2},
            "7": {"num_query_groups": 4},
        },
        **SIZES,
    ),
    # Norms with a mean.
    "layer_norm": HybridConfig(
        layer_pattern="*-",
        num_query_groups=2,
        qk_layernorm_scope="all_heads",
        normalization="LayerNorm",
        layernorm_zero_centered_gamma=True,
        **SIZES,
    ),
}
KV_HEADS = {"two": {2: 1, 4: 1, 5: 1}, "one": {2: 1, 6: 1, 7: 1}, "layer_norm": {1: 1}}


def run_model(folder):
    model = load(folder, tensor_model_parallel_size=RANKS)
    save_checkpoint(model, folder / "from_four_ranks")
    state = model.sharded_state_dict()
    found = pieces(state)
    for value in state.values():
        if isinstance(value, ShardedTensorFactory):
            assert torch.equal(value.merge_fn([part.data for part in value.build()]), value.data)
    apply_factories(state)
    _, metadata = determine_global_metadata(state)
    validate_sharding_integrity(metadata)  # each place has one main copy
    caches = enumerate(model.cache_requirements(), start=1)
    return {
        "pieces": found,
        "kv_heads": {i: cache.kv.num_heads for i, cache in caches if cache.kv is not None},
        **logits_loss_gradients(model),
    }


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    parallel_state.initialize_model_parallel(RANKS)
    results = {name: run_model(folder / name) for name in MODELS}
    torch.save(results, folder / f"results{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """For each model (one process, the ranks, folder)."""
    folder = tmp_path_factory.mktemp("four")
    single = {name: single_process(config, folder / name) for name, config in MODELS.items()}
    mp.spawn(worker, args=(folder,), nprocs=RANKS)
    ranks = [torch.load(folder / f"results{rank}.pt") for rank in range(RANKS)]
    return {name: (single[name], [rank[name] for rank in ranks], folder / name) for name in MODELS}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("what", ["logits", "packed", "loss"])
def test_forward(outcomes, model, what):
    single, ranks, _ = outcomes[model]
    for rank in ranks:
        torch.testing.assert_close(rank[what], single[what], atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_gradients(outcomes, model):
    single, ranks, _ = outcomes[model]
    for name, expected in single["gradients"].items():
        for rank in ranks:
            torch.testing.assert_close(
                rank["gradients"][name],
                expected,
                atol=1e-5 * max(1.0, expected.abs().max().item()),
                rtol=0,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_is_that_of_one_process(outcomes, model):
    _, _, folder = outcomes[model]
    for file in ("config.json", "model.safetensors"):
        assert (folder / file).read_bytes() == (folder / "from_four_ranks" / file).read_bytes()


@pytest.mark.parametrize("model", MODELS)
def test_distributed_checkpoint_is_that_of_one_process(outcomes, model):
    single, ranks, _ = outcomes[model]
    expected, joined = whole(single["pieces"]), whole(*(rank["pieces"] for rank in ranks))
    assert joined.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(joined[key][: len(tensor)], tensor), key  # ranks pad the vocabulary


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_keeps_the_keys_and_values_of_its_own_heads(outcomes, model):
    _, ranks, _ = outcomes[model]
    assert all(rank["kv_heads"] == KV_HEADS[model] for rank in ranks)
