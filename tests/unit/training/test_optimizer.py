"""Optimizers over a model of one rank, against torch's own on the same gradients."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from small_models import small_fields
from stock_megatron import core_groups

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.training.core_cpu_patch import core_cpu_patch
from megatron_hybrid.training.lora import LoraFields, add_adapters
from megatron_hybrid.training.optimizer import (
    OptimizerFields,
    build_optimizer,
    build_schedule,
    describe_optimizers,
    is_layer_matrix,
    update,
)

CONFIG = small_fields("M-*EG", num_moe_experts=2, moe_ffn_hidden_size=16)
RATE, DECAY = 1e-2, 0.1
UNDECAYED = {"A_log", "D", "dt_bias", "bias"}


@pytest.fixture(autouse=True)
def on_cpu():
    core_groups()
    with core_cpu_patch():
        yield


def wrapped(dtype=torch.float32, distributed=False, has_adapters=False, **fields):
    config = HybridConfig(**{**CONFIG, **fields}, params_dtype=dtype)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
    )
    model = build_hybrid_model(config)
    if has_adapters:
        add_adapters(model, LoraFields(rank=2))
    return DistributedDataParallel(config, ddp_config, model)


def fields(**values):
    return OptimizerFields.of(
        "optimizer",
        {"learning_rate": RATE, "weight_decay": DECAY, "decay": "constant", **values},
    )


def backward(chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(CONFIG["vocab_size"], (1, 24), generator=generator)
    chunk.zero_grad_buffer()
    chunk(ids[:, :-1], labels=ids[:, 1:].contiguous()).mean().backward()
    chunk.finish_grad_sync()


def decays(name, parameter):
    is_matrix = parameter.dim() == 2 or ".experts." in name
    return is_matrix and name.rpartition(".")[2] not in UNDECAYED


def matrices_of(name, parameter):
    """Matrices of a parameter for Muon: those of a stack of experts, and queries, keys, values."""
    if parameter.dim() == 3:
        return list(parameter)
    if "layers.4.self_attention.in_proj" in name:  # Gated DeltaNet's, with z, beta and alpha
        return list(parameter.split([32, 32, 96, 96, 4, 4]))
    if "linear_qkv" not in name:
        return [parameter]
    groups = parameter.view(2, 48, 48)  # of 24 rows of queries, 12 of keys, 12 of values
    return [groups[:, a:b].reshape(-1, 48) for a, b in ((0, 24), (24, 36), (36, 48))]


class TorchMuon:
    """torch's own on copies of the matrices, which are compared with those of each parameter."""

    def __init__(self, mains):
        self.mains = mains
        self.copies = {
            name: [torch.nn.Parameter(each.detach().clone()) for each in matrices_of(name, main)]
            for name, main in mains.items()
        }
        self.optimizer = torch.optim.Muon(
            [each for copies in self.copies.values() for each in copies],
            lr=RATE,
            weight_decay=DECAY,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        )

    @torch.no_grad()
    def step(self):
        for name, main in self.mains.items():
            for copy, gradient in zip(self.copies[name], matrices_of(name, main.grad)):
                copy.grad = gradient.clone()
        self.optimizer.step()
        for name, main in self.mains.items():
            copies = self.copies[name]
            if "linear_qkv" in name:
                whole = torch.cat([each.view(2, -1, 32) for each in copies], 1)
            else:
                whole = torch.cat(list(copies))
            main.copy_(whole.view_as(main))


