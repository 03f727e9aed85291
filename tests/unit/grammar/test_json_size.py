"""The length of JSON text, computed without writing it."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.grammar.spec import is_longer

PLAIN = st.text(st.sampled_from("abc"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(VALUES)
def test_nothing_is_called_longer_than_it_is(value: Any) -> None:
    assert not is_longer(value, len(json.dumps(value, ensure_ascii=False)))


@given(
    st.recursive(
        PLAIN, lambda inner: st.lists(inner, min_size=1) | st.dictionaries(PLAIN, inner, min_size=1)
    )
)
def test_of_plain_texts_the_length_is_exact(value: Any) -> None:
    length = len(json.dumps(value))
    assert is_longer(value, length - 1)
    assert not is_longer(value, length)


def test_what_has_no_end_is_longer() -> None:
    ring: list[Any] = []
    ring.append({"ring": (ring, ring)})
    assert is_longer(ring, 100_000)
