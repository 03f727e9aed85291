"""The tokenizer of a GGUF file as the files of transformers' tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from mlx_parallm.models.gguf.fields import Fields, shown
from mlx_parallm.models.gguf.pre_tokenizers import PRE_TOKENIZERS, byte_level
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_list, is_object

Json = dict[str, Any]

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
#: ``WHOLE``: the key of a whole tokenizer.json, which the format allows and few files have.
WHOLE = "tokenizer.huggingface.json"
# NORMAL, CONTROL, USER_DEFINED: types of tokens.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
# SPACE: as vocabularies of sentencepiece write it.
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# ENDS: keys of tokens that end an answer, and their names where files lack these keys. Files name
# one token as the end, which chats of Llama 3 and Gemma do not write.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TOKENS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]", "<｜end▁of▁sentence｜>"),
    }
)
# QWEN2_NAMES: ways to cut texts that models of Qwen2 may have. transformers cuts these models'
# texts as Qwen does, whatever their tokenizer.json says.
QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
# MAX_PIECE: longest token, in characters, that merges are looked for; the time for one
# grows with the square of its length.
MAX_PIECE = 256
GEMMA = ("gemma2", "gemma3")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer of a file, as the contents of other files.

    Attributes:
        tokenizer: the content of tokenizer.json.
        config: that of tokenizer_config.json.
        end_ids: tokens that end an answer, sorted.
    """

    tokenizer: Json
    config: Json
    end_ids: list[int]


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens with their types."""

    fields: Fields
    tokens: list[str]
    types: Sequence[float]

    def of_types(self, *types: int) -> Iterator[tuple[int, str]]:
        """Yield ids and texts of tokens of some types."""
        for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in types:
                yield number, token

    def id_of(self, key: str) -> int | None:
        """Return the token that a key names; None if the file has no such key."""
        key = PREFIX + key
        value = self.fields.header.values.get(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise self.fields.wrong(key, f"a token id below {len(self.tokens)}")
        return value


def tokenizer_files(fields: Fields, vocab_size: int) -> TokenizerFiles:
    """Return the tokenizer of a file.

    Args:
        fields: the metadata.
        vocab_size: rows of the table of embeddings.

    Raises:
        ModelLoadError: it has none, or one of a kind that is not read.
    """
    tokens = fields.strings(f"{PREFIX}tokens")
    if len(tokens) > vocab_size:
        raise fields.wrong(f"{PREFIX}tokens", f"at most {vocab_size} tokens, as embeddings have")
    types_key = f"{PREFIX}token_type"
    types: Sequence[float] = [NORMAL] * len(tokens)
    if fields.has(types_key):
        types = fields.numbers(types_key, len(tokens), "iI")
    vocabulary = _Vocabulary(fields, tokens, types)
    config = _config(vocabulary)
    tokenizer = _whole(fields) if fields.has(WHOLE) else _built(vocabulary)
    return TokenizerFiles(tokenizer, config, _end_ids(vocabulary))


def _built(vocabulary: _Vocabulary) -> Json:
    """Return tokenizer.json, made from a vocabulary."""
    fields = vocabulary.fields
    model = fields.text(f"{PREFIX}model")
    if model == "gpt2":
        parts, begins = _byte_level(vocabulary), False
    elif model == "llama" and fields.architecture != "qwen2":
        parts, begins = _pieces(vocabulary), True
    else:
        raise ModelLoadError(
            f"{fields.header.path}: tokenizers of the kind {shown(model)} are not read from GGUF "
            f"files of {fields.architecture}."
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(starmap(_added, _added_tokens(vocabulary))),
        **parts,
        "post_processor": _post_processor(vocabulary, begins=begins, is_bytes=model == "gpt2"),
    }


def _byte_level(vocabulary: _Vocabulary) -> Json:
    """Return the parts of a byte-level tokenizer."""
    fields = vocabulary.fields
    key = f"{PREFIX}pre"
    name = fields.text(key, "qwen2" if fields.architecture.startswith("qwen") else None)
    known = QWEN2_NAMES if fields.architecture == "qwen2" else [*PRE_TOKENIZERS]
    if name not in known:
        raise ModelLoadError(
            f"{fields.header.path}: {key} is {shown(name)}, and how it cuts texts is not known; "
            f"served are {', '.join(known)}. A folder in the form of Hugging Face's models may "
            "be served."
        )
    pre = PRE_TOKENIZERS[name]
    merges = [merge.split(" ") for merge in fields.strings(f"{PREFIX}merges")]
    model = {"ignore_merges": pre.takes_whole, **_bpe(vocabulary.tokens, merges)}
    return {**pre.fields(), "model": model, "decoder": byte_level()}


def _pieces(vocabulary: _Vocabulary) -> Json:
    """Return the parts of a tokenizer with pieces of sentencepiece."""
    fields = vocabulary.fields
    is_gemma = fields.architecture in GEMMA
    tokens = list(vocabulary.tokens)
    scores = fields.numbers(f"{PREFIX}scores", len(tokens), "f")
    for number, _ in _runs_of_spaces(vocabulary):
        # llama.cpp's converter writes the spaces of these tokens as such.
        tokens[number] = SPACE * len(tokens[number])
    mergeable = [number for number, _ in vocabulary.of_types(NORMAL, USER_DEFINED)]
    if is_gemma:
        # Gemma's scores are not the order of its merges; that of its tokens is.
        ranks: Mapping[int, float] = {number: number for number in mergeable}
    else:
        ranks = {number: -scores[number] for number in mergeable}
    unknown = vocabulary.id_of("unknown_token_id")
    model = {
        **_bpe(tokens, _merges(tokens, ranks)),
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": None if unknown is None else tokens[unknown],
    }
    begins = fields.flag(f"{PREFIX}add_space_prefix", default=True)
    return {**_spaces(begins=begins), "model": model}


def _spaces(*, begins: bool) -> Json:
    """Return how pieces write spaces; ``begins`` is True if a text gets one before it."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    restore = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if begins else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    steps = [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
    }


