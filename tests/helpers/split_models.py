"""A model on one process and on several ranks: what both compute, and from which weights."""

import dataclasses
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import validation
from megatron.core.distributed.finalize_model_grads import _allreduce_layernorm_grads
from megatron.core.packed_seq_params import PackedSeqParams
from reference import tiny_model
from sharded_tensors import pieces, whole

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, read_config, save_checkpoint
from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.models.hybrid_model import NO_LABEL, build_hybrid_model
from megatron_hybrid.models.sharding.gathering import gather_whole
from megatron_hybrid.models.sharding.tensor_sharding import shard, unshard


def batch():
    tokens = torch.randint(0, 61, (2, 31), generator=torch.Generator().manual_seed(7))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def micro_batches(seed, count, length):
    """(input ids, labels), each [1, length]."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 61, (count, 1, length + 1), generator=generator)
    return [(row[:, :-1], row[:, 1:].contiguous()) for row in rows]


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
    labels[0, 3:7] = NO_LABEL
    with torch.no_grad():
        logits = model(inputs, runtime_gather_output=True)
        tokens, params = packed_batch()
        packed = model(tokens, packed_seq_params=params, runtime_gather_output=True)
    loss = model(inputs, labels=labels)
    loss.mean().backward()
    model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    _allreduce_layernorm_grads([model], model.config, model.pg_collection.tp)
    tp = model.pg_collection.tp
    gradients = {}
    for name, parameter in model.named_parameters():
        pieces = [torch.empty_like(parameter) for _ in range(tp.size())]
        dist.all_gather(pieces, parameter.grad.contiguous(), group=tp)
        gradients[name] = unshard(pieces, parameter)
        # Copies on other ranks have the same gradient.
        own = shard(gradients[name], parameter, tp.rank())
        torch.testing.assert_close(parameter.grad, own, atol=1e-6, rtol=1e-5)
    return {"logits": logits, "packed": packed, "loss": loss.detach(), "gradients": gradients}


def main_gradients(model):
    """Whole gradients by name, of a stage under core's data parallelism."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.main_grad.clone()
        for mark in ("cut", "num_experts"):
            if hasattr(parameter, mark):
                setattr(gradient, mark, getattr(parameter, mark))
        found |= gather_whole(model.canonical_name(name), gradient, model.pg_collection)
    return found


def sharded_pieces(model):
    """This rank's pieces of a model; core has checked that each place has one main copy."""
    sharded = model.sharded_state_dict()
    built = [getattr(value, "build", lambda own=value: own)() for value in sharded.values()]
    validation.validate_sharding_integrity(validation.determine_global_metadata({0: built})[1])
    return pieces(sharded)


def load(folder, **sizes):
    model = build_hybrid_model(read_config(folder, **sizes))
    load_checkpoint(model, folder)
    return model


def save_old_and_new(folder, **fields):
    """Two models of other weights, "old" and "new": in folders, and as named tensors (`.pt`)."""
    models = {name: tiny_model(**fields, seed=seed) for seed, name in enumerate(("old", "new"))}
    for name, model in models.items():
        save_checkpoint(model, folder / name)
        state = {n: tensor.detach().clone() for n, tensor in own_tensors(model).items()}
        torch.save(state, folder / f"{name}.pt")
    return models


def assert_same_answers(found, expected):
    """Equal tokens and skipped tokens, and log-probabilities within 1e-5."""
    for (tokens, logs, skipped), row in zip(found, expected, strict=True):
        assert tokens == row[0] and skipped == row[2]
        torch.testing.assert_close(torch.tensor(logs), torch.tensor(row[1]), atol=1e-5, rtol=0)


def single_process(config, folder):
    torch.manual_seed(3)
    model = build_hybrid_model(dataclasses.replace(config))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 1 and not name.endswith(("multipliers", "A_H")):  # of no checkpoint
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    save_checkpoint(model, folder)
    return {"pieces": pieces(model.sharded_state_dict()), **logits_loss_gradients(model)}


def assert_close(value, expected, name=""):
    """Within 1e-5 of the larger of 1 and the largest expected value."""
    bound = 1e-5 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        value, expected, atol=bound, rtol=0, msg=lambda text: f"{name}: {text}"
    )


def assert_all_close(found, expected):
    """The same names, and each tensor close."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, name)


def assert_same_checkpoint(path, other, single, ranks):
    """Equal files in both folders, and equal tensors in core's distributed checkpoints, by the
    "pieces" of one process and of each rank."""
    for file in ("config.json", "model.safetensors"):
        assert (path / file).read_bytes() == (other / file).read_bytes()
    expected, joined = whole(single["pieces"]), whole(*(rank["pieces"] for rank in ranks))
    assert joined.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(joined[key][: len(tensor)], tensor), key  # ranks pad the vocabulary
