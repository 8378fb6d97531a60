"""A script serves the model that Megatron built for it, wrapped or bare."""

import pytest
import stock_megatron
import torch
from door import answer, door_engine, greedy_params
from reference import VOCAB_SIZE, random_tokens
from torch import nn

PROMPT = random_tokens(40)


class Wrapper(nn.Module):
    """Has the model as `module`, as Float16Module and DDP do, and its config."""

    def __init__(self, module):
        super().__init__()
        self.module, self.config = module, module.config


@pytest.mark.parametrize("pattern", ["M*-M*-", None])
@pytest.mark.parametrize("wrapped", [False, True])
def test_its_answers_are_those_of_its_own_forward(monkeypatch, pattern, wrapped):
    config = stock_megatron.core_config(num_layers=len(pattern or "--"), init_method_std=0.2)
    torch.manual_seed(0)
    with stock_megatron.on_cpu(monkeypatch):
        if pattern is None:
            stock = stock_megatron.gpt_model(
                config, vocab_size=VOCAB_SIZE, position_embedding_type="rope"
            )
        else:
            stock = stock_megatron.hybrid_model(config, pattern, vocab_size=VOCAB_SIZE)
    stock.eval()
    engine = door_engine(Wrapper(Wrapper(stock)) if wrapped else stock)
    given = answer(engine, PROMPT, greedy_params(5))
    tokens = torch.tensor([PROMPT + given.generated_tokens])
    positions = torch.arange(tokens.shape[1])[None]
    with stock_megatron.on_cpu(monkeypatch), torch.no_grad():
        logits = stock(tokens, position_ids=positions, attention_mask=None)[0]
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == given.generated_tokens
    again = answer(engine, PROMPT, greedy_params(5))
    assert again.generated_tokens == given.generated_tokens
    assert again.num_cached_tokens >= len(PROMPT) - 1
