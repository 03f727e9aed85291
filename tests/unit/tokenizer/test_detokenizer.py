import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mlx_parallm.tokenizer.loading import load_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, twice.",
    "  indented\n\tcode(x) { return x; }\n\n",
    "naïve café, e\u0301 combining, Ω≈ç√",
    "你好世界。今天天气很好",
    "👩‍👩‍👧‍👦 family 🙂🙃 flags 🇩🇪",
]
SPECIAL = [
    AddedToken("<|end|>", special=True),
    AddedToken("<think>", special=False),
    AddedToken("é!", special=False),
]


def save(backend, folder, **config):
    backend.add_tokens([token for token in SPECIAL if not token.special])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", **config)
    hf.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [1, 2]}))
    return load_tokenizer(folder)


@pytest.fixture(scope="module", params=["alone", "in a sequence"])
def byte_level(request, tmp_path_factory):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    decoder = decoders.ByteLevel()
    backend.decoder = decoder if request.param == "alone" else decoders.Sequence([decoder])
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    return save(backend, tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<|end|>", "<unk>"], unk_token="<unk>"
    )
    backend.train_from_iterator(CORPUS, trainer)
    return save(backend, tmp_path_factory.mktemp("unigram"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    pieces = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁a", "the", "a", "b", "é", "世"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return save(backend, tmp_path_factory.mktemp("fallback"))


def stream(tokenizer, ids, skip):
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


def test_detokenizers_share_the_set_of_hidden_ids(byte_level, metaspace):
    for tokenizer in (byte_level, metaspace):
        first, second = (tokenizer.detokenizer(skip_special_tokens=True) for _ in range(2))
        assert first._hidden
        assert first._hidden is second._hidden


def assert_exact(tokenizer, ids, skip):
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, ids, skip)) == expected


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 450), max_size=40), st.booleans())
def test_byte_level_equals_decoding_at_once_for_any_ids(byte_level, ids, skip):
    assert_exact(byte_level, ids, skip)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=40), st.booleans())
def test_metaspace_equals_decoding_at_once_for_any_ids(metaspace, ids, skip):
    assert_exact(metaspace, ids, skip)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("athe b世🙂é\n<"), max_size=30), st.booleans())
def test_byte_fallback_equals_decoding_at_once_for_any_text(byte_fallback, text, skip):
    ids = [*byte_fallback.encode(text), 1, *byte_fallback.encode(text)]
    assert_exact(byte_fallback, ids, skip)


@pytest.fixture(params=["byte level", "byte fallback"])
def byte_tokenizer(request, byte_level, byte_fallback):
    return byte_level if request.param == "byte level" else byte_fallback


def test_a_character_comes_out_whole_with_its_last_byte(byte_tokenizer):
    tokenizer = byte_tokenizer
    ids = [i for b in "🦜".encode() for i in range(300) if tokenizer.token_bytes(i) == bytes([b])]
    assert stream(tokenizer, ids, True) == ["", "", "", "🦜", ""]


def test_an_invalid_byte_finally_comes_out(byte_tokenizer):
    tokenizer = byte_tokenizer
    bad = next(i for i in range(300) if tokenizer.token_bytes(i) == b"\xff")
    text = "".join(stream(tokenizer, [bad] * 20, True)[:-1])
    assert set(text) == {"\ufffd"}
    assert len(text) >= 16


def test_half_a_character_at_the_end_becomes_one_replacement(byte_level):
    first = next(i for i in range(300) if byte_level.token_bytes(i) == b"\xe2")
    assert stream(byte_level, [first], True) == ["", "\ufffd"]


def test_a_hidden_special_token_does_not_swallow_the_next_space(metaspace):
    ids = metaspace.encode("the dog")
    assert "".join(stream(metaspace, [ids[0], 0, *ids], True)).count(" the") == 1


def test_ids_outside_the_vocabulary_show_nothing(byte_level, metaspace):
    for tokenizer in (byte_level, metaspace):
        assert stream(tokenizer, [tokenizer.vocab_size, 10**6], True) == ["", "", ""]


def test_token_bytes_of_a_text_are_the_texts_bytes(byte_level, byte_fallback):
    text = "the 世 🙂 café"
    for tokenizer, expected in ((byte_level, text), (byte_fallback, f" {text}")):
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == expected.encode()


def test_a_token_string_marks_bytes_that_are_no_text(byte_level):
    first = next(i for i in range(300) if byte_level.token_bytes(i) == b"\xe2")
    assert byte_level.token_string(first) == "\ufffd"
    assert byte_level.token_string(byte_level.encode(" the")[0]).startswith(" ")


def test_a_vocabulary_string_has_the_marks_of_the_vocabulary(byte_level, metaspace):
    (first, *_) = byte_level.encode(" the")
    assert byte_level.vocabulary_string(first).startswith("\u0120")
    (first, *_) = metaspace.encode("the")
    assert metaspace.vocabulary_string(first).startswith("\u2581")
    assert byte_level.vocabulary_string(10**6) == ""


def test_some_special_tokens_may_stay_and_other_tokens_be_left_out(byte_level):
    end = byte_level.token_id("<|end|>")
    (letter,) = byte_level.encode("a")
    for skip, shown, hidden, expected in (
        (True, (), (), "a"),
        (True, (end,), (), "a<|end|>"),
        (False, (), (), "a<|end|>"),
        (False, (), (end,), "a"),
        (True, (end,), (letter,), "<|end|>"),
    ):
        detokenizer = byte_level.detokenizer(skip_special_tokens=skip, shown=shown, hidden=hidden)
        pieces = [*(detokenizer.add(token_id) for token_id in (letter, end)), detokenizer.flush()]
        assert "".join(pieces) == expected
