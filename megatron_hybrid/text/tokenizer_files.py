"""The files of a checkpoint's tokenizer: tokenizer.json, or one that `transformers` converts, its
settings, its chat templates, and the ids that end an answer."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

from megatron_hybrid.text.chat_template import ChatTemplate
from megatron_hybrid.utils.files import read_failure, read_json, replace_file, write_json
from megatron_hybrid.utils.validation import Range, check_field

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE_FOLDER = "additional_chat_templates"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"  # of older checkpoints
GENERATION_CONFIG_FILE = "generation_config.json"

# Sources of a tokenizer for `transformers` without tokenizer.json.
FOREIGN_FILES = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")

_BYTE_LEVEL = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer")
_AS_WRITTEN = ("granitemoehybrid", "jamba", "kimi_linear", "minimax_m2", "olmo_hybrid")
"""Model types for which `transformers` takes tokenizer.json as it is, whatever its class."""
_MARK = "\u2581"  # for a space
_END_TOKEN = Annotated[int, Range(ge=-1)]


def find_tokenizer(folder: str | os.PathLike[str]) -> Path | None:
    """Return the file that `Tokenizer.from_folder` reads first, or None without a tokenizer."""
    paths = (Path(folder) / name for name in (TOKENIZER_FILE, *FOREIGN_FILES))
    return next((path for path in paths if os.path.lexists(path)), None)


def read_tokenizer_files(folder: Path, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of `Tokenizer`. `Tokenizer.from_folder` describes those of this."""
    path = find_tokenizer(folder)
    if path is None:
        raise ValueError(
            f"{folder / TOKENIZER_FILE} does not exist, nor {', '.join(FOREIGN_FILES)} next to "
            "it: the folder has no tokenizer."
        )
    if config is None:
        config = _read_if_there(folder / "config.json")
    settings, older = _read_if_there(folder / TOKENIZER_CONFIG_FILE), folder / SPECIAL_TOKENS_FILE
    if "added_tokens_decoder" not in settings and older.exists():
        settings.update(read_json(older))
    templates = _read_templates(folder, settings)
    if path.name == TOKENIZER_FILE:
        tokenizer = _read_tokenizer(path)
        if config.get("model_type") not in _AS_WRITTEN:
            _follow_class(tokenizer, {**config, **settings})
    else:
        tokenizer, names = _convert(path)
        settings.update(names)
    # Truncation and padding are for batches of training data.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
    config_path = folder / TOKENIZER_CONFIG_FILE
    try:
        _add_tokens(tokenizer, settings)
        name = named_tokens(settings).get("eos_token")
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{config_path} does not fit {path}: {error}") from error
    eod = None if name is None else tokenizer.token_to_id(name)
    if name is not None and eod is None:
        raise ValueError(f"{config_path} names the end token {name!r}, which {path} lacks.")
    return {
        "tokenizer": tokenizer,
        "eod": eod,
        "end_tokens": _read_end_tokens(folder, config),
        "settings": settings,
        "chat_templates": templates,
        "generation_config": _read_if_there(folder / GENERATION_CONFIG_FILE),
    }


def write_tokenizer_files(
    folder: Path,
    tokenizer: tokenizers.Tokenizer,
    end_tokens: Sequence[int],
    settings: Mapping[str, Any],
    chat_templates: Mapping[str, ChatTemplate],
    generation_config: Mapping[str, Any],
) -> None:
    """Write the files of `Tokenizer.save`."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / TOKENIZER_FILE, lambda path: tokenizer.save(str(path)))
    # `transformers` takes tokenizer.json as it is for this class.
    usual = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": None}
    write_json(folder / TOKENIZER_CONFIG_FILE, {**usual, **settings})
    for path in (folder / SPECIAL_TOKENS_FILE, *_template_files(folder).values()):
        path.unlink(missing_ok=True)  # of an earlier tokenizer
    for name, template in chat_templates.items():
        path = folder / CHAT_TEMPLATE_FOLDER / f"{name}.jinja"
        path = folder / CHAT_TEMPLATE_FILE if name == "default" else path
        path.parent.mkdir(exist_ok=True)
        path.write_text(template.source, encoding="utf-8")
    path = folder / GENERATION_CONFIG_FILE
    if generation_config:
        write_json(path, generation_config)
    name = named_tokens(settings).get("eos_token")
    stated = [] if name is None else [tokenizer.token_to_id(name)]
    stated += _read_end_tokens(folder, _read_if_there(folder / "config.json"))
    if tuple(dict.fromkeys(stated)) != end_tokens:
        write_json(path, {**_read_if_there(path), "eos_token_id": list(end_tokens)})


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if os.path.lexists(path) else {}


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        # from_file raises a bare Exception for every error; reading here distinguishes them.
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        why = read_failure(path, error)
        raise ValueError(f"{path} cannot be read as a tokenizer: {why}") from error


def _follow_class(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Replace parts where `transformers` 5 does so by the tokenizer's class. They decide whether
    the first word gets a space, which is a part of a token."""
    kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
    adds, before = settings.get("add_prefix_space"), tokenizer.pre_tokenizer
    state = json.loads(before.__getstate__()) if before is not None else {}
    steps = state.get("pretokenizers", [state])
    of_bytes = [step for step in steps if step.get("type") == "ByteLevel"]
    if kind in _BYTE_LEVEL and of_bytes:
        for step in of_bytes:
            step["add_prefix_space"] = bool(adds)
        before.__setstate__(json.dumps(state).encode())
        tokenizer.pre_tokenizer = before
    is_byte_level = of_bytes or isinstance(tokenizer.decoder, decoders.ByteLevel)
    is_bpe = isinstance(tokenizer.model, tokenizers.models.BPE)
    if kind == "LlamaTokenizer" and is_bpe and not is_byte_level:
        adds = adds is not False
        scheme = "always" if settings.get("legacy") else "first"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            _MARK, scheme if adds else "never", split=False
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace(_MARK, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                *([decoders.Strip(" ", left=1)] if adds else []),
            ]
        )


