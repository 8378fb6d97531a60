"""Compiles what published models launch on GPUs that are not there, and tells what it needs.

python tests/helpers/ahead_of_time.py  # a line for each kernel of ours and GPU, and a table

A model is cut to a layer of each kind, and to narrow projections between them. What a kernel
depends on stays: heads and their widths, states, windows, chunks, convolutions. An engine on the
CPU runs prompts and decodes and captures states, by launches that do nothing but compile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_stub
import torch
import triton
import wgmma

if TYPE_CHECKING:
    from megatron_hybrid import HybridConfig

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "functional" / "huggingface" / "hub_configs"
"""config.json as published."""

OTHER_SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "falcon_h1_1_5b": (
        "falcon_h1_0_5b",
        {"kv_channels": 128, "mamba_num_heads": 48, "mamba_state_dim": 256},
    ),
    "falcon_h1_34b": (
        "falcon_h1_0_5b",
        {
            **{"num_attention_heads": 20, "num_query_groups": 4, "kv_channels": 128},
            **{"mamba_num_heads": 32, "mamba_head_dim": 128, "mamba_state_dim": 256},
            "mamba_num_groups": 2,
        },
    ),
    "gemma_3_12b": ("gemma_3_4b", {"num_attention_heads": 16, "num_query_groups": 8}),
    "jamba_1_5_large": ("jamba_1_5_mini", {"num_attention_heads": 64, "mamba1_inner_size": 16384}),
    "llama_3_1_70b": ("llama_3_1_8b", {"num_attention_heads": 64}),
    "mamba2_2_7b": ("mamba_codestral_7b", {"mamba_num_heads": 80, "mamba_num_groups": 1}),
    "nemotron_h_56b": (
        "nemotron_h_8b",
        {"num_attention_heads": 64, "mamba_num_heads": 256, "mamba_state_dim": 256},
    ),
    "qwen3_5_27b": ("qwen3_5_4b", {"num_attention_heads": 24, "linear_num_value_heads": 48}),
}
"""Checkpoint -> a smaller one of its architecture, and where its layers differ."""

ODD = {
    "vocab_size": 128,
    "num_attention_heads": 6,
    "kv_channels": 20,
    "attention_chunk_size": 30,
    "softmax_type": "learnable",
    "attention_logit_softcap": 30.0,
    "mamba_head_dim": 24,
    "mamba_state_dim": 20,
    "mamba_num_heads": 6,
    "mamba_num_groups": 3,
    "mamba_chunk_size": 16,
    "mamba1_state_dim": 5,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
    "linear_chunk_size": 32,
}
"""With those of `small_config`: no powers of two, and no stride of 16 bytes follows from any."""

NARROW = {
    "hidden_size": 64,
    "vocab_size": 128,
    "ffn_hidden_size": 64,
    "num_moe_experts": 4,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 32,
    "num_residual_streams": None,
}
"""Fields on which no kernel of ours depends, where a model has them; but a gated short convolution
has `hidden_size` channels."""

WITHOUT_KERNELS = "-EBP"
"""Symbols of layers that launch none of ours."""

FORMS: dict[str, tuple[int, dict[str, float]]] = {
    "heads": (16, {}),
    "pages": (256, {}),
    "windows": (16, {"window": 1024}),
    "chunks": (16, {"chunk": 512, "softcap": 30.0}),
}
"""Prefills of attention alone, by the first part of a name: tokens of a page, and the pattern.
"windows_192x128" has keys 192 wide and values 128."""

PROMPTS = ((1100,), (61, 24))
"""Lengths of those that run side by side: a few keys and many, alone and not."""
CAPTURED = 21
"""A position in all of them whose states are captured."""

OWN = "megatron_hybrid.ops."
"""The package of our kernels."""


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs; see `gpu_stub.Kernel`."""

    model: str
    """The first one that launches it."""
    dtype: str
    """Of the model."""
    kernel: str
    gpu: str
    triton: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_wgmma: int
    races: list[str]
    """See `wgmma.races`."""
    options: dict[str, int]
    constants: dict[str, Any]
    divisible: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help="such as nemotron_h_8b:bfloat16; all by default")
    parser.add_argument("--gpu", type=int, choices=gpu_stub.DEVICES, help="one of them alone")
    arguments = parser.parse_args()
    if arguments.gpu is not None:
        warnings.simplefilter("ignore")  # of libraries that are not there
        models = arguments.models or all_models()
        record = gpu_stub.install(arguments.gpu)
        for compiled in compile_all(record, models):
            print(json.dumps(asdict(compiled), default=str), flush=True)
        return
    rows = []
    for gpu in gpu_stub.DEVICES:  # a process each: libraries and Triton keep to the first one
        command = [sys.executable, *sys.argv, "--gpu", str(gpu)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                rows.append(json.loads(line))
        if process.returncode:
            sys.exit(process.returncode)
    print(table(rows), file=sys.stderr)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The most that each kernel needs, in markdown."""
    cases = defaultdict(list)
    for row in rows:
        cases[row["kernel"]].append(row)
    lines = [
        "| kernel | cases | registers of a thread | spilled bytes | shared memory of a block |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for kernel, its in sorted(cases.items()):
        registers, spilled, shared = (
            max(row[name] for row in its) for name in ("registers", "spilled_bytes", "shared_bytes")
        )
        kibibytes = -(-shared // 1024)
        lines.append(f"| `{kernel}` | {len(its)} | {registers} | {spilled} | {kibibytes} KiB |")
    return "\n".join(lines)


def compile_all(record: gpu_stub.Record, models: Iterable[str]) -> Iterator[Compiled]:
    """Each kernel of ours that the models launch, once.

    Args:
        record: of `gpu_stub.install`.
        models: some of `all_models()`, or names of `FORMS`.
    """
    gpu_stub.let_backends_serve_the_cpu()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # or libraries would refuse float32
    known = 0
    with _launches():
        for model, dtype in (name.split(":") for name in models):
            form, _, widths = model.partition("_")
            if form in FORMS:
                _prefill(*FORMS[form], *map(int, widths.split("x")), dtype)
            else:
                config = cut_config(model, dtype)
                _answer(config)
                _norm_rows(config)
                _adapter_rows(config)
                _packed_rows(config)
            for kernel in list(record.kernels.values())[known:]:
                yield Compiled(
                    model,
                    dtype,
                    kernel.name.removeprefix(OWN),
                    kernel.gpu,
                    triton.__version__,
                    kernel.registers,
                    kernel.spilled_bytes,
                    kernel.shared_bytes,
                    kernel.num_wgmma,
                    wgmma.races(kernel.text("ttgir")) if kernel.num_wgmma else [],
                    kernel.options,
                    kernel.constants,
                    sorted(kernel.divisible),
                )
            known = len(record.kernels)


def all_models() -> list[str]:
    """Names and dtypes for `cut_config`, with a colon between."""
    names = [*sorted(path.stem for path in CONFIGS.glob("*.json")), *OTHER_SIZES, "odd"]
    return [f"{name}:{dtype}" for dtype in ("bfloat16", "float32") for name in names]


def cut_config(name: str, dtype: str) -> HybridConfig:
    """The configuration of a checkpoint, with the first layers up to one of each kind that
    launches kernels, and narrow between them."""
    from small_models import small_config

    from megatron_hybrid import HybridConfig
    from megatron_hybrid.checkpoints.folder import config_of

    if name == "odd":
        return small_config("MGKS*WL+C", params_dtype=getattr(torch, dtype), **ODD)
    base, changes = OTHER_SIZES.get(name, (name, {}))
    values = json.loads((CONFIGS / f"{base}.json").read_text(encoding="utf-8"))
    whole = config_of(values, base)
    kinds: dict[tuple, int] = {}
    symbols = whole.pattern.symbols
    for number, symbol in enumerate(symbols, 1):
        if symbol not in WITHOUT_KERNELS:
            overrides = sorted(whole.overrides_of(number, symbol).items())
            kinds.setdefault((symbol, repr(overrides)), number)
    cut = symbols[: max(kinds.values())]
    fields = whole.to_dict() | changes
    fields |= {field: value for field, value in NARROW.items() if fields.get(field) is not None}
    fields["moe_router_topk"] = min(2, whole.moe_router_topk)  # of one chosen expert more is asked
    if "C" in cut:
        fields["hidden_size"] = whole.hidden_size
    fields["layer_pattern"] = "".join(cut)
    fields["layer_overrides"] = {
        layers: own
        for layers, own in fields["layer_overrides"].items()
        if layers in cut or (layers.isdigit() and int(layers) <= len(cut))
    }
    return HybridConfig.from_dict(fields | {"huggingface_config": None, "params_dtype": dtype})


def _answer(config: HybridConfig) -> None:
    """Run a random model's engine, prefills and decodes, with states captured; then train it."""
    import numpy as np
    from unwritten_outputs import any_token

    from megatron_hybrid import (
        DynamicInferenceEngine,
        InferenceConfig,
        RequestOptions,
        SamplingParams,
        build_hybrid_model,
    )

    sizes = InferenceConfig(max_requests=4, max_tokens=2048, max_sequence_length=2048)
    model = build_hybrid_model(config)
    engine = DynamicInferenceEngine(model.eval(), None, sizes)
    params = SamplingParams(top_k=1, num_tokens_to_generate=3, ignore_termination=True)
    rng = np.random.default_rng(0)
    for lengths in PROMPTS:
        prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]
        with any_token():  # else logits that are no numbers end an answer before it decodes
            engine.generate(prompts, params, RequestOptions(cache_breakpoints=[CAPTURED]))
    engine.close()
    tokens = torch.ones(1, 2 * config.mamba1_chunk_size, dtype=torch.long)
    model.train()(tokens, labels=tokens).mean().backward()


