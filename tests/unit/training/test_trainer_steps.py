"""Steps of a trainer on one rank: skipped ones, accumulation, evaluation, adapters, and the log."""

import math
import os
import socket
from functools import partial

import pytest
import torch
from index_folders import write_conversations, write_documents
from matrix import matrix_rows
from megatron.core import parallel_state
from small_recipes import SIZES, small_recipe, write_small_text

from megatron_hybrid import HybridConfig, build_hybrid_model, load_pretrained, save_checkpoint
from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.models.mixers.router import Router
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.checkpoints import Checkpoints
from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.data.datasets import build_datasets
from megatron_hybrid.training.lora import load_adapters
from megatron_hybrid.training.losses import CrossEntropy, LossSums
from megatron_hybrid.training.reports import LOG, read_log
from megatron_hybrid.training.trainer import Trainer, TrainingError, training_device

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::FutureWarning")

LENGTH, ROWS, STEPS = 32, 4, 4
MODEL = {
    "layer_pattern": "M*E",
    **SIZES,
    "vocab_size": 3072,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "init_method_std": 0.1,
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(DEMO_FOLDER)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Prefix of a dataset of documents."""
    return write_small_text(tmp_path_factory.mktemp("data") / "text")


def recipe_of(text, **sections):
    """A recipe; sections: fields beside the usual ones."""
    model = sections.pop("whole_model", {**MODEL, **sections.pop("model", {})})
    data = {"sequence_length": LENGTH, "blend": [text], "split": "3,1", **sections.pop("data", {})}
    run = {"steps": STEPS, "global_batch_size": ROWS, **sections.pop("run", {})}
    optimizer = {"min_learning_rate": 1e-3, **sections.pop("optimizer", {})}
    return small_recipe(model=model, data=data, run=run, optimizer=optimizer, **sections)


def build(recipe, folder, kind=Trainer):
    parallel_state.destroy_model_parallel()
    return kind(recipe, folder, torch.device("cpu"))


@pytest.fixture(autouse=True)
def device():
    with training_device() as device:
        yield device


def train(recipe, folder, kind=Trainer):
    trainer = build(recipe, folder, kind)
    trainer.train()
    trainer.close()
    return trainer


def logged(folder, *names):
    """Values of each step in the log."""
    records = [record for record in read_log(folder / LOG) if "loss" in record]
    return [tuple(record[name] for name in names) for record in records]


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.named_parameters()}


def poisoned(steps, value):
    """A Trainer of which these steps, from 1, have a loss or a gradient that is not finite."""

    class Poisoned(Trainer):
        def step(self, data):
            before = weights(self)
            result = super().step(data)
            same = all(torch.equal(before[name], p) for name, p in weights(self).items())
            assert same == (self.progress.step in steps) == (not result.updated)
            return result

        def _run_batches(self, data, **options):
            metrics, num_labels = super()._run_batches(data, **options)
            if self.progress.step + 1 in steps:
                if value == "loss":
                    metrics = {"loss": (math.nan, num_labels)}
                else:
                    next(self.model.parameters()).main_grad.view(-1)[3] = float(value)
            return metrics, num_labels

    return Poisoned


@pytest.mark.parametrize("value", matrix_rows(["loss", "nan", "inf"], "loss", "nan"))
def test_steps_that_are_not_finite_are_skipped_counted_and_logged(text, tmp_path, value):
    chosen = recipe_of(text, run={"steps": 6, "max_skipped_steps": 2})
    trainer = train(chosen, tmp_path, poisoned({2, 3, 5}, value))
    assert (trainer.progress.skipped_steps, trainer.progress.skipped_in_row) == (3, 0)
    assert [skipped for (skipped,) in logged(tmp_path, "skipped_steps")] == [0, 1, 2, 2, 3, 3]
    assert logged(tmp_path, "gradient_norm")[1] == (None,)
    resumed = build(chosen, tmp_path)
    assert resumed.progress == trainer.progress


def test_too_many_of_them_end_the_run_after_its_last_checkpoint(text, tmp_path):
    chosen = recipe_of(
        text,
        run={"steps": 6, "max_skipped_steps": 1},
        checkpoints={"every_steps": 2, "asynchronous": True},
    )
    with pytest.raises(TrainingError, match=r"2 steps in a row, up to step 5, had a loss of"):
        train(chosen, tmp_path, poisoned({4, 5}, "nan"))
    assert Checkpoints(tmp_path).newest().name == "iter_0000004"
    resumed = train(chosen, tmp_path)
    assert (resumed.progress.step, resumed.progress.skipped_steps) == (6, 1)


def test_micro_batches_add_up_to_a_large_batch(text, tmp_path):
    # At Adam's usual epsilon, gradients of rounding alone would move as far as the others.
    runs = [
        train(
            recipe_of(text, run={"micro_batch_size": size}, optimizer={"epsilon": 1e-5}),
            tmp_path / str(size),
        )
        for size in (1, ROWS)
    ]
    small, large = (logged(tmp_path / str(size), "loss", "gradient_norm") for size in (1, ROWS))
    assert small == [pytest.approx(one, abs=1e-6, rel=1e-6) for one in large]
    for one, other in zip(*(weights(run).values() for run in runs)):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "told", "other"),
    [("text", "the data", [300]), ("text", "the data", [300, 302]), ("held", "data.valid", [302])],
)
def test_a_run_does_not_go_on_with_other_documents(tmp_path, tokenizer, name, told, other):
    rows = [[300, 301, tokenizer.eod]] * 40
    path, held = (write_documents(tmp_path / each, rows, tokenizer) for each in ("text", "held"))
    run = {"steps": 1, "eval_every_steps": 1, "eval_batches": 1}
    data = {"sequence_length": LENGTH, "train": [path], "valid": [held]}
    recipe = small_recipe(model=MODEL, data=data, run=run)
    train(recipe, tmp_path / "run")
    write_documents(tmp_path / name, [[*other, tokenizer.eod]] * 40, tokenizer)
    with pytest.raises(CheckpointError, match=f"was saved with the contents of {told}="):
        build(recipe, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": {"params_dtype": "bfloat16"}}, "model.params_dtype='torch.float32'.*bfloat16"),
        ({"model": {"moe_aux_loss_coeff": 0.1}}, "model.moe_aux_loss_coeff='0.0'.* has '0.1'"),
        ({"model": {"moe_z_loss_coeff": 0.1}}, "model.moe_z_loss_coeff='None'.* has '0.1'"),
        ({"model": {"layernorm_epsilon": 1e-4}}, "model.layernorm_epsilon=1e-05, .* has 0.0001"),
        ({"run": {"global_batch_size": 1, "steps": 4}}, "run.steps=1, .* has 4: .*n.global_batch_"),
        ({"run": {"global_batch_size": 8, "steps": 1}}, "run.global_batch_size=4, .* has 8"),
        ({"model": {"hidden_dropout": 0.1}}, "model.hidden_dropout=None, .* has '0.1'"),
        ({"optimizer": {"beta2": 0.5}}, "optimizer.beta2=0.95, .* has 0.5"),
        ({"optimizer": {"clip_gradient": 0.1}}, "optimizer.clip_gradient=1.0, .* has 0.1"),
        ({"run": {"seed": 7, "steps": 1}}, "run.seed=1234, .* has 7"),
    ],
)
def test_a_run_does_not_go_on_with_other_fields_of_its_results(text, tmp_path, change, match):
    train(recipe_of(text, run={"steps": 1}), tmp_path)
    with pytest.raises(CheckpointError, match=f"was saved with {match}"):
        build(recipe_of(text, **{"run": {"steps": 1}, **change}), tmp_path)


def test_a_step_without_a_label_changes_nothing_and_a_run_of_them_is_an_error(text, tmp_path):
    class Unlabelled(Trainer):
        def step(self, data):
            batches = [next(data) for _ in range(self.num_micro_batches)]
            for batch in batches:
                batch.loss_mask.zero_()
            before = weights(self)
            result = super().step(iter(batches))
            assert not result.updated and math.isnan(result.loss)
            assert all(torch.equal(before[name], p) for name, p in weights(self).items())
            return result

    with pytest.raises(TrainingError, match=f"none of the {STEPS} steps has changed the model"):
        train(recipe_of(text, run={"max_skipped_steps": STEPS}), tmp_path / "a", Unlabelled)
    assert {one["loss"] for one in read_log(tmp_path / "a" / LOG)} == {None}
    with pytest.raises(TrainingError, match=r"2 steps in a row, .*, or no label"):
        train(recipe_of(text, run={"max_skipped_steps": 1}), tmp_path / "b", Unlabelled)


def test_validation_data_without_a_label_is_an_error_before_the_first_step(tmp_path, tokenizer):
    path = write_documents(tmp_path / "text", [[300, 301, tokenizer.eod]] * 40, tokenizer)
    held = write_documents(tmp_path / "held", [[tokenizer.eod]] * 400, tokenizer)
    data = {"sequence_length": LENGTH, "train": [path], "valid": [held]}
    recipe = small_recipe(model=MODEL, data=data, run={"steps": 1, "eval_every_steps": 1})
    with pytest.raises(TrainingError, match="data has no label in the 10 batches"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / LOG).exists()


_OTHER = torch.ones(2, requires_grad=True)


def own_loss(change, metrics=()):
    """The cross entropy, changed."""

    class Own(CrossEntropy):
        def __call__(self, log_probs, batch):
            sums = super().__call__(log_probs, batch)
            return change(sums.total, sums.count)

    Own.metrics = metrics
    return Own()


@pytest.mark.parametrize(
    ("change", "metrics", "match"),
    [
        (lambda total, count: LossSums(total.detach(), count), (), "a total with a gradient"),
        (lambda total, count: LossSums(total, -count), (), r"count=tensor\(-\d.* count of 0 or mo"),
        (lambda total, count: LossSums(total, count * math.inf), (), r"count=tensor\(inf\)"),
        (lambda total, count: LossSums(total, 3.0), (), r"count=3\.0.* tensors of one number"),
        (lambda total, count: LossSums(total, count.to("meta")), (), "of one number on cpu"),
        (lambda total, count: LossSums(total[None], count), (), r"total=tensor\(\[\d"),
        (lambda total, count: LossSums(total + 0j, count), (), r"total=tensor\(\d.*j, grad"),
        (lambda total, count: (total, count), (), r"returned \(tensor.*; it must be LossSums"),
        (lambda total, count: LossSums(total, count), ["kl"], r"each name of \['kl'\]"),
        (lambda total, count: LossSums(total, count, {"kl": count}), ["kl"], "and as metrics"),
        (lambda total, count: LossSums(_OTHER.sum(), count), (), "a total with a gradient"),
        (LossSums, ["tokens", "kl"], r"metrics \['tokens'\], names of the log"),
        (LossSums, ["mtp_loss_2", "seq_load_balancing_loss"], r"'mtp_loss_2', 'seq_load_.* of the"),
        (LossSums, "kl", "is 'kl'; it must be a list of texts"),
    ],
)
def test_what_a_loss_returns_is_checked_by_its_name(text, tmp_path, change, metrics, match):
    with pytest.raises(ValueError, match=f"the loss Own .*{match}"):
        train(recipe_of(text), tmp_path, partial(Trainer, loss=own_loss(change, metrics)))


def test_a_column_that_a_batch_lacks_is_named(text, tmp_path):
    class Own(CrossEntropy):
        def __call__(self, log_probs, batch):
            return LossSums(batch.columns["reference"].sum(), batch.loss_mask.sum())

    with pytest.raises(ValueError, match=r"column 'reference' of a batch that has \[\].*needs_ref"):
        train(recipe_of(text), tmp_path, partial(Trainer, loss=Own()))


def test_gradients_are_on_whatever_the_caller_and_the_loss_set(text, tmp_path):
    def off(total, count):
        torch.set_grad_enabled(False)
        return LossSums(total, count)

    train(recipe_of(text), tmp_path / "whole")
    with torch.inference_mode():
        train(recipe_of(text), tmp_path / "off", partial(Trainer, loss=own_loss(off)))
    with torch.no_grad():
        trainer = build(recipe_of(text), tmp_path / "own")
        assert trainer.step(trainer.batches()).gradient_norm > 0
    assert torch.is_grad_enabled()
    names = ("loss", "gradient_norm")
    assert logged(tmp_path / "off", *names) == logged(tmp_path / "whole", *names)


def test_the_end_of_the_data_is_told(text, tmp_path):
    trainer = build(recipe_of(text), tmp_path)
    with pytest.raises(TrainingError, match=r"the data ends at run\.steps=0"):
        trainer.step(iter(()))


def test_a_folder_has_one_run_at_a_time(text, tmp_path):
    first = build(recipe_of(text), tmp_path)
    holder = f"by process {os.getpid()} on {socket.gethostname()}, for 0:00:"
    with pytest.raises(OSError, match=f"{tmp_path} belongs to a run that is under way, {holder}"):
        build(recipe_of(text), tmp_path)
    first.close()
    second = build(recipe_of(text), tmp_path)
    del second
    assert not (tmp_path / "run.lock").exists()


def test_evaluation_changes_nothing_and_further_losses_are_in_the_log(text, tmp_path):
    model = {
        "layer_pattern": "M*E/*E",
        "hidden_dropout": 0.1,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.1,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    runs = {}
    for every in (0, 1):
        chosen = recipe_of(text, model=model, run={"eval_every_steps": every, "eval_batches": 1})
        runs[every] = train(chosen, tmp_path / str(every))
    names = ("mtp_loss_1", "loss", "gradient_norm", "load_balancing_loss", "z_loss", "tokens")
    without, beside = (logged(tmp_path / str(every), *names) for every in (0, 1))
    assert without == beside and len(beside) == STEPS
    # Two thirds of log(vocabulary) is far below what an untrained model has.
    assert all(ahead > 4 and min(others) > 0 for ahead, *others in beside)
    state, other = (run.model.state_dict() for run in runs.values())
    assert any(name.endswith("expert_bias") and value.any() for name, value in state.items())
    for name, value in state.items():
        assert not torch.is_tensor(value) or torch.equal(value, other[name]), name
    evaluations = [one["eval_loss"] for one in read_log(tmp_path / "1" / LOG) if "eval_loss" in one]
    assert len(evaluations) == STEPS and evaluations[-1] == runs[1].evaluate()


@pytest.mark.parametrize("step", [2, STEPS])
def test_an_evaluation_that_a_kill_interrupted_is_made_again(text, tmp_path, step):
    class Killed(Trainer):
        def evaluate(self):
            if self.progress.step == step:
                raise KeyboardInterrupt
            return super().evaluate()

    chosen = recipe_of(
        text,
        run={"eval_every_steps": 2, "eval_batches": 1},
        checkpoints={"every_steps": 2, "asynchronous": step == STEPS},
    )
    whole = train(chosen, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(chosen, tmp_path, Killed)
    assert Checkpoints(tmp_path).newest().name == f"iter_{step:07d}"
    for name in (".log.jsonl.1.tmp", "exported/.model.safetensors.9.tmp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert train(chosen, tmp_path).progress == whole.progress
    train(chosen, tmp_path)  # nothing is left to do
    assert not list(tmp_path.rglob(".*.tmp"))
    lines = [
        [(one["step"], one.get("loss"), one.get("eval_loss")) for one in read_log(folder / LOG)]
        for folder in (tmp_path, tmp_path / "whole")
    ]
    assert lines[0] == lines[1] and len(lines[0]) == STEPS + STEPS // 2


@pytest.mark.parametrize(("name", "is_killed"), [("adam", True), ("muon", True), ("sgd", False)])
def test_the_first_line_after_an_end_is_that_of_no_end(text, tmp_path, name, is_killed, capfd):
    class Killed(Trainer):
        def step(self, data):
            if self.progress.step == 3:
                raise KeyboardInterrupt
            return super().step(data)

    chosen = recipe_of(
        text,
        model={"moe_aux_loss_coeff": 0.1, "hidden_dropout": 0.1},
        run={"eval_every_steps": 1, "eval_batches": 1},
        optimizer={"name": name},
        checkpoints={"every_steps": 3},
    )
    chosen.reports.every_steps = STEPS
    whole = train(chosen, tmp_path / "whole")
    if is_killed:
        with pytest.raises(KeyboardInterrupt):
            train(chosen, tmp_path, Killed)
    else:
        chosen.run.stop_at_step = 3
        train(chosen, tmp_path)
        chosen.run.stop_at_step = None
    again = train(chosen, tmp_path)
    for one, other in zip(weights(again).values(), weights(whole).values()):
        assert torch.equal(one, other)
    names = ("step", "loss", "load_balancing_loss", "gradient_norm", "tokens")
    (line,), (expected,) = (logged(folder, *names) for folder in (tmp_path, tmp_path / "whole"))
    assert line == pytest.approx(expected, rel=1e-6) and line[2] > 0
    told = capfd.readouterr().err
    assert ("Muon trains decoder.layers.*.mixer.in_proj.weight, " in told) == (name == "muon")
    assert ("experts.linear_fc1.weight" in told) == (name == "muon")


def test_muon_without_experts_saves_and_goes_on(text, tmp_path):
    chosen = recipe_of(text, model={"layer_pattern": "M*-"}, optimizer={"name": "muon"})
    chosen.run.stop_at_step = 2
    train(chosen, tmp_path)
    chosen.run.stop_at_step, chosen.optimizer.learning_rate = None, 2e-3
    assert train(chosen, tmp_path).progress.step == STEPS
    assert max(logged(tmp_path, "learning_rate")[2:]) < (2e-3,)  # rates may change


def test_adapters_are_trained_alone_saved_and_merged(text, tmp_path, tokenizer):
    base = tmp_path / "base"
    torch.manual_seed(3)
    save_checkpoint(build_hybrid_model(HybridConfig(**MODEL)), base)
    tokenizer.save(base)
    chosen = recipe_of(
        text, whole_model={"pretrained": str(base)}, lora={"rank": 4}, run={"steps": 8}
    )
    chosen.tokenizer = str(base)
    trainer = train(chosen, tmp_path / "run")
    losses = [loss for (loss,) in logged(tmp_path / "run", "loss")]
    assert losses[-1] < losses[0] - 0.1
    start = dict(load_pretrained(base, dtype=torch.float32)[0].named_parameters())
    for name, value in weights(trainer).items():
        assert ".lora." in name or torch.equal(value, start[name]), name
    products = {
        name.removesuffix(".lora"): module.product().detach()
        for name, module in trainer.model.named_modules()
        if name.endswith(".lora")
    }
    trainer.export(str(tmp_path / "out"))
    trainer.save()
    trainer.export(tmp_path / "again")  # it has changed nothing
    for name in ("model.safetensors", "adapters/adapter_model.safetensors"):
        first, second = (tmp_path / folder / name for folder in ("out", "again"))
        assert first.read_bytes() == second.read_bytes()
    merged = dict(load_pretrained(tmp_path / "out", dtype=torch.float32)[0].named_parameters())
    assert merged.keys() == start.keys() and products
    for name, value in merged.items():
        product = products.get(name.removesuffix(".weight"), torch.zeros(()))
        torch.testing.assert_close(value, start[name] + product, atol=1e-6, rtol=1e-6)
    alone = load_pretrained(base, dtype=torch.float32)[0]
    load_adapters(alone, tmp_path / "out" / "adapters")
    for name, product in products.items():
        torch.testing.assert_close(alone.get_submodule(f"{name}.lora").product(), product)


def test_sequences_are_cut_while_the_length_warms_up(text, tmp_path):
    chosen = recipe_of(
        text,
        data={"sequence_length_warmup": [[1, 4], [2, 8]], "reset_at_documents": False},
        run={"eval_every_steps": 1, "eval_batches": 1},
    )
    trainer, longest = build(chosen, tmp_path), {True: [], False: []}

    def note(model, args, kwargs):
        longest[model.training].append(kwargs["packed_seq_params"].max_seqlen_q)

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train()
    assert longest[True] == [4] * ROWS + [8] * ROWS + [LENGTH] * (STEPS - 2) * ROWS
    assert longest[False] == [LENGTH] * STEPS * ROWS


def test_conversations_have_a_loss_on_answers_alone(tmp_path, tokenizer):
    conversations = [[300 + i % 7] * 6 + [400, 401, 402, tokenizer.eod] for i in range(40)]
    found = []
    for scale in (1, 1 / 64):  # means are by weight
        prefix = str(tmp_path / f"chats{scale}")
        spans = [(6, 8, scale), (8, 10, scale / 4)]
        write_conversations(prefix, conversations, [spans] * 40, tokenizer)
        chosen = recipe_of(prefix, data={"kind": "sft", "split": "1"})
        data, _, _ = build_datasets(chosen.data, tokenizer, (STEPS * ROWS, 0, 0))
        counts = [int(data[i]["loss_mask"].count_nonzero()) for i in range(STEPS * ROWS)]
        trainer = build(chosen, tmp_path / f"run{scale}")
        batch = Batch.of([data[i] for i in range(ROWS)])
        rows = {"labels": batch.labels, "packed_seq_params": batch.packed_seq_params()}
        losses = trainer.model(batch.tokens, None, None, **rows) * batch.loss_mask
        expected = (losses.sum() / batch.loss_mask.sum()).item()
        trainer.train()
        trainer.close()
        assert trainer.progress.tokens == sum(counts)
        assert 0 < sum(counts) <= 0.5 * STEPS * ROWS * LENGTH
        found.append(logged(tmp_path / f"run{scale}", "loss", "gradient_norm"))
        first, last = found[-1][0][0], found[-1][-1][0]
        assert first == pytest.approx(expected, rel=1e-5) and last < first
    assert sum(found[0], ()) == pytest.approx(sum(found[1], ()), rel=1e-4)


def test_routers_are_told_what_only_fills_a_row(tmp_path, tokenizer):
    prefix = tmp_path / "chats"
    # Three of 10 predictions in a row, and 2 tokens to fill it.
    chats = [[*range(300, 310), tokenizer.eod]] * 40
    write_conversations(prefix, chats, [[(6, 10)]] * 40, tokenizer)
    trainer = build(recipe_of(str(prefix), data={"kind": "sft", "split": "1"}), tmp_path / "run")
    (router,) = (one for one in trainer.model.modules() if isinstance(one, Router))
    assert router.config.calculate_per_token_loss  # a micro-batch counts by its labels
    told = []
    trainer.model.decoder.register_forward_pre_hook(lambda module, args: told.append(args[1]))
    trainer.step(trainer.batches())
    fills = torch.arange(LENGTH) >= 30
    assert len(told) == ROWS
    assert all(torch.equal(context.padding_mask_T, fills) for context in told)


def test_models_with_routers_of_different_depth_train_one_after_the_other(text, tmp_path):
    for name, pattern in (("one", "E"), ("three", "*ME")):
        balanced = {"layer_pattern": pattern, "moe_aux_loss_coeff": 0.1}
        balanced["moe_router_load_balancing_type"] = "aux_loss"
        train(recipe_of(text, model=balanced, run={"steps": 2}), tmp_path / name)
        assert logged(tmp_path / name, "load_balancing_loss")[-1][0] >= 1
