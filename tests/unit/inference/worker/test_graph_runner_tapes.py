"""Steps of decodes by tapes have the bits of steps that run as they are."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from graph_recorder import EVERY_LAYER, recorded_graphs
from reference import fresh_model, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.worker import graph_runner
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.mixers.mlp import MLPMixer

PROMPTS = [random_tokens(70), random_tokens(9, seed=1), random_tokens(33, seed=2)]


@contextmanager
def no_tapes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_runner, "_MOST_DECODES", 0)
        yield


@contextmanager
def forwards_of_python(model: HybridModel) -> Iterator[list[int]]:
    """The rows of each forward that is more than a tape."""
    rows, forward = [], HybridModel.forward

    def counted(self, input_ids, *args, **kwargs):
        rows.append(input_ids.numel())
        return forward(self, input_ids, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HybridModel, "forward", counted)
        yield rows


def answers(engine, counts=(14, 6, 9)) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of requests that end at different steps."""
    params = [
        SamplingParams(seed=number, num_tokens_to_generate=count, return_log_probs=True)
        for number, count in enumerate(counts)
    ]
    found = engine.generate(PROMPTS, params)
    return [(result.token_ids, result.log_probs) for result in found]


@pytest.mark.parametrize("pattern", EVERY_LAYER)
def test_tapes_have_the_bits_of_forwards(pattern):
    model = tiny_model(pattern, num_moe_experts=6, moe_router_topk=2)
    with no_tapes():
        plain = answers(tiny_engine(model))
    with forwards_of_python(model) as rows:
        assert answers(tiny_engine(model)) == plain
    # The prompts; then two steps each of 3, of 2 and of 1 decode, and one in which each ends.
    assert len(rows) == 10


def test_drafts_saves_and_starts_run_as_they_are():
    """A tape is of decodes of one row each, and of nothing else."""
    model = tiny_model()
    fields = {"speculation": "lookup", "num_speculative_tokens": 3}
    with no_tapes():
        plain = answers(tiny_engine(model, **fields))
    assert answers(tiny_engine(model, **fields)) == plain


def test_a_tape_is_made_anew_when_weights_change():
    model, other = fresh_model(), fresh_model(seed=1)
    engine = tiny_engine(model)
    before = answers(engine)
    model.load_state_dict(other.state_dict())
    engine.update_weights()
    after = answers(engine)
    assert after == answers(tiny_engine(other)) != before
    engine.suspend()
    engine.resume()
    assert answers(engine) == after


def test_a_hook_is_called_in_every_step():
    model, calls = fresh_model(), []
    engine = tiny_engine(model)
    answers(engine)
    hook = model.decoder.layers[0].register_forward_hook(lambda *_: calls.append(1))
    answers(engine)
    assert len(calls) == 15  # a last step keeps the state
    hook.remove()


class OwnLayer(MLPMixer):
    """As of another package."""


def test_layers_of_others_run_as_they_are():
    """They may read what a recording of them would take for constant."""
    model = fresh_model("*-")
    model.decoder.layers[1].mlp.__class__ = OwnLayer
    with forwards_of_python(model) as rows:
        answers(tiny_engine(model))
    assert len(rows) == 15
    with recorded_graphs():
        engine = tiny_engine(model, cuda_graphs=True)
    assert engine.stats()["graphs"] == 4  # of decodes alone


def test_an_engine_of_adapters_has_tapes_of_steps_without():
    model = tiny_model("M*-")
    with no_tapes():
        plain = answers(tiny_engine(model))
    with forwards_of_python(model) as rows:
        assert answers(tiny_engine(model, max_adapters=1)) == plain
    assert len(rows) == 10


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_has_no_tape(autocast):
    model = tiny_model()

    def found():
        engine = tiny_engine(model)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            return answers(engine)

    with no_tapes():
        plain = found()
    with forwards_of_python(model) as rows:
        assert found() == plain
    assert (len(rows) == 15) == autocast
