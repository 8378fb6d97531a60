"""Tokenizers and chat templates: the same ids and texts as `transformers` makes of the folder."""

import json
import sys
import threading
import time
from base64 import b64encode

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron_hybrid.text import tokenizer_files
from megatron_hybrid.text.chat_template import ChatTemplate, TextTooLongError
from megatron_hybrid.text.tokenizer import Tokenizer, train_tokenizer
from megatron_hybrid.text.tokenizer_files import find_tokenizer

transformers = pytest.importorskip("transformers")
LONG = "Zażółć 漢字 🙂 hello, world! " * 1000

BOS, EOS, START, END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
SPECIAL = [BOS, EOS, START, END]
VOCAB_SIZE = 306  # all merges of the lines that it is trained on
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
ROLES = {**FAST, "bos_token": BOS, "eos_token": EOS}
TEXTS = [
    "Hello, world! How are you today?",
    "  two  spaces\n\n\ttab ",
    "Zażółć 漢字 🙂",
    f"a{EOS} b {START}user\nc{END}",
    f"a {EOS} b<new> c <|next|>",
    "",
]


@pytest.fixture(scope="session")
def trained():
    """tokenizer.json of a byte-level BPE tokenizer, as text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lines = ["Hello world, how are you today?\n\n", "user assistant system\n think tool "] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer.to_str()


@pytest.fixture
def write(tmp_path, trained):
    """Writes a folder: tokenizer.json with changes, and other files from strings or JSON values."""

    def make(change=None, **files):
        tokenizer = tokenizers.Tokenizer.from_str(trained)
        if change is not None:
            change(tokenizer)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            suffix = "" if "." in name else ".json"
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / (name + suffix)).write_bytes(text.encode())
        return tmp_path

    return make


def theirs(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def with_bos(tokenizer):
    """What Llama 3 does: byte-level offsets, then a token before the text."""
    bos = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos])


def with_bos_and_eos(tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", pair=None, special_tokens=[(BOS, 0), (EOS, 1)]
    )


def sentencepiece_decoder():
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])


def for_batches(tokenizer):
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(pad_id=1, pad_token=EOS, length=50)


def added(content, **fields):
    return {
        "content": content,
        **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False),
        **{"special": True, **fields},
    }


# Text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [None, with_bos, with_bos_and_eos, for_batches])
@pytest.mark.parametrize(
    "settings",
    [
        ROLES,
        {**ROLES, "add_bos_token": True, "add_eos_token": True},  # tokenizer.json decides
        {**ROLES, "add_bos_token": False},
        {**ROLES, "split_special_tokens": True},
        {**ROLES, "sep_token": "Hello"},  # a word of the vocabulary becomes special
        {**ROLES, "extra_special_tokens": ["Hello"]},
        {**ROLES, "additional_special_tokens": ["Hello", START]},
        {**ROLES, "extra_special_tokens": {"image_token": "Hello"}},
        {**ROLES, "image_token": "Hello"},
        *(
            {**ROLES, "added_tokens_decoder": decoder}
            for decoder in (
                {"1": added(EOS, lstrip=True, rstrip=True)},
                {"1": added(EOS, special=False)},
                {"306": added("<new>"), "307": added("<|next|>", special=False)},
                {str(i): added(token) for i, token in enumerate(SPECIAL)},
            )
        ),
    ],
)
def test_same_ids_as_transformers(write, change, settings):
    folder = write(change, tokenizer_config=settings)
    ours, other = Tokenizer.from_folder(folder), theirs(folder)
    assert ours.vocab_size == len(other)
    for text in TEXTS:
        assert ours.tokenize(text) == other(text)["input_ids"]
        plain = other(text, add_special_tokens=False)["input_ids"]
        assert ours.tokenize(text, add_special_tokens=False) == plain
        for skips in (True, False):
            assert ours.detokenize(plain, skips) == other.decode(plain, skip_special_tokens=skips)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("GPT2Tokenizer", {"add_prefix_space": True}),
        ("Qwen2TokenizerFast", {"add_prefix_space": True}),
        ("GPT2TokenizerFast", {}),
        ("LlamaTokenizer", {}),
        ("LlamaTokenizerFast", {"legacy": True}),
        ("LlamaTokenizer", {"add_prefix_space": False}),
        ("PreTrainedTokenizerFast", {"add_prefix_space": False}),
        (None, {"add_prefix_space": False}),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "jamba"])
def test_the_first_word_gets_a_space_where_its_class_gives_one(write, kind, settings, model_type):
    def change(tokenizer):
        if kind == "Qwen2TokenizerFast":
            parts = transformers.Qwen2Tokenizer().backend_tokenizer
            tokenizer.normalizer, tokenizer.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
        elif kind == "GPT2TokenizerFast":  # the file says the opposite
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        elif kind != "GPT2Tokenizer":
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
            tokenizer.pre_tokenizer = None
            tokenizer.decoder = sentencepiece_decoder()
            tokenizer.add_tokens(["▁", "▁▁", "▁Hello"])

    config = {**ROLES, "unk_token": None, **settings, "tokenizer_class": kind}
    folder = write(change, tokenizer_config=config, config={"model_type": model_type})
    ours, other = Tokenizer.from_folder(folder), theirs(folder)
    for text in TEXTS:
        ids = ours.tokenize(text)
        assert ids == other(text)["input_ids"]
        assert ours.detokenize(ids) == other.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("settings", "more", "roles"),
    [
        (FAST, {}, (None, None)),
        (ROLES, {}, (1, 0)),
        # Of older checkpoints, and of newer ones, which hold all of them in one file.
        (FAST, {"eos_token": {**added(EOS)}, "bos_token": BOS, "sep_token": "Hello"}, (1, 0)),
        ({**ROLES, "added_tokens_decoder": {"1": added(EOS)}}, {"eos_token": END}, (1, 0)),
    ],
)
def test_roles_are_those_of_the_file_that_counts(write, settings, more, roles):
    folder = write(with_bos, tokenizer_config=settings, special_tokens_map=more)
    ours, other = Tokenizer.from_folder(folder), theirs(folder)
    assert ours.tokenize(TEXTS[0]) == other(TEXTS[0])["input_ids"]
    assert (ours.eod, ours.bos) == (other.eos_token_id, other.bos_token_id) == roles


def test_roles_whose_token_the_vocabulary_lacks_stay_text(write):
    folder = write(tokenizer_config={**ROLES, "pad_token": "<pad>"})
    ours = Tokenizer.from_folder(folder)
    assert ours.vocab_size == VOCAB_SIZE
    assert max(ours.tokenize("<pad>")) < VOCAB_SIZE


@pytest.mark.parametrize(
    ("pre_tokenizer", "decoder"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
        (pre_tokenizers.Metaspace(), sentencepiece_decoder()),
        (pre_tokenizers.Metaspace(), decoders.Metaspace()),
    ],
)
def test_the_bytes_of_tokens_make_up_the_text(pre_tokenizer, decoder):
    is_byte_level = isinstance(decoder, decoders.ByteLevel)
    if is_byte_level:
        pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefé", "<", "0", "x"]
    pieces += ["ab"]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    model = models.BPE(vocab, [("a", "b")], byte_fallback=not is_byte_level)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer, inner.decoder = pre_tokenizer, decoder
    inner.add_tokens([tokenizers.AddedToken("<tool>"), tokenizers.AddedToken("naïve 漢")])
    inner.add_special_tokens([EOS])
    tokenizer = Tokenizer(inner)
    texts = ["abc é ab", "ab<tool>naïve 漢 cab", "a b"]
    if is_byte_level or "ByteFallback" in str(decoder):
        texts.append("漢字 🙂 ~")
    for text in texts:
        ids = tokenizer.tokenize(text)
        data = b"".join(tokenizer.token_bytes[token] for token in [*ids, vocab["a"]])
        assert data.decode().lstrip() == tokenizer.detokenize([*ids, vocab["a"]]).lstrip()
        assert data.decode().lstrip() == text + "a"
    assert tokenizer.token_bytes[inner.token_to_id(EOS)] == b""
    assert tokenizer.shown_bytes(inner.token_to_id(EOS)) == EOS.encode()
    assert tokenizer.shown_bytes(vocab["a"]) == b"a"
    assert tokenizer.shown_bytes(tokenizer.vocab_size) == b""  # a model's vocabulary is padded
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size


def test_the_bytes_of_tokens_of_an_unknown_decoder_are_not_guessed():
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    inner.decoder = decoders.BPEDecoder()
    with pytest.raises(ValueError, match="its decoder is BPEDecoder; those known are ByteLevel"):
        Tokenizer(inner).token_bytes  # noqa: B018


# End tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (1,)),
        ({"generation_config": {"eos_token_id": 3}}, (1, 3)),
        ({"generation_config": {"eos_token_id": [3, 1, 2]}}, (1, 3, 2)),
        ({"config": {"eos_token_id": [2, 3]}}, (1, 2, 3)),
        ({"config": {"text_config": {"eos_token_id": 2}}}, (1, 2)),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": 3}}, (1, 3)),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": None}}, (1, 2)),
        ({"config": {"eos_token_id": 2}, "generation_config": {}}, (1, 2)),
        ({"config": {"eos_token_id": -1, "text_config": None}}, (1,)),
        ({"tokenizer_config": FAST}, ()),
        ({"tokenizer_config": FAST, "config": {"eos_token_id": [2, 3]}}, (2, 3)),
        ({"tokenizer_config": FAST, "config": {"eos_token_id": 0}}, (0,)),
    ],
)
def test_end_tokens(write, files, expected):
    tokenizer = Tokenizer.from_folder(write(**{"tokenizer_config": ROLES, **files}))
    assert tokenizer.end_tokens == expected
    assert tokenizer.eod == (expected[0] if expected else None)


# Chat templates ----------------------------------------------------------------------------------

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{ part.text }}{% endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' + call.function | tojson(indent=2) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Refuses chats without a user, drops the reasoning of earlier turns, opens that of the next.
REASONING = """\
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content is defined and loop.index0 > ns.last -%}
{{ '<think>' + message.reasoning_content + '</think>' }}
{%- endif -%}
{{ message.content | trim + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}{{ '' if enable_thinking is false else '<think>\\n' }}
{%- endif -%}
"""

# Strict about roles, with a system text inside of the first user's message, and special tokens.
ALTERNATING = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
{% set system = messages[0]['content'] + '\\n\\n' %}
{% set rest = messages[1:] %}
{%- else %}
{% set system = '' %}
{% set rest = messages %}
{%- endif %}
{% for message in rest %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
[INST] {{ (system if loop.first else '') + message['content'] }} [/INST]
{%- else %}
 {{ message['content'] + eos_token }}
{%- endif %}
{% endfor %}
"""

# No special tokens at all.
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

EXTENSIONS = """\
Today is {{ strftime_now('%Y') }}.
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}
{{ message.content }} < & > '{{ message | tojson }}'
        {% endgeneration %}
    {% else %}
{{ message.content }}{{ documents is none }}{{ tools is none }}{{ image_token }}
    {% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
"""

TEMPLATES = {
    "chatml": CHATML,
    "reasoning": REASONING,
    "alternating": ALTERNATING,
    "plain": PLAIN,
    "extensions": EXTENSIONS,
}

QUESTION = {"role": "user", "content": " Hello, how are you? "}
ANSWER = {"role": "assistant", "content": "Zażółć\n", "reasoning_content": "They <ask> & I…"}
SYSTEM = {"role": "system", "content": "You are Ünïcode.\n"}
CHATS = [
    [QUESTION],
    [SYSTEM, QUESTION],
    [QUESTION, ANSWER],
    [SYSTEM, QUESTION, ANSWER, QUESTION],
    [QUESTION, ANSWER, QUESTION, ANSWER, {"role": "user", "content": "\n\nbye"}],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'It\'s <hot> & "dry" in Łódź',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
WITH_TOOL_CALL = [
    QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Łódź"}}}
        ],
    },
    {"role": "tool", "content": "30 °C", "name": None},
]


