"""Megatron's InferenceConfig and SamplingParams: each field is honoured, warned of, or refused."""

import re
import warnings
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from door import MIB, answer, door_engine, greedy_params
from reference import random_tokens, tiny_model

from megatron_hybrid import compat
from megatron_hybrid.megatron import (
    AsyncScheduleMode,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    InferenceConfig,
    KVCacheManagementMode,
    MambaInferenceStateConfig,
    PrefixCachingEvictionPolicy,
    SamplingParams,
    TextGenerationController,
    config,
    sampling_params,
)

DOC = Path(__file__).parents[3] / "docs" / "reference" / "megatron_fields.md"
PROMPT = random_tokens(40)
OTHER_VALUES = {
    "paused_buffer_size_gb": 2,
    "unified_memory_level": 1,
    "num_cuda_graphs": 4,
    "cuda_graph_mixed_prefill_count": 2,
    "cuda_graph_sizing_distribution": "linear",
    "cuda_graph_all_prefills": True,
    "cuda_graph_max_tokens": 64,
    "static_kv_memory_pointers": True,
    "use_flashinfer_fused_rope": True,
    "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU,
    "metrics_writer": object(),
    "logging_step_interval": 10,
    "sampling_backend": "flashinfer",
    "request_metadata_types": [("temperature", torch.float32)],
    "use_synchronous_zmq_collectives": True,
    "disable_ep_consensus": True,
    "ep_consensus_interval": 5,
}


def test_every_field_without_effect_warns_by_name_and_reason():
    assert OTHER_VALUES.keys() == config.WITHOUT_EFFECT.keys()
    for name, value in OTHER_VALUES.items():
        with pytest.warns(UserWarning) as caught:
            DynamicInferenceContext(None, InferenceConfig(**{name: value}))
        (warning,) = caught
        assert name in str(warning.message)
        assert config.WITHOUT_EFFECT[name] in str(warning.message)


def test_the_defaults_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DynamicInferenceContext(None, InferenceConfig(verbose=True))


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("image_preprocessing_config", object(), "prompts are text; leave it None"),
        ("mamba_inference_state_config", 3, "leave it None"),
        ("block_size_tokens", 3, "16, 32, 64"),
        ("buffer_size_gb", 0, "a number above 0"),
        ("buffer_size_gb", float("nan"), "a number above 0"),
        ("prefix_caching_mamba_gb", -1, "a number from 0 to"),
        ("mamba_memory_ratio", 1.5, "a number above 0 and below 1"),
        ("prefix_caching_routing_alpha", 7, "from 0 to 1"),
        ("prefix_caching_routing_alpha", "0.5", "from 0 to 1"),
        ("async_sched_mode", "bogus", "legacy, async"),
        ("logprobs_mode", "bogus", "'raw_logprobs' or 'processed_logprobs'"),
        ("sampling_backend", "numpy", "'torch' or 'flashinfer'"),
        ("kv_cache_management_mode", "keep", "persist, offload, recompute"),
        ("prefix_caching_eviction_policy", "fifo", "ref_zero, lru"),
        ("prefix_caching_coordinator_policy", "random", "load_balanced"),
        ("cuda_graph_sizing_distribution", "square", "exponential, linear"),
    ],
)
def test_values_that_are_not_legal_are_refused(field, value, legal):
    with pytest.raises(AssertionError, match=f"InferenceConfig.{field} is .*{legal}") as raised:
        DynamicInferenceContext(None, InferenceConfig(**{field: value}))
    assert isinstance(raised.value, ValueError)  # core raises either, by the field


