"""load_pretrained: a trained model and its tokenizer, from a folder or from the package."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint
from megatron_hybrid.checkpoints.folder import CheckpointFolder
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.distributed.ranks import fail_together
from megatron_hybrid.distributed.rendezvous import announce_failure
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.config.precision import DTYPES
from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
from megatron_hybrid.models.sharding.parallel_setup import initialize_distributed
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.text.tokenizer_files import find_tokenizer
from megatron_hybrid.utils.other_names import names_arguments
from megatron_hybrid.utils.validation import check_field

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "demo_model"


@names_arguments(HybridConfig)
def load_pretrained(
    folder: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    mtp: bool = False,
    **overrides: Any,
) -> tuple[HybridModel, Tokenizer | None]:
    """Load a model in eval mode, and its tokenizer (None if the folder has none).

    Args:
        folder: a checkpoint of ours, a model folder of Hugging Face (one of the architectures in
            docs/reference/models.md), or "demo" for the small model in the package.
        device: of the weights, such as "cuda"; None means torch's default device.
        dtype: of the weights, or its name, such as "bfloat16"; None means as saved. In half
            precision, the operands of fp32 computations stay in fp32, unrounded: routers, their
            biases, and the `A_log`, `D` and `dt_bias` of recurrent layers.
        mtp: also load the MTP head, if the folder has one: to draft with it
            (`speculation="mtp"`), to train it, or to write the whole model back.
        overrides: HybridConfig fields to replace, such as tensor_model_parallel_size.

    Raises:
        CheckpointError: the folder is not a checkpoint, or a broken one; on all ranks, if one of
            them finds it so.
        TypeError: there is no such argument; the message gives the right one.
        ValueError: this machine has no such device, or there is no dtype of this name.
    """
    if isinstance(dtype, str):
        check_field("dtype", dtype, Literal[tuple(DTYPES)])
        dtype = DTYPES[dtype]
    initialize_distributed()
    with announce_failure("load_pretrained()"):
        with fail_together(CheckpointError):
            device = checked_device(device)
            opened = CheckpointFolder(checked_folder(folder))
            if dtype is not None:
                overrides["params_dtype"] = dtype
            opened.check_quantization()
            # Random initialization would take longer than reading the file.
            config = opened.config(mtp, perform_initialization=False, **overrides)
            tokenizer = load_tokenizer(opened.path, config.vocab_size, opened.values)
            is_packed = opened.is_packed
        # Parameters that packed weights replace are never written: they take no room in a CPU's
        # memory.
        with torch.device("cpu") if is_packed else device:
            model = build_hybrid_model(config)
        load_checkpoint(model, opened, cast=dtype is not None)
        return model.to(device).eval(), tokenizer


def model_folder(name: str | os.PathLike[str]) -> Path:
    """Return the path of a model folder; "demo" is the one in the package."""
    return DEMO_FOLDER if str(name) == DEMO else Path(name)


def open_config(name: str | os.PathLike[str]) -> CheckpointFolder:
    """Open a `model_folder`, or the folder of a config.json. Raises CheckpointError if there is no
    config that can be read."""
    path = model_folder(name)
    if not path.exists():
        advice = hub_advice(name)
        raise CheckpointError(f"{path} is not there: name a folder or a config.json.{advice}")
    return CheckpointFolder(path) if path.is_dir() else CheckpointFolder(path.parent, path.name)


def checked_folder(name: str | os.PathLike[str]) -> Path:
    """Find a `model_folder`. Raises CheckpointError if there is no such folder."""
    path = model_folder(name)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder. Give the folder of a checkpoint (config.json, "
            f"model.safetensors, tokenizer.json), or {DEMO!r} for the model in the package."
            f"{hub_advice(name)}"
        )
    return path


def hub_advice(name: str | os.PathLike[str]) -> str:
    """Advise on a missing folder whose name looks like a model of a hub; "" for other names."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)):
        return ""
    return (
        f" A model of the Hugging Face Hub has to be downloaded first: `hf download {name} "
        "--local-dir FOLDER`."
    )


def checked_device(device: str | torch.device | None) -> torch.device:
    """Return a device, torch's default one for None. Raise ValueError if it cannot be used."""
    if device is None:
        device = torch.get_default_device()
    if not re.fullmatch(r"(cpu|cuda)(:\d{1,2})?", str(device)):
        raise ValueError(f"device is {device!r}; use 'cpu', 'cuda' or 'cuda:1'")
    checked = torch.device(device)
    if checked.type == "cuda" and (checked.index or 0) >= torch.cuda.device_count():
        has_cuda = torch.version.cuda or torch.version.hip
        why = f"finds {torch.cuda.device_count()} GPUs" if has_cuda else "is a build for CPUs"
        raise ValueError(
            f"device is {device!r}, and torch {torch.__version__} {why}: use another device, or "
            "install the build of torch for your GPU"
        )
    return checked


def load_tokenizer(
    path: Path, vocab_size: int, config: Mapping[str, Any] | None = None
) -> Tokenizer | None:
    """Load the tokenizer of a model folder; None if it has none.

    config: content of its config.json, if it was read.

    Raises:
        CheckpointError: it cannot be read, or has more tokens than the model.
    """
    file = find_tokenizer(path)
    if file is None:
        return None
    try:
        tokenizer = Tokenizer.from_folder(path, config)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if tokenizer.base_vocab_size > vocab_size:
        raise CheckpointError(
            f"{file} has {tokenizer.base_vocab_size} tokens, but the model's "
            f"vocab_size is {vocab_size}. They do not belong together."
        )
    return tokenizer