def folder_with(write, template, **settings):
    config = {**ROLES, "image_token": START, **settings}
    return write(with_bos, tokenizer_config=config, **{"chat_template.jinja": template})


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("generate", [True, False])
def test_same_prompts_as_transformers(write, template, generate):
    folder = folder_with(write, TEMPLATES[template])
    ours, other = Tokenizer.from_folder(folder), theirs(folder)
    for messages in CHATS:
        text = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        assert ours.render_chat(messages, generate) == text
        ids = other.apply_chat_template(messages, add_generation_prompt=generate)["input_ids"]
        assert ours.apply_chat_template(messages, add_generation_prompt=generate) == ids


@pytest.mark.parametrize(
    ("template", "messages", "arguments"),
    [
        ("chatml", [SYSTEM, QUESTION], {"tools": TOOLS}),
        ("chatml", WITH_TOOL_CALL, {"tools": TOOLS}),
        ("chatml", [{"role": "user", "content": [{"type": "text", "text": "a"}]}], {}),
        ("reasoning", [QUESTION], {"enable_thinking": False}),
        ("extensions", WITH_TOOL_CALL, {"documents": [{"title": "a", "text": "b"}]}),
        ("alternating", [QUESTION], {"bos_token": "other"}),
    ],
)
def test_tools_and_variables(write, template, messages, arguments):
    folder = folder_with(write, TEMPLATES[template])
    ours, other = Tokenizer.from_folder(folder), theirs(folder)
    expected = other.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **arguments
    )
    assert ours.render_chat(messages, **arguments) == expected


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_any_of_its_names(name):
    template = ChatTemplate("{{ messages[0].thinking + messages[0].reasoning_content }}")
    assert template.render([{"role": "assistant", name: "so"}]) == "soso"


