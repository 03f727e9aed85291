"""The words for numbers, dates and money in the languages of the translator.

Readers written for this test alone turn the words back into values.
"""

from __future__ import annotations

import datetime
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.translate import english, french, german
from demo.translate.english import ENGLISH
from demo.translate.french import FRENCH
from demo.translate.german import GERMAN
from demo.translate.items import LANGUAGES
from demo.translate.language import (
    FIRST_YEAR,
    LAST_YEAR,
    MAX_NUMBER,
    Currency,
    Language,
    Money,
    words,
)

NUMBERS: dict[int, tuple[str, str, str]] = {
    0: ("zero", "null", "zéro"),
    1: ("one", "eins", "un"),
    16: ("sixteen", "sechzehn", "seize"),
    17: ("seventeen", "siebzehn", "dix-sept"),
    21: ("twenty-one", "einundzwanzig", "vingt et un"),
    30: ("thirty", "dreißig", "trente"),
    66: ("sixty-six", "sechsundsechzig", "soixante-six"),
    70: ("seventy", "siebzig", "soixante-dix"),
    71: ("seventy-one", "einundsiebzig", "soixante et onze"),
    77: ("seventy-seven", "siebenundsiebzig", "soixante-dix-sept"),
    80: ("eighty", "achtzig", "quatre-vingts"),
    81: ("eighty-one", "einundachtzig", "quatre-vingt-un"),
    91: ("ninety-one", "einundneunzig", "quatre-vingt-onze"),
    99: ("ninety-nine", "neunundneunzig", "quatre-vingt-dix-neuf"),
    100: ("one hundred", "einhundert", "cent"),
    101: ("one hundred one", "einhunderteins", "cent un"),
    180: ("one hundred eighty", "einhundertachtzig", "cent quatre-vingts"),
    200: ("two hundred", "zweihundert", "deux cents"),
    201: ("two hundred one", "zweihunderteins", "deux cent un"),
    1000: ("one thousand", "eintausend", "mille"),
    1001: ("one thousand one", "eintausendeins", "mille un"),
    1100: ("one thousand one hundred", "eintausendeinhundert", "mille cent"),
    21_000: ("twenty-one thousand", "einundzwanzigtausend", "vingt et un mille"),
    80_000: ("eighty thousand", "achtzigtausend", "quatre-vingt mille"),
    80_080: ("eighty thousand eighty", "achtzigtausendachtzig", "quatre-vingt mille quatre-vingts"),
    101_000: ("one hundred one thousand", "einhunderteintausend", "cent un mille"),
    200_000: ("two hundred thousand", "zweihunderttausend", "deux cent mille"),
    200_200: ("two hundred thousand two hundred", "zweihunderttausendzweihundert",
              "deux cent mille deux cents"),
    999_999: (
        "nine hundred ninety-nine thousand nine hundred ninety-nine",
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
        "neuf cent quatre-vingt-dix-neuf mille neuf cent quatre-vingt-dix-neuf",
    ),
}  # fmt: skip
MONEY: dict[Money, tuple[str, str, str]] = {
    Money("€", 0): ("zero euros", "null Euro", "zéro euro"),
    Money("€", 1): ("zero euros and one cent", "null Euro und ein Cent", "zéro euro et un centime"),
    Money("$", 2): ("zero dollars and two cents", "null Dollar und zwei Cent",
                    "zéro dollar et deux cents"),
    Money("€", 100): ("one euro", "ein Euro", "un euro"),
    Money("$", 101): ("one dollar and one cent", "ein Dollar und ein Cent", "un dollar et un cent"),
    Money("€", 200): ("two euros", "zwei Euro", "deux euros"),
    Money("€", 10_121): (
        "one hundred one euros and twenty-one cents",
        "einhundertein Euro und einundzwanzig Cent",
        "cent un euros et vingt et un centimes",
    ),
    Money("$", 8_000_080): (
        "eighty thousand dollars and eighty cents",
        "achtzigtausend Dollar und achtzig Cent",
        "quatre-vingt mille dollars et quatre-vingts cents",
    ),
}  # fmt: skip
DATES: dict[str, tuple[str, str, str]] = {
    "1900-07-31": ("July thirty-first, nineteen hundred",
                   "der einunddreißigste Juli neunzehnhundert",
                   "le trente et un juillet mille neuf cents"),
    "1905-01-01": ("January first, nineteen oh five",
                   "der erste Januar neunzehnhundertfünf",
                   "le premier janvier mille neuf cent cinq"),
    "1984-03-12": ("March twelfth, nineteen eighty-four",
                   "der zwölfte März neunzehnhundertvierundachtzig",
                   "le douze mars mille neuf cent quatre-vingt-quatre"),
    "2000-02-29": ("February twenty-ninth, two thousand",
                   "der neunundzwanzigste Februar zweitausend",
                   "le vingt-neuf février deux mille"),
    "2007-08-03": ("August third, two thousand seven",
                   "der dritte August zweitausendsieben",
                   "le trois août deux mille sept"),
    "2010-12-20": ("December twentieth, twenty ten",
                   "der zwanzigste Dezember zweitausendzehn",
                   "le vingt décembre deux mille dix"),
    "2080-10-08": ("October eighth, twenty eighty",
                   "der achte Oktober zweitausendachtzig",
                   "le huit octobre deux mille quatre-vingts"),
}  # fmt: skip
ENGLISH_ORDINALS = words(
    """first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth
    fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth twenty-first
    twenty-second twenty-third twenty-fourth twenty-fifth twenty-sixth twenty-seventh
    twenty-eighth twenty-ninth thirtieth thirty-first"""
)
GERMAN_ORDINALS = words(
    """erste zweite dritte vierte fünfte sechste siebte achte neunte zehnte elfte zwölfte dreizehnte
    vierzehnte fünfzehnte sechzehnte siebzehnte achtzehnte neunzehnte zwanzigste
    einundzwanzigste zweiundzwanzigste dreiundzwanzigste vierundzwanzigste fünfundzwanzigste
    sechsundzwanzigste siebenundzwanzigste achtundzwanzigste neunundzwanzigste dreißigste
    einunddreißigste"""
)


