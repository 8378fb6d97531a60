"""`load_weights`: named tensors in, and answers are those of a new engine on the new weights."""

import random

import pytest
import torch
from reference import greedy, random_tokens, tiny_engine, tiny_model
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from megatron_hybrid.checkpoints.folder import adapter_of, config_of
from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.distributed.rank_control import RankControl
from megatron_hybrid.inference.exclusive import EngineBusyError
from megatron_hybrid.inference.weights.updates import WeightsUnfinishedError
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.training.lora import LoraFields, add_adapters

PROMPT, SECOND = random_tokens(100), random_tokens(60, seed=1)
LOGGED = greedy(5, return_log_probs=True, skip_prompt_log_probs=True)
PATTERN = "MG*-EW"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
Q, K, V = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_of_fsdp_is_refused_and_a_second_one_takes_its_weights(default_group):
    """Whatever was served before, the wrapped one can be trained."""
    model, served = fresh_model(seed=1, pattern="M*-"), fresh_model(seed=2, pattern="M*-")
    with tiny_engine(fresh_model(seed=1, pattern="M*-")) as engine:
        expected = engine.generate([PROMPT], greedy(5))[0].token_ids
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    wrapped = fsdp.FullyShardedDataParallel(fresh_model(), device_id=torch.device("cpu"))
    for refused in (model, [model], wrapped):
        with pytest.raises(ValueError, match=r"wrapped by FSDP.*full_tensor"):
            tiny_engine(refused)
    with tiny_engine(served) as engine:
        engine.generate([PROMPT], greedy(5))
        engine.load_weights((name, p.full_tensor()) for name, p in model.named_parameters())
        assert engine.generate([PROMPT], greedy(5))[0].token_ids == expected
    model.train()
    model(torch.tensor([PROMPT])).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def fresh_model(seed=0, pattern=PATTERN, **fields):
    """One that no other test has."""
    return tiny_model.__wrapped__(pattern, seed, **fields)


def llama(seed=0, **fields):
    torch.manual_seed(seed)
    return build_hybrid_model(config_of({**LLAMA, **fields}, "LLAMA", init_method_std=0.1)).eval()


def our_names(model):
    """Copies of all tensors of a model, as in one of our checkpoints."""
    return {name: tensor.detach().clone() for name, tensor in own_tensors(model).items()}


def their_names(model):
    """The same as in a Hugging Face folder."""
    ours, theirs = our_names(model), {}
    for tensor_map in adapter_of(model.config).tensors(model.config):
        values = tensor_map.layout.to_theirs([ours[name] for name in tensor_map.ours])
        theirs.update(zip(tensor_map.theirs, values, strict=True))
    return theirs


def separate_experts(model):
    """As Megatron's model with one module for each expert has them."""
    given = our_names(model)
    for name in [name for name in given if ".experts." in name]:
        path, _, rest = name.partition("linear_")
        for i, expert in enumerate(given.pop(name)):
            given[f"{path}local_experts.{i}.linear_{rest}"] = expert
    return given


def row(result):
    return result.token_ids, result.log_probs, result.prefix.skipped_tokens


def answers(engine):
    """Of an unknown prompt, a longer one that resumes from it, and another one."""
    prompts = [PROMPT, PROMPT + SECOND, SECOND]
    return [row(engine.generate([prompt], LOGGED)[0]) for prompt in prompts]


def equal(model, expected):
    return all(torch.equal(tensor, expected[name]) for name, tensor in our_names(model).items())


KINDS = {
    "ours": (fresh_model, our_names),
    "separate experts": (fresh_model, separate_experts),
    "theirs": (llama, their_names),
    "theirs, tied": (lambda seed=0: llama(seed, tie_word_embeddings=True), their_names),
    "bf16": (lambda seed=0: fresh_model(seed, params_dtype=torch.bfloat16), our_names),
}


