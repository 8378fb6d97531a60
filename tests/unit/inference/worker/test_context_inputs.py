"""The inputs of steps: right in every step, and always at the same addresses."""

import numpy as np
import pytest
import torch
from reference import finish, greedy, is_greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.scheduling.step_plan import StepPlan
from megatron_hybrid.inference.worker.context import StepBuffer

MODEL = tiny_model("MG*-W-")


def give_the_device_memory_of_its_own(buffer: StepBuffer) -> None:
    """As on a GPU: what is not uploaded is never seen."""
    buffer._device = torch.full_like(buffer._host, 0x7F)
    for name, host in buffer.host.items():
        part = buffer._device[buffer._starts[name] :][: host.nbytes]
        buffer.device[name] = part.view(buffer.device[name].dtype).view(host.shape)


def expected_inputs(plan: StepPlan, block: int) -> dict[str, list]:
    """Of the forward, token by token, from the plan alone."""
    works = plan.work
    columns = sum(table.shape[1] for table in works[0].tables)
    rows = [(work, position) for work in works for position in range(work.start, work.end)]
    padding = [0] * (-len(rows) % 2)
    pages: list[list[int]] = [[] for _ in range(columns)]
    for work, position in rows:
        full, *local = (table[position // block] for table in work.tables)
        own = [np.zeros_like(full) if position < work.shared_tokens else full, *local]
        for column, page in zip(pages, np.concatenate(own).tolist(), strict=True):
            column.append(page)
    ends = np.cumsum([len(work.tokens) for work in works]).tolist()
    captures = [
        end - work.end + save.position - 1
        for work, end in zip(works, ends)
        for save in work.saves
        if save.position < work.end
    ]
    expected = {
        "input_ids": [int(work.tokens[p - work.start]) for work, p in rows] + padding,
        "positions": [position for _, position in rows] + padding,
        "write_pages": [column + padding for column in pages],
        "write_rows": [position % block for _, position in rows] + padding,
        "slots": [work.slot for work in works],
        "first_rows": [end - len(work.tokens) for work, end in zip(works, ends)],
        "last_rows": [end - 1 for end in ends],
        "capture_rows": captures,
        "logit_rows": [
            row for work, end in zip(works, ends) for row in range(end - work.num_logits, end)
        ],
        "starts": [work.start for work in works],
    }
    for index in range(columns):
        expected[f"block table {index}"] = [
            [
                np.concatenate([table[i] for table in work.tables])[index]
                for i in range(-(-work.end // block))
            ]
            for work in works
        ]
    return expected


@pytest.mark.parametrize("has_own_memory", [False, True], ids=["one memory", "two memories"])
def test_inputs_are_those_of_the_plan_at_the_same_addresses_in_every_step(has_own_memory):
    """Prefills in chunks with captures, decodes, prompts without a forward, padding, and fewer
    rows than in the step before."""
    engine = tiny_engine(MODEL, max_tokens=40, max_requests=4)
    context, begin_step = engine.context, engine.context.begin_step
    if has_own_memory:
        give_the_device_memory_of_its_own(context._buffer)
    addresses: dict[str, set[int]] = {}
    num_checked = 0

    def checked(plan: StepPlan) -> None:
        nonlocal num_checked
        begin_step(plan)
        given = {"ready_slots": context._ready_slots}
        expected = {"ready_slots": [ready.slot for ready in plan.ready]}
        if plan.work:
            tables = enumerate(context._column_tables)
            given |= context._inputs | {f"block table {i}": table for i, table in tables}
            expected |= expected_inputs(plan, context.block_size_tokens)
            num_checked += 1
        assert given.keys() == expected.keys()
        for name, tensor in given.items():
            if tensor.numel():
                addresses.setdefault(name, set()).add(tensor.data_ptr())
            if name.startswith("block table"):  # what lies behind a row's blocks is not read
                for row, blocks in zip(tensor.tolist(), expected[name], strict=True):
                    assert row[: len(blocks)] == blocks
            else:
                assert tensor.tolist() == expected[name], name

    context.begin_step = checked
    shared = random_tokens(70)
    prompts = [shared, random_tokens(9, seed=1), [*shared[:50], 1, 2, 3], random_tokens(33, seed=2)]
    drawn = SamplingParams(seed=1, num_tokens_to_generate=5, return_log_probs=True)
    for params in (greedy(7), drawn, greedy(3)):
        requests = [engine.add_request(prompt, params) for prompt in prompts]
        finish(engine)
        for prompt, request in zip(prompts, requests):
            if params.top_k == 1:
                assert is_greedy(MODEL, prompt, request.result().token_ids)
    assert num_checked > 20
    assert addresses.keys() >= {"capture_rows", "ready_slots", "block table 1"}
    assert all(len(pointers) == 1 for pointers in addresses.values()), addresses


def test_a_step_of_the_most_tokens_and_requests_fits():
    engine = tiny_engine(MODEL, max_tokens=37, max_requests=5, max_sequence_length=48)
    prompts = [random_tokens(40, seed=seed) for seed in range(9)]
    for prompt, result in zip(prompts, engine.generate(prompts, greedy(8))):
        assert is_greedy(MODEL, prompt, result.token_ids)
