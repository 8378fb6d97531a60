"""Memory-only mode, as Megatron-LM's pull request 3657 specified it for hybrid models.

A hybrid model cannot start a prefill after a shared prefix without the recurrent state at its end,
so blocks are shared while every token is still computed.
"""

from reference import greedy, is_greedy, random_tokens, tiny_engine, tiny_model

PROMPT = random_tokens(96)
BLOCK = 16


def two_running_requests():
    """An engine in the middle of answering one prompt twice: the second came one step later."""
    engine = tiny_engine(prefix_caching="memory_only", block_size_tokens=BLOCK)
    first = engine.add_request(PROMPT, greedy(8))
    engine.step()
    second = engine.add_request(PROMPT, greedy(8))
    engine.step()
    return engine, first, second


def test_matching_blocks_skip_no_tokens_and_the_whole_chunk_is_computed():
    engine, _, second = two_running_requests()
    assert second.report.shared_tokens == len(PROMPT)
    assert second.lease.skipped_tokens == 0
    # One decode token of the first request, then every prompt token of the second.
    assert engine.context.ragged_layout().lengths == (1, len(PROMPT))


def test_second_request_takes_no_extra_blocks_for_the_shared_part():
    _, first, second = two_running_requests()
    num_blocks = len(PROMPT) // BLOCK
    assert (second.lease.block_table[:num_blocks] == first.lease.block_table[:num_blocks]).all()
    # What it holds of its own is its window block(s) and room for its decode, not the prompt's KV.
    own_full = set(second.lease.block_table.ravel()) - set(first.lease.block_table.ravel())
    assert len(own_full) == len(second.lease.block_table) - num_blocks


def test_shared_blocks_have_reference_count_two():
    engine, first, _ = two_running_requests()
    shared = first.lease.block_table[: len(PROMPT) // BLOCK].ravel()
    assert (engine.cache.allocator.ref_counts[shared] == 2).all()


def test_all_prompt_tokens_are_in_the_context_at_kv_offset_zero():
    engine, _, second = two_running_requests()
    context = engine.context
    row = 1  # decodes come first
    assert context.ragged_layout().start_positions[row] == 0
    assert context.input_ids[0, 1 : 1 + len(PROMPT)].tolist() == PROMPT
    while not second.done:
        engine.step()
    assert is_greedy(tiny_model(), PROMPT, second.generated_tokens)
    engine.check_integrity()
