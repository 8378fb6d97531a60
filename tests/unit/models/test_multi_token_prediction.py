"""Multi-token prediction: its losses as written out here, its names, and what it leaves alone."""

import pytest
import stock_megatron
import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from reference import greedy, tiny_engine, tiny_model
from small_models import packed_params, random_tokens, small_config

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.checkpoints.megatron.built_model import from_megatron
from megatron_hybrid.checkpoints.megatron.torch_dist import load_megatron, save_megatron
from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.models.mixers.base import StackInputs
from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.models.parameter_names import canonical_name
from megatron_hybrid.ops.ragged import RaggedLayout

PATTERN = "MG*-/*M/*M"
FACTOR = 0.3


@pytest.fixture(autouse=True)
def scale():
    """core's schedules leave the scale of their last run."""
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    yield
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))


def model(pattern=PATTERN, **fields):
    torch.manual_seed(2)
    return build_hybrid_model(
        small_config(pattern, mtp_loss_scaling_factor=FACTOR, **fields)
    ).train()


def written_out(own, tokens, mask):
    """The mean loss of each part over one row of tokens [1, T + 1], and that of the model."""
    inputs, labels = tokens[0, :-1], tokens[0, 1:]
    layout = RaggedLayout((len(inputs),), (0,))
    context = UncachedContext(layout, "cpu")
    embed = own.embedding.word_embeddings.weight

    def losses(hidden):
        return F.cross_entropy(hidden @ own.output_layer.weight.T, labels, reduction="none")

    hidden = own.decoder(embed[inputs], context, StackInputs(None))
    main = losses(hidden)
    means = []
    for depth, part in enumerate(own.mtp.layers, start=1):
        n = len(inputs)
        ahead = torch.cat((inputs[depth:], torch.zeros(depth, dtype=torch.long)))
        x = torch.cat((part.enorm(embed[ahead]), part.hnorm(hidden)), -1) @ part.eh_proj.weight.T
        for layer in part.mtp_model_layer.layers:
            x = layer(x, UncachedContext(layout, "cpu"), StackInputs(None))
        hidden = part.final_layernorm(x)
        logits = hidden[: n - depth] @ own.output_layer.weight.T
        each = F.cross_entropy(logits, labels[depth:], reduction="none")
        kept = mask[depth:]
        means.append((each * kept).sum() / kept.sum())
    return main, torch.stack(means)


@pytest.mark.parametrize("fields", [{}, {"calculate_per_token_loss": True}], ids=["mean", "sum"])
def test_gradients_are_those_of_the_sum_of_all_losses(fields):
    own, tokens = model(**fields), random_tokens(1, 24)
    mask = (torch.arange(23) % 5 > 0).float()
    main, means = written_out(own, tokens, mask)
    per_token = bool(fields)
    total = (main * mask).sum() if per_token else main.mean()
    weight = FACTOR * mask.sum() if per_token else FACTOR
    (total + weight * means.mean()).backward()
    expected = {name: p.grad.clone() for name, p in own.named_parameters()}
    own.zero_grad()
    losses = own(tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask[None])
    torch.testing.assert_close(losses[0], main, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own.mtp.losses, means.detach(), atol=1e-5, rtol=1e-5)
    ((losses[0] * mask).sum() if per_token else losses.mean()).backward()
    for name, parameter in own.named_parameters():
        scale = expected[name].abs().max()
        torch.testing.assert_close(
            parameter.grad, expected[name], atol=1e-5 * scale.item(), rtol=1e-4
        )


if not stock_megatron.IS_0_16:  # whose hybrid model has none

    @pytest.mark.parametrize(
        "fields", [{}, {"calculate_per_token_loss": True}, {"mtp_use_repeated_layer": True}]
    )
    def test_core_computes_the_same(fields):
        per_token = "calculate_per_token_loss" in fields
        own = model("M*-/*M/*M", **fields)
        expected = dict(own.named_parameters())
        with stock_megatron.on_cpu():
            stock = stock_megatron.mamba_model(own.config).train()
            names = {canonical_name(name): name for name, _ in stock.named_parameters()}
            assert names.keys() == expected.keys()
            with torch.no_grad():
                for name, parameter in expected.items():
                    stock.get_parameter(names[name]).copy_(parameter)
            tokens, mask = random_tokens(2, 24), (torch.rand(2, 23) > 0.3).float()
            positions = torch.arange(23).expand(2, -1)
            for one in (own, stock):
                losses = one(
                    *(tokens[:, :-1], positions, None), labels=tokens[:, 1:], loss_mask=mask
                )
                total = (losses * mask).sum()
                (total if per_token else total / mask.sum()).backward()
        for name, parameter in expected.items():
            theirs = stock.get_parameter(names[name]).grad
            bound = 1e-5 * theirs.abs().max().item()
            torch.testing.assert_close(parameter.grad, theirs, atol=bound, rtol=1e-4)
        served = from_megatron(stock)  # a part drafts, its own parameters
        assert served.config.layer_pattern == own.config.layer_pattern
        theirs = {id(p) for p in stock.parameters()}
        assert {id(p) for p in served.parameters()} == theirs
        logged = MTPLossLoggingHelper.tracker.pop("loss_values")
        torch.testing.assert_close(own.mtp.losses, logged, atol=1e-5, rtol=1e-5)