def test_values_of_enums_become_members():
    made = InferenceConfig(async_sched_mode="legacy", kv_cache_management_mode="offload")
    assert made.async_sched_mode is AsyncScheduleMode.LEGACY
    assert made.kv_cache_management_mode is KVCacheManagementMode.OFFLOAD


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ((0.004, 8, 7), AssertionError, "max_tokens is 7, less than max_requests=8"),
        ((0.004, 0, 7), AssertionError, "max_requests is 0; it must be a whole number from 1"),
        ((0.001, 64, None), AssertionError, r"max_requests=64 .*buffer_size_gb=0\.001"),
        ((1_000_000, 64, None), MemoryError, r"cpu has \d+ .* for \d+ .*buffer_size_gb=1000000"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused_by_their_numbers(fields, error, message):
    names = ("buffer_size_gb", "max_requests", "max_tokens")
    with pytest.raises(error, match=message):
        door_engine(**dict(zip(names, fields)))


@pytest.mark.parametrize(
    ("pattern", "enabled", "states_gb", "mode"),
    [
        ("MG*-", False, None, "off"),
        ("MG*-", False, 4 * MIB, "off"),
        ("MG*-", True, 4 * MIB, "restore"),
        ("MG*-", True, None, "memory_only"),
        ("MG*-", True, 0, "memory_only"),
        ("*-*-", True, None, "restore"),
        ("*-*-", True, 4 * MIB, "restore"),
        ("*-*-", False, None, "off"),
    ],
)
def test_the_mode_follows_two_fields_and_the_model(pattern, enabled, states_gb, mode):
    fields = {"enable_prefix_caching": enabled, "prefix_caching_mamba_gb": states_gb}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = door_engine(tiny_model(pattern), **fields)
    said = [str(each.message) for each in caught if "prefix_caching_mamba_gb" in str(each.message)]
    assert len(said) == (mode == "memory_only")
    assert engine.engine.config.prefix_caching == mode
    answer(engine, PROMPT, greedy_params(2))
    again = answer(engine, PROMPT, greedy_params(2))
    assert again.num_cached_tokens == (len(PROMPT) if mode == "restore" else 0)


def test_a_budget_below_megatrons_least_is_refused_with_the_least():
    with pytest.raises(ValueError, match="or more, for 25 states of") as raised:
        door_engine(prefix_caching_mamba_gb=1e-9)
    least = float(re.search("must be (.*) or more", str(raised.value))[1])
    with pytest.raises(ValueError, match="lower max_tokens"):
        door_engine(prefix_caching_mamba_gb=0.99 * least)
    assert (
        door_engine(prefix_caching_mamba_gb=1.01 * least).engine.config.prefix_caching == "restore"
    )


def test_the_buffer_is_live_slots_and_pool():
    engine = door_engine(prefix_caching_mamba_gb=None).engine
    slots = 8 * engine.cache.spec.slot_bytes
    assert engine.config.cache_bytes == (4 << 20) - slots
    assert door_engine().engine.config.cache_bytes == (8 << 20) - slots


@pytest.mark.parametrize("ratio", [None, 0.25])
def test_requests_are_derived_from_the_buffer(ratio):
    engine = door_engine(max_requests=None, mamba_memory_ratio=ratio)
    count, slot = engine.context.max_requests, engine.engine.cache.spec.slot_bytes
    share = (4 << 20) * (ratio or 0.5)
    assert count % 4 == 0 and count * slot <= share < (count + 4) * slot
    assert door_engine(max_requests=None, max_tokens=12).context.max_requests == 12
    few = door_engine(max_requests=None, max_tokens=3).context.max_requests
    assert few == 3
    assert door_engine(max_tokens=None).context.max_tokens == 16384  # as Megatron's


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, False),
        ({"cuda_graph_impl": "none"}, False),
        ({"cuda_graph_impl": "local"}, True),
        ({"enable_cuda_graph": True}, True),
        ({"cuda_graph_impl": "transformer_engine"}, False),
    ],
)
def test_decodes_are_captured_where_the_models_config_asks_for_it(fields, wanted):
    small = InferenceConfig(
        buffer_size_gb=4 * MIB, async_sched_mode="async" if wanted else "legacy"
    )
    made = config.engine_config(small, tiny_model(), SimpleNamespace(**fields))
    assert made.cuda_graphs is made.async_scheduling is wanted


def test_drafts_are_looked_up_where_the_config_asks_for_speculative_tokens():
    """Answers are the same, so any drafter will do."""
    for most, speculation in ((0, "off"), (2, "lookup")):
        small = InferenceConfig(buffer_size_gb=4 * MIB, num_speculative_tokens=most)
        made = config.engine_config(small, tiny_model(), None)
        assert (made.speculation, made.num_speculative_tokens) == (speculation, most or 1)
    with pytest.raises(AssertionError, match="num_speculative_tokens is -1"):
        small = InferenceConfig(buffer_size_gb=4 * MIB, num_speculative_tokens=-1)
        config.engine_config(small, tiny_model(), None)


def test_the_seed_is_the_models():
    """Of the model that the script built; ours around its parameters has core's default."""
    small = InferenceConfig(buffer_size_gb=4 * MIB)
    model = tiny_model()
    assert config.engine_config(small, model, None).random_seed == 42
    stock = SimpleNamespace(inference_sampling_seed=7, deterministic_mode=True)
    assert config.engine_config(small, model, stock).random_seed == 7
    context = DynamicInferenceContext(stock, small)
    wrapped = TextGenerationController(GPTInferenceWrapper(model, context), None)
    assert DynamicInferenceEngine(wrapped, context).engine.config.random_seed == 7