def test_a_null_is_as_good_as_nothing():
    template = ChatTemplate("{% for m in messages %}{{ m.content is defined }}{% endfor %}")
    assert template.render([{"role": "assistant", "content": None, "name": "a"}]) == "False"


LISTED = [
    {"name": "default", "template": "usual {{ messages | length }}"},
    {"name": "tool_use", "template": "with {{ tools | length }}"},
]


@pytest.mark.parametrize(
    ("stated", "files", "usual", "with_tools"),
    [
        ("{{ messages[0].role }}!", {}, "user!", "user!"),
        (LISTED, {}, "usual 1", "with 1"),
        (LISTED[:1], {}, "usual 1", "usual 1"),
        (LISTED, {"chat_template.jinja": "a\r\nfile\n\n"}, "a\nfile\n", "a\nfile\n"),
        (
            None,
            {"additional_chat_templates/tool_use.jinja": "t", "chat_template.jinja": "d"},
            "d",
            "t",
        ),
    ],
)
def test_where_templates_come_from(write, tmp_path, stated, files, usual, with_tools):
    (tmp_path / "additional_chat_templates").mkdir()
    folder = write(tokenizer_config={**ROLES, "chat_template": stated}, **files)
    for tokenizer in (Tokenizer.from_folder(folder), saved_again(folder)):
        assert tokenizer.render_chat([QUESTION]) == usual
        assert tokenizer.render_chat([QUESTION], tools=TOOLS) == with_tools
        assert tokenizer.chat_template is not None
    other = theirs(folder)
    assert other.apply_chat_template([QUESTION], tokenize=False) == usual
    assert other.apply_chat_template([QUESTION], tools=TOOLS, tokenize=False) == with_tools


@pytest.mark.parametrize("settings", [ROLES, {**ROLES, "chat_template": LISTED[1:]}])
def test_no_template(write, settings):
    tokenizer = Tokenizer.from_folder(write(tokenizer_config=settings))
    assert tokenizer.chat_template is None
    for method in (tokenizer.render_chat, tokenizer.apply_chat_template, tokenizer.chat_prompt):
        with pytest.raises(ValueError, match=r"neither chat_template\.jinja nor .*tokenizer_con"):
            method([QUESTION])


