"""Arguments that several commands share, and how they are read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GIVE_MODEL = "give a model, as MODEL or as --model MODEL"
MODEL_HELP = (
    "Load this model: a checkpoint folder, of this package or from Hugging Face, or 'demo', the "
    "small model in the package."
)
PLANNED_MODEL_HELP = (
    "Take this model: a checkpoint folder, a config.json, the name of a recipe in the package "
    "such as nemotron_h_8b, a recipe's YAML file that sets model.vocab_size, or 'demo'."
)


DTYPES = ("bfloat16", "float16", "float32")


class CommandParser(argparse.ArgumentParser):
    """Reads the arguments of one command. Errors show its usage.

    Args:
        name: of the command.
        about: sentences at the head of the help.
    """

    def __init__(self, name: str, about: str):
        super().__init__(
            prog=f"megatron-hybrid {name}", description=about, formatter_class=_Formatter
        )

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options, and the `arguments` that they were read from. Positional arguments may stand
        before, between and behind others."""
        options = self.parse_intermixed_args(arguments)
        options.arguments = list(arguments)
        if getattr(options, "model", "") is None:
            self.error(GIVE_MODEL)
        return options


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the defaults of options to the help, except None, False and what is empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default in ([], "", math.inf):
            return action.help
        return super()._get_help_string(action)


class _Model(argparse.Action):
    """Takes the model in either way, but not in both."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        is_option = option_string is not None
        if getattr(namespace, "is_model_option", is_option) != is_option:
            parser.error(f"the model is given twice, as {namespace.model} and as {values}")
        namespace.model, namespace.is_model_option = values, is_option


def add_model(
    parser: argparse.ArgumentParser, default: str | None = "demo", about: str = MODEL_HELP
) -> None:
    """Add `model`, which may be given as an argument or as `--model`. default: None: there is none,
    and the model has to be given."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", action=_Model, default=argparse.SUPPRESS, help=about
    )
    parser.add_argument(
        "--model",
        action=_Model,
        default=default,
        help="Name the model by this option, in place of the argument MODEL.",
    )


def add_prompts(parser: argparse.ArgumentParser, about: str) -> None:
    """Add `prompt`, a list."""
    about += " The option may be given several times."
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT", help=about)


