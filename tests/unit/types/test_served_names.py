"""Names that requests may use."""

from __future__ import annotations

import pytest

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.confinement import MAX_NAME, check_name
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.types.errors import InvalidRequestError

GOOD = ("a", "org/name", "v1.2", "...", "a..b", "größer", "名", "a b", "x" * MAX_NAME, "/models/a")
BAD = (
    "",
    "x" * (MAX_NAME + 1),
    ".",
    "..",
    "a/..",
    "../a",
    "a/./b",
    "a\nb",
    "\0",
    "a\x7f",
    "\x1b[2J",
)
UNSEEN = ("a\u200bb", "a\u2028b", "\ud800", "a\u202eb", "\u0085")


@pytest.mark.parametrize("name", GOOD)
def test_ordinary_names_are_taken(name: str) -> None:
    check_name(name)
    assert AdapterUpload(name=name, weights=AdapterWeights({})).name == name


@pytest.mark.parametrize("name", BAD + UNSEEN)
def test_names_that_cannot_be_written_are_refused(name: str) -> None:
    for check in (check_name, lambda name: AdapterUpload(name=name, weights=AdapterWeights({}))):
        with pytest.raises(InvalidRequestError) as refused:
            check(name)
        assert refused.value.param == "name"
