"""Tiny random models of transformers, and what they say: the outside world of the adapters."""

import copy
import functools
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import put_together  # noqa: F401
import torch
from matrix import matrix_rows
from safetensors.torch import load_file
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, conversion_mapping
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.step3p7 import modeling_step3p7 as step
from transformers.utils import logging

CONFIGS = Path(__file__).parent / "configs"
NOISE = 0.08
FROM_THE_CONFIG = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""How the names of buffers end that a model computes, and saves."""
WITH_OTHER_PARTS = ("falcon_h1_ungated_norm", "gemma4_experts", "nemotron_h_moe")
PLAIN = {
    *("ernie4_5", "exaone4", "granite", "granitemoe", "hunyuan_v1_dense", "mistral", "mixtral"),
    *("olmo2", "qwen2", "qwen2_moe", "qwen3", "seed_oss", "smollm3"),
}
"""Transformers of layers that others have, too: `make test` compares their logits alone."""

logging.disable_progress_bar()


class Step3p5ForCausalLM(step.Step3p7PreTrainedModel):
    """The language model of Step 3.7, which transformers has inside of the whole alone."""

    def __init__(self, config):
        super().__init__(config)
        self.model = step.Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, tokens, **kwargs):
        return CausalLMOutput(logits=self.lm_head(self.model(tokens, **kwargs).last_hidden_state))


# As in released folders, but for the prefixes of the whole.
mapping = conversion_mapping.get_checkpoint_conversion_mapping("step3p7")[5:]
conversion_mapping.register_checkpoint_conversion_mapping("Step3p5ForCausalLM", mapping)
Step3p5ForCausalLM.config_class = step.Step3p7TextModel.config_class
AutoModelForCausalLM.register(Step3p5ForCausalLM.config_class, Step3p5ForCausalLM, exist_ok=True)


def with_stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The six experts of each layer in two tensors."""
    layers = {name.partition("experts.0.")[0] for name in tensors if ".experts.0." in name}
    assert layers
    for layer in layers:
        gate, up, down = (
            torch.stack([tensors.pop(f"{layer}experts.{i}.{name}_proj.weight") for i in range(6)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{layer}experts.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"{layer}experts.down_proj"] = down
    return tensors


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder that are weights."""
    tensors = load_file(folder / "model.safetensors")
    return {name: each for name, each in tensors.items() if not name.endswith(FROM_THE_CONFIG)}


def config_names() -> list[str]:
    """One name for each tiny model: architecture, and variant where there are several."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def kept_names(left_out: Collection[str] = PLAIN) -> list[str]:
    """One tiny model an architecture, and those that have parts which no other one has."""
    kept = {}
    for name in config_names():
        kept.setdefault(read_values(name)["model_type"], name)
    return [kept[each] for each in kept if each not in left_out] + [*WITH_OTHER_PARTS]


def config_rows(left_out: Collection[str] = PLAIN) -> list:
    """Parameters of a test of all tiny models, of which `make test` runs those that are kept."""
    return matrix_rows(config_names(), *kept_names(left_out))


def read_values(name: str) -> dict[str, Any]:
    """The content of a tiny model's config file."""
    return json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))


def build(name: str, *, seed: int = 0, noise: float = NOISE, **changes: Any) -> PreTrainedModel:
    """`build_of` the tiny model's config. changes: of it."""
    return build_of({**read_values(name), **changes}, seed=seed, noise=noise)


def build_of(values: dict[str, Any], *, seed: int = 0, noise: float = NOISE) -> PreTrainedModel:
    """The model, each number of it drawn: no two tensors could be taken for one another.

    Args:
        values: its config.
        noise: standard deviation of what is added to the numbers that transformers draws.
    """
    values = dict(values)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in dict(model.state_dict(keep_vars=True)).items():
            if tensor.is_floating_point() and not name.endswith(FROM_THE_CONFIG):
                tensor.add_(torch.randn(tensor.shape, generator=generator) * noise)
    return model


class _WideFloats(TorchFunctionMode):
    """Whatever asks for float32 gets float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


@contextmanager
def in_float64() -> Iterator[None]:
    """Models are built and run in float64, where they cast to float32 too."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _WideFloats():
            yield
    finally:
        torch.set_default_dtype(default)


def twin_in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in float64; to be run `in_float64`, too."""
    with in_float64():
        twin = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.config),
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",  # the other one has no float64
        )
    twin.load_state_dict(model.state_dict())
    return twin.eval()


class Reference:
    """Full forward passes of transformers, without a cache: right for every architecture."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._greedy = functools.lru_cache(maxsize=4096)(self._predicted)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s] -> [b, s, vocab]."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)  # some do not default to it
        return self.model(tokens, position_ids=positions, use_cache=False).logits

    def is_greedy(self, prompt: list[int], generated: list[int]) -> bool:
        """Whether every generated token is the likeliest one after all tokens before it."""
        predicted = self._greedy((*prompt, *generated))
        return predicted[len(prompt) - 1 : -1] == generated

    def _predicted(self, tokens: tuple[int, ...]) -> list[int]:
        return self.logits(torch.tensor([tokens]))[0].argmax(-1).tolist()