def _bpe(tokens: Sequence[str], merges: list[list[str]]) -> Json:
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        # Texts are encoded as the first of equal tokens.
        vocabulary.setdefault(token, number)
    return {"type": "BPE", "vocab": vocabulary, "merges": merges}


def _merges(tokens: Sequence[str], ranks: Mapping[int, float]) -> list[list[str]]:
    """Return the merges of two tokens that make a third, the one of the lowest rank first.

    Args:
        tokens: all tokens.
        ranks: of those that merges make.
    """
    numbers = {token: number for number, token in reversed(list(enumerate(tokens)))}
    merges: list[tuple[float, int, int, str, str]] = []
    for number, rank in ranks.items():
        token = tokens[number]
        cuts = range(1, len(token)) if len(token) <= MAX_PIECE else range(0)
        for cut in cuts:
            left, right = token[:cut], token[cut:]
            if left in numbers and right in numbers:
                # Merges that make one token are in the order of the length of their left part.
                merges.append((rank, -cut, number, left, right))
    return [[left, right] for *_, left, right in sorted(merges)]


def _runs_of_spaces(vocabulary: _Vocabulary) -> Iterator[tuple[int, str]]:
    for number, token in vocabulary.of_types(USER_DEFINED):
        if token and not token.strip(" "):
            yield number, token


def _added_tokens(vocabulary: _Vocabulary) -> Iterator[tuple[int, str, bool]]:
    """Yield id and text of tokens that are found in texts as they are, and if they are special."""
    runs = dict(_runs_of_spaces(vocabulary))
    kinds = {number: True for number, _ in vocabulary.of_types(CONTROL)}
    unknown = vocabulary.id_of("unknown_token_id")
    if unknown is not None:
        kinds[unknown] = True
    kinds |= {number: False for number, _ in vocabulary.of_types(USER_DEFINED)}
    for number in sorted(kinds.keys() - runs.keys()):
        if vocabulary.tokens[number]:
            yield number, vocabulary.tokens[number], kinds[number]


def _added(number: int, token: str, is_special: bool) -> Json:
    stays = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": token, **stays, "special": is_special}


def _post_processor(vocabulary: _Vocabulary, *, begins: bool, is_bytes: bool) -> Json | None:
    """Return what adds tokens before and behind a text; ``begins`` is how it is without a key."""
    fields = vocabulary.fields
    begin, end = (vocabulary.id_of(f"{name}_token_id") for name in ("bos", "eos"))
    adds_begin = fields.flag(f"{PREFIX}add_bos_token", default=begins) and begin is not None
    adds_end = fields.flag(f"{PREFIX}add_eos_token", default=False) and end is not None
    specials = [begin] * adds_begin, [end] * adds_end
    names = [[vocabulary.tokens[each or 0] for each in side] for side in specials]
    if not any(names):
        return byte_level() if is_bytes else None

    def around(kind: int, text: str) -> list[Json]:
        before, behind = (
            [{"SpecialToken": {"id": name, "type_id": kind}} for name in side] for side in names
        )
        return [*before, {"Sequence": {"id": text, "type_id": kind}}, *behind]

    ids = [each or 0 for side in specials for each in side]
    texts = [name for side in names for name in side]
    return {
        "type": "TemplateProcessing",
        "single": around(0, "A"),
        "pair": [*around(0, "A"), *around(1, "B")],
        "special_tokens": {
            text: {"id": text, "ids": [number], "tokens": [text]}
            for text, number in zip(texts, ids, strict=True)
        },
    }


def _config(vocabulary: _Vocabulary) -> Json:
    fields = vocabulary.fields
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.size(".context_length"),
    }
    for name, key in SPECIALS.items():
        number = vocabulary.id_of(f"{key}_token_id")
        if number is not None:
            config[name] = vocabulary.tokens[number]
    templates = _templates(fields)
    if templates:
        only_default = [*templates] == ["default"]
        config["chat_template"] = (
            templates["default"]
            if only_default
            else [{"name": name, "template": text} for name, text in templates.items()]
        )
    return config


def _templates(fields: Fields) -> dict[str, str]:
    names = {"default": TEMPLATE} if fields.has(TEMPLATE) else {}
    if fields.has("tokenizer.chat_templates"):
        others = fields.strings("tokenizer.chat_templates")
        names |= {name: f"{TEMPLATE}.{name}" for name in others if name != "default"}
    return {name: fields.text(key) for name, key in names.items() if fields.has(key)}


def _end_ids(vocabulary: _Vocabulary) -> list[int]:
    named = {vocabulary.id_of(key) for key in END_KEYS} - {None}
    # Some converters make these tokens user-defined.
    marked = {
        number
        for number, token in vocabulary.of_types(CONTROL, USER_DEFINED)
        if token in END_TOKENS
    }
    return sorted(number for number in named | marked if number is not None)


def _whole(fields: Fields) -> Json:
    try:
        content = json.loads(fields.text(WHOLE))
    except (ValueError, RecursionError) as cause:
        raise fields.wrong(WHOLE, "a tokenizer.json") from cause
    if not is_object(content) or not is_list(content.get("added_tokens")):
        raise fields.wrong(WHOLE, "a tokenizer.json")
    return content
