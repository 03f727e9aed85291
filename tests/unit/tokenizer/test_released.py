"""Texts are encoded by calls that hold nothing, and only if they may fit."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import tokenizer_utils
from tokenizers import Tokenizer

from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_FOLDERS
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.tokenizer.lanes import Lanes
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.tokenizer.released import FEW_CHARS, GROUP_CHARS, SHORT_CHARS, ReleasedTokenizer
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.errors import ContextLengthError
from mlx_parallm.types.token_limit import ANY_LENGTH, TokenLimit

WAIT_S = 60.0
TOO_LONG = "word " * 1_400_000
ENCODER_FOLDER = next(folder for name, folder in DEMO_FOLDERS.items() if folder != DEMO_FOLDER)


class Spy:
    """A tokenizer that records its calls, and fails where a long text would hold the GIL."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.encoded: list[list[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode(self, text: str, **options: Any) -> Any:
        assert len(text) <= SHORT_CHARS, "encode holds the interpreter"
        return self._backend.encode(text, **options)

    def encode_batch_fast(self, texts: Sequence[Any], **options: Any) -> Any:
        self.encoded.append(list(texts))
        return self._backend.encode_batch_fast(texts, **options)

    def encode_batch(self, texts: Sequence[Any], **options: Any) -> Any:
        self.encoded.append(list(texts))
        return self._backend.encode_batch(texts, **options)


@functools.cache
def original() -> Any:
    """Return the tokenizer as mlx_lm loads it."""
    return tokenizer_utils.load(DEMO_FOLDER)


@pytest.fixture(scope="module")
def demo() -> ParallmTokenizer:
    return load_tokenizer(DEMO_FOLDER)


