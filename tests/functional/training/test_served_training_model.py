"""The model that megatron-core's own optimizer trains is served between its steps."""

import pytest
import torch
from core_training import adam_of, data_parallel
from matrix import matrix_rows
from megatron.core.transformer.module import Float16Module
from reference import copy_of, fresh_model, greedy, is_greedy, random_tokens, tiny_engine
from stock_megatron import core_groups

from megatron_hybrid.training.core_cpu_patch import core_cpu_patch

PROMPT = random_tokens(100)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("dtype", "is_distributed", "is_told"),
    matrix_rows(
        [
            (*row, told)
            for row in (("fp32", False), ("fp32", True), ("bf16", True))
            for told in (False, True)
        ],
        ("fp32", False, False),
        ("bf16", True, True),
    ),
)
def test_steps_of_the_optimizer_begin_epochs(dtype, is_distributed, is_told):
    """A distributed one writes into views of the parameters, and steps on copies of bf16 ones."""
    core_groups()
    model = fresh_model(params_dtype=DTYPES[dtype])
    inner = Float16Module(model.config, model) if dtype == "bf16" else model
    with core_cpu_patch():
        shared = {"use_distributed_optimizer": is_distributed}
        wrapped = data_parallel(model, inner, **shared)
        fields = {"bf16": dtype == "bf16", "params_dtype": DTYPES[dtype], **shared}
        optimizer = adam_of(wrapped, lr=3e-2, **fields)
        engine = tiny_engine([wrapped])
        for epoch in range(3):
            first, again = (engine.generate([PROMPT], greedy(4))[0] for _ in range(2))
            assert first.epochs == [(epoch, 0)]
            assert [first.prefix.skipped_tokens, again.prefix.skipped_tokens] == [0, len(PROMPT)]
            assert first.token_ids == again.token_ids
            expected = tiny_engine(copy_of(model)).generate([PROMPT], greedy(4))[0]
            assert first.token_ids == expected.token_ids
            if dtype == "fp32":
                assert is_greedy(copy_of(model), PROMPT, first.token_ids)
            wrapped.train()
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            before = next(model.parameters()).clone()
            wrapped(torch.tensor([PROMPT])).float().square().mean().backward()
            wrapped.finish_grad_sync()
            optimizer.step()
            assert not torch.equal(before, next(model.parameters()))
            if is_told:
                engine.update_weights()
            else:
                wrapped.eval()
