"""Arguments that several commands share, and how they are read."""

import argparse
import math
import re
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from megatron_hybrid.utils.field_help import fields_help
from megatron_hybrid.utils.other_names import PROGRAM, advice

ENGINE = "megatron_hybrid.inference.config.InferenceConfig"
SERVER = "megatron_hybrid.serving.config.ServingConfig"
SAMPLING = "megatron_hybrid.inference.sampling_params.SamplingParams"
MODELS_OWN = "The default is the model's own (generation_config.json), else"
MODEL_HELP = (
    "Load this model: a checkpoint folder, of this package or from Hugging Face, or 'demo', the "
    "small model in the package."
)
PLANNED_MODEL_HELP = (
    "Take this model: a checkpoint folder, a config.json, the name of a recipe in the package "
    "such as nemotron_h_8b, a recipe's YAML file that sets model.vocab_size, or 'demo'."
)
DTYPES = ("bfloat16", "float16", "float32")


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, and names the help in another."""

    def error(self, message: str) -> NoReturn:
        """Report an error, and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\nSee {self.prog} --help.\n")


class CommandParser(Parser):
    """The parser of one command. For a name that an option has in other programs, its error names
    the option here.

    Args:
        name: that of the command.
        about: sentences at the head of the help.
        prog: how to call a program that takes the command's options, in place of the command.
    """

    def __init__(self, name: str, about: str, prog: str | None = None):
        super().__init__(
            prog=prog or f"{PROGRAM}{name}",
            description=about,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        self._place = f"{PROGRAM}{name}"
        self.options: dict[str, str] = {}
        """Fields of `add_field` -> their options, for errors."""

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options, the `arguments` that they were read from, and `option_of`, the
        options of fields. Positional arguments may stand before, between and after others."""
        self._check_names(arguments)
        options = self.parse_intermixed_args(arguments)
        options.arguments, options.option_of = list(arguments), self.options
        if hasattr(options, "named_model"):
            given = [name for name in (options.model, options.named_model) if name is not None]
            if len(given) == 2:
                self.error(f"the model is given twice, as {given[0]} and as {given[1]}")
            (options.model,) = given or [options.default_model]
            if options.model is None and not getattr(options, "train", None):
                self.error("give a model, as MODEL or as --model MODEL")
        return options

    def _check_names(self, arguments: Sequence[str]) -> None:
        """Exit with 2 at the first unknown option, before other errors, which may follow from
        it."""
        known = self._option_string_actions
        for argument in takewhile(lambda argument: argument != "--", arguments):
            found = re.fullmatch(r"(--?[A-Za-z][\w.-]*)(=.*)?", argument, re.DOTALL)
            if found and found[1] not in known:
                own = self.options.get(found[1].lstrip("-").replace("-", "_"))
                remedy = f"use {own}" if own else advice(self._place, found[1], known)
                self.error(f"there is no {found[1]}" + (f": {remedy}" if remedy else ""))


class _Formatter(argparse.HelpFormatter):
    """Adds limits and defaults of options to the help, except None, False and what is empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        limits = _WANTED.get(action.type) or getattr(action, "limits", "")
        notes = [limits] if limits else []
        unsaid = (None, [], "", math.inf, argparse.SUPPRESS)
        if action.default is not False and action.default not in unsaid:
            notes.append("default: %(default)s")
        return f"{action.help} ({'; '.join(notes)})" if notes else action.help


def add_model(
    parser: argparse.ArgumentParser, default: str | None = "demo", about: str = MODEL_HELP
) -> None:
    """Add `model`, which may be given as an argument or as `--model`, and has to be given if
    `default` is None."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=about)
    more = f" The default is {default}." if default else ""
    parser.add_argument(
        "--model",
        dest="named_model",
        metavar="MODEL",
        help=f"Name the model by this option, in place of the argument MODEL.{more}",
    )
    parser.set_defaults(default_model=default)


def add_source_and_target(parser: argparse.ArgumentParser, source: str) -> None:
    """Add the folders that a command reads and writes. `source` is the help of the first."""
    parser.add_argument("source", metavar="SOURCE", help=source)
    parser.add_argument(
        "target", metavar="TARGET", help="Write to this folder, which must be new or empty."
    )


def add_prompts(parser: argparse.ArgumentParser, about: str) -> None:
    """Add `prompt`, a list."""
    about += " The option may be given several times."
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT", help=about)


def add_field(
    parser: CommandParser, option: str, of: str, field: str, more: str = "", **given: Any
) -> None:
    """Add an option whose help and default are those of a config's field.

    Args:
        parser: that of the command.
        option: the option's name.
        of: the class, `ENGINE`, `SERVER` or `SAMPLING`.
        field: the field's name, which stands in brackets after the help.
        more: a sentence after the help.
        given: arguments of `add_argument`, which take precedence.
    """
    parser.options[field] = option
    about = fields_help(of)[field]
    name = option.removeprefix("--").replace("-", "_")
    shown = about.sentence if name == field else f"{about.sentence[:-1]} ({field})."
    known = {"help": f"{shown} {more}".strip().replace("%", "%%"), "default": about.default}
    if given.get("action") == "store_true":
        known.pop("default")
    if about.kind:
        known["type"] = partial(_number, about.kind, about.wanted)
    parser.add_argument(option, **known | given).limits = about.wanted


def _number(kind: type, wanted: str, text: str) -> float:
    """Read the number of an option; the config checks its limits."""
    try:
        return kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give {wanted}") from error


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
    more = "A name in brackets is the name of the setting in Python; errors use this name, too."
    parser.epilog = f"{parser.epilog or ''} {more}".strip()
    add_model(parser)
    parser.add_argument(
        "--device",
        help="Run the model on this device, such as cpu, cuda or cuda:1. The default is cuda if "
        "there is a GPU, else cpu.",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="Convert the weights to this number format. auto keeps their saved format on a GPU, "
        "and takes float32 on a CPU.",
    )
    add_field(
        parser,
        "--context",
        ENGINE,
        "max_sequence_length",
        "Write it as 4096, 100k (100,000) or 1M.",
        type=str,
        default="8192",
        metavar="TOKENS",
    )
    add_field(parser, "--mode", ENGINE, "prefix_caching")
    add_field(parser, "--cache-mib", ENGINE, "cache_bytes", metavar="MIB")
    add_field(parser, "--memory-fraction", ENGINE, "memory_fraction", metavar="PART")
    add_field(parser, "--host-cache-mib", ENGINE, "host_cache_bytes", metavar="MIB")
    add_field(parser, "--state-encoding", ENGINE, "state_encoding", metavar="ENCODING")
    add_field(parser, "--cache-dir", ENGINE, "cache_dir", metavar="FOLDER")


_SERVED: dict[str, dict[str, Any]] = {
    "max_requests": {"metavar": "N"},
    "cache_policy": {"metavar": "POLICY"},
    "short_prompt_share": {"metavar": "PART"},
    "max_adapters": {"metavar": "N"},
    "max_adapter_rank": {"metavar": "N"},
    "speculation": {"metavar": "HOW"},
    "num_speculative_tokens": {"metavar": "N"},
    "cuda_graphs": {"action": "store_true"},
    "async_scheduling": {"action": "store_true"},
    "warm_up": {"action": argparse.BooleanOptionalAction},
    "logprobs_mode": {"metavar": "MODE"},
    "otlp_traces_endpoint": {"metavar": "URL"},
}
"""Fields of InferenceConfig with options of the same names -> arguments of `add_argument`."""


def add_served_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options of an engine for many requests that `add_engine` lacks."""
    for field, given in _SERVED.items():
        add_field(parser, f"--{field.replace('_', '-')}", ENGINE, field, **given)


def inference_config(options: argparse.Namespace, **fields: Any):
    """Make an InferenceConfig from the options of `add_engine`, and other fields."""
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
    """Make an InferenceConfig from the options of `add_engine` and `add_served_engine`."""
    return inference_config(options, **{field: getattr(options, field) for field in _SERVED})


def make_engine(options: argparse.Namespace):
    """Make an engine from the options of `add_engine`, for a few requests: it compiles no more than
    these need."""
    from megatron_hybrid.inference.engine import DynamicInferenceEngine

    config = inference_config(options, warm_up=False)
    return DynamicInferenceEngine(*load(options.model, options.device, options.dtype), config)


def load(
    folder: str,
    device: str | None = None,
    dtype: str = "auto",
    mtp: bool = False,
    **fields: Any,
):
    """Load model and tokenizer, on the GPU if there is one; on a CPU in fp32, which is faster there
    and avoids near ties in greedy answers.

    Args:
        folder: that of the model.
        device, dtype: take the place of these; see `add_engine`.
        mtp: see `load_pretrained`.
        fields: those of HybridConfig, such as the sizes of the layout over ranks.
    """
    import torch

    from megatron_hybrid.checkpoints.checkpoint import CheckpointError
    from megatron_hybrid.checkpoints.pretrained import checked_device, load_pretrained

    place = checked_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    automatic = "float32" if place.type == "cpu" else None
    chosen = automatic if dtype == "auto" else dtype
    model, tokenizer = load_pretrained(folder, place, chosen, mtp, **fields)
    if tokenizer is None:
        raise CheckpointError(f"{folder} has no tokenizer.json, which text prompts need")
    return model, tokenizer


def load_for_chats(options: argparse.Namespace, **fields: Any):
    """Load model and tokenizer, with the template and the drafts that were asked for. `fields` are
    those of `load`."""
    mtp = getattr(options, "speculation", None) == "mtp"
    if getattr(options, "max_adapters", 0):  # projections of Transformer Engine include a norm
        fields["layer_spec"] = "local"
    model, tokenizer = load(options.model, options.device, options.dtype, mtp, **fields)
    if options.chat_template:
        source = read_text("--chat-template", options.chat_template)
        tokenizer.set_chat_template(source, options.chat_template)
    return model, tokenizer


def planned_config(model: str, mtp: bool = False):
    """Return the config of a model whose weights need not be here: see PLANNED_MODEL_HELP. With
    `mtp` it has its MTP head, which a recipe may also ask for itself."""
    from megatron_hybrid.tools.plan import read_model_config
    from megatron_hybrid.training.recipe import Recipe

    # "demo" is the model of the package, not its recipe.
    if model != "demo" and Recipe.path_of(model).suffix == ".yaml":
        return Recipe.load(model).whole_model_config(mtp)
    return read_model_config(model, mtp)


def read_text(option: str, path: str) -> str:
    """Read the UTF-8 text of a file, or raise ValueError that names the option."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "is not UTF-8")
        raise ValueError(f"{option} {path}: {reason}; name a file of text") from error


def positive(text: str, told: str = "a number above 0, up to a billion") -> float:
    """Parse a number above 0, up to a billion. The second argument ends the error."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1e9:  # also NaN
        raise argparse.ArgumentTypeError(f"{text!r}: give {told}")
    return number


def gigabytes(text: str) -> float:
    """Parse a size in GB (10^9 bytes)."""
    return positive(text.lower().removesuffix("gb"), "GB, above 0 and up to a billion")


def whole_number(text: str) -> int:
    """Parse a whole number from 1 on."""
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 on")
    return number


_WANTED = {whole_number: "a whole number of 1 or more", positive: "a number above 0"}
"""Readers of numbers -> what they want, for the help."""
