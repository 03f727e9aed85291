"""Names of languages as clients write them."""

from __future__ import annotations

import pytest

from mlx_parallm.tokenizer.speech.rules import SpeechRules
from mlx_parallm.types.errors import InvalidRequestError

CODES = ("en", "he", "jw", "no", "pt", "tl", "yue", "zh")
ENGLISH = SpeechRules(start_id=0, end_id=1, no_timestamps_id=2)
ALL = SpeechRules(
    start_id=0,
    end_id=1,
    no_timestamps_id=20,
    languages={code: number for number, code in enumerate(CODES, 2)},
)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("EN", "en"),
        ("en-US", "en"),
        (" pt_br", "pt"),
        ("Portuguese", "pt"),
        ("zh-Hant-TW", "zh"),
        ("mandarin", "zh"),
        ("yue-HK", "yue"),
        ("nb-NO", "no"),
        ("fil", "tl"),
        ("jv", "jw"),
        ("iw", "he"),
        ("auto", None),
        ("Auto", None),
    ],
)
def test_codes_tags_and_names_are_understood(name: str, code: str | None) -> None:
    assert ALL.language(name) == code


@pytest.mark.parametrize("name", ["en", "en-US", "english", "English"])
def test_a_model_of_english_knows_its_names(name: str) -> None:
    assert ENGLISH.language(name) == "en"
    assert ENGLISH.language("auto") is None


@pytest.mark.parametrize("name", ["xx", "xx-US", "null", "-en", "klingon"])
def test_others_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="none of this model's") as refusal:
        ALL.language(name)
    assert refusal.value.param == "language"
    with pytest.raises(InvalidRequestError, match="English alone"):
        ENGLISH.language("de-DE")