@pytest.mark.parametrize(
    ("template", "messages", "error", "message"),
    [
        ("{% if %}", [QUESTION], ValueError, r"chat_template\.jinja is no Jinja template"),
        ("{% frobnicate %}", [QUESTION], ValueError, "no Jinja template: .*unknown tag"),
        (ALTERNATING, [QUESTION, QUESTION], ValueError, "cannot render .* roles must alternate"),
        ("{{ messages[5].role }}", [QUESTION], ValueError, "cannot render these messages"),
        ("{{ 1 / 0 }}", [QUESTION], ValueError, "cannot render these messages: division by zero"),
        ("{{ messages.append(1) }}", [QUESTION], ValueError, "not safely callable|unsafe"),
        ("{{ messages.__class__.__mro__ }}", [QUESTION], ValueError, "unsafe"),
        (PLAIN, [], ValueError, "needs one message or more"),
        (PLAIN, ["hello"], TypeError, "message 0 of the chat is of type str; each is a dict"),
        (PLAIN, QUESTION, TypeError, "message 0 of the chat is of type str"),
        (PLAIN, [{"role": "user", "content": {1, 2}}], TypeError, "content of type set"),
        (PLAIN, [{"role": "user", "content": "a", "x": {1, 2}}], TypeError, "must be JSON values"),
        (PLAIN, [{"role": "user", "content": "a\ud800"}], ValueError, r"has \\ud800, half of a ch"),
    ],
)
def test_templates_that_fail(write, template, messages, error, message):
    tokenizer = Tokenizer.from_folder(folder_with(write, template))
    for method in (tokenizer.apply_chat_template, tokenizer.chat_prompt):
        with pytest.raises(error, match=message):
            method(messages)


def test_a_template_changes_nothing_of_the_caller():
    messages, tools = [dict(QUESTION)], [dict(TOOLS[0])]
    source = "{% for m in messages + tools %}{% set _ = m.update({'a': 1}) %}{% endfor %}"
    with pytest.raises(ValueError, match="cannot render"):
        ChatTemplate(source).render(messages, tools=tools)
    assert (messages, tools) == ([QUESTION], TOOLS)


# Forks -------------------------------------------------------------------------------------------


def shared(first, second):
    pairs = zip([*first, -1], [*second, -2])
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


def test_forks_are_behind_the_system_prompt_and_where_the_last_message_says_something(write):
    tokenizer = Tokenizer.from_folder(folder_with(write, CHATML))

    def said(index, messages, begins):
        """Where the content of a message starts."""
        return begins[index] + len(tokenizer.tokenize(f"{START}{messages[index]['role']}\n", False))

    for messages in CHATS[:-1]:  # in the last one a new line merges with the header's
        ids, forks = tokenizer.chat_prompt(messages)
        assert ids == tokenizer.apply_chat_template(messages)
        begins = [i for i, token in enumerate(ids) if token == 2]
        first, last = int(messages[0] is SYSTEM), len(messages) - 1
        starts = {begins[first], said(first, messages, begins), said(last, messages, begins)}
        assert forks == sorted(starts - {0})
    head = said(0, [SYSTEM], [0])
    assert tokenizer.chat_prompt([SYSTEM])[1] == [head]
    ids, forks = tokenizer.chat_prompt([QUESTION], tools=TOOLS)
    start = ids.index(2, 1)  # tools are written before all messages
    assert forks == [start, said(0, [QUESTION], [start])]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("template", ["chatml", "alternating", "plain"])
def test_forks_of_tokenizers_that_prepend_a_space(tmp_path, scheme, template):
    """As those from sentencepiece do: to the text, or to what follows each special token."""
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    words = [message["content"] for chat in CHATS for message in chat]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL + bytes_, show_progress=False)
    inner.train_from_iterator(words, trainer)
    Tokenizer(inner, 1, settings=ROLES).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[template])
    tokenizer, other = Tokenizer.from_folder(tmp_path), theirs(tmp_path)
    for messages in CHATS:
        full = tokenizer.apply_chat_template(messages)
        assert full == other.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        _, forks = tokenizer.chat_prompt(messages)
        text = tokenizer.render_chat(messages)
        template = tokenizer.template_of(None)
        chars = template.fork_points(template.conversation(messages, ROLES), text, True)
        expected = {  # also before a letter, whose token may have the space
            min(shared(tokenizer.tokenize(text[:char] + end, False), full) for end in ("", "a"))
            for char in chars
        }
        assert forks == sorted(expected - {0, len(full)})


def test_the_next_turn_leaves_where_the_template_writes_an_answer_otherwise(write):
    tokenizer = Tokenizer.from_folder(folder_with(write, REASONING))
    for thinking in (True, False):
        turn = [SYSTEM, QUESTION]
        ids, forks = tokenizer.chat_prompt(turn, enable_thinking=thinking)
        later = tokenizer.apply_chat_template([*turn, ANSWER, QUESTION])
        common = shared(ids, later)
        assert (common < len(ids)) == thinking  # it asks for thoughts, which history lacks
        assert (common in forks) == thinking


def test_a_long_chat_takes_no_more_renderings_than_a_short_one(monkeypatch, write):
    tokenizer = Tokenizer.from_folder(folder_with(write, CHATML))
    runs = []
    run = ChatTemplate.run
    monkeypatch.setattr(ChatTemplate, "run", lambda *a: runs.append(1) or run(*a))
    counts = []
    for turns in (1, 1, 20):  # the first one finds which forms the template takes
        tokenizer.chat_prompt([SYSTEM, *[QUESTION, ANSWER] * turns, QUESTION])
        counts.append(len(runs))
        runs.clear()
    assert counts[1] == counts[2] <= 8


