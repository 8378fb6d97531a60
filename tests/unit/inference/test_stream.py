"""Streams and stops: the pieces make up the text, and no part of a stop string is ever shown."""

import gc
import itertools
import threading
import weakref

import numpy as np
import pytest
import tokenizers
from differential import InjectedError, failing_at_first, failing_forward
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import finish, greedy, greedy_tokens, random_tokens, tiny_engine, tiny_model
from scripted import EOD, PIECES, ByteTokenizer, scripted_engine
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.output import GrowingText, OutputProcessor
from megatron_hybrid.inference.requests.request import Request
from megatron_hybrid.inference.sampling_params import Sampled, SamplingParams
from megatron_hybrid.text.tokenizer import Tokenizer

PROMPT = [40, 41, 42, 43]


def params(script, **fields):
    return SamplingParams(num_tokens_to_generate=len(script), seed=1, **fields)


def answer(monkeypatch, script, **fields):
    engine = scripted_engine(monkeypatch, {1: script})
    return engine.generate([PROMPT], params(script, **fields))[0]


def streamed(monkeypatch, script, **fields):
    engine = scripted_engine(monkeypatch, {1: script})
    events = list(engine.stream(PROMPT, params(script, **fields)))
    assert not engine.has_work
    assert [event.result is None for event in events] == [True] * (len(events) - 1) + [False]
    return events


# Stream ------------------------------------------------------------------------------------------


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    script=st.lists(st.sampled_from([*PIECES, 50]), min_size=1, max_size=12),
    words=st.lists(st.sampled_from(["STOP", "OP", "ab", "é", "S", "Sé", " ", "€a"]), max_size=3),
    keep=st.booleans(),
)
def test_pieces_make_up_the_text_and_show_nothing_of_a_stop_string(
    monkeypatch, script, words, keep
):
    fields = {"stop_words": tuple(words), "detokenize_stop_sequence": keep}
    events = streamed(monkeypatch, script, **fields)
    result = events[-1].result
    assert "".join(event.text for event in events) == result.text
    assert [token for event in events for token in event.token_ids] == result.token_ids

    expected = answer(monkeypatch, script, **fields)
    assert result.text == expected.text
    assert result.token_ids == expected.token_ids
    if keep:
        assert all(result.text.count(word) <= 1 for word in words)
    else:
        assert not any(word in result.text for word in words)
    whole = ByteTokenizer().detokenize(script)
    if EOD not in script and not any(word in whole for word in words):
        assert result.text == whole
        assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("script", "texts"),
    [
        ([0, 7, 8, 10, 11, 1], ["a", "", "é", "", "€", "b"]),
        ([0, 7], ["a", "\ufffd"]),  # bytes that are no text come out at the end
    ],
)
def test_a_piece_ends_inside_no_character(monkeypatch, script, texts):
    assert [event.text for event in streamed(monkeypatch, script)] == texts


def test_what_may_begin_a_stop_string_is_held_back(monkeypatch):
    events = streamed(monkeypatch, [0, 4, 0, 4, 5, 1], stop_words=("STOP",))
    assert "".join(event.text for event in events) == "aSTa"
    assert events[-1].result.finish_reason == "stop"
    assert len(events) == 5  # the token after the stop string is never drawn


TEXTS = ["a b, c", " two  spaces", "é€ 漢字 🙂🙂", "\ufffd", "lines\n\nmore\n", "don't stop", ""]


