"""Digests: equal exactly when what they are of is equal, in every process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.types.content import (
    PACKAGES,
    Identity,
    PendingContent,
    block_hash,
    digest_of,
    kv_content,
    passing_content,
    root_hash,
    state_content,
    updated_content,
)
from mlx_parallm.types.request import BaseWeights, PolicyWeights, WeightsVersion

PARTS = st.lists(st.one_of(st.text(max_size=3), st.binary(max_size=3)), max_size=3)
IDENTITY = Identity(
    config={"model_type": "llama", "rms_norm_eps": 1e-5, "rope_scaling": {"factor": 8.0}},
    versions={"mlx": "0.31", "mlx-lm": "0.31"},
    code="",
    device="cpu",
    choices={"path": "packed", "kernels": {"rows": True}},
    dtype="float32",
    kv_dtype="auto",
    block_size=16,
    attention="reference",
    block_layout="heads-1",
    state_layout="float32[3, 64] float32[4, 16, 16]",
    rank=0,
    world_size=1,
)
#: Other values of each field; the first key of a nested field is enough to differ.
OTHERS: dict[str, Sequence[Any]] = {
    "config": [
        {**IDENTITY.config, "rms_norm_eps": 1e-6},
        {**IDENTITY.config, "rope_scaling": {"factor": 8}},
        {**IDENTITY.config, "sliding_window": None},
        {"model_type": "llama"},
    ],
    "versions": [{"mlx": "0.32", "mlx-lm": "0.31"}, {"mlx": "0.31"}],
    "code": ["another"],
    "device": ["metal"],
    "choices": [{"path": "split", "kernels": {"rows": True}}, {"path": "packed", "kernels": {}}],
    "dtype": ["bfloat16"],
    "kv_dtype": ["int8"],
    "block_size": [32],
    "attention": ["metal"],
    "block_layout": ["heads-2"],
    "state_layout": ["bfloat16[3, 64] float32[4, 16, 16]", "float32[4, 16, 16] float32[3, 64]", ""],
    "rank": [1],
    "world_size": [2],
}


def test_kinds_of_devices_have_in_common_what_is_not_theirs() -> None:
    common = IDENTITY.across_devices().digest
    assert common != IDENTITY.digest
    for field, values in OTHERS.items():
        for value in values:
            other = replace(IDENTITY, **{field: value}).across_devices()
            is_device = field in ("device", "attention", "choices")
            assert (other.digest == common) is is_device, field
    for package in PACKAGES:
        versions = dict.fromkeys(PACKAGES, "1")
        first = replace(IDENTITY, versions=versions).across_devices()
        other = replace(IDENTITY, versions=versions | {package: "2"}).across_devices()
        assert (first.digest == other.digest) is (package == "numpy")
    drafted = replace(IDENTITY, choices={**IDENTITY.choices, "draft": ("config", "code")})
    assert drafted.across_devices().digest != common


@given(first=st.tuples(st.sampled_from("ab"), PARTS), other=st.tuples(st.sampled_from("ab"), PARTS))
def test_digests_are_equal_exactly_when_all_parts_are(
    first: tuple[str, list[str | bytes]], other: tuple[str, list[str | bytes]]
) -> None:
    is_equal = digest_of(first[0], *first[1]) == digest_of(other[0], *other[1])
    assert is_equal is (first == other)


def test_every_field_of_an_identity_decides() -> None:
    assert {each.name for each in fields(Identity)} == OTHERS.keys()
    changed = [
        replace(IDENTITY, **{name: value}) for name, values in OTHERS.items() for value in values
    ]
    digests = {each.digest for each in (IDENTITY, *changed)}
    assert len(digests) == 1 + len(changed)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(), st.text(max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=5,
)


def typed(value: Any) -> Any:
    """Return a value with the types of its leaves, because 1 == 1.0 == True in Python."""
    if isinstance(value, dict):
        return {key: typed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [typed(each) for each in value]
    return type(value).__name__, repr(value)


@given(
    first=st.dictionaries(st.text(max_size=2), JSON, max_size=3),
    other=st.dictionaries(st.text(max_size=2), JSON, max_size=3),
)
def test_configs_are_distinguished_whatever_the_order_of_their_keys(
    first: dict[str, Any], other: dict[str, Any]
) -> None:
    digests = [replace(IDENTITY, config=config).digest for config in (first, other)]
    assert (digests[0] == digests[1]) is (typed(first) == typed(other))
    backwards = dict(reversed(first.items()))
    assert replace(IDENTITY, config=backwards).digest == digests[0]


def test_the_state_after_a_block_has_a_content_of_its_own() -> None:
    roots = [root_hash(b"one"), root_hash(b"other")]
    links = [block_hash(roots[0], [1, 2]), block_hash(roots[1], [1, 3])]
    contents = {
        name(root, link)
        for name in (state_content, bytes.__add__)
        for root in roots
        for link in links
    }
    assert len(contents) == 8
    assert {len(content) for content in contents} == {32}


def test_an_identity_is_the_same_in_another_process() -> None:
    program = (
        "from tests.unit.types.test_content import IDENTITY\n"
        "from mlx_parallm.types.content import updated_content\n"
        "print(IDENTITY.digest, updated_content('a', 'b'))"
    )
    # time limit: none; the process does nothing but this.
    process = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert process.stdout.decode().split() == [IDENTITY.digest, updated_content("a", "b")]


def test_the_order_of_updates_decides() -> None:
    once = updated_content("base", "one")
    twice = updated_content(once, "two")
    other = updated_content(updated_content("base", "two"), "one")
    assert len({"base", once, twice, other, updated_content("base", "onetwo")}) == 5


def test_a_passing_content_never_comes_again() -> None:
    assert len({passing_content() for _ in range(1000)}) == 1000


def test_the_content_of_an_adapter_is_that_of_earlier_versions() -> None:
    # Logs of training sessions and clients have kept such digests.
    a = HostTensor(np.arange(8, dtype=np.float32).reshape(2, 4))
    module = LowRank(kind="linear", a=a, b=a.transposed(), scale=2.0)
    adapter = AdapterWeights({"layer": module}, saved={"head": a}, of_checkpoint=True)
    assert adapter.digest == "ffac9dbda7044bc8034a5aa11f8ac91e2830ab419df265ea75383cc8100ce567"


def test_kv_lasts_only_if_every_part_of_its_weights_has_a_digest() -> None:
    base = BaseWeights(WeightsVersion(), PendingContent(), IDENTITY.digest)
    lasting = WeightsVersion("adapter", is_lasting=True)
    weights = [PolicyWeights(base), PolicyWeights(base, lasting)]
    assert [each.lasting_content for each in weights] == [None, None]
    before = [each.content for each in weights]
    base.lasting.digest = "digest"
    expected = [kv_content(IDENTITY.digest, "digest", adapter) for adapter in ("", "adapter")]
    assert [each.lasting_content for each in weights] == expected
    # What is known of the weights changes no key of this process.
    assert [each.content for each in weights] == before
    for passing in (replace(lasting, is_lasting=False), replace(lasting, is_cached=False)):
        assert PolicyWeights(base, passing).lasting_content is None
    assert PolicyWeights(replace(base, identity=None)).lasting_content is None
