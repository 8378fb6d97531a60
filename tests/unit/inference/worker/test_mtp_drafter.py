"""Drafts by a model's MTP head, against that part written out."""

from functools import partial

import pytest
import torch
from drafted import noted, poison_rejected
from graph_recorder import recorded_graphs
from grouped_experts import grouped_experts
from reference import greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.sampling_params import Draw, SamplingParams
from megatron_hybrid.inference.worker.sampler import sample
from megatron_hybrid.models.mixers.base import StackInputs
from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout

BASE = random_tokens(40)
PROMPTS = [BASE + random_tokens(n, n) for n in (3, 17)]
PATTERNS = ("MG*-/*E", "*-/*-", "+E/+E", "W-M/W*")
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, num_tokens_to_generate=6, seed=3)


@torch.no_grad()
def written_out(model, tokens, count, params):
    """Drafts behind `tokens`: the row of each token but the first has its embedding and the hidden
    state before; each further one the draft and what gave it. Drawn ones have the noise of the
    token itself."""
    part, embed = model.mtp.layers[0], model.embedding.word_embeddings.weight
    ids = torch.tensor(tokens)
    hidden = model.decoder(
        embed[ids], UncachedContext(RaggedLayout((len(ids),), (0,)), "cpu"), StackInputs(embed[ids])
    )
    hidden, drafts = hidden[:-1], []
    for _ in range(count):
        layout = RaggedLayout((len(hidden),), (0,))
        rows = part(hidden, embed[ids[1:]], UncachedContext(layout, "cpu"))[-1:]
        draw = Draw(params.resolved(), params.seed or 0, 0, len(ids))
        drafts.append(int(sample(model.compute_logits(rows), [draw])))
        ids, hidden = torch.cat((ids, torch.tensor(drafts[-1:]))), torch.cat((hidden, rows))
    return drafts


def answers(model, params, **fields):
    """Answers of prompts in turn, of one again, of second turns, of several together, with hits."""
    engine = tiny_engine(model, **fields)
    told = []
    if fields:
        poison_rejected(engine)
        told = noted(engine)
    found = [engine.generate([prompt], params)[0] for prompt in (*PROMPTS, PROMPTS[0])]
    more = [[*r.prompt_tokens, *r.token_ids, *random_tokens(5)] for r in found[:2]]
    found += engine.generate([more[0]], params) + engine.generate([more[1], *PROMPTS], params)
    engine.check_integrity()
    rows = [(r.token_ids, r.log_probs, r.prefix.skipped_tokens) for r in found]
    return rows, told, engine.stats()


@pytest.mark.parametrize(
    ("pattern", "params"), list(zip(PATTERNS, [SAMPLED, greedy(6, return_log_probs=True)] * 2))
)
def test_tokens_and_hits_are_those_without_drafts(pattern, params):
    """And drafts are those of the part written out, also where its rows come from the cache."""
    model = tiny_model(pattern)
    expected, _, before = answers(model, params)
    given, told, after = answers(model, params, speculation="mtp", num_speculative_tokens=2)
    for (tokens, log_probs, skipped), own in zip(expected, given, strict=True):
        assert (tokens, skipped) == (own[0], own[2])
        if log_probs is not None:
            torch.testing.assert_close(torch.tensor(own[1]), torch.tensor(log_probs))
    assert after["draft_tokens"] > 30 and after["steps"] <= before["steps"]
    for tokens, drafts in told[::7] + told[-3:]:
        assert drafts and drafts == written_out(model, tokens, len(drafts), params)


def test_replayed_decodes_keep_the_rows_of_the_part(monkeypatch):
    """Passes of the part are replayed, too."""
    model, found, launched = tiny_model(PATTERNS[0]), [], []

    def launched_pass(predicted, *args):
        launched.append(args)
        return predicted(*args)

    with recorded_graphs(), grouped_experts():
        for has_graphs in (False, True):
            engine = tiny_engine(model, speculation="mtp", cuda_graphs=has_graphs)
            found.append(noted(engine, used=False))
            monkeypatch.setattr(
                engine.runner, "_predicted", partial(launched_pass, engine.runner._predicted)
            )
            engine.generate(PROMPTS, greedy(6))
            assert bool(engine.stats()["graph_steps"]) == has_graphs
            assert bool(launched) != has_graphs
            launched.clear()
    assert found[0] == found[1] and len(found[0]) == 8


def test_a_part_that_raises_costs_only_its_drafts(monkeypatch, caplog):
    model = tiny_model(PATTERNS[0])
    expected, _, _ = answers(model, greedy(6))
    monkeypatch.setattr(model.mtp.layers[0], "forward", lambda *_: 1 / 0)
    given, _, stats = answers(model, greedy(6), speculation="mtp")
    assert given == expected and not stats["draft_tokens"] and not stats["step_failures"]
    assert "MTPDrafter: ZeroDivisionError" in caplog.text


def test_over_ranks_a_part_that_raises_is_told_to_the_others(monkeypatch):
    """They may wait for this rank inside of the part."""
    model = tiny_model(PATTERNS[0])
    engine = tiny_engine(model, speculation="mtp")
    monkeypatch.setattr(engine.scheduler.draft_planner.drafts, "_on_ranks", True)
    monkeypatch.setattr(model.mtp.layers[0], "forward", lambda *_: 1 / 0)
    engine.add_request(PROMPTS[0], greedy(4))
    with pytest.raises(ZeroDivisionError):
        for _ in range(4):
            engine.step()


def test_drafts_push_out_no_running_request():
    """Where decodes need all pages, there is no room for drafts, and nobody is preempted for it."""
    model = tiny_model(PATTERNS[0])
    prompts = [random_tokens(30, seed) for seed in range(3)]
    spec = tiny_engine(model, speculation="mtp").cache.spec
    pages = 1 + 3 * 3 * sum(spec.pages_per_block)  # 3 blocks of 16 tokens each
    fields = {"cache_bytes": pages * spec.page_bytes, "max_requests": 3, "prefix_caching": "off"}
    engine = tiny_engine(model, speculation="mtp", num_speculative_tokens=7, **fields)
    given = engine.generate(prompts, greedy(18))
    stats = engine.stats()
    assert stats["preemptions"] == 0 and stats["draft_tokens"]
    expected = tiny_engine(model).generate(prompts, greedy(18))
    assert [r.token_ids for r in given] == [r.token_ids for r in expected]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("M*", "has no MTP head"), ("*-/M", "keeps states or a window of keys")],
)
def test_a_model_that_cannot_draft_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        tiny_engine(tiny_model(pattern), speculation="mtp")
