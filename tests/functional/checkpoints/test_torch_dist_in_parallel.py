"""`torch_dist` folders that megatron-core saved on four ranks load in any layout of ours."""

import pytest
import stock_megatron
import torch
import torch.distributed as dist
from matrix import asked, matrix_rows
from megatron.core import parallel_state
from megatron_folders import PATTERN_ARGUMENT, load_folder, megatron_args, save_folder
from rank_processes import on_ranks

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.model_tensors import full_state_dict

pytestmark = pytest.mark.matrix

RANKS, VOCAB = 4, 64
HYBRID = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
HYBRID |= {"add_bias_linear": False}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 20, "moe_router_topk": 2}
EXPERT_ARGS = {"num_experts": 4, "moe_ffn_hidden_size": 20, "moe_router_topk": 2}
LAYOUTS = {  # pattern, None for a GPTModel; TP, PP and EP that saved it
    "hybrid, TP 2, PP 2": ("M-*-", {}, (2, 2, 1)),
    "hybrid, PP 4": ("M-*-", {}, (1, 4, 1)),
    "gpt, TP 2, PP 2": (None, {}, (2, 2, 1)),
    "experts, TP 2, EP 2": ("M*EE", EXPERTS, (2, 1, 2)),
}
TOKENS = torch.randint(0, VOCAB, (2, 37), generator=torch.Generator().manual_seed(3))


def build(pattern, fields, sizes=(1, 1, 1), stage=0):
    """A stock model, or this rank's part of it."""
    tp, pp, ep = sizes
    torch.manual_seed(7 + stage)
    config = stock_megatron.core_config(
        **{**HYBRID, **fields},
        num_layers=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        pipeline_dtype=torch.float32,
    )
    arguments = {"vocab_size": VOCAB, "position_embedding_type": "rope"}
    arguments |= {"pre_process": stage == 0, "post_process": stage == pp - 1}
    with stock_megatron.on_cpu():
        return stock_megatron.stock_model(config, pattern, **arguments)


def args_of(pattern, fields):
    args = {"num_layers": 4, "padded_vocab_size": VOCAB}
    args |= EXPERT_ARGS if fields else {}
    return megatron_args(**args, **({} if pattern is None else {PATTERN_ARGUMENT: pattern}))


def read_all(folder, names):
    found = {}
    for name in names:
        pattern, fields, sizes = LAYOUTS[name]
        tp, pp, ep = sizes
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        stock = build(pattern, fields, sizes, stage)
        with stock_megatron.on_cpu():
            save_folder(stock, folder / name, args_of(pattern, fields))
        dist.barrier()
        parallel_state.destroy_model_parallel()
        model = mh.load_megatron(folder / name, tensor_model_parallel_size=2)
        with torch.no_grad():
            logits = model(TOKENS, runtime_gather_output=True)
        parallel_state.destroy_model_parallel()
        staged = mh.load_megatron(folder / name, pipeline_model_parallel_size=2)
        found[name] = logits, full_state_dict(staged)
    return found


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """The folders by layout, and what two ranks of ours read from each."""
    path = tmp_path_factory.mktemp("ranks")
    return path, on_ranks(read_all, RANKS, path, path, asked(request, "name", LAYOUTS))[0]


@pytest.mark.parametrize("name", matrix_rows(LAYOUTS, "hybrid, TP 2, PP 2"))
def test_every_layout_gives_core_s_own_numbers(saved, name):
    (folder, found), (pattern, fields, _) = saved, LAYOUTS[name]
    stock = build(pattern, fields)
    with stock_megatron.on_cpu():
        load_folder(stock, folder / name / "iter_0000100")
    expected = stock_megatron.logits_of(stock, TOKENS)
    model = mh.load_megatron(folder / name)
    with torch.no_grad():
        whole = model(TOKENS)
    split, state = found[name]
    torch.testing.assert_close(whole, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(split, expected, atol=2e-5, rtol=1e-5)
    own = full_state_dict(model)
    assert own.keys() == state.keys()
    assert all(torch.equal(own[key], state[key]) for key in own)
    assert expected.abs().max() > 0.5
