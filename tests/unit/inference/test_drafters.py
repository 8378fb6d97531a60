"""Drafters without a model: what they propose."""

from itertools import count

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reference import greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.drafters import Drafts, last_occurrence
from megatron_hybrid.inference.requests.options import RequestOptions

FEW = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@given(tokens=FEW, tail=FEW, least=st.integers(1, 4), more=st.integers(0, 3))
def test_the_last_of_the_longest_matches(tokens, tail, least, more):
    longest = least + more
    lengths = {  # of each place's match, compared one by one
        place: next(
            n
            for n in range(len(tail) + place + 1)
            if n == min(place, len(tail), longest) or tokens[place - n - 1] != tail[-n - 1]
        )
        for place in range(1, len(tokens))
    }
    best = max(lengths.values(), default=0)
    expected = max((p for p, n in lengths.items() if n == best), default=0) if best >= least else 0
    assert last_occurrence(np.array(tokens), np.array(tail), least, longest) == expected


def test_what_followed_the_same_tokens_in_the_prompt():
    words = random_tokens(30)
    prompt = [*words, *words[:8]]
    engine = tiny_engine(tiny_model("*-"), speculation="lookup", num_speculative_tokens=5)
    request = engine.add_request(prompt, greedy(4))
    engine.step()
    propose = engine.scheduler.draft_planner.drafts.drafter.propose
    request.tokens[len(prompt)] = words[8]
    assert propose(request, 5) == words[9:14]
    assert propose(request, 2) == words[9:11]
    request.tokens[len(prompt)] = 96 - words[8]
    assert propose(request, 5) == []


def test_an_answer_of_another_request_is_proposed_to_those_of_its_salt_alone():
    engine = tiny_engine(speculation="lookup", num_speculative_tokens=3)
    prompt, params = random_tokens(20), greedy(25)
    first = engine.generate([prompt], params)[0].token_ids
    steps, drafted = engine.num_steps, engine.stats()["draft_tokens_accepted"]
    assert engine.generate([prompt], params)[0].token_ids == first
    # The first token has no draft, then each step gives four; the last token runs for its state.
    assert engine.num_steps - steps == 1 + 24 // 4 + 1
    assert engine.stats()["draft_tokens_accepted"] - drafted == 18
    steps = engine.num_steps
    assert engine.generate([prompt], params, RequestOptions(salt="other"))[0].token_ids == first
    assert engine.num_steps - steps > 7


def test_an_answer_is_proposed_also_where_its_kv_is_gone():
    engine = tiny_engine(tiny_model("G*-"), speculation="lookup")
    prompt = random_tokens(20)
    first = engine.generate([prompt], greedy(25))[0].token_ids
    engine.cache.evict(10_000)
    steps = engine.num_steps
    assert engine.generate([prompt], greedy(25))[0].token_ids == first
    assert engine.num_steps - steps == 1 + 24 // 4 + 1


def test_a_drafter_that_always_fails_is_logged_by_kind_ever_more_seldom(caplog):
    class Broken:
        tokens = count(100)

        def propose(self, request, most):
            if (token := next(self.tokens)) % 2:
                raise KeyError(token)
            return [token]  # outside of the vocabulary, each time another one

    drafts = Drafts(Broken(), most=1, vocab_size=96)
    assert [drafts.propose(None, 1) for _ in range(240)] == [[]] * 240
    lines = [record.getMessage().partition(":")[0] for record in caplog.records]
    left_out = "and its drafts are left out"
    times = ("", " 10 times", " 100 times")
    assert lines == [f"a drafter has failed{each}, {left_out}" for each in times for _ in "ab"]
