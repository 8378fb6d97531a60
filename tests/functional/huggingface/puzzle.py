"""Nemotron-H whose layers have sizes of their own, put together of transformers' layers, as
transformers has no class for it."""

import copy

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModelForCausalLM, NemotronHConfig, NemotronHForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock

NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


@strict
class PuzzleConfig(NemotronHConfig):
    model_type = "nemotron_h_puzzle"
    block_configs: list | None = None

    def __post_init__(self, **kwargs):
        types = [block["block_type"] for block in self.block_configs or ()]
        self.layers_block_type = [NAMES.get(each, each) for each in types] or None
        super().__post_init__(**kwargs)


class PuzzleForCausalLM(NemotronHForCausalLM):
    config_class = PuzzleConfig

    def __init__(self, config):
        super().__init__(config)
        for i, block in enumerate(config.block_configs):
            own = copy.copy(config)
            for key in block.keys() - {"block_type"}:
                setattr(own, key, block[key])
            self.model.layers[i] = NemotronHBlock(own, i)
        self.post_init()


AutoConfig.register("nemotron_h_puzzle", PuzzleConfig)
AutoModelForCausalLM.register(PuzzleConfig, PuzzleForCausalLM)
_, *experts = get_checkpoint_conversion_mapping("nemotron_h")
register_checkpoint_conversion_mapping("nemotron_h_puzzle", experts)
