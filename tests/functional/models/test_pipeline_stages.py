"""Four processes on gloo whose pipeline stages share parameters, or have layers of few kinds, give
what one process gives under core's own schedule."""

import pytest
import torch
from core_training import data_parallel, mean_loss_step, set_up_groups
from matrix import asked, matrix_rows
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from rank_processes import train_on_ranks
from sharded_tensors import pieces
from small_models import small_config
from split_models import (
    assert_close,
    assert_same_checkpoint,
    main_gradients,
    micro_batches,
    sharded_pieces,
)

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, read_config, save_checkpoint
from megatron_hybrid.checkpoints.model_tensors import full_state_dict, own_tensors
from megatron_hybrid.models.hybrid_model import build_hybrid_model

RANKS, LENGTH, VOCAB_SIZE, MICRO_BATCHES = 4, 20, 61, 4
BATCHES = micro_batches(5, MICRO_BATCHES, LENGTH)
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EP, ROWS = "expert_model_parallel_size", "sequence_parallel"
FIELDS = dict(
    mamba_num_heads=8,
    mamba_head_dim=12,
    num_shared_blocks=2,
    shared_block_adapter_rank=6,
    shared_block_attention_adapters=True,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=20,
    pipeline_dtype=torch.float32,
)
TIED = {"share_embeddings_and_output_weights": True}
MODELS = {
    "two": dict(layer_pattern="ZMZ|Z-Z", embedding_multiplier=3.0, **TIED),
    # Block 0 on the first and last stage, block 1 on the third; the second passes the embedding on.
    "four": dict(layer_pattern="V|M|V*|V", mamba1_num_heads=2, **TIED),
    "few_kinds": dict(layer_pattern="MM-|*E", **TIED),
}
LAYOUTS = {
    "pp2": ("two", {PP: 2}),
    "pp2_tp2": ("two", {PP: 2, TP: 2}),
    "pp4": ("four", {PP: 4}),
    "pp2_tp2_rows": ("two", {PP: 2, TP: 2, ROWS: True}),
    "tp4": ("two", {PP: 1, TP: 4}),  # more ranks than key/value heads
    "pp2_ep2": ("few_kinds", {PP: 2, EP: 2}),
}
"""{name: (model, sizes)}"""
each_layout = pytest.mark.parametrize("layout", matrix_rows(LAYOUTS, "pp2_tp2_rows", "pp4"))


def logits_step(batches, model):
    inputs, _ = next(batches)
    return model(inputs, runtime_gather_output=True), lambda logits, non_loss_data: logits


def finalize(chunks, *args, **kwargs):
    finalize_model_grads(chunks, *args, **kwargs)
    for chunk in chunks:
        chunk.module.sum_shared_gradients()


def run_layout(folder, name, sizes):
    """What this rank computes, and its pieces of the model."""
    set_up_groups(sizes)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    config = read_config(folder, pipeline_dtype=torch.float32, **sizes)
    torch.manual_seed(stage)  # stages draw different numbers
    model = build_hybrid_model(config)
    initial = {key: tensor.detach().clone() for key, tensor in own_tensors(model).items()}
    load_checkpoint(model, folder)
    save_checkpoint(model, folder / name)
    sharded = sharded_pieces(model)
    wrapped = data_parallel(model, finalize=finalize)
    wrapped.zero_grad_buffer()
    group = parallel_state.get_data_parallel_group()
    own = BATCHES[group.rank() :: group.size()]
    schedule = dict(
        model=[wrapped],
        num_microbatches=len(own),
        seq_length=LENGTH,
        micro_batch_size=1,
        adjust_tensor_shapes_fn=model.adjust_tensor_shapes if sizes[PP] > 1 else None,
    )
    run = get_forward_backward_func()
    logits = run(
        forward_step_func=logits_step,
        data_iterator=iter(own),
        forward_only=True,
        collect_non_loss_data=True,
        **schedule,
    )
    schedule |= dict(forward_step_func=mean_loss_step, data_iterator=iter(own))
    losses = run(forward_only=False, **schedule)
    result = {
        "place": (stage, model.pg_collection.tp.rank(), group.rank()),
        "size": group.size(),
        "initial": initial,
        "pieces": sharded,
        "logits": [one[..., :VOCAB_SIZE] for one in logits],
        "losses": [one["loss"] for one in losses],
        "gradients": main_gradients(model),
        "state": full_state_dict(model),
    }
    parallel_state.destroy_model_parallel()
    return result


