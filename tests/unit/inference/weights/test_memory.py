"""The memory of the weights given back in a suspension, and taken again."""

import pytest
import torch
from reference import greedy, is_greedy, random_tokens, tiny_engine, tiny_model
from torch import nn

from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.inference.exclusive import EngineSuspendedError
from megatron_hybrid.inference.weights.memory import WeightMemory

PROMPT = random_tokens(60)


def fresh_model(seed=0):
    return tiny_model.__wrapped__("M*-", seed)


def held_bytes(model):
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


def answer(engine):
    return engine.generate([PROMPT], greedy(4))[0].token_ids


def test_weights_that_were_kept_come_back_as_the_same():
    model = fresh_model()
    with tiny_engine(model) as engine:
        expected, size = answer(engine), held_bytes(model)
        with pytest.raises(RuntimeError, match="needs a suspended engine"):
            engine.release_weights()
        engine.suspend("host")
        engine.release_weights()
        engine.release_weights()  # no effect
        assert held_bytes(model) == 0 < size
        for call in (engine.resume, engine.update_weights, engine.start_weight_update):
            with pytest.raises(EngineSuspendedError, match="call reacquire_weights"):
                call()
        with pytest.raises(EngineSuspendedError, match="call reacquire_weights"):
            engine.load_weights({})
        engine.reacquire_weights()
        assert held_bytes(model) == size
        engine.resume()
        assert engine.epoch == 0
        result = engine.generate([PROMPT], greedy(4))[0]
        assert result.token_ids == expected
        assert result.prefix.skipped_tokens == len(PROMPT)


def set_data(model):
    model.decoder.final_norm.weight.data = torch.full_like(model.decoder.final_norm.weight, 1.7)


def replace_parameter(model):
    model.decoder.final_norm.weight = nn.Parameter(
        torch.full((model.config.hidden_size,), 1.7), requires_grad=False
    )


def add_hook(model):
    model.decoder.final_norm.register_forward_hook(lambda module, inputs, output: output * 1.3)


@pytest.mark.parametrize("change", [set_data, replace_parameter, add_hook])
def test_what_changes_while_weights_have_no_memory_drops_the_cache(change):
    model = fresh_model()
    with tiny_engine(model) as engine:
        answer(engine)
        engine.suspend("host")
        engine.release_weights()
        change(model)
        engine.reacquire_weights()
        engine.resume()
        result = engine.generate([PROMPT], greedy(4))[0]
        assert (engine.epoch, result.prefix.skipped_tokens) == (1, 0)
        assert is_greedy(model, PROMPT, result.token_ids)


def test_weights_that_were_dropped_have_to_be_sent():
    model, other = fresh_model(), fresh_model(1)
    named = {name: tensor.detach() for name, tensor in own_tensors(other).items()}
    with tiny_engine(other) as engine:
        expected = answer(engine)
    with tiny_engine(model) as engine:
        answer(engine)
        engine.suspend()
        engine.release_weights(keep=False)
        engine.reacquire_weights()
        engine.resume()
        (first, tensor), *rest = named.items()
        with pytest.raises(RuntimeError, match="dropped: send all of them"):
            answer(engine)
        engine.load_weights({first: tensor})
        with pytest.raises(RuntimeError, match="dropped: send all of them"):
            answer(engine)
        engine.load_weights(dict(rest))
        assert not engine.awaits_weights and answer(engine) == expected


def test_a_part_for_multi_token_prediction_need_not_be_sent():
    model = tiny_model("M*/*")
    named = {name: tensor.clone() for name, tensor in own_tensors(model).items()}
    with tiny_engine(model, speculation="mtp") as engine:
        expected = answer(engine)
        engine.suspend()
        engine.release_weights(keep=False)
        engine.reacquire_weights()
        engine.resume()
        engine.load_weights({name: t for name, t in named.items() if not name.startswith("mtp.")})
        assert not engine.awaits_weights and answer(engine) == expected


def test_memory_that_others_hold_a_part_of_is_not_given_back():
    buffer = torch.zeros(6)
    model = torch.nn.Linear(2, 2, bias=False)
    model.weight.data = buffer[:4].view(2, 2)
    memory = WeightMemory(model)
    with pytest.raises(ValueError, match="weight is a part of 24 bytes that are not its own"):
        memory.release(keep=True)
    assert not memory.is_released and buffer.nbytes == 24
