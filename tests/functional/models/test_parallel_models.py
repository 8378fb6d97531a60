"""Four tensor-parallel ranks on gloo, some with copies of the same heads or groups, or two replicas
of two ranks each, give what one process gives.

The weights come from one checkpoint that a single process wrote.
"""

import pytest
import torch
from matrix import asked, matrix_rows
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, apply_factories
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from rank_processes import on_ranks
from reference import greedy, tiny_engine
from sharded_tensors import pieces
from small_models import small_config
from split_models import (
    assert_all_close,
    assert_same_answers,
    assert_same_checkpoint,
    batch,
    load,
    logits_loss_gradients,
    single_process,
)

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint

pytestmark = pytest.mark.matrix

RANKS = 4
SIZES = dict(  # whose heads divide over four ranks
    hidden_size=32,
    num_attention_heads=8,
    kv_channels=8,
    mamba_head_dim=8,
    qk_layernorm=True,
)
EXPERTS = dict(num_moe_experts=5, moe_router_topk=2, moe_ffn_hidden_size=20)
ALL_BUT_FEW = small_config(
    "MG*SKA+C-W-E",  # of 61 tokens, which is odd: two ranks need a padded column
    qk_layernorm=True,
    layer_overrides={symbol: {"add_bias_linear": True} for symbol in "MG*SK+C-W"},  # not experts
    mamba1_norm="weighted",
    mamba1_proj_bias=True,
    short_conv_bias=True,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_latent_size=12,
    moe_shared_expert_intermediate_size=28,
    moe_shared_expert_gate=True,
    moe_shared_expert_clamp_value=0.5,
    activation_func_clamp_value=0.3,
    activation_clamp_after=True,
    **EXPERTS,
)
# The other layer kinds and options.
THE_OTHERS = small_config(
    "LH-P*BW*QRK+USAP",
    share_embeddings_and_output_weights=True,
    attention_chunk_size=9,
    norm_placement="sandwich",
    layer_overrides={
        "L": {"softmax_type": "learnable", "attention_output_gate": True, "qk_l2_norm": True},
        "R": {"attention_output_gate": True, "attention_head_gate": True},
        "H": {"add_bias_linear": True, "mamba_proj_bias": True},
        "-": {"mlp_output_multiplier": 1.3, "activation_sparsity": 0.6},
        "W": {"keys_as_values": True, "value_l2_norm": True},
        "*": {"value_channels": 10, "value_multiplier": 0.7},
        "B": {"layer_scalar": True},
        "K": {"kda_low_rank_gates": False, "kda_decay_bound": -5.0, "kda_fp32_conv": True},
        "+": {"latent_output_gate": True},
        "Q": {"attention_output_bias": True},
        "A": {"lightning_rope": True, "lightning_norm_groups": 2, "rotary_percent": 0.5},
        "8": {"kv_source_layer": 5},
    },
    mamba_gated_norm="norm_first",
    mamba_section_multipliers=[0.5, 0.75, 1.5, 2.0, 1.25],
    attention_output_multiplier=0.8,
    mamba_input_multiplier=1.2,
    per_layer_input_size=10,
    per_layer_vocab_size=50,
    num_residual_streams=3,
    residual_rank=5,
    lru_num_blocks=4,
    mamba1_num_heads=2,
    **EXPERTS,
)
MODELS = {
    # Two groups or key heads, each on two ranks; and heads of latent attention.
    "two": small_config(
        "M*GH+-",
        add_qkv_bias=True,
        attention_output_gate=True,
        mamba_section_multipliers=[0.5, 0.75, 1.5, 2.0, 1.25],
        layer_overrides={"M": {"mamba_proj_bias": True}, "H": {"attention_head_gate": True}},
        **SIZES,
    ),
    # One group, on all ranks; norms over all heads; keys and values of another layer.
    "one": small_config(
        "M*G-*W*",
        num_query_groups=1,
        mamba_num_groups=1,
        linear_num_key_heads=1,
        linear_num_value_heads=8,
        mamba_gated_norm="norm_first",
        qk_layernorm_scope="all_heads",
        share_embeddings_and_output_weights=True,
        layer_overrides={
            "W": {"keys_as_values": True, "softmax_type": "learnable", "query_rank": 24},
            "5": {"kv_source_layer": 2},
            "7": {"num_query_groups": 4},
        },
        **SIZES,
    ),
    "all but few": ALL_BUT_FEW,
    "the others": THE_OTHERS,
    # Heads of two softmaxes, of one group; a memory of channels that the ranks share out.
    "sambay": small_config(
        "SW-*J*",
        normalization="LayerNorm",
        fp32_residual_connection=True,
        position_embedding_type="none",
        add_qkv_bias=True,
        attention_output_bias=True,
        differential_lambda=0.4,
        layer_overrides={"6": {"kv_source_layer": 4}},
        **{**SIZES, "qk_layernorm": False},
    ),
    # Norms with a mean.
    "layer_norm": small_config(
        "*-",
        qk_layernorm_scope="all_heads",
        normalization="LayerNorm",
        layernorm_zero_centered_gamma=True,
        **SIZES,
    ),
}
TWO_RANKS = ("all but few", "the others")
"""Models of as many ranks; others have all four."""
SERVED = ("two", "one", "sambay")
SPLIT_ROWS = (*SERVED, *TWO_RANKS)
"""Models that run with sequence parallelism, too."""
KV_HEADS = {"two": {2: 1, 4: 1, 5: 1}, "one": {2: 1, 6: 1, 7: 1}, "layer_norm": {1: 1}}
KV_HEADS["sambay"] = {2: 1, 4: 1}