# Saving ------------------------------------------------------------------------------------------


def saved_again(folder):
    Tokenizer.from_folder(folder).save(folder / "saved")
    return Tokenizer.from_folder(folder / "saved")


@pytest.mark.parametrize("template", [CHATML, None])
@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": ROLES},
        {"tokenizer_config": {**ROLES, "eos_token": added(EOS), "sep_token": "Hello"}},
        {"tokenizer_config": FAST, "config": {"eos_token_id": [3, 2]}},
        {"tokenizer_config": FAST, "config": {"eos_token_id": 3}},
        {"tokenizer_config": ROLES, "generation_config": {"eos_token_id": [3, 1]}},
        {"tokenizer_config": FAST, "special_tokens_map": {"eos_token": EOS, "bos_token": BOS}},
        {"tokenizer_config": {"eos_token": EOS, "added_tokens_decoder": {"306": added("<new>")}}},
        {},
    ],
)
def test_a_reload_is_equal(write, files, template):
    if template is not None:
        files = {**files, "chat_template.jinja": template}
    folder = write(with_bos, **files)
    before, after = Tokenizer.from_folder(folder), saved_again(folder)
    assert (after.eod, after.bos, after.vocab_size) == (before.eod, before.bos, before.vocab_size)
    assert after.end_tokens == before.end_tokens
    assert after.chat_template == before.chat_template == template
    other = theirs(folder / "saved")
    for text in TEXTS:
        assert after.tokenize(text) == before.tokenize(text) == other(text)["input_ids"]
    if template is not None:
        assert after.render_chat(CHATS[3]) == before.render_chat(CHATS[3])
        assert other.apply_chat_template(CHATS[3], tokenize=False, add_generation_prompt=True) == (
            before.render_chat(CHATS[3])
        )


def test_saving_replaces_the_tokenizer_of_a_folder(write, tmp_path, trained):
    folder = folder_with(write, CHATML)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("old")
    (folder / "generation_config.json").write_text('{"top_k": 5, "eos_token_id": 3}')
    Tokenizer(tokenizers.Tokenizer.from_str(trained), 1).save(folder)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eod, tokenizer.bos, tokenizer.chat_template) == (1, None, None)
    assert tokenizer.end_tokens == (1,)
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "top_k": 5,
        "eos_token_id": [1],
    }
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat([QUESTION], tools=TOOLS)


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": [3, 4]}])
def test_a_generation_config_is_handed_on_and_none_is_written_without_need(write, ends):
    folder = write(tokenizer_config=ROLES, config={"eos_token_id": 1})
    saved_again(folder)
    saved = folder / "saved" / "generation_config.json"
    assert not saved.exists()
    values = {"temperature": 0.7, "top_k": 20, "do_sample": True, **ends}
    write(generation_config=values)
    before, after = Tokenizer.from_folder(folder), saved_again(folder)
    assert json.loads(saved.read_text()) == values
    assert after.end_tokens == before.end_tokens


# Folders without tokenizer.json ------------------------------------------------------------------


@pytest.fixture
def foreign(write):
    """vocab.json and merges.txt."""

    def make(**settings):
        folder = write(tokenizer_config={**ROLES, "tokenizer_class": "GPT2Tokenizer", **settings})
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [" ".join(pair) for pair in model["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
        (folder / "tokenizer.json").unlink()
        return folder

    return make


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"chat_template": CHATML}])
def test_other_files_by_transformers(foreign, settings):
    folder = foreign(unk_token=EOS, **settings)
    ours, other = Tokenizer.from_folder(folder), theirs(folder)
    again = saved_again(folder)
    for text in TEXTS:
        assert ours.tokenize(text) == again.tokenize(text) == other(text)["input_ids"]
    assert (ours.tokenize("a")[0] == ours.bos) == ("add_bos_token" in settings)
    assert (ours.eod, ours.bos) == (again.eod, again.bos) == (1, 0)
    assert ours.chat_template == again.chat_template == settings.get("chat_template")
    assert (folder / "saved" / "tokenizer.json").exists()


def test_roles_that_transformers_knows_for_a_class(foreign):
    folder = foreign()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    ours, other = Tokenizer.from_folder(folder), theirs(folder)
    assert other.eos_token == "<|endoftext|>"
    assert (ours.eod, ours.bos) == (other.eos_token_id, other.bos_token_id)
    assert saved_again(folder).eod == ours.eod


def test_other_files_that_transformers_cannot_read(foreign, monkeypatch):
    folder = foreign()
    (folder / "vocab.json").write_text("[")
    with pytest.raises(ValueError, match=r"transformers cannot read .*vocab\.json"):
        Tokenizer.from_folder(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist.*pip install transf"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.model").write_bytes(b"\n\x0e")
    monkeypatch.setattr(tokenizer_files, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tokenizer\.model needs .*pip install sentencepiece"):
        Tokenizer.from_folder(folder)


def test_a_file_of_mistral_has_its_end_token(tmp_path):
    vocab = [{"rank": i, "token_bytes": b64encode(bytes([i])).decode()} for i in range(256)]
    special = [{"rank": i, "token_str": f"<{text}>"} for i, text in enumerate(("unk", "s", "/s"))]
    sizes = {"default_vocab_size": 259, "default_num_special_tokens": 3, "pattern": ".+"}
    values = {"config": sizes, "vocab": vocab, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(values))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.tokenize("ab")) == (1, 2, [100, 101])