@pytest.mark.parametrize(
    ("kind", "is_listed"), [*((kind, True) for kind in KINDS), ("separate experts", False)]
)
def test_answers_are_those_of_a_new_engine(tmp_path, kind, is_listed):
    make, names_of = KINDS[kind]
    model, trained = make(), make(seed=1)
    with tiny_engine(trained) as engine:
        expected = answers(engine)
    given = {name: value.float() for name, value in names_of(trained).items()}
    with tiny_engine(model, host_cache_bytes=4 << 20, cache_dir=tmp_path) as engine:
        assert answers(engine) != expected
        engine.save_cache()
        engine.cache.evict(10**6)
        engine.load_weights(given if is_listed else iter(given.items()))
        assert engine.epoch == 1 and equal(model, our_names(trained))
        counts = engine.stats()
        assert not any(counts[name] for name in ("cached_tokens", "host_bytes", "disk_bytes"))
        assert answers(engine) == expected
        assert engine.generate([PROMPT], LOGGED)[0].epochs == [(1, 0)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("names_of", [our_names, their_names])
def test_any_part_in_any_order(names_of, seed):
    """All others stay as they are. Tensors of theirs that are one of ours come together."""
    model, trained = llama(), llama(seed=1)
    old, new = our_names(model), our_names(trained)
    random.seed(seed)
    wanted = {name for name in old if random.random() < 0.5}
    maps = adapter_of(model.config).tensors(model.config)
    names = wanted
    if names_of is their_names:
        names = {name for m in maps if m.ours[0] in wanted for name in m.theirs}
    pairs = [(name, value) for name, value in names_of(trained).items() if name in names]
    random.shuffle(pairs)
    engine = tiny_engine(model)
    engine.load_weights(iter(pairs) if seed % 2 else pairs)
    assert equal(model, {**old, **{name: new[name] for name in wanted}})


def test_one_buffer_may_hold_all_tensors_in_turn():
    """As where a trainer broadcasts them one by one."""
    model, trained = llama(), llama(seed=1)
    buffer = torch.empty(10_000)

    def received():
        for name, value in their_names(trained).items():
            view = buffer[: value.numel()].view(value.shape)
            yield name, view.copy_(value)

    tiny_engine(model).load_weights(received())
    assert equal(model, our_names(trained))


def without(name):
    return lambda given: given.pop(name)


def with_(**values):
    return lambda given: given.update(values)


MISTAKES = {
    "unknown": (with_(extra=torch.zeros(1)), "the model has no tensor extra: name tensors as in"),
    "half": (without(K), f"q_proj.weight was given without {K}: they are one tensor of .* {QKV}"),
    "shape": (with_(**{K: torch.zeros(16, 31)}), rf"{K} has shape \[16, 31\] in what load_weights"),
    "meta": (with_(**{K: torch.zeros(16, 32, device="meta")}), f"{K} is on the meta device"),
    "sparse": (with_(**{K: torch.zeros(16, 32).to_sparse()}), f"{K} is .* with torch.sparse_coo"),
    "lazy": (with_(**{K: torch.nn.UninitializedParameter()}), f"{K} has no shape yet"),
    "quantized": (with_(**{K: torch.zeros(16, 32).to(torch.int8)}), "Quantized weights"),
    "NaN": (with_(**{K: torch.full((16, 32), torch.nan)}), f"{K} has numbers that are NaN in what"),
    "large": (
        with_(**{K: torch.full((16, 32), 1e300, dtype=torch.float64)}),
        rf"{K} has the number 1e\+300 in what load_weights was given, but torch.float32",
    ),
    "two values": (with_(**{QKV: torch.zeros(64, 32)}), f"differs from what was given .*{QKV}"),
}


@pytest.mark.parametrize(
    ("name", "is_listed"), [*((name, True) for name in MISTAKES), ("half", False), ("NaN", False)]
)
def test_a_mistake_is_named_and_changes_nothing_where_all_is_known(name, is_listed):
    change, message = MISTAKES[name]
    model = llama()
    old, given = our_names(model), their_names(llama(seed=1))
    change(given)
    engine = tiny_engine(model)
    before = answers(engine)
    taken = []

    def stream():
        for pair in given.items():
            taken.append(pair)
            yield pair

    with pytest.raises(CheckpointError, match=message) as raised:
        engine.load_weights(given if is_listed else stream())
    if is_listed:
        assert equal(model, old) and engine.epoch == 0
        assert engine.generate([PROMPT], LOGGED)[0].prefix.skipped_tokens == 100
    else:  # what other processes wait for is taken all the same
        assert len(taken) == len(given) and "were written before: send these" in str(raised.value)
        with pytest.raises(WeightsUnfinishedError, match=f"{message}.*: send these once more"):
            engine.generate([PROMPT], LOGGED)
        engine.load_weights(their_names(llama()))
        assert engine.epoch == 1 and answers(engine) == before


def test_a_stream_of_which_nothing_is_known_changes_nothing():
    model = llama()
    old = our_names(model)
    engine = tiny_engine(model)
    with pytest.raises(CheckpointError, match=r"no tensor module\.lm_head.weight \(and \d+ more\)"):
        engine.load_weights((f"module.{n}", t) for n, t in their_names(llama(seed=1)).items())
    assert equal(model, old) and engine.epoch == 0
    engine.load_weights([])
    assert engine.epoch == 0


class Piece(torch.Tensor):
    """Of a distributed tensor."""

    full_tensor = None


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (None, "got NoneType"),
        (3, "got int"),
        (["ab", "c"], "pairs of a name and a tensor, got a str"),
        ([("a", torch.zeros(1), 3)], "got a tuple"),
        ([(1, torch.zeros(1))], "got a tuple"),
        ({QKV: [1.0]}, f"{QKV} is a list, not a whole tensor"),
        (iter([(QKV, None)]), f"{QKV} is a NoneType, not a whole tensor"),
        ({QKV: torch.zeros(2).as_subclass(Piece)}, "is a Piece, not .*: give its full_tensor"),
    ],
)
def test_what_is_no_pairs_is_refused(pairs, message):
    engine = tiny_engine(tiny_model())
    with pytest.raises(TypeError, match=message):
        engine.load_weights(pairs)
    assert engine.epoch == 0


