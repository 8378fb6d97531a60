"""Runs a script of Megatron-LM on a CPU: `python -m megatron_hybrid.megatron cpu_shim.py SCRIPT`.

Arguments, tokenizer and configs are Megatron's own; the model of `--load` is read by
`load_megatron`, since theirs loads by CUDA.
"""

import runpy
import sys

import megatron.training
import torch
import torch.distributed as dist
from megatron.inference import utils as inference_utils
from megatron.training import global_vars, initialize
from torch.overrides import TorchFunctionMode

import megatron_hybrid as mh


class OnCPU(TorchFunctionMode):
    """Tensors that ask for a GPU lie on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def initialize_megatron(*_, **__) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    for name in ("reset_peak_memory_stats", "synchronize"):
        setattr(torch.cuda, name, lambda: None)
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_: None)
    torch.cuda.max_memory_allocated = lambda: 0
    torch.cuda.memory_stats = lambda: {
        f"{kind}_bytes.all.peak": 0 for kind in ("allocated", "reserved")
    }
    for module in (megatron.training, initialize):
        module.initialize_megatron = initialize_megatron
    inference_utils.get_model_for_inference = lambda: mh.load_megatron(
        global_vars.get_args().load, device="cpu"
    )
    script, *rest = sys.argv[1:]
    sys.argv = [script, *rest]
    with OnCPU():
        runpy.run_path(script, run_name="__main__")