def trained(pre_tokenizer, decoder):
    """A tokenizer of the `tokenizers` library."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizer, decoder
    trainer = trainers.BpeTrainer(
        special_tokens=["<eod>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([*TEXTS, "the cat sat on the mat"], trainer)
    return Tokenizer(inner, 0)


def as_llama_2_has_it():
    """Characters that are no token are written in tokens of a byte each."""
    bytes_ = {f"<0x{byte:02X}>": 10 + byte for byte in range(256)}
    words = dict.fromkeys(["<unk>", *"\u2581abcdot", "\u2581c", "\u2581t"])
    vocab = {word: index for index, word in enumerate(words)} | bytes_
    inner = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return Tokenizer(inner, 0)


TOKENIZERS = {
    "bytes": trained(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    "spaces": trained(pre_tokenizers.Metaspace(), decoders.Metaspace()),
    "sentencepiece": as_llama_2_has_it(),
}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    texts=st.lists(st.sampled_from(TEXTS), max_size=5),
    noise=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 265)), max_size=6),
    steps=st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_growing_text_is_the_start_of_the_text(name, texts, noise, steps):
    """Also around special tokens, bytes that are no text, and characters of several tokens."""
    tokenizer = TOKENIZERS[name]
    tokens = noisy_tokens(tokenizer, texts, noise)
    growing, end = GrowingText(tokenizer.detokenize, ()), 0
    for step in itertools.cycle(steps):
        if end >= len(tokens):
            break
        start, end = end, min(len(tokens), end + step)
        whole = tokenizer.detokenize(tokens[:end]).rstrip("\ufffd")
        assert growing.add(tokens[start:end]) == whole


def noisy_tokens(tokenizer, texts, noise):
    """Of the texts, with other ones at random places."""
    tokens = tokenizer.tokenize("".join(texts))
    for place, token in noise:
        tokens.insert(min(place, len(tokens)), token % tokenizer.vocab_size)
    return tokens


def request_for(count, stop_words):
    """A request for so many tokens, behind a prompt of one."""
    return Request(
        request_id=0,
        tokens=np.zeros(1 + count, np.int32),
        num_prompt_tokens=1,
        params=SamplingParams(num_tokens_to_generate=count, stop_words=stop_words),
        seed=0,
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    texts=st.lists(st.sampled_from([*TEXTS, "🙂\n🙂🙂"]), max_size=5),
    noise=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 265)), max_size=3),
    words=st.lists(
        st.sampled_from(["\n", "a", "b,", "🙂", "漢字", "s\n", "don't", " "]), min_size=1
    ),
)
def test_a_stop_string_ends_the_answer_when_the_text_has_it(name, texts, noise, words):
    """Looking at the newest tokens finds what the whole text shows, and when it first does."""
    tokenizer = TOKENIZERS[name]
    tokens = noisy_tokens(tokenizer, texts, noise)
    output = OutputProcessor(tokenizer)
    count = max(1, len(tokens))
    request = request_for(count, words)
    for end, token in enumerate(tokens, 1):
        text = tokenizer.detokenize(tokens[:end])
        stops = any(word in text for word in words)
        assert output.append(request, Sampled(token)) == (stops or end == count)
        if stops:
            assert request.finish_reason == "stop"
            return


def test_bytes_that_are_no_character_spoil_a_stop_string_behind_them():
    """As the text is written in the end; what follows a character by itself is as it looks."""
    tokenizer = TOKENIZERS["sentencepiece"]
    bad, *rest = (10 + byte for byte in b"\xffbbbb\n")
    output = OutputProcessor(tokenizer)
    for tokens, reason in (([bad, *rest], "length"), (rest, "stop")):
        request = request_for(len(tokens), ["\n"])
        for token in tokens:
            output.append(request, Sampled(token))
        assert request.finish_reason == reason


class Counting(ByteTokenizer):
    """Counts the tokens that it is asked for."""

    num_read = 0

    def detokenize(self, ids):
        self.num_read += len(ids)
        return super().detokenize(ids)


def test_a_search_for_stop_strings_reads_each_token_a_few_times():
    count, tokenizer = 2000, Counting()
    request = request_for(count, ["STOP"])
    output = OutputProcessor(tokenizer)
    for _ in range(count):
        output.append(request, Sampled(8))  # the second byte of a character, without the first
    assert request.finish_reason == "length"
    assert tokenizer.num_read < 50 * count


def test_growing_text_reads_each_token_a_few_times():
    tokenizer, tokens = Counting(), [0, 7, 8, EOD, 10, 11] * 500
    growing = GrowingText(tokenizer.detokenize, ["STOP"])
    for token in tokens:
        text = growing.add([token])
    assert text == ("aé€" * 500)[:-3]
    assert tokenizer.num_read < 6 * len(tokens)


def test_a_stream_has_the_log_probs_of_its_tokens():
    engine = tiny_engine()
    params = greedy(9, return_log_probs=True, skip_prompt_log_probs=True, top_n_logprobs=2)
    events = list(engine.stream(random_tokens(20), params))
    result = events[-1].result
    assert [value for event in events for value in event.log_probs] == result.log_probs
    tops = [top for event in events for top in event.top_n_logprobs]
    assert tops == result.top_n_logprobs and len(tops) == 9
    plain = list(engine.stream(random_tokens(20), greedy(3)))
    assert (
        {event.log_probs for event in plain} == {event.top_n_logprobs for event in plain} == {None}
    )


@pytest.mark.parametrize("count", [1, 16, 64])
def test_every_stream_gets_every_token_by_itself(count):
    """In turn, one at a time after the first few, and not read at all until the others end."""
    engine = tiny_engine(tiny_model("-"), max_requests=64)
    streams = [engine.stream(random_tokens(4, seed=seed), greedy(64)) for seed in range(count)]
    events = [[next(stream) for stream in streams] for _ in range(3)]
    before = engine.num_steps
    told = [[*first, *rest] for first, rest in zip(zip(*events), map(list, reversed(streams)))]
    assert [len(each) for each in told] == [64] * count
    assert {len(event.token_ids) for each in told for event in each} == {1}
    assert engine.num_steps - before == 64 - 3 + 1  # the last one keeps the states of the ends


def test_steps_tell_what_each_request_got():
    engine = tiny_engine(tokenizer=ByteTokenizer(), max_tokens=16)
    requests = [engine.add_request("a cab", greedy(5)), engine.add_request("b" * 40, greedy(3))]
    told = {request.request_id: [] for request in requests}
    while engine.has_work:
        outputs = engine.step()
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            told[output.request_id].append(output)
    for request in requests:
        *first, last = outputs = told[request.request_id]
        assert all(output.result is None and output.finish_reason is None for output in first)
        assert last.result == request.result() and last.finish_reason == "length"
        assert {id(output.prefix) for output in outputs} == {id(request.prefix)}
        tokens = [token for output in outputs for token in output.token_ids]
        assert tokens == request.token_ids
        assert "".join(output.text for output in outputs) == request.text


def test_generate_reads_its_text_once():
    tokenizer = Counting()
    engine = tiny_engine(tokenizer=tokenizer)
    (result,) = engine.generate([random_tokens(10)], greedy(40, ignore_termination=True))
    assert tokenizer.num_read == len(result.token_ids) == 40


def test_a_stream_has_the_outputs_of_all_samples():
    engine, sampling = tiny_engine(), SamplingParams(num_tokens_to_generate=6, seed=1)
    given = random_tokens(20), sampling, RequestOptions(n=3)
    pieces, ended = [[], [], []], []
    for output in engine.stream(*given):
        pieces[output.sample_index] += output.token_ids
        ended += [output.sample_index] * (output.result is not None)
    (result,) = tiny_engine().generate([given[0]], *given[1:])
    assert pieces == [sample.token_ids for sample in result.samples]
    assert sorted(ended) == [0, 1, 2] and not engine.has_work


@pytest.mark.parametrize("drop", [False, True])
def test_the_end_of_a_stream_ends_all_samples_that_are_not_answered(drop):
    """The first one is answered at once: its stop token is the one that it draws."""
    model, prompt = tiny_model("M-"), random_tokens(20)
    engine, sampling = tiny_engine(model), SamplingParams(num_tokens_to_generate=9, seed=1)
    samples = tiny_engine(model).generate([prompt], sampling, RequestOptions(n=3))[0].samples
    first, *others = [sample.token_ids[0] for sample in samples]
    assert first not in others
    sampling.stop_token_ids = [first]
    stream = engine.stream(prompt, sampling, RequestOptions(n=3))
    while next(stream).result is None:
        pass
    request, *others = stream.request.samples
    assert request.finish_reason == "stop" and not any(sample.done for sample in others)
    if not drop:
        stream.close()
    del stream
    engine.step()
    assert not engine.has_work and {each.finish_reason for each in others} == {"cancelled"}
    assert request.finish_reason == "stop"
    engine.check_integrity()


def test_a_stream_whose_request_is_cancelled_ends():
    engine = tiny_engine()
    stream = engine.stream(random_tokens(20), greedy(6))
    first = next(stream)
    (request,) = engine.scheduler.running
    engine.cancel(request)
    (last,) = stream
    assert last.result.finish_reason == "cancelled"
    assert last.result.token_ids == first.token_ids


@pytest.mark.parametrize("num_events", [0, 1, 3, 6])
def test_closing_a_stream_early_cancels_the_request(num_events):
    engine = tiny_engine(max_tokens=16)
    with engine.stream(random_tokens(40), greedy(6)) as stream:
        for _ in range(num_events):
            next(stream)
    assert not engine.has_work and not list(stream)
    assert not engine.cache.allocator.ref_counts.any()
    engine.check_integrity()


def test_a_stream_whose_step_fails_takes_its_request_along():
    engine = tiny_engine()
    stream = engine.stream(random_tokens(40), greedy(6))
    next(stream)
    with failing_forward(engine), pytest.raises(InjectedError):
        next(stream)
    assert not engine.has_work and not list(stream)
    engine.check_integrity()


def test_streams_get_a_token_an_output_though_what_follows_a_step_fails():
    engine = tiny_engine()
    streams = [engine.stream(random_tokens(20, seed=seed), greedy(6)) for seed in range(2)]
    outputs = [[], []]
    for stream, own in zip(streams, outputs):
        own.append(next(stream))
    engine.live.run_moves = failing_at_first(engine.live.run_moves, InjectedError())
    with pytest.raises(InjectedError):
        engine.step()
    for stream, own in zip(streams, outputs):
        own += stream
        assert [len(output.token_ids) for output in own] == [1] * 6
    assert not engine.has_work
    engine.check_integrity()


def test_a_failing_clean_up_of_generate_leaves_no_request_behind(monkeypatch):
    engine = tiny_engine(max_requests=1)
    cancel, failed = engine.scheduler.cancel, []

    def failing(request):
        cancel(request)
        if not failed:
            failed.append(request)
            raise InjectedError

    monkeypatch.setattr(engine.scheduler, "cancel", failing)
    with failing_forward(engine), pytest.raises(InjectedError):
        engine.generate([random_tokens(20, seed=seed) for seed in range(3)], greedy(6))
    assert failed and not engine.scheduler.waiting and not engine.has_work
    engine.check_integrity()


def test_finished_requests_are_freed_without_garbage_collection():
    engine = tiny_engine()
    gc.collect()
    gc.disable()
    try:
        requests = [
            weakref.ref(engine.add_request(PROMPT, greedy(2), RequestOptions(n=n))) for n in (1, 3)
        ]
        finish(engine)
        assert [request() for request in requests] == [None, None]
    finally:
        gc.enable()


def test_a_stream_closed_in_its_own_step_ends_after_it(monkeypatch):
    engine = tiny_engine()
    stream = engine.stream(random_tokens(40), greedy(6))
    forward = engine.runner.forward

    def close(plan):
        stream.close()
        assert list(stream) == []
        return forward(plan)

    monkeypatch.setattr(engine.runner, "forward", close)
    first = next(stream)
    monkeypatch.undo()
    assert len(first.token_ids) == 1
    (request,) = engine.scheduler.running
    assert not list(stream) and engine.step() == []
    assert request.result().finish_reason == "cancelled"
    assert request.token_ids == first.token_ids
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize("thread", [False, True])
def test_a_dropped_stream_is_cancelled_between_two_steps(thread, monkeypatch):
    """Whenever its garbage is collected: here in the middle of a forward."""
    model = tiny_model("MG*-")
    engine = tiny_engine(model)
    prompt, forward = random_tokens(50, seed=1), engine.runner.forward

    def collect(plan):
        if thread:
            collector = threading.Thread(target=gc.collect)
            collector.start()
            collector.join()
        else:
            gc.collect()
        return forward(plan)

    stream = engine.stream(random_tokens(40), greedy(500))
    next(stream)
    (request,) = engine.scheduler.running
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle
    assert not request.closed
    monkeypatch.setattr(engine.runner, "forward", collect)
    result = engine.generate([prompt], greedy(6))[0]
    assert result.token_ids == greedy_tokens(model, prompt, 6)
    assert request.closed and request.result().finish_reason == "cancelled"
    assert not engine.has_work
    engine.check_integrity()


def test_a_dropped_stream_does_not_keep_the_cache_from_being_cleared():
    engine = tiny_engine()
    stream = engine.stream(random_tokens(40), greedy(6))
    next(stream)
    del stream
    engine.clear_cache()
    assert not engine.has_work


# Stops -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "fields", "kept"),
    [
        ((EOD,), {}, [20, 21]),  # the tokenizer's own
        ((EOD, 30, 21), {}, [20]),
        ((), {}, [20, 21, EOD, 22]),
        ((EOD, 20), {"termination_id": 21}, [20]),
        ((EOD,), {"stop_token_ids": (30, 21)}, [20]),
        ((EOD,), {"stop_token_ids": (20,)}, []),
        ((EOD,), {"termination_id": 30}, [20, 21, EOD, 22]),
        ((EOD, 21), {"ignore_termination": True, "stop_token_ids": (20,)}, [20, 21, EOD, 22]),
        ((EOD,), {"detokenize_stop_sequence": True}, [20, 21, EOD]),
    ],
)
def test_stop_tokens(monkeypatch, ends, fields, kept):
    monkeypatch.setattr(ByteTokenizer, "end_tokens", ends, raising=False)
    script = [20, 21, EOD, 22]
    result = answer(monkeypatch, script, return_log_probs=True, **fields)
    assert result.token_ids == kept
    assert len(result.log_probs) == len(kept)
    stopped = len(kept) < 4
    assert result.finish_reason == ("stop" if stopped else "length")


@pytest.mark.parametrize(
    ("script", "words", "keep", "text", "num_tokens"),
    [
        ([0, 3, 1], ("STOP",), False, "a", 2),
        ([0, 3, 1], ("STOP",), True, "aSTOP", 2),
        ([0, 4, 5, 1], ("STOP",), False, "a", 3),
        ([9, 0, 4, 5], ("STOP",), False, "Sa", 4),
        ([0, 4, 5, 1], ("OP", "STOP"), False, "a", 3),  # both end here: the longer begins first
        ([2, 2], ("ba",), False, "a", 2),
        ([0, 7, 8], ("é",), False, "a", 3),
        ([0, 4, EOD, 5], ("STOP",), False, "aST", 2),  # a stop token comes first
        ([0, 1, 0], "b", False, "a", 2),  # one string alone
        ([0, 1, 0], ("x",), False, "aba", 3),
    ],
)
def test_stop_strings(monkeypatch, script, words, keep, text, num_tokens):
    result = answer(
        monkeypatch, script, stop_words=words, detokenize_stop_sequence=keep, return_log_probs=True
    )
    assert result.text == text
    assert result.token_ids == script[:num_tokens]
    assert len(result.log_probs) == num_tokens


def test_a_stop_string_across_tokens_without_text(monkeypatch):
    script = [4, EOD, EOD, EOD, EOD, EOD, EOD, 5, 0]
    result = answer(monkeypatch, script, stop_words=("STOP",), ignore_termination=True)
    assert (result.finish_reason, result.text) == ("stop", "")
    assert len(result.token_ids) == 8


def test_a_stop_string_in_the_prompt_stops_nothing(monkeypatch):
    engine = scripted_engine(monkeypatch, {1: [0, 0]}, prompt_length=1)
    result = engine.generate("STOP", params([0, 0], stop_words=("STOP", "OPa")))[0]
    assert result.text == "aa"


# Special tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos_itself", [False, True])
def test_add_bos_adds_one(monkeypatch, adds_bos_itself):
    engine = scripted_engine(monkeypatch, {1: [0]}, prompt_length=2)
    if adds_bos_itself:
        monkeypatch.setattr(ByteTokenizer, "tokenize", lambda self, text: [ByteTokenizer.bos, 0])
    given = SamplingParams(num_tokens_to_generate=1, seed=1, add_BOS=True)
    assert engine.generate("a", given)[0].prompt_tokens == [ByteTokenizer.bos, 0]
    assert engine.explain("a", given).match.prompt_tokens == 2


def test_special_tokens_in_the_text_need_a_tokenizer_that_can_write_them(monkeypatch):
    with pytest.raises(ValueError, match="skip_special_tokens=False needs a tokenizer"):
        answer(monkeypatch, [20], skip_special_tokens=False)
