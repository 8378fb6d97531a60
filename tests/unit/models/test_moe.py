"""The mixture of experts against the blocks of transformers, and by itself."""

import contextlib

import pytest
import torch
from grouped_experts import grouped_experts
from small_models import random_tokens, small_config, small_model
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    JambaConfig,
    Lfm2MoeConfig,
    Llama4TextConfig,
    NemotronHConfig,
    Qwen3NextConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.jamba.modeling_jamba import JambaSparseMoeBlock
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeSparseMoeBlock
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.activations import ACTIVATIONS
from megatron_hybrid.ops.ragged import RaggedLayout

HIDDEN, EXPERTS, WIDTH, SHARED, LATENT = 48, 8, 20, 28, 12
FIELDS = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH, "moe_router_topk": 3}


each_backend = pytest.mark.parametrize(
    "backend", [contextlib.nullcontext, grouped_experts], ids=["reference", "grouped_mm"]
)


def qwen3_next():
    """Softmax, renormalised; a shared expert behind a gate."""
    block = Qwen3NextSparseMoeBlock(
        Qwen3NextConfig(
            hidden_size=HIDDEN,
            num_experts=EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=WIDTH,
            shared_expert_intermediate_size=SHARED,
            norm_topk_prob=True,
        )
    )
    fields = {"moe_shared_expert_intermediate_size": SHARED, "moe_shared_expert_gate": True}
    shared = block.shared_expert
    return (
        block,
        fields,
        lambda: {
            "router.weight": block.gate.weight,
            "experts.linear_fc1.weight": block.experts.gate_up_proj,
            "experts.linear_fc2.weight": block.experts.down_proj,
            "shared_experts.linear_fc1.weight": torch.cat(
                [shared.gate_proj.weight, shared.up_proj.weight]
            ),
            "shared_experts.linear_fc2.weight": shared.down_proj.weight,
            "shared_experts.gate_weight": block.shared_expert_gate.weight,
        },
    )


def nemotron_h():
    """Sigmoid with a selection bias and groups; plain experts in a latent space."""
    block = NemotronHMoE(
        NemotronHConfig(
            hidden_size=HIDDEN,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=1,
            routed_scaling_factor=2.5,
            moe_intermediate_size=WIDTH,
            moe_shared_expert_intermediate_size=SHARED,
            moe_latent_size=LATENT,
            mlp_hidden_act="relu2",
            layers_block_type=["moe"],
        )
    )
    fields = {
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": SHARED,
        "moe_latent_size": LATENT,
        "gated_linear_unit": False,
        "activation_func": ACTIVATIONS["squared_relu"],
    }
    return (
        block,
        fields,
        lambda: {
            "router.weight": block.gate.weight,
            "router.expert_bias": block.gate.e_score_correction_bias,
            "experts.linear_fc1.weight": block.experts.up_proj,
            "experts.linear_fc2.weight": block.experts.down_proj,
            "shared_experts.linear_fc1.weight": block.shared_experts.up_proj.weight,
            "shared_experts.linear_fc2.weight": block.shared_experts.down_proj.weight,
            "fc1_latent_proj.weight": block.fc1_latent_proj.weight,
            "fc2_latent_proj.weight": block.fc2_latent_proj.weight,
        },
    )


def deepseek_v3():
    """Sigmoid with a selection bias and groups, of which several are chosen; gated experts."""
    block = DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=HIDDEN,
            n_routed_experts=EXPERTS,
            num_local_experts=EXPERTS,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            moe_intermediate_size=WIDTH,
            n_shared_experts=1,
            norm_topk_prob=True,
        )
    )
    fields = {
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": WIDTH,
    }
    shared = block.shared_experts
    return (
        block,
        fields,
        lambda: {
            "router.weight": block.gate.weight,
            "router.expert_bias": block.gate.e_score_correction_bias,
            "experts.linear_fc1.weight": block.experts.gate_up_proj,
            "experts.linear_fc2.weight": block.experts.down_proj,
            "shared_experts.linear_fc1.weight": torch.cat(
                [shared.gate_proj.weight, shared.up_proj.weight]
            ),
            "shared_experts.linear_fc2.weight": shared.down_proj.weight,
        },
    )


def jamba():
    """Softmax over all experts, not renormalised."""
    block = JambaSparseMoeBlock(
        JambaConfig(
            hidden_size=HIDDEN,
            num_experts=EXPERTS,
            num_experts_per_tok=3,
            intermediate_size=WIDTH,
        )
    )
    weights = lambda: {  # noqa: E731
        "router.weight": block.router.weight,
        "experts.linear_fc1.weight": block.experts.gate_up_proj,
        "experts.linear_fc2.weight": block.experts.down_proj,
    }
    return block, {"moe_router_pre_softmax": True}, weights