def _convert(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Make a tokenizer from files of another kind. Return it and its special tokens by role."""
    is_of_pieces = path.name == "tokenizer.model" and path.read_bytes()[:1] == b"\n"  # a protobuf
    if is_of_pieces and find_spec("sentencepiece") is None:
        raise ValueError(f"{path} needs a package to be read: pip install sentencepiece protobuf")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{path.parent / TOKENIZER_FILE} does not exist. To make it from {path.name}: pip "
            "install transformers"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(path.parent), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ValueError(f"transformers cannot read {path} as a tokenizer: {error}") from error
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(tokenizer, tokenizers.Tokenizer):
        raise ValueError(
            f"{path.parent / TOKENIZER_FILE} does not exist, and the {type(loaded).__name__} that "
            f"transformers makes from {path.name} cannot be written as one."
        )
    # transformers gives tokens of Mistral's files no roles.
    roles = {"bos_token": "<s>", "eos_token": "</s>"} if path.name == "tekken.json" else {}
    return tokenizer, {**roles, **loaded.special_tokens_map}


def _template_files(folder: Path) -> dict[str, Path]:
    paths = {p.stem: p for p in sorted((folder / CHAT_TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / CHAT_TEMPLATE_FILE).exists():
        paths["default"] = folder / CHAT_TEMPLATE_FILE
    return paths


def _read_templates(folder: Path, settings: dict[str, Any]) -> dict[str, ChatTemplate]:
    """Read the templates, and remove those in `settings`; template files take precedence."""
    stated = settings.pop("chat_template", None)
    templates = {}
    for name, path in _template_files(folder).items():
        try:
            templates[name] = ChatTemplate(path.read_text(encoding="utf-8"), str(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    if templates or stated is None:
        return templates
    origin = f"chat_template of {folder / TOKENIZER_CONFIG_FILE}"
    if isinstance(stated, str):
        stated = [{"name": "default", "template": stated}]
    try:
        sources = {entry["name"]: entry["template"] for entry in stated}
        # Names become file names when the tokenizer is saved.
        sound = all(re.fullmatch(r"\w[\w.-]*", name) for name in sources)
        sound = sound and all(isinstance(source, str) for source in sources.values())
    except (TypeError, KeyError):
        sound = False
    if not sound:
        raise ValueError(f"{origin} must be a string or a list of {{name, template}}")
    return {name: ChatTemplate(source, origin) for name, source in sources.items()}


def _read_end_tokens(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """Read the ids that end an answer from generation_config.json, else from `config`."""
    generation_config = _read_if_there(folder / GENERATION_CONFIG_FILE)
    for name, values in ((GENERATION_CONFIG_FILE, generation_config), ("config.json", config)):
        ids = values.get("eos_token_id")
        if ids is None and isinstance(values.get("text_config"), dict):
            ids = values["text_config"].get("eos_token_id")
        if ids is None:
            continue
        check_field(f"{folder / name}: eos_token_id", ids, _END_TOKEN | list[_END_TOKEN])
        ids = ids if isinstance(ids, list) else [ids]
        return [i for i in ids if i >= 0]  # -1 stands for none
    return []


# Special tokens ----------------------------------------------------------------------------------


def _content(token: Any) -> str | None:
    """Return the text of a token, which Hugging Face's files hold as a string or an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return texts of special tokens by role, such as `bos_token` or a model's `image_token`."""
    roles = {key: value for key, value in settings.items() if key.endswith("_token")}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        roles.update(extra)
    texts = {role: _content(token) for role, token in roles.items()}
    for role in ("bos_token", "eos_token"):
        if roles.get(role) is not None and texts[role] is None:
            raise ValueError(f"{role} is {roles[role]!r}, which is no token")
    return {role: text for role, text in texts.items() if text is not None}


def _add_tokens(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add the added and special tokens of the settings, as `transformers` does."""
    added = tokenizer.get_added_tokens_decoder().values()
    present = {token.content: token.__getstate__() for token in added}
    stated = {}
    for number, state in (settings.get("added_tokens_decoder") or {}).items():
        stated[int(number)] = tokenizers.AddedToken(**state)
    for number, token in sorted(stated.items()):
        if present.get(token.content) != token.__getstate__():
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            raise ValueError(
                f"it gives {token.content!r} the id {number}, which is "
                f"{tokenizer.token_to_id(token.content)} there"
            )
        present[token.content] = token.__getstate__()
    named = list(named_tokens(settings).values())
    for key in ("extra_special_tokens", "additional_special_tokens"):
        if isinstance(settings.get(key), list):
            named += filter(None, map(_content, settings[key]))
    # Tokens outside the vocabulary have no embedding; their text stays plain text.
    known = {name for name in named if tokenizer.token_to_id(name) is not None}
    tokenizer.add_special_tokens(sorted(known - set(present)))