def answers(model):
    """Tokens, log-probs and skipped tokens of prompts with a common prefix, served in turn."""
    engine = tiny_engine(model.eval(), max_tokens=24, verify_ranks=True)
    params = greedy(5, return_log_probs=True, skip_prompt_log_probs=True)
    start = batch()[0].flatten().tolist()
    results = [engine.generate([[*start[:40], i, 7]], params)[0] for i in (1, 1, 2)]
    model.train()
    return [(r.token_ids, r.log_probs, r.prefix.skipped_tokens) for r in results]


def run_model(folder, tp):
    model = load(folder, tensor_model_parallel_size=tp)
    save_checkpoint(model, folder / "from_ranks")
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
        "answers": answers(model) if folder.name in SERVED else None,
    }


def run_sequence_parallel(folder, tp):
    model = load(folder, tensor_model_parallel_size=tp, sequence_parallel=True)
    rows = []
    model.decoder.layers[0].register_forward_hook(lambda _, args, out: rows.append(len(out)))
    results = logits_loss_gradients(model)
    assert tp < RANKS or rows == [64 // RANKS] * 3  # 60 tokens, padded
    return {**results, "answers": answers(model) if folder.name in SERVED else None}


def run_all(folder, names):
    results = {}
    for name in names:
        tp = 2 if name in TWO_RANKS else RANKS
        parallel_state.initialize_model_parallel(tp)
        results[name] = run_model(folder / name, tp)
        if name in SPLIT_ROWS:
            results[name]["sequence"] = run_sequence_parallel(folder / name, tp)
        parallel_state.destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """For each model that is asked for (one process, the ranks, folder)."""
    folder = tmp_path_factory.mktemp("four")
    names = asked(request, "model", MODELS)
    single = {name: single_process(MODELS[name], folder / name) for name in names}
    ranks = on_ranks(run_all, RANKS, folder, folder, names)
    return {name: (single[name], [rank[name] for rank in ranks], folder / name) for name in names}


@pytest.mark.parametrize("model", matrix_rows(MODELS, "two"))
def test_forward_and_gradients_with_split_rows_too(outcomes, model):
    single, ranks, _ = outcomes[model]
    split = [rank["sequence"] for rank in ranks] if model in SPLIT_ROWS else []
    for found in (*ranks, *split):
        for what in ("logits", "packed", "loss"):
            torch.testing.assert_close(found[what], single[what], atol=1e-5, rtol=0)
        assert_all_close(found["gradients"], single["gradients"])


@pytest.mark.parametrize("model", matrix_rows(SERVED, "two"))
def test_ranks_serve_as_one_process_does(outcomes, model):
    _, ranks, folder = outcomes[model]
    expected = answers(load(folder))
    assert expected[1][2] > 0
    for rank in ranks:
        for found in (rank["answers"], rank["sequence"]["answers"]):
            assert_same_answers(found, expected)


@pytest.mark.parametrize("model", matrix_rows(MODELS, "two"))
def test_checkpoints_are_those_of_one_process(outcomes, model):
    single, ranks, folder = outcomes[model]
    assert_same_checkpoint(folder, folder / "from_ranks", single, ranks)


@pytest.mark.parametrize("model", matrix_rows(KV_HEADS, "two"))
def test_a_rank_keeps_the_keys_and_values_of_its_own_heads(outcomes, model):
    _, ranks, _ = outcomes[model]
    assert all(rank["kv_heads"] == KV_HEADS[model] for rank in ranks)