def test_a_tensor_that_is_given_twice_must_be_the_same():
    """As in the state dict of a tied model of transformers."""
    model, trained = (llama(seed, tie_word_embeddings=True) for seed in (0, 1))
    given = their_names(trained)
    head = given["model.embed_tokens.weight"].clone()
    engine = tiny_engine(model)
    engine.load_weights({**given, "lm_head.weight": head})
    assert equal(model, our_names(trained))
    for wrong in ({**given, "lm_head.weight": head + 1}, {"lm_head.weight": head + 1, **given}):
        with pytest.raises(CheckpointError, match="differs from what was given before"):
            engine.load_weights(wrong)
        assert equal(model, our_names(trained))
        with pytest.raises(CheckpointError, match="differs from what was given before"):
            engine.load_weights(iter(wrong.items()))
        engine.load_weights(given)
    engine.load_weights({"lm_head.weight": head + 2})
    assert torch.equal(model.embedding.word_embeddings.weight, head + 2)
    with pytest.raises(CheckpointError, match="was given twice"):
        engine.load_weights([(Q, given[Q]), (Q, given[Q])])


def test_extra_states_hold_no_weights_and_names_of_hugging_face_are_of_its_models():
    model = fresh_model()
    engine = tiny_engine(model)
    engine.load_weights({"decoder.layers.0.mixer.in_proj._extra_state": None})
    assert engine.epoch == 0
    with pytest.raises(CheckpointError, match="are known for models that were loaded from such"):
        engine.load_weights({"lm_head.weight": torch.zeros(1)})


