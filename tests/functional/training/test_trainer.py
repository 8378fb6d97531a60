"""A recipe trains in any layout what a loop of plain torch trains, and goes on in any other."""

import json
import math
from pathlib import Path

import pytest
import torch
from index_folders import write_documents
from matrix import asked, matrix_rows
from megatron.core import parallel_state
from rank_processes import train_on_ranks

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, read_config, save_checkpoint
from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER, load_pretrained
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.data.batches import batches
from megatron_hybrid.training.data.datasets import build_datasets
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.training.reports import LOG, read_log
from megatron_hybrid.training.trainer import Trainer, training_device

# Core reads the gradients of views.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::FutureWarning")

RANKS = 2
STEPS, SAVED_STEP = 4, 2
ROWS, LENGTH = 4, 32
# Adam divides by sqrt(v) + eps: at 1e-8 the parameters whose gradient is rounding alone would move
# as far as the others.
ADAM = dict(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-5)
TP, PP, EP = ({f"{kind}_model_parallel_size": RANKS} for kind in ("tensor", "pipeline", "expert"))
LAYOUTS = {
    "tp": ({**TP, "sequence_parallel": True}, {}),
    "pp": (PP, {}),
    "dp": ({}, {}),
    "distributed": ({}, {"distributed": True}),
    "ep": (EP, {}),
    "bf16": ({"params_dtype": "bfloat16"}, {}),
    "bf16 distributed": ({"params_dtype": "bfloat16"}, {"distributed": True}),
}
"""name: (fields of the model, fields of the optimizer)."""
FP32 = [name for name in LAYOUTS if "bf16" not in name]
RESUMED = [("tp", "pp"), ("tp", "ep"), ("pp", "dp"), ("distributed", "distributed")]
"""(layout that saved, layout that goes on)."""
SAME = ["distributed", "bf16", "bf16 distributed"]
"""Layouts that go on to the bit."""
PROCESSES = [["tp"], ["pp"], ["dp", "bf16", "bf16 distributed", "distributed", "ep"]]
"""Layouts that share processes: core keeps some of its groups for good. Each finds the checkpoints
of those before it."""
CONFIG = dict(
    layer_pattern="MG*|KWE",
    hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=3072,
    ffn_hidden_size=80,
    sliding_window=7,
    qk_layernorm=True,
    mamba_head_dim=16,
    mamba_state_dim=12,
    mamba_num_groups=2,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_moe_experts=4,
    moe_router_topk=4,  # all: which of two equal experts is chosen would be a matter of rounding
    moe_ffn_hidden_size=20,
    init_method_std=0.15,
)


def recipe(folder: Path, layout: str | None = None, **run) -> Recipe:
    model, optimizer = LAYOUTS.get(layout, ({}, {}))
    return Recipe.of(
        {
            "model": {"pretrained": str(folder / "weights"), **model},
            "tokenizer": "demo",
            "data": {"sequence_length": LENGTH, "train": [str(folder / "text")]},
            "run": {
                "steps": STEPS,
                "global_batch_size": ROWS,
                "overlap_gradients": layout == "distributed",
                **run,
            },
            "optimizer": {**ADAM, "warmup_steps": 3, **optimizer},
            "checkpoints": {"every_steps": SAVED_STEP, "keep": 0, "asynchronous": False},
            "reports": {"every_steps": 1},
        }
    )


def train(folder: Path, name: str, chosen: Recipe) -> Trainer:
    parallel_state.destroy_model_parallel()
    trainer = Trainer(chosen, folder / name, torch.device("cpu"))
    trainer.train()
    trainer.close()
    return trainer


def train_alone(folder: Path, name: str, chosen: Recipe) -> None:
    with training_device():
        train(folder, name, chosen)


def in_sixteen_bits(folder: Path) -> Recipe:
    """A short run of a bf16 model whose checkpoints are written while it goes on."""
    chosen = recipe(folder, stop_at_step=2)
    chosen.model["params_dtype"] = "bfloat16"
    chosen.checkpoints.every_steps, chosen.checkpoints.asynchronous = 1, True
    return chosen


def export_initial(folder: Path, layout: str | None) -> None:
    """Write the random weights with which a run in a layout starts."""
    chosen = recipe(folder, layout)
    del chosen.model["pretrained"]
    chosen.model = {**CONFIG, **chosen.model}
    name = f"initial {layout}"
    parallel_state.destroy_model_parallel()
    Trainer(chosen, folder / f"run of {name}", torch.device("cpu")).export(folder / name)


def train_all(layouts: list[str], folder: Path) -> None:
    """On each rank."""
    export_initial(folder, layouts[-1])
    if "distributed" in layouts:
        trainer = train(folder, "sixteen bits", in_sixteen_bits(folder))
        trainer.optimizer.step()  # as a script without `update`
    for layout in layouts:
        train(folder, layout, recipe(folder, layout))
    for saved, resumed in dict.fromkeys([*RESUMED, *zip(SAME, SAME)]):
        if resumed in layouts and (folder / saved).exists():
            name = f"{saved} to {resumed}"
            if torch.distributed.get_rank() == 0:
                take_up(folder, saved, name)
            torch.distributed.barrier()
            train(folder, name, recipe(folder, resumed))