def add_state_encoding(parser: argparse.ArgumentParser) -> None:
    """Add `state_encoding`."""
    parser.add_argument(
        "--state-encoding",
        default="exact",
        metavar="ENCODING",
        help="Store cached recurrent states in this number format: exact keeps all bits; bf16 and "
        "int8 round them, so that more states fit.",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `json`, a flag."""
    parser.add_argument("--json", action="store_true", help="Print JSON in place of a table.")


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """Add `chat_template`."""
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Write chats by the Jinja template in this file, in place of the model's own "
        "template.",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the model and the settings of an engine."""
    add_model(parser)
    parser.add_argument(
        "--device",
        help="Run the model on this device, such as cpu, cuda or cuda:1. The default is cuda if "
        "there is a GPU, else cpu.",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="Convert the weights to this number format. By default they keep their saved format "
        "on a GPU, and are float32 on a CPU.",
    )
    parser.add_argument(
        "--context",
        default="8192",
        metavar="TOKENS",
        help="Allow a prompt and its answer at most this many tokens together, such as 4096, 100k "
        "(100,000) or 1M (max_sequence_length).",
    )
    parser.add_argument(
        "--mode",
        default="restore",
        help="Reuse the shared beginnings of prompts in this way. restore computes a shared "
        "beginning once. memory_only computes it for each prompt, but stores its keys and "
        "values once. off shares nothing (prefix_caching).",
    )
    parser.add_argument(
        "--cache-mib",
        type=int,
        metavar="MIB",
        help="Give the cache this size, in MiB. It holds the keys and values of attention, and "
        "saved states (cache_bytes). The default follows from --memory-fraction.",
    )
    parser.add_argument(
        "--memory-fraction",
        type=float,
        default=0.9,
        metavar="PART",
        help="Without --cache-mib, give the cache this part, up to 1, of the memory that the "
        "model leaves free; on a CPU at most a quarter of the available memory (memory_fraction).",
    )
    parser.add_argument(
        "--host-cache-mib",
        type=int,
        default=0,
        metavar="MIB",
        help="Keep evicted states, keys and values in this much host memory, in MiB; 0 keeps none "
        "(host_cache_bytes).",
    )
    add_state_encoding(parser)
    parser.add_argument(
        "--cache-dir",
        metavar="FOLDER",
        help="Save the cache in this folder at the end, and start with the cache that is saved "
        "there. Prompts of fewer than 16 tokens are not saved. Each rank has its own folder "
        "in this one. By default nothing is saved.",
    )


def add_served_engine(parser: argparse.ArgumentParser) -> None:
    """Add what an engine for many requests is asked for beside `add_engine`."""
    parser.add_argument(
        "--max-requests",
        type=int,
        default=64,
        metavar="N",
        help="Run at most N requests at a time.",
    )
    parser.add_argument(
        "--speculation",
        default="off",
        metavar="HOW",
        help="Draft the next tokens of answers, and check several drafts in a step; answers are "
        "the same. lookup drafts the tokens that followed the same tokens before. mtp drafts "
        "by the model's part for multi-token prediction, if the model has one. off drafts "
        "nothing.",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=3,
        metavar="N",
        help="With --speculation lookup or mtp, draft at most N tokens of a request in a step.",
    )
    parser.add_argument(
        "--cuda-graphs",
        action="store_true",
        help="Capture the steps that only generate tokens as CUDA graphs, and replay these. A GPU "
        "then waits less for Python. By default no graphs are captured.",
    )
    parser.add_argument(
        "--no-warm-up",
        action="store_false",
        dest="warm_up",
        help="Start without a warm-up: the first requests then wait until their kernels are "
        "compiled. By default a GPU compiles kernels before the first request (warm_up).",
    )
    parser.add_argument(
        "--logprobs-mode",
        default="raw_logprobs",
        metavar="MODE",
        help="Return log-probabilities of this kind. raw_logprobs are the model's own. "
        "processed_logprobs are those of the distribution that tokens are drawn from, after "
        "the request's temperature and other sampling parameters (logprobs_mode).",
    )


PYTHON_NAMES = "A name in brackets is the name of the setting in Python; errors use this name."


def inference_config(options: argparse.Namespace, **fields: Any):
    """An InferenceConfig from the options of `add_engine`, and other fields."""
    from megatron_hybrid.inference.config import InferenceConfig
    from megatron_hybrid.tools.plan import parse_count

    return InferenceConfig(
        prefix_caching=options.mode,
        cache_bytes=None if options.cache_mib is None else options.cache_mib << 20,
        memory_fraction=options.memory_fraction,
        host_cache_bytes=options.host_cache_mib << 20,
        max_sequence_length=parse_count(options.context),
        state_encoding=options.state_encoding,
        cache_dir=options.cache_dir,
        **fields,
    )


def served_config(options: argparse.Namespace):
    """An InferenceConfig from the options of `add_engine` and `add_served_engine`."""
    return inference_config(
        options,
        max_requests=options.max_requests,
        speculation=options.speculation,
        num_speculative_tokens=options.num_speculative_tokens,
        cuda_graphs=options.cuda_graphs,
        warm_up=options.warm_up,
        logprobs_mode=options.logprobs_mode,
    )


def make_engine(options: argparse.Namespace):
    """An engine from the options of `add_engine`, for a few requests: it compiles no more than
    these need."""
    from megatron_hybrid.inference.engine import DynamicInferenceEngine

    config = inference_config(options, warm_up=False)
    return DynamicInferenceEngine(*load(options.model, options.device, options.dtype), config)


def load(
    folder: str,
    device: str | None = None,
    dtype: str | None = None,
    mtp: bool = False,
    **sizes: int,
):
    """Load model and tokenizer, on the GPU if there is one; on a CPU in fp32, which is faster there
    and avoids near ties in greedy answers.

    Args:
        folder: of the model.
        device, dtype: in place of these; see `add_engine`.
        mtp: see `load_pretrained`.
        sizes: of the layout over ranks, fields of HybridConfig.
    """
    import torch

    from megatron_hybrid.checkpoints.checkpoint import CheckpointError
    from megatron_hybrid.checkpoints.pretrained import checked_device, load_pretrained

    place = checked_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None and place.type == "cpu":
        dtype = "float32"
    converted = None if dtype is None else getattr(torch, dtype)
    model, tokenizer = load_pretrained(folder, place, converted, mtp, **sizes)
    if tokenizer is None:
        raise CheckpointError(f"{folder} has no tokenizer.json, which text prompts need")
    return model, tokenizer


def load_for_chats(options: argparse.Namespace, **sizes: int):
    """Model and tokenizer, with the template and the drafts that were asked for. sizes: as for
    `load`."""
    mtp = getattr(options, "speculation", None) == "mtp"
    model, tokenizer = load(options.model, options.device, options.dtype, mtp, **sizes)
    if options.chat_template:
        try:
            source = Path(options.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise OSError(f"--chat-template {options.chat_template}: {error.strerror}") from error
        tokenizer.set_chat_template(source, options.chat_template)
    return model, tokenizer


def planned_config(model: str, mtp: bool = False):
    """The config of a model that need not be here: see PLANNED_MODEL_HELP. mtp: with its part for
    multi-token prediction; a recipe has it as it says."""
    from megatron_hybrid.tools.plan import read_model_config
    from megatron_hybrid.training.recipe import Recipe

    # "demo" is the model of the package, not its recipe.
    if model != "demo" and Recipe.path_of(model).suffix == ".yaml":
        return Recipe.load(model).whole_model_config(mtp)
    return read_model_config(model, mtp)


def check_file(option: str, path: str) -> None:
    """Raise ValueError for a path that no file can be written to."""
    if path.endswith("/") or Path(path).is_dir():
        raise ValueError(f"{option} {path} is a folder: give the name of a file in it")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no such folder; make it first")


def gigabytes(text: str) -> float:
    """A size in GB (10^9 bytes)."""
    try:
        number = float(text.lower().removesuffix("gb"))
    except ValueError:
        number = math.nan
    if not 0 < number < 1e9:  # also NaN
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a number of GB above 0 and below a billion"
        )
    return number


def whole_number(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 on")
    return number