def summed(parts: list[str], values: dict[str, int], hundred: str, thousand: str) -> int:
    """Return the value of words that multiply what stands before them, or are added."""
    total = group = 0
    for word in parts:
        if word == hundred:
            group = 100 * (group or 1)
        elif word == thousand:
            total, group = 1000 * (group or 1), 0
        else:
            group += values[word]
    return total + group


def read_english(text: str) -> int:
    tens = dict(zip(english.TENS, range(20, 100, 10), strict=True))
    values = {word: value for value, word in enumerate(english.SMALL)} | tens
    return summed(re.split("[ -]", text), values, "hundred", "thousand")


def read_german(text: str) -> int:
    head, thousand, tail = text.partition("tausend")
    if thousand:
        return 1000 * read_german(head) + (read_german(tail) if tail else 0)
    head, hundred, tail = text.partition("hundert")
    if hundred:
        return 100 * read_german(head) + (read_german(tail) if tail else 0)
    tens = dict(zip(german.TENS, range(20, 100, 10), strict=True))
    values = {word: value for value, word in enumerate(german.SMALL)} | tens | {"ein": 1}
    unit, und, ten = text.partition("und")
    return values[unit] + values[ten] if und else values[text]


def read_french(text: str) -> int:
    parts = "dix onze douze treize quatorze quinze seize vingt trente quarante cinquante soixante"
    values = {word: value for value, word in enumerate(french.SMALL[:10])}
    values |= dict(zip(parts.split(), (*range(10, 17), *range(20, 61, 10)), strict=True))
    values["quatrevingt"] = 80
    text = re.sub(r"quatre-vingts?\b", "quatrevingt", text).replace(" et ", " ")
    text = re.sub(r"\bcents\b", "cent", text)
    return summed(re.split("[ -]", text), values, "cent", "mille")


READERS = {"en": read_english, "de": read_german, "fr": read_french}


@pytest.mark.parametrize("value", NUMBERS)
def test_numbers(value: int):
    assert tuple(language.number(value) for language in LANGUAGES) == NUMBERS[value]


@pytest.mark.parametrize("amount", MONEY, ids=str)
def test_money(amount: Money):
    assert tuple(language.money(amount) for language in LANGUAGES) == MONEY[amount]


@pytest.mark.parametrize("day", DATES)
def test_dates(day: str):
    value = datetime.date.fromisoformat(day)
    assert tuple(language.date(value) for language in LANGUAGES) == DATES[day]


def test_ordinals():
    assert tuple(map(english.ordinal, range(1, 32))) == ENGLISH_ORDINALS
    assert tuple(map(german.ordinal, range(1, 32))) == GERMAN_ORDINALS


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.code)
def test_every_number_below_10_000_is_read_back(language: Language):
    read = READERS[language.code]
    assert all(read(language.number(value)) == value for value in range(10_000))


@given(st.integers(0, MAX_NUMBER))
def test_any_number_is_read_back(value: int):
    assert {READERS[each.code](each.number(value)) for each in LANGUAGES} == {value}


@given(st.integers(0, MAX_NUMBER))
def test_german_before_a_noun_drops_only_the_s_of_eins(value: int):
    assert german.before_noun(value) == re.sub("eins$", "ein", GERMAN.number(value))


@given(st.integers(0, MAX_NUMBER))
def test_french_plurals_stand_only_at_the_end(value: int):
    spoken = FRENCH.number(value).split(" ")
    assert not any(word.endswith(("cents", "vingts")) for word in spoken[:-1])
    is_round = value >= 200 and value % 1000 >= 200 and value % 100 == 0
    assert spoken[-1].endswith(("cents", "vingts")) == (is_round or value % 100 == 80)


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.code)
def test_no_two_values_have_the_same_words(language: Language):
    first = datetime.date(FIRST_YEAR, 1, 1).toordinal()
    last = datetime.date(LAST_YEAR, 12, 31).toordinal()
    days = range(first, last + 1, 7)
    texts = [language.number(value) for value in range(12_000)]
    texts += [language.date(datetime.date.fromordinal(day)) for day in days]
    texts += [language.money(Money(coin, value)) for coin in ("€", "$") for value in range(12_000)]
    assert len(set(texts)) == len(texts)


@given(st.sampled_from(("€", "$")), st.integers(0, 999_999))
def test_plurals_of_coins(currency: Currency, hundredths: int):
    amount = Money(currency, hundredths)
    units, cents = amount.parts
    english_parts = ENGLISH.money(amount).split(" and ")
    assert english_parts[0].endswith("s") == (units != 1)
    assert english_parts[-1].endswith("s") == ((cents or units) != 1)
    assert FRENCH.money(amount).endswith("s") == ((cents or units) >= 2)
    assert not GERMAN.money(amount).endswith("s")