def test_the_scale_of_cores_schedules_is_taken():
    own, tokens = model(), random_tokens(1, 12)
    gradients = []
    for scale in (1.0, 4.0):
        MTPLossAutoScaler.set_loss_scale(torch.tensor(scale))
        own.zero_grad()
        own(tokens, labels=tokens).mean().backward()
        gradients.append(own.mtp.layers[1].eh_proj.weight.grad.clone())
    torch.testing.assert_close(gradients[1], 4 * gradients[0])


def test_no_part_looks_into_another_sequence():
    own, lengths = model(), (9, 1, 14)
    tokens, labels = random_tokens(1, 26), random_tokens(1, 26)  # two rows of padding
    own(tokens, labels=labels, packed_seq_params=packed_params(0, 9, 10, 24))
    together, sums = own.mtp.losses, torch.zeros(2)
    for x, y in zip(tokens[:, :24].split(lengths, 1), labels[:, :24].split(lengths, 1)):
        own(x, labels=y)
        sums += own.mtp.losses * torch.tensor([x.shape[1] - 1, x.shape[1] - 2]).clamp(min=0)
    torch.testing.assert_close(together, sums / torch.tensor([8 + 13.0, 7 + 12.0]))


def test_labels_to_ignore_count_for_nothing():
    own, tokens = model(), random_tokens(1, 20)
    labels = random_tokens(1, 20)
    mask = torch.rand(1, 20) > 0.4
    own(tokens, labels=labels, loss_mask=mask.float())
    masked = own.mtp.losses
    own(tokens, labels=labels.masked_fill(~mask, -100))
    torch.testing.assert_close(own.mtp.losses, masked)


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9},
        {"recompute_granularity": "selective", "recompute_modules": ["mamba", "core_attn"]},
    ],
)
def test_recompute(fields):
    tokens, gradients = random_tokens(1, 20), []
    for own in (model(hidden_dropout=0.1), model(hidden_dropout=0.1, **fields)):
        torch.manual_seed(0)
        own(tokens, labels=tokens).mean().backward()
        gradients.append({name: p.grad for name, p in own.named_parameters()})
    assert all(torch.equal(g, gradients[1][name]) for name, g in gradients[0].items())


@pytest.mark.parametrize("repeats", [False, True])
def test_a_folder_keeps_the_weights(tmp_path, repeats):
    own = model(mtp_use_repeated_layer=repeats)
    save_checkpoint(own, tmp_path / "ours")
    save_megatron(own, tmp_path / "theirs")
    expected = dict(own.named_parameters())
    assert any(name.startswith("mtp.layers.1.") for name in expected) != repeats
    ours = load_pretrained(tmp_path / "ours", mtp=True)[0]
    for read in (ours, load_megatron(tmp_path / "theirs")):
        assert {name for name, _ in read.named_parameters()} == expected.keys()
        assert all(torch.equal(p, expected[name]) for name, p in read.named_parameters())
        assert read.config.layer_pattern == PATTERN and read.config.mtp_num_layers == 2
        assert read.config.mtp_use_repeated_layer == repeats


def test_serving_and_evaluation_run_the_model_alone():
    own, tokens = tiny_model("M*-/M*"), list(range(20))
    alone = tiny_model.__wrapped__("M*-")
    state = {name: t for name, t in own.state_dict().items() if not name.startswith("mtp.")}
    alone.load_state_dict(state)
    assert len(own.cache_requirements()) == 3
    answers = [tiny_engine(one).generate([tokens], greedy(6))[0] for one in (own, alone)]
    assert answers[0].token_ids == answers[1].token_ids
    own(torch.tensor([tokens]), labels=torch.tensor([tokens]))
    assert own.mtp.losses is None


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"mtp_num_layers": 1}, "mtp_num_layers is 1, but layer_pattern 'MG.*' has 2 parts after"),
        ({"pattern": "M*", "mtp_num_layers": 1}, "has 0 parts after '/'. Leave mtp_num_layers"),
        ({"pipeline_model_parallel_size": 2}, "has no embedding. Use one stage"),
        ({"pattern": "M/E"}, "num_moe_experts is None"),
    ],
)
def test_one_clear_error(fields, message):
    with pytest.raises(ValueError, match=message):
        small_config(fields.pop("pattern", PATTERN), **fields)


def test_tokens_are_needed_beside_a_decoder_input():
    own, tokens = model(), random_tokens(1, 8)
    with pytest.raises(ValueError, match="Pass input_ids with decoder_input"):
        own(None, decoder_input=own.embedding(tokens, None), labels=tokens)