def test_tokenizers_that_cannot_become_a_file(tmp_path):
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").touch()
    with pytest.raises(ValueError, match=r"ByT5Tokenizer .* from vocab\.txt cannot be written"):
        Tokenizer.from_folder(tmp_path)


def test_find_tokenizer(foreign, tmp_path):
    assert find_tokenizer(tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist, nor tokenizer\.model,"):
        Tokenizer.from_folder(tmp_path)
    folder = foreign()
    assert find_tokenizer(str(folder)) == folder / "vocab.json"
    (folder / "tokenizer.model").touch()
    assert find_tokenizer(folder) == folder / "tokenizer.model"
    (folder / "tokenizer.json").touch()
    assert find_tokenizer(folder) == folder / "tokenizer.json"


# Malformed files ---------------------------------------------------------------------------------
CONFIG, GENERATION = "tokenizer_config", "generation_config"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG, {"eos_token": 5}, "eos_token is 5, which is no token"),
        (CONFIG, {"eos_token": "<eos>"}, "names the end token '<eos>'"),
        (CONFIG, {"added_tokens_decoder": {"1": {"a": 2}}}, "does not fit"),
        (CONFIG, {"added_tokens_decoder": {"7": added(EOS)}}, "id 7, which is 1 there"),
        (CONFIG, {"chat_template": [{"name": "a"}]}, "string or a list of {name, temp"),
        (CONFIG, {"chat_template": [{"name": "../a", "template": ""}]}, "chat_template"),
        (GENERATION, {"eos_token_id": "2"}, "eos_token_id is '2'; it must be a whole number"),
        ("config", {"eos_token_id": [True]}, "eos_token_id[0] is True; it must be a whole number"),
        ("chat_template.jinja", None, "cannot be read"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read as a tokenizer"),
    ],
)
def test_malformed_files(write, name, content, message):
    folder = write()
    if content is None:
        (folder / name).write_bytes(b"\xff\xff")
    else:
        write(**{name: content})
    with pytest.raises(ValueError) as error:
        Tokenizer.from_folder(folder)
    assert message in str(error.value)
    assert str(folder / name) in str(error.value)


# Answers -----------------------------------------------------------------------------------------

TURNS = "{%% for m in messages %%}<|im_start|>{{ m.role }}\n%s{%% endfor %%}"
SPOKEN = "{{ m.content }}<|im_end|>"
MARKED = (
    "{% if m.role == 'assistant' %}{% generation %}SPOKEN{% endgeneration %}"
    "{% else %}SPOKEN{% endif %}{{ '\\n\\n' }}"
)
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINKING = "{% if m.role == 'assistant' and loop.last %}<think>\n</think>{% endif %}"
WITH_MARKS = TURNS % MARKED.replace("SPOKEN", SPOKEN) + PROMPT
WITHOUT_MARKS = TURNS % (SPOKEN + "\n\n") + PROMPT
THINKING_WITH_MARKS = TURNS % MARKED.replace("SPOKEN", THINKING + SPOKEN) + PROMPT
THINKING_WITHOUT_MARKS = TURNS % (THINKING + SPOKEN + "\n\n") + PROMPT
SPEECHES = [
    [QUESTION, ANSWER],
    [SYSTEM, QUESTION, ANSWER, QUESTION],
    [QUESTION, {"role": "assistant", "content": " two  words"}, QUESTION, ANSWER],
    [QUESTION, ANSWER, ANSWER, {"role": "tool", "content": "🙂"}, {**ANSWER, "content": ""}],
    [{"role": "assistant", "content": "hi there 漢字🙂"}, QUESTION],
    [QUESTION, {"role": "assistant", "content": f"Say {END} twice."}, QUESTION, ANSWER],
]


def spans_of(mask):
    """[start, end) of each run of ones."""
    edges = [i for i in range(len(mask) + 1) if [0, *mask][i] != [*mask, 0][i]]
    return list(zip(edges[::2], edges[1::2]))


def their_answers(folder, messages):
    other = theirs(folder)
    found = other.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return found["input_ids"], [(*span, 1.0) for span in spans_of(found["assistant_masks"])]


@pytest.mark.parametrize(
    ("template", "marked"),
    [
        *((each, each) for each in (WITH_MARKS, THINKING_WITH_MARKS, EXTENSIONS)),
        (WITHOUT_MARKS, WITH_MARKS),
        (THINKING_WITHOUT_MARKS, THINKING_WITH_MARKS),
    ],
)
@pytest.mark.parametrize("messages", SPEECHES)
def test_answers_are_those_of_transformers_with_marks_and_without(
    write, template, marked, messages
):
    """Marks begin and end what a model writes, with its end token."""
    settings = {**ROLES, "eos_token": END}
    folder = write(tokenizer_config=settings, **{"chat_template.jinja": template})
    ours = Tokenizer.from_folder(folder).chat_with_answers(messages)
    write(tokenizer_config=settings, **{"chat_template.jinja": marked})
    assert ours == their_answers(folder, messages)


