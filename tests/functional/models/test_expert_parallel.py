"""Four processes on gloo that split the experts give what one process gives, with the same tokens
on all ranks and with different ones."""

import pytest
import torch
import torch.distributed as dist
from core_training import data_parallel, set_up_groups
from matrix import asked, matrix_rows
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from rank_processes import train_on_ranks
from router_losses import forget_losses, take_losses
from sharded_tensors import pieces
from small_models import small_config
from split_models import (
    assert_all_close,
    assert_close,
    assert_same_checkpoint,
    load,
    main_gradients,
    micro_batches,
    sharded_pieces,
)

from megatron_hybrid.checkpoints.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_config,
    save_checkpoint,
)
from megatron_hybrid.checkpoints.megatron.torch_dist import load_megatron, save_megatron
from megatron_hybrid.checkpoints.model_tensors import full_state_dict
from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout

pytestmark = pytest.mark.matrix  # test_moe_training.py has a row of `make test`

RANKS, LENGTH, VOCAB_SIZE = 4, 24, 61
TP, ROWS = "tensor_model_parallel_size", "sequence_parallel"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
FIELDS = dict(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_router_score_function="sigmoid",
    moe_ffn_hidden_size=20,
)
MODELS = {
    "cut": dict(
        layer_pattern="*EBE",
        layer_overrides={
            "2": {"moe_latent_size": 12, "moe_shared_expert_intermediate_size": 28},
            "4": {"moe_router_topk": 1, "moe_apply_probs_on_input": True},
        },
    ),
    "biased": dict(layer_pattern="*E", layer_overrides={"E": {"add_bias_linear": True}}),
    "balanced": dict(layer_pattern="*E"),
    "dropping": dict(layer_pattern="*E"),
}
LOSSES = {
    "cut": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.3, 0.5],
        "moe_z_loss_coeff": 0.2,
    },
    "biased": {},
    "dropping": {"moe_expert_capacity_factor": 0.7},
    # The ranks' micro batches have one loss.
    "balanced": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.7},
}
"""Of the router, by model."""
LAYOUTS = {
    "ep2": ("cut", {EP: 2}),
    "ep4": ("biased", {EP: 4}),
    "tp2_ep2": ("cut", {TP: 2, EP: 2}),
    "tp2_whole_ep2": ("biased", {TP: 2, EP: 2, ETP: 1}),  # among the tensor-parallel ranks
    "tp2_whole_ep4": ("biased", {TP: 2, EP: 4, ETP: 1}),
    "tp2_whole": ("cut", {TP: 2, ETP: 1}),
    "tp2_ep2_balanced": ("balanced", {TP: 2, EP: 2}),
    "tp2_rows_balanced": ("balanced", {TP: 2, ROWS: True}),
    "ep2_dropping": ("dropping", {EP: 2}),
    "tp2_ep2_dropping": ("dropping", {TP: 2, EP: 2}),
    "tp2_whole_ep2_dropping": ("dropping", {TP: 2, EP: 2, ETP: 1}),
    "tp2_ep2_rows": ("cut", {TP: 2, EP: 2, ROWS: True}),
    "tp2_ep4_rows": ("biased", {TP: 2, EP: 4, ETP: 1, ROWS: True}),
}
"""{name: (model, sizes)}"""
KEPT = ("tp2_whole_ep2", "tp2_ep2_balanced", "tp2_whole_ep2_dropping", "tp2_ep2_rows")
each_layout = pytest.mark.parametrize("layout", matrix_rows(LAYOUTS, *KEPT))


def batch(number):
    """Of a data-parallel rank."""
    return micro_batches(number, 1, LENGTH)[0]


class EngineContext(UncachedContext):
    """All ranks run the same tokens."""

    same_tokens_on_expert_ranks = True

    def last_token_logits(self, hidden_1Th):
        return hidden_1Th[0]


def gradients(model, inputs, labels):
    """Loss, and whole gradients by name under core's data parallelism."""
    wrapped = data_parallel(model)
    wrapped.zero_grad_buffer()
    loss = wrapped(inputs, labels=labels).mean()
    loss.backward()
    finalize_model_grads([wrapped])
    return loss.detach(), main_gradients(model)


def run_layout(folder, name, sizes):
    """What this rank computes, and its pieces of the model."""
    set_up_groups(sizes)
    forget_losses()
    model = load(folder, **sizes, **LOSSES[folder.name])
    save_checkpoint(model, folder / name)
    sharded = sharded_pieces(model)
    number = model.pg_collection.dp.rank()
    inputs, labels = batch(number)
    with torch.no_grad():
        logits = model(inputs, runtime_gather_output=True)
        context = EngineContext(RaggedLayout.uniform(1, LENGTH), inputs.device)
        same = model(batch(0)[0], inference_context=context)
    loss, found = gradients(model, inputs, labels)
    router_losses = take_losses(of_all_ranks=True)
    parallel_state.destroy_model_parallel()
    return {
        "number": number,
        "pieces": sharded,
        "experts": len(model.decoder.layers[1].mlp.experts.linear_fc1.weight),
        "logits": logits[..., :VOCAB_SIZE],
        "same_tokens": same,
        "loss": loss,
        "router_losses": router_losses,
        "gradients": found,
    }


