"""A journal holds each weight once, however often updates replace some of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import numpy as np
import pytest

from mlx_parallm.adapters.safetensors import MODEL_DTYPES, read_safetensors, write_file
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.replicas import member as member_module
from mlx_parallm.replicas.entries import Entry, way
from mlx_parallm.replicas.member import Member, content_digest
from mlx_parallm.replicas.past import Past
from mlx_parallm.types.errors import InvalidRequestError
from tests.replica_fleet import FakeHost, Labels, update

SIZE = 1000


def tensors(names: Sequence[str], value: int) -> bytes:
    filled = np.full(SIZE, value, np.float32)
    return write_file({name: HostTensor(filled) for name in names}, {})


async def updated(*updates: Sequence[str]) -> Member:
    """Return a server after updates of these weights, each with its number as their value."""
    member = Member(FakeHost(Labels()))
    for number, names in enumerate(updates, 1):
        content = tensors(names, number)
        head = {**update(*names), "version": str(number)}
        place = number, member.state.digest
        entry = Entry(*place, head, content_digest(content), "http://a:1")
        await member.stage(entry, content)
        await member.commit(entry.digest)
        await member.shrunk()
    return member


def restored(member: Member) -> dict[str, float]:
    """Return the weights that a fresh server has after the journal."""
    weights: dict[str, float] = {}
    past = Past.from_json(json.loads(json.dumps(member.state.past.to_json())))
    for step in way((), past.journal):
        assert step.entry is not None
        content = member.content(step.entry.rest_content or "")
        read = read_safetensors(bytes(content), param="x", dtypes=MODEL_DTYPES)
        assert sorted(read) == sorted(step.head["names"])
        weights |= {name: float(tensor.array[0]) for name, tensor in read.items()}
    return weights


@pytest.mark.parametrize(
    ("updates", "num_entries"),
    [
        (["xy", "yz", "zx"], 2),
        (["xy", "yz", "zx"] * 5, 2),
        (["xyz", "x", "y"], 3),
        (["xyz", "x", "y", "z"], 3),
        (["xy", "xy"], 1),
    ],
)
async def test_each_weight_is_held_once(updates: list[str], num_entries: int) -> None:
    member = await updated(*updates)
    wanted = {name: number for number, names in enumerate(updates, 1) for name in names}
    assert restored(member) == wanted
    assert len(member.state.journal) == num_entries
    num_bytes = sum(len(content) for content in member.state.contents.values())
    assert num_bytes < len(wanted) * (4 * SIZE + 500)


async def test_digests_of_the_state_stay_as_they_were() -> None:
    member = await updated("xy", "y")
    first, last = member.state.journal
    assert list(first.rest["names"]) == ["x"]
    assert first.digest == last.parent
    assert last.digest == member.state.digest
    assert Entry.from_json(json.loads(json.dumps(first.to_json()))).digest == first.digest


async def test_large_contents_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "INLINE_BYTES", 0)
    member = await updated("xy", "yz", "zx")
    assert restored(member) == {"x": 3, "y": 2, "z": 3}


@pytest.mark.parametrize("kept", [3, [], {}, {"names": "x", "content": "y"}, {"names": ["x"]}])
def test_other_rests_are_refused(kept: object) -> None:
    entry = Entry(1, "", {"kind": "resume"}, None, "http://a:1").to_json()
    with pytest.raises(InvalidRequestError):
        Entry.from_json({**entry, "kept": kept})


async def test_an_update_meanwhile_is_kept() -> None:
    member = await updated("xy")
    contents = [tensors("y", 2), tensors("x", 3)]
    for number, (name, content) in enumerate(zip("yx", contents, strict=True), 2):
        head = {**update(name), "version": str(number)}
        digest = content_digest(content)
        entry = Entry(number, member.state.digest, head, digest, "http://a:1")
        await member.stage(entry, content)
        await member.commit(entry.digest)
    await asyncio.sleep(0)
    await member.shrunk()
    assert restored(member) == {"x": 3, "y": 2}
