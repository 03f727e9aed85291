"""Bounds of a text's number of tokens, compared with its encoding."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.tokenizer.text_bounds import SLICE_CHARS, TextBounds

CORPUS = [
    "the quick brown fox jumps over the lazy dog " * 4,
    "internationalisation of counterrevolutionaries " * 4,
    " " * 64 + "=" * 40 + "\n\n\n\t\t" + "e\u0301\u00e9 \u4f60\u597d " * 8 + "0123456789" * 3,
    "def f(x):\n        return x\n" * 4,
]
SPLIT = Regex(r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def _byte_level(normalizer: object = None, added: tuple[AddedToken, ...] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(SPLIT, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def _llama() -> Tokenizer:
    """Return SentencePiece's BPE: spaces are marks, and the whole text is one word."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    letters = [*map(chr, range(0x21, 0x7F)), "\u2581", "\u00e9"]
    merges: list[tuple[str, str]] = []
    for word in ("\u2581the", "\u2581quick", "\u2581\u2581\u2581\u2581", "ation", "====="):
        for at in range(1, len(word)):
            if (word[:at], word[at]) not in merges:
                merges.append((word[:at], word[at]))
    for token in [*letters, *(left + right for left, right in merges)]:
        vocab.setdefault(token, len(vocab))
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return tokenizer


def _fused() -> Tokenizer:
    """Return a tokenizer without bytes, for which adjacent unknown characters are one token."""
    tokenizer = _llama()
    model = tokenizer.model
    model.byte_fallback = False  # type: ignore[attr-defined]
    tokenizer.model = model
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _wordpiece(added: tuple[str, ...] = ()) -> Tokenizer:
    vocab = {"[UNK]": 0} | {
        token: number + 1
        for number, token in enumerate(["the", "fox", "a", "b", "##a", "##b", "##s", ".", "1"])
    }
    tokenizer = Tokenizer(
        models.WordPiece(vocab=vocab, unk_token="[UNK]", max_input_chars_per_word=12)
    )
    tokenizer.normalizer = normalizers.BertNormalizer()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece()  # type: ignore[assignment]
    tokenizer.add_tokens(list(added))
    return tokenizer


MASK = AddedToken("<mask>", lstrip=True, rstrip=True, special=True)
TOKENIZERS = {
    "demo": Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")),
    "byte level": _byte_level(),
    "NFC": _byte_level(normalizers.NFC(), (AddedToken("<|a long added token|>", special=True),)),
    "lower": _byte_level(
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        (AddedToken("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFGHIJKLM", normalized=True),),
    ),
    "strips": _byte_level(None, (MASK,)),
    "llama": _llama(),
    "fused": _fused(),
    "unigram": _unigram(),
    "wordpiece": _wordpiece(),
    "added words": _wordpiece(("the fox a", "b")),
    "bert": _wordpiece(("[MASK]", "<mask>")),
}
BOUNDS = {name: TextBounds(tokenizer) for name, tokenizer in TOKENIZERS.items()}
# With slices of few characters short texts are cut too.
FINE = {name: TextBounds(tokenizer, slice_chars=8) for name, tokenizer in TOKENIZERS.items()}
_PIECES = st.sampled_from(
    [
        "the quick ",
        "internationalisation",
        " ",
        " " * 70,
        "=" * 90,
        "\n\n",
        "\t",
        "a",
        " b",
        "cab is ",
        "ing 12",
        "the fox a",
        "<mask>",
        "<|a long added token|>",
        "ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFGHIJKLM",
        "e\u0301\u0323",
        "\u1100\u1161\u11a8",
        "\u03c9\u0314\u0342\u0345",
        "\u212a",
        "\u3000\u00a0\u2003",
        "\u4f60\u597d",
        "[MASK]",
        "a.b,c",
        "?!\u3402\u9fff\uf900",
        "\U0001f469\u200d\U0001f4bb",
        "\u0600a",
        "a\u0000b\u200d",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "12345678",
        "\u0939\u093f",
        "x\r\ny",
    ]
)
_REPEATED = st.builds(lambda piece, count: piece * count, _PIECES, st.integers(1, 30))
TEXTS = st.lists(st.one_of(_PIECES, _REPEATED, st.text(max_size=8)), max_size=30).map("".join)


def _ids(name: str, text: str) -> list[int]:
    return TOKENIZERS[name].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=50, deadline=None)
def test_a_text_that_could_fit_is_never_said_not_to(name: str, text: str) -> None:
    num_tokens = len(_ids(name, text))
    assert not BOUNDS[name].exceeds(text, num_tokens)
    assert not FINE[name].exceeds(text, num_tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, most=st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_what_remains_of_a_cut_text_has_the_tokens_that_are_kept(
    name: str, text: str, most: int
) -> None:
    whole, bounds = _ids(name, text), FINE[name]
    assert _ids(name, bounds.head(text, most))[:most] == whole[:most]
    last = _ids(name, bounds.tail(text, most))
    assert last[len(last) - min(most, len(last)) :] == whole[max(0, len(whole) - most) :]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_long_texts_of_words_are_known_not_to_fit(name: str) -> None:
    text = "word " * 100_000
    assert BOUNDS[name].exceeds(text, 4000)


@pytest.mark.parametrize("name", sorted({*TOKENIZERS} - {"NFC", "added words"}))
def test_long_texts_of_words_are_cut(name: str) -> None:
    text = "word " * 100_000
    assert len(BOUNDS[name].head(text, 100)) < SLICES
    assert len(BOUNDS[name].tail(text, 100)) < SLICES


# Cuts are searched slice by slice.
SLICES = 3 * SLICE_CHARS


@pytest.mark.parametrize("name", ["demo", "byte level", "NFC", "llama"])
def test_long_runs_of_spaces_are_known_not_to_fit(name: str) -> None:
    assert BOUNDS[name].exceeds(" " * 3_000_000, 8192)


@pytest.mark.parametrize("name", ["strips", "unigram", "wordpiece"])
def test_spaces_that_may_vanish_are_not_counted(name: str) -> None:
    assert not BOUNDS[name].exceeds(" " * 3_000_000, 1)


@pytest.mark.parametrize("name", ["demo", "byte level", "NFC"])
def test_odd_characters_are_known_not_to_fit(name: str) -> None:
    assert BOUNDS[name].exceeds("\U0001f469\u200d\u4f60\u0301" * 1_000_000, 8192)


@pytest.mark.parametrize("text", ["[MASK]", "<mask>", "a.b,", "\u4f60\u597d"])
def test_words_that_no_space_divides_are_counted(text: str) -> None:
    assert BOUNDS["bert"].exceeds(text * 100_000, 8192)


def test_one_word_of_a_vocabulary_of_words_is_one_token_however_long() -> None:
    assert not BOUNDS["wordpiece"].exceeds("a" * 1_000_000, 1)


def test_a_tokenizer_that_may_delete_text_has_no_bound() -> None:
    tokenizer = _byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(SPLIT, "removed", True)  # type: ignore[assignment]
    bounds = TextBounds(tokenizer)
    text = "word " * 100_000
    assert not bounds.exceeds(text, 1)
    assert bounds.head(text, 1) is text
    assert bounds.tail(text, 1) is text