def take_up(folder: Path, saved: str, name: str) -> None:
    """Let the run `name` go on from the middle of another."""
    step = f"iter_{SAVED_STEP:07d}"
    (folder / name).mkdir()
    (folder / name / step).symlink_to(folder / saved / step)


def rows(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, norm of the gradient) of the steps in a run's log."""
    return [(one["step"], one["loss"], one["gradient_norm"]) for one in read_log(folder / LOG)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    torch.manual_seed(3)
    save_checkpoint(build_hybrid_model(HybridConfig(**CONFIG)), folder / "weights")
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(5, 60, (60,), generator=generator).tolist()
    # Few words, so that there is something to learn.
    documents = [
        [*torch.randint(300, 320, (size,), generator=generator).tolist(), tokenizer.eod]
        for size in sizes
    ]
    write_documents(folder / "text", documents, tokenizer)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """Rows of a loop of plain torch."""
    chosen = recipe(folder)
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    data, _, _ = build_datasets(chosen.data, tokenizer, (STEPS * ROWS, 0, 0))
    model = build_hybrid_model(read_config(folder / "weights"))
    load_checkpoint(model, folder / "weights")
    decayed = [p for n, p in model.named_parameters() if _decays(n, p)]
    others = [p for n, p in model.named_parameters() if not _decays(n, p)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        eps=ADAM["epsilon"],
        betas=(0.9, 0.95),
    )
    found = []
    batch_list = batches(data, micro_batch_size=ROWS, global_batch_size=ROWS)
    for step, batch in zip(range(1, STEPS + 1), batch_list):
        done = max(0, step - 3) / (STEPS - 3)
        rate = step / 3 if step <= 3 else (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = ADAM["learning_rate"] * rate
        optimizer.zero_grad()
        losses = model(
            batch.tokens, labels=batch.labels, packed_seq_params=batch.packed_seq_params()
        )
        loss = (losses * batch.loss_mask).sum() / batch.loss_mask.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((step, loss.item(), norm.item()))
    return found


def _decays(name: str, parameter: torch.Tensor) -> bool:
    kind = name.rpartition(".")[2]
    return kind == "weight" and (parameter.dim() == 2 or ".experts." in name)


@pytest.fixture(scope="module")
def ranks(folder, request):
    """Run `train_all`, which leaves its runs in the folder."""
    for layouts in PROCESSES:
        layouts = asked(request, "layout", layouts)
        if not layouts:
            continue
        rendezvous = folder / f"ranks of {layouts[0]}"
        rendezvous.mkdir()
        train_on_ranks(train_all, RANKS, rendezvous, layouts, folder)


def check(found, expected):
    assert [step for step, *_ in found] == [step for step, *_ in expected]
    for (step, loss, norm), (_, right_loss, right_norm) in zip(found, expected):
        assert loss == pytest.approx(right_loss, abs=1e-6 if step == 1 else 1e-4)
        assert norm == pytest.approx(right_norm, abs=1e-3)


def test_it_learns(expected):
    assert expected[-1][1] < 0.9 * expected[0][1]


def test_one_rank_trains_as_plain_torch(folder, expected):
    train_alone(folder, "one", recipe(folder, micro_batch_size=2))
    check(rows(folder / "one"), expected)


@pytest.mark.parametrize("layout", matrix_rows(FP32, "tp", "distributed", "ep"))
def test_two_ranks_train_as_plain_torch(folder, ranks, expected, layout):
    check(rows(folder / layout), expected)


@pytest.mark.parametrize(
    ("saved", "resumed"), matrix_rows(RESUMED, ("tp", "ep"), ("distributed", "distributed"))
)
def test_two_ranks_go_on_from_any_layout(folder, ranks, expected, saved, resumed):
    check(rows(folder / f"{saved} to {resumed}"), expected[SAVED_STEP:])


@pytest.mark.parametrize("layout", matrix_rows(FP32, "distributed"))
def test_one_rank_goes_on_from_two(folder, ranks, expected, layout):
    name = f"{layout} to one"
    take_up(folder, layout, name)
    chosen = recipe(folder)
    chosen.optimizer.distributed = layout == "distributed"
    train_alone(folder, name, chosen)
    check(rows(folder / name), expected[SAVED_STEP:])


@pytest.mark.parametrize("layout", matrix_rows(SAME, "distributed"))
def test_the_same_layout_goes_on_to_the_bit(folder, ranks, layout):
    found = rows(folder / f"{layout} to {layout}")
    assert found and found == rows(folder / layout)[SAVED_STEP:]


def initial(folder, layout):
    model, _ = load_pretrained(folder / f"initial {layout}", dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def drawn_alone(folder):
    """The random weights of one rank."""
    with training_device():
        export_initial(folder, None)
    return dict(initial(folder, None).named_parameters())


@pytest.mark.parametrize("layout", matrix_rows(["tp", "pp", "ep"], "tp", "ep"))
def test_random_weights_are_those_of_one_rank_in_any_layout(folder, ranks, drawn_alone, layout):
    found = dict(initial(folder, layout).named_parameters())
    assert found.keys() == drawn_alone.keys()
    assert [name for name in found if not torch.equal(found[name], drawn_alone[name])] == []


def test_the_log_is_of_one_rank(folder, ranks):
    lines = (folder / "tp" / LOG).read_text().splitlines()
    assert len(lines) == STEPS
    assert json.loads(lines[0])["tokens_per_second"] > 0