@pytest.fixture
def spy() -> Spy:
    return Spy(Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")))


def _released(spy: Spy) -> ReleasedTokenizer:
    return ReleasedTokenizer(spy)  # type: ignore[arg-type]


@given(text=st.text(), special=st.booleans())
@settings(deadline=None)
def test_the_ids_are_those_of_transformers(
    demo: ParallmTokenizer, text: str, special: bool
) -> None:
    wanted = original().encode(text, add_special_tokens=special)
    assert demo.encode(text, add_special_tokens=special) == list(wanted)


def test_the_ids_of_a_long_text_are_those_of_transformers(demo: ParallmTokenizer) -> None:
    text = "Some words, \u4f60\u597d and \U0001f469\u200d\U0001f4bb; " * 2000
    assert demo.encode(text) == list(original().encode(text))


def test_texts_are_encoded_without_holding_the_interpreter(spy: Spy) -> None:
    text = "a" * (SHORT_CHARS + 1)
    ids = _released(spy).ids([text], ANY_LENGTH, add_special_tokens=True)
    assert spy.encoded == [[text]]
    assert len(ids) == 1


@given(text=st.text(max_size=SHORT_CHARS), special=st.booleans())
@settings(deadline=None)
def test_a_short_text_has_the_ids_that_it_has_among_others(
    demo: ParallmTokenizer, text: str, special: bool
) -> None:
    released = ReleasedTokenizer(Tokenizer.from_str(demo.backend_json or ""))
    (alone,) = released.ids([text], ANY_LENGTH, add_special_tokens=special)
    among, _ = released.ids([text, text], ANY_LENGTH, add_special_tokens=special)
    assert alone == among


def test_a_short_text_that_is_too_long_is_refused_with_its_length(spy: Spy) -> None:
    with pytest.raises(ContextLengthError, match="your prompt has 10 tokens"):
        _released(spy).ids(["1 " * 5], TokenLimit(most=9), add_special_tokens=False)


def test_short_texts_share_no_threads_with_others(spy: Spy) -> None:
    texts = ["some words"] * 8
    assert sum(map(len, texts)) <= FEW_CHARS
    _released(spy).ids(texts, ANY_LENGTH, add_special_tokens=True)
    assert spy.encoded == [[text] for text in texts]


def test_many_texts_are_encoded_in_groups_that_others_come_between(spy: Spy) -> None:
    texts = [f"words {number} " * 40 for number in range(2000)]
    released = _released(spy)
    assert released.ids(texts, ANY_LENGTH, add_special_tokens=True) == [
        released.ids([text], ANY_LENGTH, add_special_tokens=True)[0] for text in texts
    ]
    groups = [group for group in spy.encoded if len(group) > 1]
    assert len(groups) > 2
    assert max(sum(map(len, group)) for group in groups) <= GROUP_CHARS


@pytest.mark.parametrize(
    "text", [TOO_LONG, " " * 3_000_000, "\U0001f469\u200d\u4f60\u0301" * 700_000]
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(spy: Spy, text: str) -> None:
    with pytest.raises(
        ContextLengthError, match=r"maximum context length is 8192 tokens\."
    ) as refusal:
        _released(spy).ids([text], TokenLimit(most=8192), add_special_tokens=True)
    assert "However, your prompt has at least 8193 tokens. Please shorten it." in str(refusal.value)
    assert spy.encoded == []


def test_what_is_cut_is_not_encoded_beyond_what_remains(spy: Spy) -> None:
    released = _released(spy)
    part = TOO_LONG[:100_000]
    for from_left in (False, True):
        limit = TokenLimit(most=512, cuts=True, from_left=from_left)
        (ids,) = released.ids([TOO_LONG], limit, add_special_tokens=False)
        (wanted,) = released.ids([part], ANY_LENGTH, add_special_tokens=False)
        kept = slice(-512, None) if from_left else slice(512)
        assert ids[kept] == wanted[kept]
        assert len(spy.encoded.pop(0)[0]) < 64 * 1024
        spy.encoded.clear()


def test_a_text_that_turns_out_too_long_is_refused_with_its_length(spy: Spy) -> None:
    text = "1 " * 3000
    with pytest.raises(ContextLengthError, match="your prompt has 6000 tokens"):
        _released(spy).ids([text], TokenLimit(most=5990), add_special_tokens=False)
    assert len(spy.encoded) == 1


def test_a_served_model_refuses_what_cannot_fit_and_counts_it_where_asked(
    demo: ParallmTokenizer,
) -> None:
    served = demo.limited(64)
    with pytest.raises(ContextLengthError):
        served.encode("a " * 1000)
    with pytest.raises(ContextLengthError):
        served.encode_chat([{"role": "user", "content": "a " * 1000}])
    assert len(served.encode("a " * 1000, limit=ANY_LENGTH)) > 64
    assert demo.encode("a " * 1000) == served.encode("a " * 1000, limit=ANY_LENGTH)


def test_encoders_refuse_and_cut_before_they_encode() -> None:
    spy = Spy(Tokenizer.from_file(str(ENCODER_FOLDER / "tokenizer.json")))
    tokenizer = EncoderTokenizer(spy)  # type: ignore[arg-type]
    spy.encoded.clear()
    refuses = TokenLimit(most=512, name="input")
    for call in (
        lambda: tokenizer.encode(["short", TOO_LONG], limit=refuses),
        lambda: tokenizer.spans(["short", TOO_LONG], limit=refuses),
        lambda: tokenizer.encode_pairs([("a", "b"), ("a", TOO_LONG)], limit=refuses),
    ):
        with pytest.raises(ContextLengthError, match="input 1 has at least 513"):
            call()
    assert spy.encoded == []
    cuts = TokenLimit(most=512, cuts=True)
    whole = TOO_LONG[:200_000]
    assert tokenizer.encode([TOO_LONG], limit=cuts)[0][:512] == tokenizer.encode([whole])[0][:512]
    (first,) = tokenizer.encode_pairs([("a word", TOO_LONG)], limit=cuts)
    (wanted,) = tokenizer.encode_pairs([("a word", whole)])
    assert first[0][:512] == wanted[0][:512]
    assert first[1] == wanted[1]


def test_a_tokenizer_written_in_python_has_a_copy_for_the_event_loop() -> None:
    lanes, held, free = Lanes({"a": 1}), threading.Event(), threading.Event()

    def hold() -> None:
        with lanes.use():
            held.set()
            assert free.wait(WAIT_S)

    async def use() -> dict[str, int]:
        with lanes.use() as lane:
            return lane

    worker = threading.Thread(target=hold)
    worker.start()
    try:
        assert held.wait(WAIT_S)
        assert asyncio.run(use()) == {"a": 1}
    finally:
        free.set()
        worker.join(WAIT_S)


def test_long_lists_of_ids_are_decoded_without_holding_the_interpreter(
    demo: ParallmTokenizer,
) -> None:
    ids = demo.encode("Some words and \u4f60\u597d. " * 500)
    assert demo.decode(ids) == demo.decode(ids[:100]) + demo.decode(ids[100:])
