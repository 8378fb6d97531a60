"""A recipe trains in any layout what a loop of plain torch trains, and goes on in any other."""

import json
import math
from pathlib import Path

import pytest
import torch
from index_folders import write_conversations, write_documents
from matrix import matrix_rows
from megatron.core import parallel_state
from rank_processes import train_on_ranks
from small_models import small_fields
from small_recipes import small_documents, small_recipe
from split_models import load

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
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
REWARDED = ["tp", "dp", "distributed"]
RESUMED = [("tp", "pp"), ("tp", "ep"), ("pp", "dp"), ("distributed", "distributed")]
"""(layout that saved, layout that goes on)."""
SAME = ["distributed", "bf16", "bf16 distributed"]
"""Layouts that go on to the bit."""
PROCESSES = [["tp"], ["pp"], ["dp", "bf16", "bf16 distributed", "distributed", "ep"]]
"""Layouts that share processes: core keeps some of its groups for good. Each finds the checkpoints
of those before it."""
CONFIG = small_fields(
    "MG*|KWE",
    vocab_size=3072,
    qk_layernorm=True,
    num_moe_experts=4,
    moe_router_topk=4,  # all: which of two equal experts is chosen would be a matter of rounding
    moe_ffn_hidden_size=20,
)


def recipe(folder: Path, layout: str | None = None, **run) -> Recipe:
    model, optimizer = LAYOUTS.get(layout, ({}, {}))
    run = {"global_batch_size": ROWS, "overlap_gradients": layout == "distributed", **run}
    return small_recipe(
        model={"pretrained": str(folder / "weights"), **model},
        data={"sequence_length": LENGTH, "train": [str(folder / "text")]},
        run={"steps": STEPS, **run},
        optimizer={**ADAM, "warmup_steps": 3, **optimizer},
        checkpoints={"every_steps": SAVED_STEP, "keep": 0},
    )


def preferences(folder: Path, layout: str | None = None) -> Recipe:
    """A recipe of DPO: both of a pair stay on one rank, and the reference is in the same layout."""
    values, pairs = recipe(folder, layout).to_dict(), [str(folder / "pairs")]
    data = {"kind": "preferences", "sequence_length": 2 * LENGTH, "train": pairs}
    return Recipe.of({**values, "data": data, "dpo": {}})


def rewarded(folder: Path, layout: str | None = None) -> Recipe:
    """A recipe of GRPO: the ranks draw the completions that one draws."""
    values = recipe(folder, layout, global_batch_size=8).to_dict()
    data = {"kind": "prompts", "sequence_length": LENGTH, "train": [str(folder / "prompts.jsonl")]}
    grpo = {"reward": f"{__name__}:mean_id", "max_tokens": 6, "group_size": 4, "beta": 0.1}
    grpo["cache_bytes"] = 8 << 20
    return Recipe.of({**values, "data": data, "grpo": grpo})


def mean_id(completion_ids, **columns):
    return [sum(ids) / len(ids) / CONFIG["vocab_size"] for ids in completion_ids]


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
        if layout in FP32:
            train(folder, f"pairs of {layout}", preferences(folder, layout))
        if layout in REWARDED:
            train(folder, f"rewards of {layout}", rewarded(folder, layout))
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


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "trainer"
    folder.mkdir()
    torch.manual_seed(3)
    save_checkpoint(build_hybrid_model(HybridConfig(**CONFIG)), folder / "weights")
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    documents = small_documents()
    write_documents(folder / "text", documents, tokenizer)
    answers = [[(2, len(document))] for document in documents]
    write_conversations(folder / "pairs", documents, answers, tokenizer, "preferences")
    prompts = [json.dumps({"prompt": f"It was {word}"}) for word in ("cold", "late", "he")]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    return folder


def train_with_torch(folder: Path) -> list[tuple[int, float, float]]:
    """`rows` of a loop of plain torch."""
    chosen = recipe(folder)
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    data, _, _ = build_datasets(chosen.data, tokenizer, (STEPS * ROWS, 0, 0))
    model = load(folder / "weights")
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


def check(folder, name, expected):
    found = rows(folder / name)
    assert [step for step, *_ in found] == [step for step, *_ in expected], name
    for (step, loss, norm), (_, right_loss, right_norm) in zip(found, expected):
        assert loss == pytest.approx(right_loss, abs=1e-6 if step == 1 else 1e-4), name
        assert norm == pytest.approx(right_norm, abs=1e-3), name


def initial(folder, layout):
    model, _ = load_pretrained(folder / f"initial {layout}", dtype=torch.float32)
    return dict(model.named_parameters())


SOME = ["tp", "distributed", "ep"]


@pytest.mark.parametrize(
    "layouts", matrix_rows([SOME, list(LAYOUTS)], SOME), ids=["some layouts", "all layouts"]
)
def test_two_ranks_train_as_plain_torch_and_go_on_from_any_layout(folder, layouts):
    """One test, so that no other process of pytest starts the ranks again."""
    expected = train_with_torch(folder)
    assert expected[-1][1] < 0.9 * expected[0][1]
    train_alone(folder, "one", recipe(folder, micro_batch_size=2))
    check(folder, "one", expected)
    for group in PROCESSES:
        group = [layout for layout in group if layout in layouts]
        if group:
            train_on_ranks(train_all, RANKS, folder / f"ranks of {group[0]}", group, folder)
    train_alone(folder, "pairs alone", preferences(folder))
    train_alone(folder, "rewards alone", rewarded(folder))
    for layout in set(REWARDED).intersection(layouts):
        check(folder, f"rewards of {layout}", rows(folder / "rewards alone"))
    for layout in set(FP32).intersection(layouts):
        check(folder, layout, expected)
        check(folder, f"pairs of {layout}", rows(folder / "pairs alone"))
    for saved, resumed in RESUMED:
        if {saved, resumed} <= set(layouts):
            check(folder, f"{saved} to {resumed}", expected[SAVED_STEP:])
    for layout in set(FP32).intersection(layouts if len(layouts) > len(SOME) else ["distributed"]):
        take_up(folder, layout, f"{layout} to one")
        chosen = recipe(folder)
        chosen.optimizer.distributed = layout == "distributed"
        train_alone(folder, f"{layout} to one", chosen)
        check(folder, f"{layout} to one", expected[SAVED_STEP:])
    for layout in set(SAME).intersection(layouts):  # to the bit
        found = rows(folder / f"{layout} to {layout}")
        assert found and found == rows(folder / layout)[SAVED_STEP:], layout
    with training_device():
        export_initial(folder, None)
    drawn_alone = initial(folder, None)
    for layout in {"tp", "pp", "ep"}.intersection(layouts):
        drawn = initial(folder, layout)
        assert drawn.keys() == drawn_alone.keys()
        assert [n for n in drawn if not torch.equal(drawn[n], drawn_alone[n])] == [], layout
    lines = (folder / "tp" / LOG).read_text().splitlines()  # of one rank
    assert len(lines) == STEPS and json.loads(lines[0])["tokens_per_second"] > 0
