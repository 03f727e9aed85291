"""Small tokenizers of the kinds that encoders have, each with 99 tokens.

They need the tokenizers library alone, so that scripts/golden_pipelines.py may use them where there
is no MLX.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

VOCAB_SIZE = 99
TEXT = (
    "the cat dog bird man woman river city house garden saw met loves fears reads writes in on "
    "near with old young red green happy sad paris london anna tom walk play run good bad movie "
    "is was very a it life goal of my name and you are"
)
WORDS = TEXT.split()
SUFFIXES = ("ing", "ed", "s", "er", "ly")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def wordpiece() -> tuple[Tokenizer, dict[str, Any]]:
    """BERT's: words in lower case, and their endings as tokens of their own."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*specials, *WORDS, *(f"##{end}" for end in SUFFIXES), ".", ",", "!", *LETTERS]
    tokens = list(dict.fromkeys(tokens))
    tokenizer = Tokenizer(models.WordPiece(_numbered(tokens), unk_token="[UNK]"))
    _set(
        tokenizer,
        normalizer=normalizers.BertNormalizer(lowercase=True),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
        post_processor=processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        ),
    )
    tokenizer.add_special_tokens(specials)
    return tokenizer, _names("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def byte_level() -> tuple[Tokenizer, dict[str, Any]]:
    """RoBERTa's: parts of words with the space before them; the mask takes that space."""
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    tokens = [*specials, "\u0120", ".", ",", "!", "A", "T", "P", *LETTERS]
    merges: list[tuple[str, str]] = []
    for word in (
        "\u0120the",
        "\u0120cat",
        "\u0120is",
        "\u0120in",
        "\u0120paris",
        "happy",
        "\u0120good",
    ):
        left = word[0]
        for letter in word[1:]:
            if left + letter not in tokens:
                tokens.append(left + letter)
                merges.append((left, letter))
            left += letter
    tokens += [f"unused{number}" for number in range(VOCAB_SIZE - 1 - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab=_numbered([*tokens, "<mask>"]), merges=merges))
    _set(
        tokenizer,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
        post_processor=processors.RobertaProcessing(
            ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
        ),
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return tokenizer, _names("<pad>", "<unk>", "<s>", "</s>", "<mask>")


def unigram() -> tuple[Tokenizer, dict[str, Any]]:
    """XLM-RoBERTa's: pieces whose first character stands for a space."""
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    words = [f"\u2581{word}" for word in WORDS]
    pieces = [*specials, "\u2581", *words, *SUFFIXES[:3], ".", ",", *LETTERS]
    pieces += [f"unused{number}" for number in range(VOCAB_SIZE - 1 - len(pieces))]
    scored = [(piece, -1.0 - 0.01 * number) for number, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram([*scored, ("<mask>", 0.0)], unk_id=3))
    _set(
        tokenizer,
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
        post_processor=processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[("<s>", 0), ("</s>", 2)],
        ),
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return tokenizer, _names("<pad>", "<unk>", "<s>", "</s>", "<mask>")


#: By the ``model_type`` of a config.
TOKENIZERS = {
    "bert": wordpiece,
    "roberta": byte_level,
    "xlm-roberta": unigram,
    "modernbert": byte_level,
}


def write_tokenizer(folder: Path, model_type: str) -> None:
    """Write the files of the tokenizer of such a model."""
    tokenizer, names = TOKENIZERS[model_type]()
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    # The class that reads the file as it is, whatever the model is.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 36, **names}
    if model_type == "bert":
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _numbered(tokens: list[str]) -> dict[str, int]:
    """Ids of ``VOCAB_SIZE`` tokens."""
    tokens = tokens + [f"[unused{number}]" for number in range(VOCAB_SIZE - len(tokens))]
    return {token: number for number, token in enumerate(tokens)}


def _names(pad: str, unk: str, cls: str, sep: str, mask: str) -> dict[str, Any]:
    return {
        "pad_token": pad,
        "unk_token": unk,
        "cls_token": cls,
        "sep_token": sep,
        "mask_token": {"__type": "AddedToken", "content": mask, "lstrip": mask == "<mask>"},
    }


def _set(tokenizer: Tokenizer, **parts: Any) -> None:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