def test_an_answer_ends_with_what_begins_the_next_turn(write):
    """GLM-4.5 has no other end token; after the last answer, the template writes none."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}<|im_end|>{% elif m.role == 'user' %}"
        "<|im_start|>{% else %}:{% endif %}{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.arguments.q }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    folder = write(tokenizer_config=ROLES, **{"chat_template.jinja": template})
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.end_tokens = user, tool = tokenizer.encode("<|im_start|><|im_end|>", False)
    call = {**ANSWER, "tool_calls": [{"function": {"name": "look", "arguments": {"q": "sea"}}}]}
    for messages, ends in (
        ([QUESTION, call, {"role": "tool", "content": "r"}, ANSWER], [tool, user]),
        ([QUESTION, call], [tool]),
    ):
        tokens, spans = tokenizer.chat_with_answers(messages)
        assert [tokens[end - 1] for _, end, _ in spans] == ends and spans[-1][1] == len(tokens)


def test_an_answer_in_the_middle_of_tokens_has_them_whole(write):
    template = (
        "{% for m in messages %}a b{% generation %}{{ m.content }}{% endgeneration %}d{% endfor %}"
    )
    folder = write(with_bos, **{"tokenizer_config": ROLES, "chat_template.jinja": template})
    tokenizer = Tokenizer.from_folder(folder)
    ids, ((start, end, _),) = tokenizer.chat_with_answers([{"role": "user", "content": "  Hello"}])
    assert tokenizer.detokenize(ids[start:end]) == "  Hello"
    ids, ((start, end, _),) = tokenizer.chat_with_answers(
        [{"role": "user", "content": "ello worl"}]
    )
    assert tokenizer.detokenize(ids[start:end]) in (" bello worl", "bello worl", "ello world")


@pytest.mark.parametrize(
    ("template", "messages", "match"),
    [
        (WITH_MARKS, [QUESTION], "the conversation has no answer"),
        (WITHOUT_MARKS, [QUESTION], "the conversation has no answer"),
        (
            "{% set x %}{% generation %} {{ messages[0].content }}{% endgeneration %}{% endset %}"
            "{{ x | trim | length }}",
            [QUESTION],
            "changes the text of its {% generation %} blocks afterwards",
        ),
    ],
)
def test_answers_that_cannot_be_found_are_refused(write, template, messages, match):
    folder = write(tokenizer_config=ROLES, **{"chat_template.jinja": template})
    with pytest.raises(ValueError, match=match):
        Tokenizer.from_folder(folder).chat_with_answers(messages)


# Training ----------------------------------------------------------------------------------------


def test_a_batch_has_the_tokens_of_each_text(write):
    tokenizer = Tokenizer.from_folder(write(with_bos, tokenizer_config=ROLES))
    assert tokenizer.tokenize_batch(TEXTS) == [tokenizer.tokenize(text) for text in TEXTS]
    with pytest.raises(ValueError, match=r"text 1 has \\ud83d, half of a character"):
        tokenizer.tokenize_batch(["a", "\ud83d"])
    with pytest.raises(ValueError, match=r"the text has \\ud800, half of a character"):
        tokenizer.tokenize("a\ud800")


def fewer_merges(tokenizer):
    values = json.loads(tokenizer.to_str())
    values["model"]["merges"] = values["model"]["merges"][1:]
    tokenizer.model = tokenizers.Tokenizer.from_str(json.dumps(values)).model


def test_fingerprints_tell_tokenizers_apart(write):
    lower_case = normalizers.Lowercase()
    made = [
        Tokenizer.from_folder(write(change, tokenizer_config=settings))
        for change in (None, lambda t: setattr(t, "normalizer", lower_case), fewer_merges)
        for settings in (ROLES, {**ROLES, "eos_token": END})
    ]
    again = Tokenizer.from_folder(write(for_batches, tokenizer_config=ROLES))
    assert len({each.fingerprint for each in made}) == len(made)
    assert again.fingerprint == made[0].fingerprint
    assert again.unique_identifiers["fingerprint"] == again.fingerprint


@pytest.mark.parametrize(
    ("pad", "expected"), [(None, -1), (EOS, -1), (BOS, -1), (START, 2), ("?!", -1)]
)
def test_pad_is_a_token_of_its_own(write, pad, expected):
    tokenizer = Tokenizer.from_folder(write(tokenizer_config={**ROLES, "pad_token": pad}))
    assert tokenizer.pad == expected


def test_a_trained_tokenizer_writes_any_text_and_is_of_the_size(tmp_path):
    made = train_tokenizer(["Once upon a time there was an old man. " * 9, "the sea"], 280)
    assert made.vocab_size == 280 and made.eod == 0 and made.detokenize([0]) == ""
    made.save(tmp_path)
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded.fingerprint == made.fingerprint
    for text in TEXTS[:3]:
        assert loaded.detokenize(loaded.tokenize(text)) == text
        assert theirs(tmp_path)(text)["input_ids"] == loaded.tokenize(text)
    assert len(loaded.tokenize("Once upon a time")) < 8
    with pytest.raises(ValueError, match="vocab_size is 256; it must be 257 or more"):
        train_tokenizer([], 256)


def test_a_tokenizer_is_trained_alike_each_time():
    texts = [f"{i} birds sang {i * i} songs" for i in range(300)]
    assert train_tokenizer(texts, 400).fingerprint == train_tokenizer(iter(texts), 400).fingerprint


def test_long_texts_have_the_tokens_of_short_ones(trained, monkeypatch):
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(trained))
    tokenizer.set_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    chat = [{"role": "user", "content": LONG}] * 2
    found = tokenizer.tokenize(LONG), tokenizer.chat_prompt(chat, False)
    assert tokenizer.detokenize(found[0]) == LONG
    monkeypatch.setattr("megatron_hybrid.text.tokenizer._LONG", 1 << 30)
    assert (tokenizer.tokenize(LONG), tokenizer.chat_prompt(chat, False)) == found
    assert tokenizer.detokenize(found[0]) == LONG


@pytest.mark.parametrize("call", ["tokenize", "detokenize"])
def test_other_threads_run_while_a_long_text_is_taken(trained, call):
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(trained))
    given = LONG if call == "tokenize" else tokenizer.tokenize(LONG)
    turns, is_over = [], threading.Event()

    def take_turns():
        while not is_over.is_set():
            turns.append(None)
            time.sleep(0)

    thread = threading.Thread(target=take_turns)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(1000)  # only a call that lets go of the interpreter gives a turn
        before = len(turns)
        for _ in range(300):  # the other thread may be late
            getattr(tokenizer, call)(given)
            if len(turns) > before:
                break
        after = len(turns)
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()
    assert after > before


def test_marks_of_calls_become_text_and_ends_stay_special(write):
    """Answers show them, guides may ask for them, and prompts keep their tokens."""
    tokenizer = Tokenizer.from_folder(folder_with(write, CHATML))
    ids = tokenizer.tokenize(f"a{START}b", add_special_tokens=False)
    assert START not in tokenizer.detokenize(ids)
    assert START.encode() not in tokenizer.token_bytes
    tokenizer.show_special_tokens([f"<{START}>", EOS])
    assert tokenizer.tokenize(f"a{START}b", add_special_tokens=False) == ids
    assert START in tokenizer.detokenize(ids)
    (index,) = tokenizer.tokenize(START, add_special_tokens=False)
    assert tokenizer.token_bytes[index] == START.encode()
    assert all(not tokenizer.token_bytes[end] for end in tokenizer.end_tokens)


class Counting:
    """A tokenizer that notes the characters of each text."""

    def __init__(self, trained):
        self.inner, self.sizes = tokenizers.Tokenizer.from_str(trained), []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def encode(self, text, **options):
        return self.encode_batch([text], **options)[0]

    def encode_batch(self, texts, **options):
        self.sizes += map(len, texts)
        return self.inner.encode_batch(texts, **options)


def test_a_long_text_is_counted_piece_by_piece(trained, monkeypatch):
    counting = Counting(trained)
    tokenizer, sizes = Tokenizer(counting), counting.sizes
    long, short = "x" * 8500, " assistant system tool" * 400
    num_tokens = len(tokenizer.tokenize(long))
    monkeypatch.setattr("megatron_hybrid.text.tokenizer._PIECE", 1000)
    limited = tokenizer.limited_to(1000)
    sizes.clear()
    with pytest.raises(TextTooLongError, match=r"first 2000 characters .* at least 1488") as error:
        limited.tokenize(long)
    assert sizes == [1000] * 2
    assert 1000 < error.value.num_tokens <= num_tokens and error.value.max_tokens == 1000
    sizes.clear()
    assert limited.tokenize(short) == tokenizer.tokenize(short)
    assert sizes == [1000] * 8 + [800] + [len(short)] * 2
    with pytest.raises(TextTooLongError, match="first 900 characters"):
        tokenizer.limited_to(100).tokenize("x" * 900)


LETTERS = {word: index for index, word in enumerate(["[UNK]", "a", "the"])}


def odd_tokenizer(kind: str) -> tokenizers.Tokenizer:
    """One of whose tokens takes any number of characters, or that drops some."""
    if kind.startswith("Word"):
        model = getattr(models, kind)(LETTERS, unk_token="[UNK]")
    else:
        model = models.BPE(LETTERS, [], unk_token="[UNK]", fuse_unk=kind == "fuse_unk")
    tokenizer = tokenizers.Tokenizer(model)
    if kind == "removed":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if kind == "strips":
        tokenizer.add_tokens([tokenizers.AddedToken("<m>", lstrip=True, rstrip=True)])
    return tokenizer


@pytest.mark.parametrize("kind", ["fuse_unk", "removed", "WordLevel", "WordPiece", "strips"])
def test_a_text_that_fits_is_never_refused(kind):
    tokenizer = Tokenizer(odd_tokenizer(kind))
    text = {"removed": " " * 300_000 + "a", "strips": " " * 150_000 + "<m>" + " " * 150_000}
    text = text.get(kind, "🙂" * 300_000)
    ids = tokenizer.tokenize(text)
    assert len(ids) == 1
    assert tokenizer.limited_to(64).tokenize(text) == ids


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_a_cut_text_little_more_is_tokenized_than_what_is_left(trained, side):
    counting = Counting(trained)
    tokenizer = Tokenizer(counting).limited_to(100)
    tokenizer.set_chat_template("{{ messages[0].content }}")
    text = " ".join(f"how are you {number}" for number in range(40_000))
    ids = Tokenizer(tokenizers.Tokenizer.from_str(trained)).tokenize(text)
    cut = tokenizer.cut_to(50, side)
    end = slice(-50, None) if side == "left" else slice(50)
    assert cut.tokenize(text)[end] == ids[end]
    assert sum(counting.sizes) < 3 * (64 << 10) < len(text)
    assert cut.chat_prompt([{"role": "user", "content": text}])[0][end] == ids[end]
    with pytest.raises(TextTooLongError):
        cut.cut_to(None, side).tokenize(text)
