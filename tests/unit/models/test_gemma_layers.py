"""What Gemma alone has: rounded factors of embeddings, per-layer inputs, experts beside an MLP."""

import pytest
import torch
import transformers
from small_models import random_tokens, small_config, small_model
from test_mixer_context import DictContext, run
from transformers.models.gemma4 import modeling_gemma4 as gemma4

from megatron_hybrid.models.mixers.base import StackInputs
from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout

HIDDEN, VOCAB = 48, 61
EXPERTS = {"num_moe_experts": 5, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}


def randomize(module):
    """Vectors (norms and scales) about 1, matrices about 0: transformers leaves some empty."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.2)
    return module.eval()


def gemma4_config(**fields):
    return transformers.Gemma4TextConfig(
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=10,
        rms_norm_eps=1e-5,
        pad_token_id=None,
        experts_implementation="eager",
        **fields,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factor_of_embeddings_is_rounded_to_their_dtype(dtype):
    model = small_model(
        "-",
        embedding_multiplier=HIDDEN**0.5,
        round_embedding_multiplier=True,
        params_dtype=dtype,
    )
    theirs = gemma4.Gemma4TextScaledWordEmbedding(VOCAB, HIDDEN, None, HIDDEN**0.5).to(dtype)
    theirs.load_state_dict(model.embedding.word_embeddings.state_dict())
    tokens = random_tokens(1, 40)
    seen = {}
    model.decoder.register_forward_pre_hook(lambda module, inputs: seen.update(hidden=inputs[0]))
    with torch.no_grad():
        model(tokens)
        assert torch.equal(seen["hidden"], theirs(tokens)[0])


@torch.no_grad()
def test_per_layer_embeddings_are_those_of_transformers():
    theirs = randomize(gemma4.Gemma4TextModel(gemma4_config()))
    model = small_model("P-PP", per_layer_input_size=10)
    model.per_layer_embedding.load_state_dict(
        {
            "weight": theirs.embed_tokens_per_layer.weight,
            "projection.weight": theirs.per_layer_model_projection.weight,
            "norm.weight": theirs.per_layer_projection_norm.weight,
        }
    )
    tokens, embedding = random_tokens(1, 30), torch.randn(1, 30, HIDDEN)
    expected = theirs.project_per_layer_inputs(embedding, theirs.get_per_layer_inputs(tokens))
    output_TJp = model.per_layer_embedding(tokens[0], embedding[0])
    torch.testing.assert_close(output_TJp, expected[0], atol=1e-6, rtol=1e-5)


def test_each_layer_takes_its_own_per_layer_input():
    model = small_model("P-PP", per_layer_input_size=10)
    inputs = StackInputs(None, torch.randn(4, 3, 10))
    hidden_Th = torch.randn(4, HIDDEN)
    mixers = [model.decoder.layers[i].mixer for i in (0, 2, 3)]
    for i, mixer in enumerate(mixers):
        gate = torch.nn.functional.silu(hidden_Th @ mixer.gate.weight.T)
        expected = (gate * inputs.per_layer_TJp[:, i]) @ mixer.projection.weight.T
        output, bias = mixer(hidden_Th, None, inputs)
        torch.testing.assert_close(output, expected)
        assert bias is None


@torch.no_grad()
def test_experts_beside_an_mlp_are_those_of_transformers():
    """With a layer norm behind both, as a layer of Gemma 4 has it; attention adds nothing."""
    config = gemma4_config(
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=12,
        hidden_activation="silu",
    )
    theirs = randomize(gemma4.Gemma4TextDecoderLayer(config, 0))
    theirs.layer_scalar.fill_(0.7)
    theirs.hidden_size_per_layer_input = 0
    theirs.self_attn.forward = lambda hidden_states, **rest: (torch.zeros_like(hidden_states), None)
    theirs.post_attention_layernorm = torch.nn.Identity()
    model = small_model("B", norm_placement="post", layer_scalar=True, **EXPERTS)
    layer = model.decoder.layers[0]
    given = theirs.state_dict()
    norms = {
        "pre_dense": "pre_feedforward_layernorm",
        "post_dense": "post_feedforward_layernorm_1",
        "pre_experts": "pre_feedforward_layernorm_2",
        "post_experts": "post_feedforward_layernorm_2",
    }
    fc1 = torch.cat([given["mlp.gate_proj.weight"], given["mlp.up_proj.weight"]])
    mixer = {
        **{f"{own}_layernorm.weight": given[f"{name}.weight"] for own, name in norms.items()},
        "dense.linear_fc1.weight": fc1,
        "dense.linear_fc2.weight": given["mlp.down_proj.weight"],
        "router.weight": given["router.proj.weight"],
        "router_scale": given["router.scale"],
        "expert_scale": given["router.per_expert_scale"],
        "experts.linear_fc1.weight": given["experts.gate_up_proj"],
        "experts.linear_fc2.weight": given["experts.down_proj"],
    }
    layer.load_state_dict(
        {
            **{f"mlp.{name}": value for name, value in mixer.items()},
            "post_layernorm.weight": given["post_feedforward_layernorm.weight"],
            "layer_scalar": given["layer_scalar"],
        },
        strict=True,
    )
    hidden_1Th = torch.randn(1, 30, HIDDEN)
    context = UncachedContext(RaggedLayout.uniform(1, 30), hidden_1Th.device)
    output = layer(hidden_1Th[0], context, StackInputs(None))
    torch.testing.assert_close(output, theirs(hidden_1Th.clone())[0], atol=3e-6, rtol=1e-5)


@torch.inference_mode()
def test_pieces_equal_the_whole():
    model = small_model("*PBP", per_layer_input_size=10, layer_scalar=True, **EXPERTS)
    model.decoder.layers[2].layer_scalar.fill_(0.6)
    tokens = random_tokens(1, 30)
    whole = model(tokens)[0]
    context = DictContext(model.cache_requirements(), 1)
    pieces = [
        run(model, context, tokens, {0: cut}, padding)[0]
        for padding, cut in enumerate([(0, 11), (11, 12), (12, 30)])
    ]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-5, rtol=1e-5)


def test_gradients_reach_every_parameter():
    model = small_model("PB", per_layer_input_size=10, **EXPERTS)
    model(random_tokens(2, 60)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_per_layer_inputs_need_a_width_and_one_stage():
    with pytest.raises(ValueError, match=r"per_layer_input_size is None. Set it"):
        small_config("P-")
    with pytest.raises(ValueError, match=r"there are 2 stages. Use 1"):
        small_config("P-", per_layer_input_size=8, pipeline_model_parallel_size=2)