def _norm_rows(config: HybridConfig) -> None:
    """Norms of residual sums as wide as those of published models; `NARROW` has none."""
    from megatron_hybrid.ops import rms_norm_of_sum

    for width in (2048, 4096, 16384):
        x_TC = torch.zeros(2, width, dtype=config.params_dtype)
        rms_norm_of_sum(x_TC, x_TC, torch.ones(width), config.layernorm_epsilon)


def _adapter_rows(config: HybridConfig) -> None:
    """Both products of an adapter of rank 16 in a projection of 4,096."""
    from megatron_hybrid.ops import slot_linear

    slots = torch.tensor([0, -1])
    for out, width in ((16, 4096), (4096, 16)):
        x_TC = torch.zeros(2, width, dtype=config.params_dtype)
        slot_linear(x_TC, x_TC.new_zeros(2, out, width), slots)


def _packed_rows(config: HybridConfig) -> None:
    """Products with packed weights of each format, of one layer and of experts."""
    from megatron_hybrid.ops import packed_linear

    e4m3, ends = torch.float8_e4m3fn, torch.tensor([1, 2], dtype=torch.int32)
    x_TC = torch.zeros(129, 4096, dtype=config.params_dtype)
    for codes, scale, group in (
        *((e4m3, torch.float32, 128), (torch.int8, torch.bfloat16, 4096)),
        *((torch.uint8, torch.bfloat16, 128), (torch.uint8, e4m3, 16)),
        (torch.uint8, torch.float8_e8m0fnu, 32),
    ):
        columns = 4096 if codes != torch.uint8 else 2048
        parts = [torch.zeros(2, 64, columns, dtype=torch.uint8).view(codes)]
        parts.append(torch.ones(2, 64, 4096 // group).to(scale))
        parts.append(torch.ones(2, 64, 1) if group == 16 else None)
        parts.append(parts[0][..., : 4096 // group].clone() if group == 128 else None)
        if codes == e4m3:
            parts.pop()
        packed_linear(x_TC, *parts, ends_E=ends)
        for rows in (x_TC, x_TC[:2]):
            packed_linear(rows, *(None if part is None else part[0] for part in parts))


def _prefill(block_size: int, form: dict[str, float], D: int, P: int, dtype: str) -> None:
    """Attention of one prompt; with sinks where it is local."""
    from megatron_hybrid.ops import AttentionPattern, RaggedLayout, paged_attention

    layout = RaggedLayout((200,), (100,))
    q = torch.zeros(layout.num_rows, 8, D, dtype=getattr(torch, dtype))
    keys, values = q.new_zeros(4, block_size, 2, D + P).split((D, P), dim=-1)
    table = torch.zeros(1, 512 // block_size, dtype=torch.int32)
    pattern = AttentionPattern(D**-0.5, **form)
    paged_attention(q, keys, values, table, layout, pattern, torch.zeros(8) if form else None)


@contextmanager
def _launches() -> Iterator[None]:
    """Launches that go on where a kernel of ours needs too much, so that one run tells of all.
    Those of libraries are left out."""
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def launch(self: JITFunction, *inputs: Any, **named: Any) -> Any:
        if self.module.startswith(OWN):
            with suppress(OutOfResources):
                return run(self, *inputs, **named)

    JITFunction.run = launch
    try:
        yield
    finally:
        JITFunction.run = run


if __name__ == "__main__":
    main()
