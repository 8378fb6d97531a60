"""Every mixer, run piece by piece through a context, gives what one uncached forward gives; what
mixers declare of states, such as the decay of a token, and Mamba mixers as they begin."""

import pytest
import torch
from small_models import ALL_MIXERS, random_tokens, small_model

from megatron_hybrid.models.mixers.base import LayerCache
from megatron_hybrid.ops import RaggedLayout, SlotStates, paged_attention

BLOCK = 4
CONTEXT_BLOCKS = 16


class DictContext:
    """The plainest context: states in a dict per sequence, one run of KV blocks per sequence."""

    same_tokens_on_expert_ranks = True

    def __init__(self, requirements: list[LayerCache], num_sequences: int):
        self.pools = {
            (layer, state.name): torch.zeros(num_sequences, *state.shape, dtype=state.dtype)
            for layer, cache in enumerate(requirements, 1)
            for state in cache.states
        }
        self.pages = {
            layer: [
                torch.zeros(num_sequences * CONTEXT_BLOCKS, BLOCK, cache.kv.num_heads, width)
                for width in (cache.kv.head_dim, cache.kv.value_dim)
            ]
            for layer, cache in enumerate(requirements, 1)
            if cache.kv
        }
        self.captured = {}

    def begin(self, sequences, lengths, starts, captures=(), padding=0):
        self.sequences = torch.tensor(sequences)
        self.layout = RaggedLayout(tuple(lengths), tuple(starts), tuple(captures), padding)

    def ragged_layout(self):
        return self.layout

    def token_positions(self):
        return self.layout.token_positions("cpu")

    def states(self, layer_number, name):
        pool = self.pools[layer_number, name]
        captured = None
        if count := len(self.layout.captures):
            captured = self.captured[layer_number, name] = pool.new_empty(count, *pool.shape[1:])
        return SlotStates(pool, self.sequences, captured)

    def attend(self, layer_number, q, k, v, pattern, sinks=None):
        if k is not None:
            self.keep(layer_number, k, v)
        return paged_attention(q, *self.key_value_cache(layer_number), self.layout, pattern, sinks)

    def attend_latents(self, layer_number, q, latents, heads, pattern):
        self.keep(layer_number, latents[:, None])
        pages, _, table = self.key_value_cache(layer_number)
        values = pages[..., : heads.rank]
        o = paged_attention(heads.absorb(q), pages, values, table, self.layout, pattern)
        return heads.values(o)

    def keep(self, layer_number, *new):
        rows = self.layout.num_tokens
        owners = self.sequences[self.layout.sequence_ids("cpu")]
        positions = self.token_positions()[:rows]
        blocks = owners * CONTEXT_BLOCKS + positions // BLOCK
        for page, rows_TKD in zip(self.pages[layer_number], new):
            page[blocks, positions % BLOCK] = rows_TKD[:rows]

    def key_value_cache(self, layer_number):
        keys, values = self.pages[layer_number]
        table = self.sequences[:, None] * CONTEXT_BLOCKS + torch.arange(CONTEXT_BLOCKS)
        return keys, values, table

    def last_token_logits(self, hidden):
        assert hidden.shape[:2] == (1, self.layout.num_rows)
        return hidden[0, : self.layout.num_tokens]


def run(model, context, tokens, cuts, padding=0, captures=()):
    """Logits of the tokens [cut of start, cut of end) of each sequence, side by side."""
    lengths = [end - start for start, end in cuts.values()]
    context.begin(list(cuts), lengths, [start for start, _ in cuts.values()], captures, padding)
    pieces = [tokens[r, start:end] for r, (start, end) in cuts.items()]
    rows = torch.cat([*pieces, torch.zeros(padding, dtype=torch.long)])
    logits = model(rows[None], inference_context=context)
    assert logits.shape == (1, sum(lengths), model.config.vocab_size)
    return logits[0].split(lengths)


GEMMA = {"per_layer_input_size": 10, "layer_scalar": True, "num_moe_experts": 5}
GEMMA |= {"moe_router_topk": 2, "moe_ffn_hidden_size": 12, "num_residual_streams": 3}