def test_adapters_stay_and_can_be_loaded():
    """Weights lie below the adapters (LoRA), whose own tensors have names, too."""
    model, trained = fresh_model(), fresh_model(seed=1)
    for each in (model, trained):
        add_adapters(each, LoraFields(rank=2))
    for name, tensor in trained.named_parameters():
        if name.endswith("lora.b"):
            tensor.data.normal_(std=0.1)
    expected = answers(tiny_engine(trained))
    adapters = {name: t for name, t in our_names(trained).items() if ".lora." in name}
    base = {name: t for name, t in our_names(trained).items() if ".lora." not in name}
    engine = tiny_engine(model)
    engine.load_weights(base)
    assert answers(engine) != expected
    engine.load_weights(adapters)
    assert answers(engine) == expected and engine.epoch == 2


def test_weights_come_while_the_engine_is_suspended_or_in_training_mode():
    model, trained = fresh_model(), fresh_model(seed=1)
    expected = answers(tiny_engine(trained))
    engine = tiny_engine(model)
    engine.generate([PROMPT], greedy(2))
    engine.suspend("host")
    model.train()
    engine.load_weights(our_names(trained))
    assert engine.epoch == 1 and engine.memory.held_bytes == 0
    engine.resume()
    assert answers(engine) == expected and engine.epoch == 1


@pytest.mark.parametrize("call", ["load_weights", "start_weight_update", "update_weights"])
def test_no_other_update_begins_inside_the_iterator_of_one(call):
    old, new = our_names(fresh_model()), our_names(fresh_model(seed=1))
    with tiny_engine(fresh_model(seed=1)) as engine:
        expected = engine.generate([PROMPT], LOGGED)[0]
    with tiny_engine(fresh_model()) as engine:

        def pairs():
            for index, pair in enumerate(new.items()):
                if index == 5:
                    with pytest.raises(EngineBusyError, match=rf"{call}\(\) .* inside load"):
                        getattr(engine, call)(*[old] * (call == "load_weights"))
                yield pair

        engine.load_weights(pairs())
        assert not engine.awaits_weights and engine.epoch == 1
        result = engine.generate([PROMPT], LOGGED)[0]
        assert (result.token_ids, result.log_probs) == (
            expected.token_ids,
            expected.log_probs,
        )


@pytest.mark.parametrize("error", [OSError, SystemExit, StopIteration])
def test_an_iterable_that_raises_leaves_an_engine_that_waits_for_weights(error):
    model, trained = fresh_model(), fresh_model(seed=1)
    new = our_names(trained)
    engine = tiny_engine(model)
    engine.generate([PROMPT], LOGGED)

    class Breaks:
        left = list(new.items())[:4]

        def __iter__(self):
            return self

        def __next__(self):
            if not self.left:
                raise error("the trainer is gone")
            return self.left.pop(0)

    if error is StopIteration:  # a legal update of a part
        engine.load_weights(Breaks())
        assert engine.epoch == 1 and not engine.awaits_weights
    else:
        with pytest.raises(error, match="the trainer is gone"):
            engine.load_weights(Breaks())
        message = f"failed with {error.__name__}: the trainer is gone. This is about 4 tensors"
        for _ in range(2):
            with pytest.raises(WeightsUnfinishedError, match=message):
                engine.generate([PROMPT], LOGGED)
        assert not engine.has_work
        engine.load_weights(list(new.items())[2:])
        with pytest.raises(WeightsUnfinishedError, match="This is about 2 tensors"):
            engine.generate([PROMPT], LOGGED)
        assert engine.epoch == 0
    engine.load_weights(list(new.items())[:2])
    engine.load_weights(new)
    assert answers(engine) == answers(tiny_engine(trained))


def test_the_rank_that_has_ended_is_named_as_the_failure(monkeypatch):
    new = our_names(fresh_model(seed=1))
    with tiny_engine(fresh_model()) as engine:

        def pairs():
            yield from list(new.items())[:4]
            raise EOFError

        with pytest.raises(EOFError):
            engine.load_weights(pairs())
        with monkeypatch.context() as patch:
            patch.setattr(RankControl, "failure", "rank 1 has ended")
            assert engine.weights_failure.endswith("of one model, as rank 1 has ended")