def run_all(folder, names):
    return {name: run_layout(folder / LAYOUTS[name][0], name, LAYOUTS[name][1]) for name in names}


def single_process(folder, name):
    torch.manual_seed(3)
    model = build_hybrid_model(small_config(**FIELDS, **MODELS[name]))
    save_checkpoint(model, folder / name)
    losses, logits = [], []
    for inputs, labels in BATCHES:
        loss = model(inputs, labels=labels).mean()
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.detach())
        logits.append(model(inputs).detach())
    return {
        "losses": losses,
        "logits": logits,
        "gradients": {key: parameter.grad for key, parameter in model.named_parameters()},
        "state": full_state_dict(model),
        "pieces": pieces(model.sharded_state_dict()),
    }


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    """({model: of one process}, [of each rank], folder)."""
    names = asked(request, "layout", LAYOUTS)
    folder = tmp_path_factory.mktemp("stages")
    single = {name: single_process(folder, name) for name in {LAYOUTS[one][0] for one in names}}
    ranks = train_on_ranks(run_all, RANKS, folder / "ranks", folder, names)
    return single, ranks, folder


@each_layout
def test_logits_and_losses(outcome, layout):
    single, ranks, _ = outcome
    model, sizes = LAYOUTS[layout]
    for rank in ranks:
        stage, _, replica = rank[layout]["place"]
        for what in ("logits", "losses"):
            found = rank[layout][what]
            if stage < sizes[PP] - 1:
                assert found == []
                continue
            expected = single[model][what][replica :: rank[layout]["size"]]
            for one, other in zip(found, expected, strict=True):
                assert_close(one, other)


@each_layout
def test_gradients_of_shared_parameters_are_summed(outcome, layout):
    single, ranks, _ = outcome
    expected = single[LAYOUTS[layout][0]]["gradients"]
    found = set()
    for rank in ranks:
        for name, gradient in rank[layout]["gradients"].items():
            assert_close(gradient, expected[name], name)
            found.add(name)
    assert found == expected.keys()


@each_layout
def test_copies_start_equal(outcome, layout):
    _, ranks, _ = outcome
    held = {}
    for rank in ranks:
        stage, tp_rank, _ = rank[layout]["place"]
        for name, tensor in rank[layout]["initial"].items():
            held.setdefault((name, tp_rank), {})[stage] = tensor
    copied = {name for (name, _), stages in held.items() if len(stages) > 1}
    if layout == "tp4":
        assert not copied
        return
    for stages in held.values():
        first, *others = stages.values()
        assert all(torch.equal(first, other) for other in others)
    blocks = {name.partition(".block.")[0] for name in copied if ".block." in name}
    layers = {"pp4": (0,), "pp2_ep2": ()}.get(layout, (0, 2))
    assert blocks == {f"decoder.layers.{layer}.mixer" for layer in layers}
    assert "embedding.word_embeddings.weight" in copied


@each_layout
def test_copies_are_saved_once(outcome, layout):
    single, ranks, folder = outcome
    model = LAYOUTS[layout][0]
    state = ranks[0][layout]["state"]
    assert state.keys() == single[model]["state"].keys()
    path, of_ranks = folder / model, [rank[layout] for rank in ranks]
    assert_same_checkpoint(path, path / layout, single[model], of_ranks)