def lfm2_moe():
    """Sigmoid with a selection bias; an epsilon in the sum, which small scores show."""
    block = Lfm2MoeSparseMoeBlock(
        Lfm2MoeConfig(
            hidden_size=HIDDEN,
            num_experts=EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=WIDTH,
            norm_topk_prob=True,
            use_expert_bias=True,
        )
    )
    fields = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_epsilon": 1e-6,
    }
    weights = lambda: {  # noqa: E731
        "router.weight": block.gate.weight,
        "router.expert_bias": block.expert_bias,
        "experts.linear_fc1.weight": block.experts.gate_up_proj,
        "experts.linear_fc2.weight": block.experts.down_proj,
    }
    return block, fields, weights


def llama4():
    """One expert, whose input is weighted by a sigmoid; a shared expert without a gate."""
    block = Llama4TextMoe(
        Llama4TextConfig(
            hidden_size=HIDDEN,
            num_local_experts=EXPERTS,
            num_experts_per_tok=1,
            intermediate_size=WIDTH,
        )
    )
    fields = {
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_shared_expert_intermediate_size": WIDTH,
    }
    shared = block.shared_expert
    return (
        block,
        fields,
        lambda: {
            "router.weight": block.router.weight,
            "experts.linear_fc1.weight": block.experts.gate_up_proj.transpose(1, 2),
            "experts.linear_fc2.weight": block.experts.down_proj.transpose(1, 2),
            "shared_experts.linear_fc1.weight": torch.cat(
                [shared.gate_proj.weight, shared.up_proj.weight]
            ),
            "shared_experts.linear_fc2.weight": shared.down_proj.weight,
        },
    )


def gpt_oss():
    """Biases everywhere, and a gate of its own kind."""
    block = GptOssMLP(
        GptOssConfig(
            hidden_size=HIDDEN,
            num_local_experts=EXPERTS,
            num_experts_per_tok=3,
            intermediate_size=WIDTH,
            swiglu_limit=0.5,
        )
    )
    fields = {
        "add_bias_linear": True,
        "activation_func": ACTIVATIONS["quick_gelu"],
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
    }
    experts = block.experts
    even_then_odd = [*range(0, 2 * WIDTH, 2), *range(1, 2 * WIDTH, 2)]
    return (
        block,
        fields,
        lambda: {
            "router.weight": block.router.weight,
            "router.bias": block.router.bias,
            "experts.linear_fc1.weight": experts.gate_up_proj.transpose(1, 2)[:, even_then_odd],
            "experts.linear_fc1.bias": experts.gate_up_proj_bias[:, even_then_odd],
            "experts.linear_fc2.weight": experts.down_proj.transpose(1, 2),
            "experts.linear_fc2.bias": experts.down_proj_bias,
        },
    )


def build(make):
    """The block of transformers with random weights, our mixer with the same, and a function of
    the block's tensors by our names."""
    block, fields, weights = make()
    with torch.no_grad():
        for tensor in block.state_dict(keep_vars=True).values():
            tensor.normal_(std=0.2)
        if make is lfm2_moe:
            block.gate.weight[:, 0] = -3.5  # `inputs` makes that a score as small as the epsilon
    mixer = small_model("E", hidden_size=HIDDEN, **{**FIELDS, **fields}).decoder.layers[0].mlp
    given = {name: tensor.detach() for name, tensor in weights().items()}
    missing, unexpected = mixer.load_state_dict(given, strict=False)
    assert not unexpected
    assert not [name for name in missing if not name.endswith("_extra_state")]
    return block, mixer, weights


def inputs(rows):
    hidden = torch.randn(rows, HIDDEN)
    hidden[:, 0] = 4.0
    return hidden


def context(rows, padding=0):
    return UncachedContext(RaggedLayout((rows,), (0,), num_padding=padding), torch.device("cpu"))


@pytest.mark.parametrize(
    "make", [qwen3_next, nemotron_h, deepseek_v3, jamba, lfm2_moe, llama4, gpt_oss]
)
@each_backend
def test_outputs_and_gradients_are_those_of_transformers(make, backend):
    block, mixer, weights = build(make)
    theirs = inputs(40).requires_grad_()
    ours = theirs.detach().clone().requires_grad_()
    expected = block(theirs[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected).view(40, HIDDEN)
    with backend():
        output, bias = mixer.train()(ours, context(40))
    assert bias is None
    torch.testing.assert_close(output, expected, atol=5e-6, rtol=5e-6)
    seed = torch.randn(40, HIDDEN)
    (expected * seed).sum().backward()
    (output * seed).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5, rtol=2e-5)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(parameter.grad)
    expected = weights()
    for name, parameter in mixer.named_parameters():
        assert expected[name].abs().max() > 1e-3
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [qwen3_next, nemotron_h, gpt_oss])
@each_backend
def test_a_row_has_the_same_bits_in_every_batch(make, backend):
    _, mixer, _ = build(make)
    hidden = inputs(64)
    with torch.no_grad(), backend():
        whole, _ = mixer(hidden, context(64))
        for rows in ([5], [60, 2, 33], torch.randperm(64)[:23].tolist()):
            padding = -len(rows) % 8
            batch = torch.cat([hidden[rows], torch.full((padding, HIDDEN), torch.nan)])
            part, _ = mixer(batch, context(len(rows), padding))
            assert torch.equal(part[: len(rows)], whole[rows])