@pytest.mark.parametrize(
    ("pattern", "fields"), [*((p, {}) for p in (*"MGSCK*W+-", ALL_MIXERS)), ("*PBP", GEMMA)]
)
@torch.inference_mode()
def test_pieces_equal_the_whole(pattern, fields):
    model = small_model(pattern, **fields)
    tokens = random_tokens(3, 40)
    whole = model(tokens)
    context = DictContext(model.cache_requirements(), 3)
    steps = [
        {0: (0, 13), 1: (0, 1)},
        {1: (1, 2), 0: (13, 14), 2: (0, 29)},
        {0: (14, 40), 2: (29, 31)},  # no decode in front
        {1: (2, 9), 2: (31, 32)},  # a decode behind a prefill
        {1: (9, 40), 2: (32, 40)},
    ]
    for padding, cuts in enumerate(steps):
        logits = run(model, context, tokens, cuts, padding)
        for (r, (start, end)), row in zip(cuts.items(), logits):
            torch.testing.assert_close(row, whole[r, start:end], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pattern", ["M", "G", "S", "C", "K", "MG"])
@torch.inference_mode()
def test_captured_states_are_those_after_that_token(pattern):
    model = small_model(pattern)
    tokens = random_tokens(2, 30)
    once = DictContext(model.cache_requirements(), 2)
    run(model, once, tokens, {0: (0, 30), 1: (0, 20)}, captures=(11, 35))
    cut = DictContext(model.cache_requirements(), 2)
    run(model, cut, tokens, {0: (0, 11), 1: (0, 5)})
    for key, captured in once.captured.items():
        torch.testing.assert_close(captured, cut.pools[key], atol=1e-5, rtol=1e-5)


def test_inference_is_the_context_alone():
    """Training mode changes nothing: what selects inference is the context."""
    model = small_model().train()
    tokens = random_tokens(1, 12)
    with torch.no_grad():
        context = DictContext(model.cache_requirements(), 1)
        (logits,) = run(model, context, tokens, {0: (0, 12)})
        torch.testing.assert_close(logits, model(tokens)[0], atol=1e-5, rtol=1e-5)


def test_cache_requirements():
    model = small_model("MG*W-CK", recurrent_state_dtype=torch.bfloat16)
    mamba, delta, full, window, mlp, conv, kimi = model.cache_requirements()
    assert [(s.name, s.shape, s.dtype) for s in mamba.states] == [
        ("conv", (96 + 2 * 24, 3), torch.float32),
        ("ssm", (6, 16, 12), torch.bfloat16),
    ]
    assert [(s.name, s.shape, s.dtype) for s in delta.states] == [
        ("conv", (2 * 32 + 96, 3), torch.float32),
        ("delta", (4, 16, 24), torch.bfloat16),
    ]
    assert [(s.name, s.shape) for s in conv.states] == [("conv", (48, 2))]
    assert [(s.name, s.shape) for s in kimi.states] == [
        ("conv", (2 * (32 + 24), 3)),
        ("delta", (2, 16, 24)),
    ]
    assert (full.kv.num_heads, full.kv.head_dim, full.kv.window) == (2, 12, None)
    assert (window.kv.num_heads, window.kv.head_dim, window.kv.window) == (2, 12, 7)
    assert mlp == LayerCache()
    assert mamba.kv is delta.kv is conv.kv is kimi.kv is None
    assert full.states == ()


@pytest.mark.parametrize("pattern", ["M", "G", ALL_MIXERS])
@torch.inference_mode()
def test_bf16_states_are_taken_and_given(pattern):
    model = small_model(pattern, recurrent_state_dtype=torch.bfloat16)
    tokens = random_tokens(1, 24)
    context = DictContext(model.cache_requirements(), 1)
    pieces = [run(model, context, tokens, {0: cut})[0] for cut in ((0, 10), (10, 24))]
    whole = model(tokens)[0]
    error = (torch.cat(pieces) - whole).abs().max()
    assert 0 < error < 0.05 * whole.abs().max()


@pytest.mark.parametrize("pattern", ["M", "S", "G", "K"])
@torch.inference_mode()
def test_an_empty_token_leaves_of_a_state_what_is_declared(pattern):
    """Zeros in, nothing is written: the state of ones becomes the decay."""
    model = small_model(pattern)
    (cache,) = model.cache_requirements()
    tail, state = cache.states
    context = DictContext([cache], 2)
    context.pools[1, state.name].fill_(1.0)
    context.begin([0, 1], [1, 1], [5, 5])
    mixer = getattr(model.decoder.layers[0], model.decoder.layers[0].mixer_name)
    if mixer.conv1d.bias is not None:
        mixer.conv1d.bias.zero_()
    mixer(torch.zeros(2, model.config.hidden_size), context)
    after = context.pools[1, state.name]
    assert after.min() > 0 and after.max() < 1 and after.std() > 0.01
    torch.testing.assert_close(after, state.decay.expand(2, *state.shape))
    assert not state.decay.requires_grad
    assert tail.decay is None


@pytest.mark.parametrize("pattern", ["H", "Z"])
def test_layers_with_a_mamba_inside_declare_its_decay(pattern):
    names = [
        state.name
        for cache in small_model(pattern).cache_requirements()
        for state in cache.states
        if state.decay is not None
    ]
    assert names == ["ssm"]


def test_initial_time_steps_and_decays():
    mixer = small_model("S", hidden_size=128).decoder.layers[0].mixer
    dt = torch.nn.functional.softplus(mixer.dt_proj.bias)
    assert 0.9e-3 < dt.min() < 3e-3 < 3e-2 < dt.max() < 0.101
    assert mixer.dt_proj.weight.abs().max() <= 8**-0.5  # of rank 128 / 16
    expected = torch.arange(1.0, 17.0).expand(256, 16)
    torch.testing.assert_close(mixer.A_log.exp(), expected)
    assert mixer.A_log.dtype == mixer.D.dtype == torch.float32
