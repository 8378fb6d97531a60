"""Engines over two ranks whose parts have little in common, or are copies: answers are those of
one rank."""

import pytest
from matrix import asked, matrix_rows
from megatron.core import parallel_state
from rank_processes import on_ranks
from reference import greedy, random_tokens, tiny_engine, tiny_model
from split_models import assert_same_answers, load

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.inference.requests.options import RequestOptions

pytestmark = pytest.mark.matrix

RANKS = 2
STAGES, SPLIT = {"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}
TIED = {"share_embeddings_and_output_weights": True}
SHARED = {"layer_pattern": "ZM|Z*-", "num_shared_blocks": 1, "gated_linear_unit": True, **TIED}
MODELS = {
    # Name: (fields of the model, layout, fields of the engine)
    "a stage without attention": ({"layer_pattern": "MG-|*W-"}, STAGES, {}),
    "a stage without recurrent layers": ({"layer_pattern": "*W|KM"}, STAGES, {}),
    "stages of other sizes": ({"layer_pattern": "M|*L*+S"}, STAGES, {}),
    "pure attention": ({"layer_pattern": "*-|**-"}, STAGES, {}),
    "rounded states": ({"layer_pattern": "M*|GK"}, STAGES, {"state_encoding": "int8"}),
    "shared blocks over stages": (SHARED, STAGES, {}),
    "shared blocks over heads": (SHARED, SPLIT, {}),
    "one key/value head": ({"layer_pattern": "*W", "num_query_groups": 1}, SPLIT, {}),
    "one Mamba group": ({"layer_pattern": "M*", "mamba_num_groups": 1}, SPLIT, {}),
    "norms over all heads": (
        {"layer_pattern": "*S", "qk_layernorm": True, "qk_layernorm_scope": "all_heads"},
        SPLIT,
        {},
    ),
    "rows over ranks": (
        {"layer_pattern": "M*-"},
        {**SPLIT, "sequence_parallel": True},
        {},
    ),
}
PROMPTS = [random_tokens(70, seed=seed) for seed in range(2)]
TURNS = [*PROMPTS, PROMPTS[0], [*PROMPTS[0][:50], *random_tokens(9, seed=7)]]


def answers(model, fields):
    params = greedy(4, return_log_probs=True)
    with tiny_engine(model, max_requests=4, max_sequence_length=160, **fields) as engine:
        results = [engine.generate([prompt], params)[0] for prompt in TURNS]
        beside = engine.generate(TURNS, greedy(4), RequestOptions(salt="side by side"))
        engine.check_integrity()
    rows = [(r.token_ids, r.log_probs, r.prefix.skipped_tokens) for r in results]
    return rows, [(r.token_ids, r.prefix.skipped_tokens) for r in beside]


def run_all(folder, names):
    given = {}
    for name in names:
        _, layout, fields = MODELS[name]
        given[name] = answers(load(folder / name, **layout).eval(), fields)
        parallel_state.destroy_model_parallel()
    return given


@pytest.fixture(scope="module")
def given(request, tmp_path_factory):
    """What one rank answers, and both ranks of the split models."""
    names = asked(request, "name", MODELS)
    folder = tmp_path_factory.mktemp("uneven").resolve()
    alone = {}
    for name in names:
        fields, _, engine_fields = MODELS[name]
        model = tiny_model(**fields)
        save_checkpoint(model, folder / name)
        alone[name] = answers(model, engine_fields)
    return alone, on_ranks(run_all, RANKS, folder, folder, names)


@pytest.mark.parametrize(
    "name",
    matrix_rows(
        MODELS,
        "a stage without attention",
        "rounded states",
        "shared blocks over stages",
        "norms over all heads",
        "rows over ranks",
    ),
)
def test_uneven_ranks_answer_as_one(given, name):
    alone, ranks = given
    expected, beside = alone[name]
    for rank in ranks:
        assert_same_answers(rank[name][0], expected)
        assert rank[name][1] == beside