def test_state_configs_of_scripts_are_read_and_their_rounding_is_warned_of():
    model = tiny_model("M*-")
    states = MambaInferenceStateConfig.from_model(model)
    assert states.layer_type_list == ["M", "*", "-"]
    assert states.ssm_states_shape == (8, 16, 16)
    assert states.ssm_chunk_alignment == states.mamba_chunk_size
    delta = MambaInferenceStateConfig.from_model(tiny_model("G*-"))
    assert delta.layer_type_list == ["G", "*", "-"] and len(delta.ssm_states_shape) == 3
    assert MambaInferenceStateConfig.from_model(tiny_model("*-")) is None
    DynamicInferenceContext(None, InferenceConfig(mamba_inference_state_config=states))
    rounded = replace(states, ssm_states_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="ssm_states_dtype=torch.bfloat16 has no effect"):
        DynamicInferenceContext(None, InferenceConfig(mamba_inference_state_config=rounded))


def test_states_of_two_kinds_have_no_common_shape():
    with pytest.raises(ValueError, match=r"M \(Mamba-2\) and G \(Gated DeltaNet\).*leave"):
        MambaInferenceStateConfig.from_model(tiny_model("MG*-"))
    shapes = ((3, 8), (8, 16, 16), torch.float32, torch.float32)
    with pytest.raises(ValueError, match="layer_type_list"):
        MambaInferenceStateConfig(["M", "*", "G"], *shapes)


if compat.MEGATRON_CORE_VERSION >= (0, 19, 0):  # 0.16 has no such InferenceConfig

    def test_fields_and_defaults_are_those_of_megatron_core():
        from megatron.core.inference import config as core
        from megatron.core.inference.sampling_params import SamplingParams as CoreParams

        for ours, theirs in (
            (InferenceConfig, core.InferenceConfig),
            (SamplingParams, CoreParams),
        ):
            own = {field.name: field.default for field in fields(ours)}
            for field in fields(theirs):
                assert field.name in own, field.name
                default = getattr(field.default, "value", field.default)
                assert getattr(own[field.name], "value", own[field.name]) == default, field.name
        for enum in (KVCacheManagementMode, PrefixCachingEvictionPolicy):
            core_enum = getattr(core, enum.__name__)
            assert {m.name: m.value for m in enum} == {m.name: m.value for m in core_enum}


def test_the_table_in_the_docs_has_every_field_and_reason():
    text = DOC.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE))
    for kind in (InferenceConfig, SamplingParams):
        missing = {field.name for field in fields(kind)} - rows.keys() - {"verbose"}
        assert not missing
    for module in (config, sampling_params):
        for name, reason in module.WITHOUT_EFFECT.items():
            assert reason in rows[name], name


# SamplingParams ----------------------------------------------------------------------------------


def test_attributes_can_be_added():
    params = SamplingParams(return_log_probs=True)
    params.add_attributes({"top_n_logprobs": 3, "min_length": 4})
    assert params.min_length == 4 and params.return_prompt_top_n_logprobs
    again = SamplingParams.deserialize(params.serialize())
    assert again.min_length == 4 and again == params
    assert SamplingParams.deserialize({"top_n_logprobs": 3}).return_prompt_top_n_logprobs
    params.skip_prompt_log_probs = True  # and what follows from it stays, until it is sent
    assert not SamplingParams.deserialize(vars(params)).return_prompt_top_n_logprobs
    params.skip_prompt_log_probs = False
    params.add_attributes({"skip_prompt_log_probs": True})
    assert not params.return_prompt_top_n_logprobs


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_an_interval_of_no_tokens_is_refused(value):
    with pytest.raises(ValueError, match=r"streaming_interval is .*from 1 to"):
        SamplingParams(streaming_interval=value)
    with pytest.raises(ValueError, match="streaming_interval"):
        SamplingParams().add_attributes({"streaming_interval": value})
    with pytest.raises(ValueError, match="streaming_interval"):
        SamplingParams.deserialize({"streaming_interval": value})


def test_the_deprecated_field_warns_and_contradictions_raise():
    with pytest.warns(DeprecationWarning, match="skip_prompt_log_probs"):
        SamplingParams(return_prompt_top_n_logprobs=True, top_n_logprobs=1)
    with pytest.warns(DeprecationWarning), pytest.raises(AssertionError, match="exclude"):
        SamplingParams(return_prompt_top_n_logprobs=True, skip_prompt_log_probs=True)


def test_parameters_without_effect_warn_by_name():
    engine = door_engine()
    for field in sampling_params.WITHOUT_EFFECT:
        with pytest.warns(UserWarning, match=f"SamplingParams.{field} has no effect"):
            request = answer(engine, PROMPT, greedy_params(2, **{field: True}))
        assert request.succeeded()