def torch_optimizers(mains, kind):
    matrices = {n: p for n, p in mains.items() if kind == "muon" and is_layer_matrix(n, p)}
    others = {n: p for n, p in mains.items() if n not in matrices}
    groups = [
        {"params": [p for n, p in others.items() if decays(n, p) == own], "weight_decay": decay}
        for own, decay in ((True, DECAY), (False, 0.0))
    ]
    if kind == "sgd":
        return [torch.optim.SGD(groups, lr=RATE, momentum=0.95)]
    optimizers = [torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))]
    if matrices:
        assert any("experts" in name for name in matrices)
        optimizers.append(TorchMuon(matrices))
    return optimizers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "distributed"),
    [("adam", False), ("adam", True), ("muon", False), ("sgd", False)],
)
def test_updates_are_those_of_torch_on_fp32_copies(name, distributed, dtype):
    chunk = wrapped(dtype, distributed)
    optimizer = build_optimizer([chunk], fields(name=name, distributed=distributed))
    build_schedule(optimizer, fields(name=name), steps=10).step(1)
    parameters = dict(chunk.module.named_parameters())
    mains = {n: torch.nn.Parameter(p.detach().float().clone()) for n, p in parameters.items()}
    assert any(p.dtype == torch.float32 for p in parameters.values())
    reference = torch_optimizers(mains, name)
    for step in range(3):
        backward(chunk, step)
        for n, parameter in parameters.items():
            mains[n].grad = parameter.main_grad.clone()
        norm = torch.nn.utils.get_total_norm([main.grad for main in mains.values()])
        updated, own_norm = update(optimizer)
        assert updated and own_norm == pytest.approx(norm.item(), rel=1e-5)
        # By the same norm: where its last bit differs, Muon's iterations in bf16 amplify that.
        own_norm = torch.tensor(own_norm, dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(mains.values(), 1.0, own_norm)
        for one in reference:
            one.step()
        for n, parameter in parameters.items():
            # One of the two may round up where the other rounds down.
            rtol = 1e-5 if parameter.dtype == torch.float32 else 2**-7
            expected = mains[n].to(parameter.dtype)
            torch.testing.assert_close(parameter, expected, rtol=rtol, atol=1e-6, msg=n)


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_adapters_decay_and_are_trained_by_adam(name):
    chunk = wrapped(has_adapters=True)
    optimizer = build_optimizer([chunk], fields(name=name))
    assert "Muon" not in describe_optimizers(chunk.module, fields(name=name))
    build_schedule(optimizer, fields(), steps=10).step(1)
    learning = {n: p for n, p in chunk.module.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in learning.items()}
    chunk.zero_grad_buffer()
    chunk.finish_grad_sync()
    update(optimizer)
    assert learning and any(value.any() for value in before.values())
    for n, parameter in learning.items():
        torch.testing.assert_close(parameter, before[n] * (1 - RATE * DECAY))


def rates(optimizer, schedule, steps):
    found = []
    for _ in range(steps):
        schedule.step(1)
        group = next(group for group in optimizer.param_groups if group["wd_mult"])
        found.append((group["lr"], group["weight_decay"]))
    return found


def test_rates_rise_stay_and_fall():
    chosen = fields(
        decay="WSD", warmup_steps=4, decay_steps=5, min_learning_rate=1e-3, end_weight_decay=0.2
    )
    optimizer = build_optimizer([wrapped()], chosen)
    found = rates(optimizer, build_schedule(optimizer, chosen, 20), 20)
    learning_rates = [rate for rate, _ in found]
    assert learning_rates[:4] == pytest.approx([RATE / 4, RATE / 2, 3 * RATE / 4, RATE])
    assert learning_rates[4:15] == pytest.approx([RATE] * 11)
    assert learning_rates[15:] == pytest.approx([8.2e-3, 6.4e-3, 4.6e-3, 2.8e-3, 1e-3])
    assert [decay for _, decay in found] == pytest.approx([0.1 + 0.005 * i for i in range(1, 21)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "muon", "distributed": True}, "optimizer muon with distributed=true: "),
        ({"name": "sgd", "distributed": True}, "optimizer sgd with distributed=true: "),
        ({"decay": "WSD"}, "decay_steps is None"),
        ({"decay_steps": 5}, "WSD alone has"),
        ({"min_learning_rate": 1.0}, "above the learning_rate"),
    ],
)
def test_a_field_without_a_legal_value_is_refused(values, message):
    with pytest.raises(ValueError) as error:
        fields(**values)
    assert message in str(error.value)


def test_fp16_is_refused():
    with pytest.raises(ValueError, match=r"params_dtype is float16.*Use bfloat16"):
        build_optimizer([wrapped(torch.float16)], fields())