def test_padding_is_counted_nowhere():
    _, mixer, _ = build(lfm2_moe)
    mixer.train()
    mixer(inputs(16), context(11, padding=5))
    assert mixer.router.local_tokens_per_expert.sum() == 11 * 3
    with torch.no_grad():
        mixer(inputs(16), context(16))
    assert mixer.router.local_tokens_per_expert.sum() == 11 * 3  # nothing was trained on them


def test_a_model_learns_through_its_router():
    model = small_model("*EME", **FIELDS, moe_shared_expert_intermediate_size=SHARED)
    tokens = random_tokens(2, 17)
    model(tokens[:, :-1], labels=tokens[:, 1:].contiguous()).mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_moe_experts": None, "moe_ffn_hidden_size": None},
            "num_moe_experts is None, but layer_pattern",
        ),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            "moe_router_pre_softmax is False, which moe_router_load_balancing_type='sinkhorn' does",
        ),
        ({"moe_token_dropping": True}, "use moe_expert_capacity_factor"),
        ({"moe_router_topk": 9}, "moe_router_topk is 9, but num_moe_experts is 8"),
        ({"moe_router_topk": 1}, "moe_router_pre_softmax=True"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_score_function='sigmoid'"),
        ({"moe_router_score_function": "tanh"}, "use 'softmax' or 'sigmoid'"),
        ({"moe_apply_probs_on_input": True}, "needs moe_router_topk=1"),
        ({"moe_shared_expert_gate": True}, "there is none"),
        ({"moe_router_num_groups": 4}, "moe_router_group_topk is None"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "do not fit"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 2}, "do not fit"),
        ({"mlp_output_multiplier": 0.5}, "mlp_output_multiplier 0.5, which experts do not have"),
        (
            {"moe_router_load_balancing_type": "entropy"},
            "moe_router_load_balancing_type is 'entropy'; use 'aux_loss'",
        ),
        (
            {"moe_router_load_balancing_type": "quantile_balancing"},
            "a bias that checkpoints and serving do not have",
        ),
        ({"moe_aux_loss_coeff": [0.01]}, "moe_aux_loss_coeff is .0.01.. Give one loss and one"),
        (
            {
                "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
                "moe_aux_loss_coeff": [0.01],
            },
            "a list of each, of the same length",
        ),
        (
            {
                "moe_router_load_balancing_type": ["aux_loss", "aux_loss"],
                "moe_aux_loss_coeff": [0.01, 0.1],
            },
            "name each loss once",
        ),
        (
            {"moe_aux_loss_coeff": -0.1},
            "moe_aux_loss_coeff is -0.1; it must be 0 or more",
        ),
        (
            {"moe_aux_loss_coeff": "1e-3"},
            "moe_aux_loss_coeff is '1e-3'; it must be a number or a list of numbers",
        ),
        ({"moe_z_loss_coeff": -0.1}, "moe_z_loss_coeff is -0.1; it must be a number of 0 or more"),
        ({"moe_token_drop_policy": "first"}, "moe_token_drop_policy is 'first'; use 'probs'"),
        ({"moe_router_dtype": "bf16"}, "moe_router_dtype is 'bf16'; use 'fp32' or 'fp64'"),
        ({"add_bias_linear": True, "tensor_model_parallel_size": 2}, "needs whole experts"),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 4},
            "expert_tensor_parallel_size is 4, which does not divide tensor_model_parallel_size=2",
        ),
        (
            {"expert_model_parallel_size": 3},
            "num_moe_experts is 8, which does not divide evenly over expert_model_parallel_size=3",
        ),
        ({"moe_ffn_hidden_size": 21, "tensor_model_parallel_size": 2}, "moe_ffn_hidden_size is 21"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        small_config("*E", **{**FIELDS, **fields})


def test_what_changes_speed_alone_in_core_is_said(caplog):
    fields = ["moe_pad_expert_input_to_capacity", "moe_shared_expert_overlap"]
    small_config(
        "*E",
        **FIELDS,
        **dict.fromkeys(fields, True),
        moe_expert_capacity_factor=1.0,
        moe_token_dispatcher_type="alltoall",
    )
    assert all(name in caplog.text for name in fields)


@pytest.mark.parametrize("name", ["moe_latent_size", "moe_shared_expert_intermediate_size"])
def test_experts_beside_an_mlp_have_no_latent_and_no_shared_expert(name):
    with pytest.raises(ValueError, match=f"{name} is 12, but the experts of a layer B work on"):
        small_config("BE", **FIELDS, **{name: 12})
    config = small_config("BE", **FIELDS, layer_overrides={"E": {name: 12}})
    assert [getattr(config.for_layer(n), name) for n in (1, 2)] == [None, 12]


def test_layers_may_have_different_experts():
    config = small_config("EE", **FIELDS, layer_overrides={"2": {"num_moe_experts": 5}})
    assert [config.for_layer(n).num_moe_experts for n in (1, 2)] == [EXPERTS, 5]
    with pytest.raises(ValueError, match="num_moe_experts is 2"):
        small_config("EE", **FIELDS, layer_overrides={"2": {"num_moe_experts": 2}})
