"""Models that megatron-core built give the same logits and answers when they are served."""

import pytest
import stock_megatron
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from stock_megatron import core_config, logits_of, scramble
from torch import nn

import megatron_hybrid as mh
from megatron_hybrid.models.flops import token_flops
from megatron_hybrid.models.hybrid_model import HybridModel

VOCAB = 61
ROPE, NOWHERE = ({"position_embedding_type": kind} for kind in ("rope", "none"))
GATED = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
MOE = {"num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20}
LATENT = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 12,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
}
DELTA = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2}


def build(pattern, config, **arguments):
    """A stock model: of a hybrid pattern, or a GPTModel for None."""
    with stock_megatron.on_cpu(), torch.no_grad():
        model = stock_megatron.stock_model(config, pattern, vocab_size=VOCAB, **arguments)
        scramble(model)
        return model


def assert_shares_all(served, stock):
    """All tensors of the served model are the stock model's own, and none of its is left out."""
    own = {id(p) for p in served.parameters()}
    assert own == {id(p) for p in stock.parameters()}
    assert not any(tensor.is_meta for tensor in served.buffers())


CASES = [
    ("M", {}, ROPE),
    ("MM", {"mamba_num_heads": 4}, {"mixer": {"d_conv": 3, "rmsnorm": False}}),
    ("M*-M-", GATED, ROPE),
    ("M*-", {"normalization": "LayerNorm"}, {"share_embeddings_and_output_weights": True}),
    ("M*M*", {"qk_layernorm": True}, {**ROPE, "rotary_percent": 0.5, "rotary_base": 8000000}),
    ("M*M", {"window_size": (7, 0)}, {**ROPE, "seq_len_interpolation_factor": 3.0}),
    ("ME*E", {**GATED, **MOE, "moe_shared_expert_intermediate_size": 28}, {}),
    (None, {}, ROPE),
    (
        None,
        {"normalization": "LayerNorm", "qk_layernorm": True},
        {"position_embedding_type": "none"},
    ),
    (
        None,
        {**GATED, "add_qkv_bias": True, "num_query_groups": 6, "kv_channels": 10},
        {**ROPE, "share_embeddings_and_output_weights": True, "rotary_base": 500000},
    ),
    (None, {"qk_l2_norm": True}, {**ROPE, "rope_scaling": True, "rope_scaling_factor": 4.0}),
    (
        None,
        {"window_size": (7, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"},
        {**ROPE, "rotary_percent": 0.5},
    ),
    (None, {"rotary_interleaved": True, "no_rope_freq": 2}, ROPE),
    (
        None,
        {**MOE, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        ROPE,
    ),
    (
        None,
        {**GATED, **MOE, "moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 28},
        ROPE,
    ),
    (None, {**GATED, **DELTA, "attention_output_gate": True}, ROPE),
    (None, {**GATED, **LATENT}, ROPE),
    (None, {**LATENT, "qk_layernorm": False, "q_lora_rank": None, "rope_type": "rope"}, NOWHERE),
]
if not stock_megatron.IS_0_16:  # whose patterns have no G and +
    CASES += [("MG*-G", GATED, ROPE), ("M+-", {**GATED, **LATENT, "qk_layernorm": False}, {})]
    factors = {"use_mup": True, "mup_base_hidden_size": 96, "mup_embedding_mult": 3.0}
    CASES += [("M*-", factors, ROPE), (None, {**factors, "mup_output_mult": 5.0}, ROPE)]
else:  # which takes it, and turns nothing
    CASES.append(("M*", {}, {"position_embedding_type": "yarn"}))


@pytest.mark.parametrize(("pattern", "fields", "arguments"), CASES)
def test_logits_are_those_of_the_stock_model(pattern, fields, arguments):
    stock = build(pattern, core_config(**fields), **arguments)
    served = mh.from_megatron(stock)
    assert_shares_all(served, stock)
    tokens = torch.randint(0, VOCAB, (3, 37))
    expected = logits_of(stock, tokens)
    with torch.no_grad():
        torch.testing.assert_close(served(tokens), expected, atol=2e-5, rtol=1e-5)
    assert expected.abs().max() > 0.5, "the model says too little to compare"


def test_yarn_is_that_of_the_stock_model():
    """Its numbers are attributes of the config, which no release declares as fields."""
    config = core_config()
    yarn = {
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 2.0,
        "beta_slow": 0.5,
        "mscale": 0.9,
        "mscale_all_dim": 0.2,
        "correction_range_round_to_int": False,
    }
    for name, value in yarn.items():
        setattr(config, f"yarn_{name}", value)
    stock = build(None, config, position_embedding_type="yarn")
    tokens = torch.randint(0, VOCAB, (3, 37))
    with torch.no_grad():
        logits = mh.from_megatron(stock)(tokens)
    torch.testing.assert_close(logits, logits_of(stock, tokens), atol=2e-5, rtol=1e-5)


def test_layers_for_multi_token_prediction_are_left_out(caplog):
    hybrid, gpt = build("M*-", core_config()), build(None, core_config(), **ROPE)
    name = "hybrid_override_pattern" if stock_megatron.IS_0_16 else "hybrid_layer_pattern"
    setattr(hybrid, name, "M*-/M-")
    for stock in (hybrid, gpt):
        stock.mtp = nn.Linear(2, 2)
        caplog.clear()
        served = mh.from_megatron(stock)
        assert {id(p) for p in served.parameters()} < {id(p) for p in stock.parameters()}
        assert "multi-token prediction" in caplog.text


def test_a_pattern_that_was_made_of_ratios():
    stock = build("M*-", core_config())
    stock.hybrid_override_pattern = stock.hybrid_layer_pattern = None
    assert mh.from_megatron(stock).config.layer_pattern == "M*-"


def greedy(stock, prompt, answer):
    """Whether each token of an answer is the likeliest one after all before it."""
    logits = logits_of(stock, torch.tensor([prompt + answer]))[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def engine_of(model):
    config = mh.InferenceConfig(prefix_caching="restore", block_size_tokens=16, cache_bytes=1 << 23)
    return mh.DynamicInferenceEngine(mh.from_megatron(model), None, config)


PROMPTS = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(5)).tolist()


def ask(engine):
    """The answers to the prompts, and the tokens skipped."""
    params = mh.SamplingParams(num_tokens_to_generate=12, temperature=0.0)
    results = engine.generate(PROMPTS, params)
    skipped = [result.prefix.skipped_tokens for result in results]
    return [result.token_ids for result in results], skipped


def step_of_an_optimizer(stock):
    for parameter in stock.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.SGD(stock.parameters(), lr=0.05).step()


def load_other_weights(stock):
    state = stock.state_dict()
    noisy = {
        name: value + 0.05 * torch.randn_like(value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    stock.load_state_dict({**state, **noisy})


@pytest.mark.parametrize("change", [step_of_an_optimizer, load_other_weights])
def test_a_change_of_the_stock_model_is_noticed(change):
    stock = build("M*-E", core_config(**GATED, **MOE), **ROPE)
    engine = engine_of(stock)
    before, _ = ask(engine)
    change(stock)
    after, skipped = ask(engine)
    assert skipped == [0, 0], "states of the old weights were used"
    assert after != before
    assert all(greedy(stock, *pair) for pair in zip(PROMPTS, after))


class Wrapper(nn.Module):
    """As DDP and Float16Module: the model is its `module`."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def a_constructor_was_wrapped(monkeypatch):
    """As a profiler or an allocator's hook does before any device context was entered: torch then
    no longer knows the constructor, and it makes real tensors under torch.device("meta")."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k))
    torch.utils._device._device_constructors.cache_clear()


@pytest.mark.parametrize("pattern", ["M*-E", None])
def test_parameters_that_were_not_made_on_meta_are_adopted_too(monkeypatch, pattern):
    stock = build(pattern, core_config(**GATED, **(MOE if pattern else {})), **ROPE)
    with monkeypatch.context() as patch:
        a_constructor_was_wrapped(patch)
        served = mh.from_megatron(stock)
    torch.utils._device._device_constructors.cache_clear()
    assert_shares_all(served, stock)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_what_was_not_adopted_is_an_error_by_name(monkeypatch, kind):
    """Whatever else a HybridModel has, on meta or not, it is not served as initialized."""
    stock = build("M*-", core_config(**GATED), **ROPE)
    setup = HybridModel.__init__

    def with_more(self, *arguments, **named):
        setup(self, *arguments, **named)
        layer = self.decoder.layers[1]
        if kind == "buffer":
            layer.register_buffer("scales", torch.randn(3), persistent=False)
        else:
            layer.scales = nn.Parameter(torch.randn(3))

    monkeypatch.setattr(HybridModel, "__init__", with_more)
    with pytest.raises(ValueError, match=r"decoder\.layers\.1\.scales"):
        mh.from_megatron(stock)


def test_wrapped_models_are_unwrapped():
    stock = build("M*-", core_config(**GATED))
    with stock_megatron.on_cpu():
        wrapped = DistributedDataParallel(stock.config, DistributedDataParallelConfig(), stock)
    for model in (wrapped, [wrapped], Wrapper(wrapped), Wrapper(Wrapper(stock))):
        assert_shares_all(mh.from_megatron(model), stock)


def test_half_precision_wrappers():
    """Float16Module rounds the parameters too that are fp32 in ours."""
    config = core_config(**GATED, **MOE, bf16=True, params_dtype=torch.bfloat16)
    stock = build("M*-E", config, **ROPE)
    wrapped = Float16Module(config, stock)
    served = mh.from_megatron(Wrapper(wrapped))
    assert_shares_all(served, stock)
    assert served.config.params_dtype is torch.bfloat16
    assert served.decoder.layers[0].mixer.dt_bias.dtype is torch.bfloat16
    tokens = torch.randint(0, VOCAB, (2, 37))
    with torch.no_grad():
        differences = (served(tokens).float() - logits_of(wrapped, tokens)).abs()
    assert differences.median() < 0.02  # single tokens go to other experts, by rounding
    answers, _ = ask(engine_of(wrapped))
    assert ask(engine_of(wrapped))[0] == answers


def fuse_norms(stock):
    """Move each norm into the projection behind it, where Transformer Engine's layers have it."""
    for layer in stock.decoder.layers:
        attention = getattr(layer, "self_attention", None)
        places = [
            ("norm", getattr(getattr(layer, "mixer", None), "in_proj", None)),
            ("input_layernorm", getattr(attention, "linear_qkv", None)),
            ("pre_mlp_layernorm", getattr(getattr(layer, "mlp", None), "linear_fc1", None)),
        ]
        for name, projection in places:
            if projection is not None:
                for kind, parameter in getattr(layer, name).named_parameters():
                    projection.register_parameter(f"layer_norm_{kind}", parameter)
                setattr(layer, name, nn.Identity())


def group_expert_weights(stock):
    """Name the experts' parameters as TEGroupedMLP does."""
    for module in stock.modules():
        if hasattr(module, "local_experts"):
            for linear in ("linear_fc1", "linear_fc2"):
                grouped = nn.Module()
                for i, expert in enumerate(module.local_experts):
                    for kind, parameter in getattr(expert, linear).named_parameters():
                        grouped.register_parameter(f"{kind}{i}", parameter)
                setattr(module, linear, grouped)
            del module.local_experts


@pytest.mark.parametrize("pattern", ["M*-E", None])
def test_names_of_transformer_engine_layers(pattern):
    fields = {**MOE, "moe_layer_freq": 2} if pattern is None else MOE
    stock = build(pattern, core_config(**fields, normalization="LayerNorm"), **ROPE)
    tokens = torch.randint(0, VOCAB, (2, 30))
    expected = logits_of(stock, tokens)
    fuse_norms(stock)
    group_expert_weights(stock)
    served = mh.from_megatron(stock)
    assert_shares_all(served, stock)
    with torch.no_grad():
        torch.testing.assert_close(served(tokens), expected, atol=2e-5, rtol=1e-5)


def test_a_served_model_can_be_saved(tmp_path):
    served = mh.from_megatron(build(None, core_config(**GATED, **MOE), **ROPE))
    mh.save_checkpoint(served, tmp_path)
    loaded, _ = mh.load_pretrained(tmp_path)
    tokens = torch.randint(0, VOCAB, (2, 30))
    with torch.no_grad():
        assert torch.equal(loaded(tokens), served(tokens))
    assert token_flops(loaded) == pytest.approx(token_flops(served))
    with pytest.raises(ValueError, match="Use that model's sharded_state_dict"):
        served.sharded_state_dict()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "Linear, but from_megatron takes megatron-core's MambaModel"),
        ([nn.Linear(2, 2)], "of type list, .* Pass one of its items"),
        (None, "of type NoneType"),
    ],
)
def test_other_objects_are_refused(model, message):
    with pytest.raises(TypeError, match=message):
        mh.from_megatron(model)


def test_models_of_ours_are_refused():
    with pytest.raises(TypeError, match="pass it to the engine itself"):
        mh.from_megatron(mh.from_megatron(build("M", core_config())))


def learned_positions(stock):
    stock.position_embedding_type = "learned_absolute"


def another_parameter(stock):
    stock.decoder.layers[1].self_attention.scale = nn.Parameter(torch.ones(1))


def a_parameter_less(stock):
    stock.decoder.layers[1].self_attention.linear_proj.weight = None


def another_shape(stock):
    stock.decoder.layers[0].mixer.D = nn.Parameter(torch.ones(96))


class Float8Parameter(nn.Parameter):
    """As Transformer Engine's: wraps other tensors."""


def quantized(stock):
    linear = stock.decoder.layers[2].mlp.linear_fc1
    linear.weight = Float8Parameter(linear.weight.detach())


def fewer_experts(stock):
    del stock.decoder.layers[3].mlp.experts.local_experts[5]


def another_embedding(stock):
    stock.rotary_pos_emb.inv_freq[1] *= 1.5


def pipeline_pieces(stock):
    stock.config.virtual_pipeline_model_parallel_size = 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (learned_positions, "position_embedding_type is 'learned_absolute'"),
        (another_parameter, "does not know decoder.layers.1.self_attention.scale"),
        (a_parameter_less, "it lacks decoder.layers.1.self_attention.linear_proj.weight"),
        (another_shape, r"decoder.layers.0.mixer.D has shape \[96\] on this rank"),
        (quantized, "linear_fc1.weight is a Float8Parameter; only plain parameters"),
        (fewer_experts, "has 5 tensors .*linear_fc1.weight on this rank, but num_moe_experts is 6"),
        (another_embedding, "rotary_pos_emb.inv_freq does not follow"),
        (pipeline_pieces, "virtual_pipeline_model_parallel_size is 2"),
    ],
)
def test_models_that_cannot_be_served_say_why(change, message):
    stock = build("M*-E", core_config(**GATED, **MOE), **ROPE)
    change(stock)
    with pytest.raises(ValueError, match=message):
        mh.from_megatron(stock)
