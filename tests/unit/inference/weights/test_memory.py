"""The memory of the weights given back in a suspension, and taken again."""

import pytest
import torch
from reference import fresh_model, greedy, is_greedy, random_tokens, tiny_engine, tiny_model
from torch import nn

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.inference.exclusive import EngineSuspendedError
from megatron_hybrid.inference.weights.memory import WeightMemory

PROMPT = random_tokens(60)


def held_bytes(model):
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


def answer(engine):
    return engine.generate([PROMPT], greedy(4))[0].token_ids


def sleep(engine, change=lambda: None, keep_cache="drop", **kept):
    """Give all memory back, and take it again. change: what happens meanwhile."""
    engine.suspend(keep_cache)
    engine.release_weights(**kept)
    change()
    engine.reacquire_weights()
    engine.resume()


def test_weights_that_were_kept_come_back_as_the_same():
    model = fresh_model("M*-")
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
    model = fresh_model("M*-")
    with tiny_engine(model) as engine:
        answer(engine)
        sleep(engine, lambda: change(model), "host")
        result = engine.generate([PROMPT], greedy(4))[0]
        assert (engine.epoch, result.prefix.skipped_tokens) == (1, 0)
        assert is_greedy(model, PROMPT, result.token_ids)


def test_weights_that_were_dropped_have_to_be_sent():
    model, other = fresh_model("M*-"), fresh_model("M*-", 1)
    named = {name: tensor.detach() for name, tensor in own_tensors(other).items()}
    with tiny_engine(other) as engine:
        expected = answer(engine)
    with tiny_engine(model) as engine:
        answer(engine)
        sleep(engine, keep=False)
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
        sleep(engine, keep=False)
        engine.load_weights({name: t for name, t in named.items() if not name.startswith("mtp.")})
        assert not engine.awaits_weights and answer(engine) == expected


def test_memory_that_others_hold_a_part_of_is_not_given_back():
    model = fresh_model("M*-")
    parameter = model.decoder.final_norm.weight
    buffer = torch.zeros(parameter.numel() + 2)
    parameter.data = buffer[:-2]
    memory = WeightMemory(model)
    with pytest.raises(ValueError, match=f"is a part of {buffer.nbytes} bytes that are not its"):
        memory.release(keep=True)
    assert not memory.is_released


def test_memory_that_numpy_has_looked_at_is_given_back(tmp_path):
    model = fresh_model("M*-")
    save_checkpoint(model, tmp_path)
    with tiny_engine(model) as engine:
        expected = answer(engine)
        engine.suspend()
        engine.release_weights()
        assert not model.has_memory
        engine.reacquire_weights()
        engine.resume()
        assert answer(engine) == expected


def test_no_other_engine_of_the_model_reads_weights_without_memory(tmp_path):
    model, named = fresh_model("M*-"), own_tensors(fresh_model("M*-", 1))
    save_checkpoint(model, tmp_path / "saved")
    with tiny_engine(model) as engine, tiny_engine(model, cache_dir=tmp_path / "cache") as other:
        expected = answer(other)
        engine.suspend()
        engine.release_weights()
        calls = {
            "generate": lambda: answer(other),
            "load": lambda: other.load_weights(named),
            "update": other.update_weights,
            "save": other.save_cache,
            "clear": other.clear_cache,
            "suspend": other.suspend,
            "checkpoint": lambda: load_checkpoint(model, tmp_path / "saved"),
            "engine": lambda: tiny_engine(model),
        }
        for name, call in calls.items():
            with pytest.raises((RuntimeError, ValueError), match="reacquire_weights"):
                call()
                pytest.fail(name)
        engine.reacquire_weights()
        other.suspend()
        engine.release_weights()
        other.release_weights()
        engine.reacquire_weights()
        other.resume()
        assert answer(other) == expected
