"""Two blocks have one address only if they and everything before them are equal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.types.content import BLOCK_DIGEST_BYTES, block_hash, root_hash

TOKENS = st.lists(st.integers(0, 3), max_size=4)


def chain(salt: bytes, blocks: Sequence[Sequence[int]]) -> bytes:
    address = root_hash(salt)
    for token_ids in blocks:
        address = block_hash(address, token_ids)
    return address


@given(
    first=st.tuples(st.binary(max_size=2), st.lists(TOKENS, max_size=3)),
    second=st.tuples(st.binary(max_size=2), st.lists(TOKENS, max_size=3)),
)
def test_addresses_are_equal_exactly_when_salt_and_blocks_are(
    first: tuple[bytes, list[list[int]]], second: tuple[bytes, list[list[int]]]
) -> None:
    assert (chain(*first) == chain(*second)) is (first == second)


def test_order_and_where_one_block_ends_matter() -> None:
    root = root_hash(b"")
    assert block_hash(root, [1, 2]) != block_hash(root, [2, 1])
    assert chain(b"", [[1, 2], [3]]) != chain(b"", [[1], [2, 3]])
    assert block_hash(root, [1, 2, 3]) != block_hash(block_hash(root, [1]), [2, 3])


def test_a_salt_is_no_block_though_its_bytes_are_the_same() -> None:
    parent = root_hash(b"salt")
    token_bytes = (7).to_bytes(8, sys.byteorder)
    assert block_hash(parent, [7]) != root_hash(parent + token_bytes)
    assert root_hash(token_bytes) != block_hash(b"", [7])


@given(st.lists(st.integers(0, 2**31), max_size=8))
def test_tuples_and_lists_of_the_same_tokens_are_the_same(token_ids: list[int]) -> None:
    root = root_hash(b"")
    assert block_hash(root, token_ids) == block_hash(root, tuple(token_ids))


def test_an_address_is_of_fixed_length_and_the_same_in_every_process() -> None:
    address = chain(b"salt", [[1, 2], [3, 4]])
    assert len(address) == len(root_hash(b"")) == BLOCK_DIGEST_BYTES
    code = (
        "from mlx_parallm.types.content import block_hash, root_hash\n"
        "print(block_hash(block_hash(root_hash(b'salt'), [1, 2]), [3, 4]).hex())"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert bytes.fromhex(printed) == address


@pytest.mark.parametrize("size", [0, 1, 64, 65, 10_000])
def test_a_salt_may_have_any_length(size: int) -> None:
    assert root_hash(b"a" * size) != root_hash(b"a" * (size + 1))
