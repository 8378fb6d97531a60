"""Memory-only mode, as Megatron-LM's pull request 3657 specified it for hybrid models.

A hybrid model cannot start a prefill after a shared prefix without the recurrent state at its end,
so blocks are shared while every token is still computed.
"""

from reference import greedy, is_greedy, random_tokens, tiny_engine, tiny_model

PROMPT = random_tokens(96)


def test_blocks_are_shared_and_every_token_is_computed():
    """One prompt twice: the second came one step later."""
    engine = tiny_engine(prefix_caching="memory_only", block_size_tokens=16)
    first = engine.add_request(PROMPT, greedy(8))
    engine.step()
    second = engine.add_request(PROMPT, greedy(8))
    engine.step()
    assert second.prefix.shared_tokens == len(PROMPT) and second.lease.skipped_tokens == 0
    # One decode token of the first request, then every prompt token of the second.
    layout = engine.context.ragged_layout()
    assert (layout.lengths, layout.start_positions[1]) == ((1, len(PROMPT)), 0)
    assert engine.context.input_ids[0, 1 : 1 + len(PROMPT)].tolist() == PROMPT
    # Of its own it holds room for its decode, not the prompt's KV.
    shared = first.lease.block_table[: len(PROMPT) // 16]
    own = set(second.lease.block_table.ravel()) - set(shared.ravel())
    assert len(own) == len(second.lease.block_table) - len(shared)
    assert (engine.cache.allocator.ref_counts[shared] == 2).all()
    while not second.done:
        engine.step()
    assert is_greedy(tiny_model(), PROMPT, second.token_ids)
    engine.check_integrity()
