"""Two processes on gloo, tensor- and pipeline-parallel, give what one process gives.

The weights come from one checkpoint that a single process wrote.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from sharded_tensors import pieces, whole

from megatron_hybrid.config import HybridConfig
from megatron_hybrid.models.checkpoint import (
    full_state_dict,
    load_checkpoint,
    read_config,
    save_checkpoint,
)
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.models.tensor_sharding import unshard

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


def batch():
    tokens = torch.randint(0, 61, (2, 31), generator=torch.Generator().manual_seed(7))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def packed_batch():
    inputs, _ = batch()
    boundaries = torch.tensor([0, 11, 12, 30, 60], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=30
    )
    return inputs.reshape(1, -1), params


def logits_loss_gradients(model):
    """Gathered logits, loss, and whole gradients by name."""
    inputs, labels = batch()
    with torch.no_grad():
        logits = model(inputs, runtime_gather_output=True)
        tokens, params = packed_batch()
        packed = model(tokens, packed_seq_params=params, runtime_gather_output=True)
    loss = model(inputs, labels=labels)
    loss.mean().backward()
    tp = model.pg_collection.tp
    gradients = {}
    for name, parameter in model.named_parameters():
        pieces = [torch.empty_like(parameter) for _ in range(tp.size())]
        dist.all_gather(pieces, parameter.grad.contiguous(), group=tp)
        if "q_layernorm" in name or "k_layernorm" in name:  # what finalize_model_grads does
            whole = getattr(parameter, "average_gradients_across_tp_domain", False)
            pieces = [sum(pieces) / (tp.size() if whole else 1)]
        gradients[name] = unshard(pieces, parameter)
    return {"logits": logits, "packed": packed, "loss": loss.detach(), "gradients": gradients}


def load(folder, **sizes):
    model = build_hybrid_model(read_config(folder, **sizes))
    load_checkpoint(model, folder)
    return model


def run_tensor_parallel(folder):
    model = load(folder, tensor_model_parallel_size=RANKS)
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


def worker(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    results = {"tensor": run_tensor_parallel(folder)}
    parallel_state.destroy_model_parallel()
    results["pipeline"] = run_pipeline_parallel(folder)
    torch.save(results, folder / f"results{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """(one process, rank 0, rank 1), and the folder."""
    folder = tmp_path_factory.mktemp("parallel")
    torch.manual_seed(3)
    model = build_hybrid_model(dataclasses.replace(CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    save_checkpoint(model, folder)
    single = {"pieces": pieces(model.sharded_state_dict()), **logits_loss_gradients(model)}
    mp.spawn(worker, args=(folder,), nprocs=RANKS)
    ranks = [torch.load(folder / f"results{rank}.pt") for rank in range(RANKS)]
    return single, ranks, folder


@pytest.mark.parametrize("what", ["logits", "packed", "loss"])
def test_tensor_parallel_forward(outcome, what):
    single, ranks, _ = outcome
    for rank in ranks:
        torch.testing.assert_close(rank["tensor"][what], single[what], atol=1e-5, rtol=0)


def test_tensor_parallel_gradients(outcome):
    single, ranks, _ = outcome
    for name, expected in single["gradients"].items():
        for rank in ranks:
            torch.testing.assert_close(
                rank["tensor"]["gradients"][name],
                expected,
                atol=1e-5 * max(1.0, expected.abs().max().item()),
                rtol=0,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def test_checkpoint_of_two_ranks_is_that_of_one(outcome):
    _, _, folder = outcome
    for file in ("config.json", "model.safetensors"):
        assert (folder / file).read_bytes() == (folder / "from_two_ranks" / file).read_bytes()


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


@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_distributed_checkpoint_of_two_ranks_is_that_of_one(outcome, way):
    single, ranks, _ = outcome
    expected = whole(single["pieces"])
    joined = whole(*(rank[way]["pieces"] for rank in ranks))
    assert joined.keys() == expected.keys()
    for key, tensor in expected.items():
        rows = len(tensor)  # two ranks pad the vocabulary
        assert torch.equal(joined[key][:rows], tensor), key