def refusals(folder):
    """Error by name: of work that is impossible, or that one rank alone cannot do."""

    def there(path, missing_on):
        return folder / ("nowhere" if dist.get_rank() == missing_on else path)

    def of(call, *args, **sizes):
        with pytest.raises(ValueError) as raised:
            call(*args, **sizes)
        return type(raised.value), str(raised.value)

    config = small_config("E", **{**FIELDS, "num_moe_experts": 3, EP: 3})
    found = {
        "world size": of(build_hybrid_model, config),
        "no folder": of(load_pretrained, there("cut", 1), **{EP: 4}),
        "no folder of Megatron": of(load_megatron, there("megatron", 2), **{EP: 4}),
    }
    parallel_state.initialize_model_parallel(expert_model_parallel_size=4)
    model = build_hybrid_model(read_config(folder / "cut", **{EP: 4}))
    found["no weights"] = of(load_checkpoint, model, there("cut", 3))
    found["another model"] = of(load_checkpoint, model, folder / "biased")
    parallel_state.destroy_model_parallel()
    return found


def run_all(folder, names):
    results = {
        name: run_layout(folder / LAYOUTS[name][0], name, LAYOUTS[name][1]) for name in names
    }
    results["refusals"] = refusals(folder)
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2)
    sizes = {TP: 2, EP: 2}
    model = load_megatron(folder / "megatron", **sizes)
    save_megatron(model, folder / "megatron_of_ranks")
    results["megatron"] = full_state_dict(model)
    pretrained, _ = load_pretrained(folder / "cut", **sizes)
    results["pretrained"] = full_state_dict(pretrained)
    parallel_state.destroy_model_parallel()
    return results


def single_process(folder, name):
    torch.manual_seed(3)
    model = build_hybrid_model(small_config(**FIELDS, **MODELS[name], **LOSSES[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # biases
                parameter.normal_(std=0.1)
    save_checkpoint(model, folder / name)
    rows = [batch(number) for number in range(RANKS)]
    with torch.no_grad():
        result = {
            "pieces": pieces(model.sharded_state_dict()),
            "logits": [model(inputs) for inputs, _ in rows],
            "loss": [model(inputs, labels=labels).mean() for inputs, labels in rows],
        }
    forget_losses()
    for num_ranks in range(1, RANKS + 1):
        steps = rows[:num_ranks]
        if name == "balanced":
            steps = [[torch.cat(part) for part in zip(*steps)]]
        model.zero_grad()
        reset_model_temporary_tensors(model.config, [model])
        for inputs, labels in steps:
            (model(inputs, labels=labels).mean() * num_ranks / len(steps)).backward()
        result[num_ranks] = {
            "gradients": {key: p.grad / num_ranks for key, p in model.named_parameters()},
            "router_losses": {key: loss / len(steps) for key, loss in take_losses().items()},
        }
    return result


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    """({model: of one process}, [of each rank], folder)."""
    names = asked(request, "layout", LAYOUTS)
    folder = tmp_path_factory.mktemp("experts")
    single = {name: single_process(folder, name) for name in MODELS}
    torch.manual_seed(4)
    save_megatron(build_hybrid_model(small_config("*EE", **FIELDS)), folder / "megatron")
    ranks = train_on_ranks(run_all, RANKS, folder / "ranks", folder, names)
    return single, ranks, folder


@each_layout
def test_different_tokens_on_the_ranks_and_the_same(outcome, layout):
    single, ranks, _ = outcome
    model, sizes = LAYOUTS[layout]
    for rank in ranks:
        own = rank[layout]
        assert own["experts"] == 4 // sizes.get(EP, 1)
        assert_close(own["logits"], single[model]["logits"][own["number"]])
        assert_close(own["loss"], single[model]["loss"][own["number"]])
        assert_close(own["same_tokens"], single[model]["logits"][0])


@each_layout
def test_gradients_and_losses_of_routers_are_those_of_the_concatenated_batch(outcome, layout):
    single, ranks, _ = outcome
    model, sizes = LAYOUTS[layout]
    for kind, expected in single[model][RANKS // sizes.get(TP, 1)].items():
        for rank in ranks:
            assert_all_close(rank[layout][kind], expected)


@each_layout
def test_checkpoints_are_those_of_one_process(outcome, layout):
    single, ranks, folder = outcome
    model = LAYOUTS[layout][0]
    path, of_ranks = folder / model, [rank[layout] for rank in ranks]
    assert_same_checkpoint(path, path / layout, single[model], of_ranks)


def test_folders_of_megatron_and_of_load_pretrained(outcome):
    _, ranks, folder = outcome
    for result, path in (("megatron", "megatron"), ("pretrained", "cut")):
        read = load_megatron if path == "megatron" else lambda at: load_pretrained(at)[0]
        expected = full_state_dict(read(folder / path))
        assert ranks[0][result].keys() == expected.keys()
        assert all(torch.equal(ranks[0][result][name], expected[name]) for name in expected)
    again = full_state_dict(load_megatron(folder / "megatron_of_ranks"))
    assert all(torch.equal(again[name], ranks[0]["megatron"][name]) for name in again)


def test_what_one_rank_cannot_do_is_an_error_on_all(outcome):
    _, ranks, _ = outcome
    said = {
        "world size": (None, "needs a multiple of 3 processes, but there are 4"),
        "no folder": (1, "nowhere is not a folder"),
        "no folder of Megatron": (2, "nowhere has neither"),
        "no weights": (3, "config.json does not exist"),
        "another model": (None, "weights"),
    }
    for rank, results in enumerate(ranks):
        for name, (failing, text) in said.items():
            kind, message = results["refusals"][name]
            assert text in message
            assert kind is (ValueError if name == "world size" else CheckpointError)
            if failing is not None:
                assert message.startswith(f"rank {failing} on ") == (rank != failing)
