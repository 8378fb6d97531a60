"""Models that Megatron split over two ranks (on gloo) are served on these ranks, shard by shard."""

import pytest
import stock_megatron
import torch
import torch.distributed as dist
from core_training import set_up_groups
from rank_processes import on_ranks
from reference import greedy, tiny_engine

import megatron_hybrid as mh

pytestmark = pytest.mark.matrix

RANKS, VOCAB = 2, 64
FIELDS = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "tensor_model_parallel_size": RANKS,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "moe_router_score_function": "sigmoid",
}
DELTA = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2}
MODELS = {"hybrid": ("M*-E", {}), "gpt": (None, {"qk_layernorm": True}), "delta": (None, DELTA)}
DISPATCHERS = ("allgather", "alltoall")
TOKENS = torch.randint(0, VOCAB, (2, 37), generator=torch.Generator().manual_seed(3))


def build(pattern, fields, **arguments):
    """A stock model of this rank's shards."""
    torch.manual_seed(7)
    config = stock_megatron.core_config(**{**FIELDS, **fields})
    arguments |= {"vocab_size": VOCAB, "position_embedding_type": "rope"}
    with stock_megatron.on_cpu(), torch.no_grad():
        return stock_megatron.stock_model(config, pattern, **arguments)


def serve_stage(rank, folder):
    """The layers and parameter names of a pipeline stage, and the answers of all stages."""
    fields = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": RANKS}
    set_up_groups(fields)
    ends = {"pre_process": rank == 0, "post_process": rank == 1}
    stock = build("M-*E", {**fields, "pipeline_dtype": torch.float32}, **ends)
    served = mh.from_megatron(stock)
    names = {name for name, parameter in served.named_parameters()}
    assert {id(p) for p in served.parameters()} == {id(p) for p in stock.parameters()}
    mh.save_checkpoint(served, f"{folder}/stages")
    return "".join(served.decoder.layer_type_list), names, answer(served)


def answer(served):
    results = tiny_engine(served).generate(TOKENS.tolist(), greedy(5))
    return [result.token_ids for result in results]


def serve_experts(rank, dispatcher, folder):
    """As `serve`, of other tokens on each rank."""
    fields = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": RANKS}
    set_up_groups(fields)
    fields["moe_token_dispatcher_type"] = dispatcher
    return serve("M*-E", fields, TOKENS[rank : rank + 1], f"{folder}/experts")


def serve(pattern, fields, tokens, folder):
    """Logits of core's model and of ours over its parameters, and the answers; it is saved, too."""
    stock = build(pattern, fields)
    expected = stock_megatron.logits_of(stock, tokens)
    served = mh.from_megatron(stock)
    assert {id(p) for p in served.parameters()} == {id(p) for p in stock.parameters()}
    with torch.no_grad():
        logits = served(tokens)
    answers = answer(served)
    mh.save_checkpoint(served, folder)
    return expected, logits, answers


def one_group_error():
    """Why a model with fewer key/value heads than ranks is refused."""
    stock = build(None, {"num_query_groups": 1})
    try:
        mh.from_megatron(stock)
    except ValueError as error:
        return str(error)


def run_all(folder):
    set_up_groups({"tensor_model_parallel_size": RANKS})
    given = {}
    for name, (pattern, fields) in MODELS.items():
        given[name] = serve(pattern, fields, TOKENS, f"{folder}/{name}")
    given["one group"] = one_group_error()
    given["stages"] = serve_stage(dist.get_rank(), folder)
    for dispatcher in DISPATCHERS:
        given[dispatcher] = serve_experts(dist.get_rank(), dispatcher, folder)
    return given


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Folder of the checkpoints, and by model what both ranks computed."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = on_ranks(run_all, RANKS, folder, folder)
    return folder, {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("name", [*MODELS, *DISPATCHERS])
def test_each_rank_computes_the_stock_model_s_part(given, name):
    for expected, logits, _ in given[1][name]:
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
        assert expected.abs().max() > 0.5


@pytest.mark.parametrize("name", [*MODELS, *DISPATCHERS])
def test_both_ranks_answer_and_save_the_whole_model(given, name):
    """Each has its part of the logits; where experts are split, of the batch."""
    folder, models = given
    loaded, _ = mh.load_pretrained(f"{folder}/{'experts' if name in DISPATCHERS else name}")
    parts, _, answers = zip(*models[name])
    assert answers[0] == answers[1]
    with torch.no_grad():
        logits = loaded(TOKENS)
    whole = torch.cat(parts, 0 if name in DISPATCHERS else -1)
    torch.testing.assert_close(logits, whole, atol=2e-5, rtol=1e-5)
    assert [row[0] for row in answers[0]] == logits[:, -1].argmax(-1).tolist()


def test_pipeline_stages_keep_their_layers_and_answer_together(given):
    folder, models = given
    (first, names, answers), (last, last_names, last_answers) = models["stages"]
    assert (first, last) == ("M-", "*E")
    assert "embedding.word_embeddings.weight" in names - last_names
    assert "decoder.final_norm.weight" in last_names - names
    assert answers == last_answers == answer(mh.load_pretrained(f"{folder}/stages")[0])


def test_a_key_value_head_that_core_cuts_is_refused(given):
    for error in given[1]["one group"]:
        assert error.startswith("num_query_groups is 1, less than tensor_model_parallel_size=2: ")
        assert "Build the model on at most 1 ranks, or save it and use load_megatron." in error
