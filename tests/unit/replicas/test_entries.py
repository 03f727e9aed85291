"""The journal keeps what a fresh server needs, and the way to it undoes what is not there."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.replicas.entries import Entry, Head, Journal, journaled, way
from mlx_parallm.types.errors import InvalidRequestError

LOAD: Head = {"kind": "load_adapter", "name": "a", "model": "m", "version": "1"}
INSTEAD: Head = {**LOAD, "name": "b", "evicted": "a"}
UNLOAD: Head = {"kind": "unload_adapter", "name": "a"}
FOLDER: Head = {
    "kind": "update_weights",
    "model": "m",
    "folder": "/x",
    "names": [],
    "version": "2",
}
LABEL: Head = {"kind": "label_weights", "model": "m", "version": "l"}
PAUSE: Head = {"kind": "pause", "mode": "keep", "clear_cache": False}
RESUME: Head = {"kind": "resume"}
EMPTY: Head = {"kind": "empty_caches"}
MODEL: Head = {"kind": "load_model", "name": "n", "model": "org/n"}
NO_MODEL: Head = {"kind": "unload_model", "name": "n"}
ALL = ["weights", "kv_cache"]


def tensors(*names: str, version: str = "3") -> Head:
    kind = "update_weights"
    return {"kind": kind, "model": "m", "folder": None, "names": names, "version": version}


def sleep(level: int) -> Head:
    return {"kind": "sleep", "level": level, "mode": "keep"}


def wake(*tags: str) -> Head:
    return {"kind": "wake", "tags": tags}


def journal(*heads: Head, start: int = 1) -> Journal:
    entries: Journal = ()
    for number, head in enumerate(heads, start):
        entries = journaled(entries, Entry(number, "", head, None, "http://a:1"))
    return entries


@pytest.mark.parametrize(
    ("heads", "lasting"),
    [
        ([LOAD, LOAD], [LOAD]),
        ([LOAD, UNLOAD], []),
        ([UNLOAD], [UNLOAD]),
        ([LOAD, UNLOAD, LOAD], [LOAD]),
        ([LOAD, INSTEAD], [INSTEAD]),
        ([LOAD, INSTEAD, {**LOAD, "evicted": "b"}], [{**LOAD, "evicted": "b"}]),
        ([FOLDER, tensors("x"), FOLDER], [FOLDER]),
        ([tensors("x"), tensors("y"), tensors("x", "z")], [tensors("y"), tensors("x", "z")]),
        ([tensors("x"), LABEL, tensors("x")], [tensors("x")]),
        ([FOLDER, LABEL, LABEL], [FOLDER, LABEL]),
        ([PAUSE, PAUSE, RESUME], []),
        ([EMPTY], []),
        ([sleep(1), wake("weights")], [sleep(1), wake("weights")]),
        ([sleep(1), wake("weights"), wake(*ALL)], []),
        ([FOLDER, tensors("x"), LABEL, sleep(2)], [FOLDER, sleep(2)]),
        ([tensors("x"), sleep(1)], [tensors("x"), sleep(1)]),
        ([MODEL, {**LOAD, "model": "n"}, NO_MODEL], []),
        ([NO_MODEL, MODEL], [MODEL]),
    ],
)
def test_the_journal_has_what_still_counts(heads: list[Head], lasting: list[Head]) -> None:
    assert [entry.head for entry in journal(*heads)] == lasting


FIELDS = [(head, name) for head in (LOAD, UNLOAD, FOLDER, LABEL, PAUSE, MODEL) for name in head]


@pytest.mark.parametrize(("head", "name"), FIELDS)
@pytest.mark.parametrize("value", [5, [], {}, [5]])
def test_journals_have_no_heads_with_wrong_fields(head: Head, name: str, value: object) -> None:
    entry = Entry(1, "", head, None, "http://a:1")
    if name != "clear_cache" and (name, value) != ("names", []):
        broken = entry.to_json() | {"head": {**head, name: value}}
        with pytest.raises(InvalidRequestError):
            Entry.from_json(broken)


@pytest.mark.parametrize(
    "head", [{"kind": "base_weights", "model": "m"}, {"kind": "wake"}, {"kind": "sleep"}, {}]
)
def test_other_heads_are_refused(head: Head) -> None:
    entry = Entry(1, "", LOAD, None, "http://a:1").to_json() | {"head": head}
    with pytest.raises(InvalidRequestError):
        Entry.from_json(entry)


@pytest.mark.parametrize("head", [{**PAUSE, "mode": "wait"}, {**sleep(1), "mode": "wait"}])
def test_a_server_that_comes_late_waits_for_no_requests(head: Head) -> None:
    assert [step.head for step in way((), journal(head))] == [{**head, "mode": "keep"}]


def steps(own: Journal, target: Journal) -> list[Any]:
    return [(step.head["kind"], step.entry is None) for step in way(own, target)]


def test_the_way_from_nothing_is_the_whole_journal() -> None:
    target = journal(MODEL, LOAD, FOLDER, PAUSE)
    assert [step.entry for step in way((), target)] == list(target)


@pytest.mark.parametrize(
    ("heads", "undone"),
    [
        ([LOAD], ["unload_adapter"]),
        ([PAUSE], ["resume"]),
        ([sleep(1)], ["wake"]),
        ([MODEL], ["unload_model"]),
        ([NO_MODEL], ["load_model"]),
        ([tensors("x"), LABEL], ["base_weights"]),
    ],
)
def test_the_way_undoes_what_the_target_never_had(heads: list[Head], undone: list[str]) -> None:
    assert steps(journal(*heads), ()) == [(kind, True) for kind in undone]


def test_weights_that_are_read_anew_get_all_changes_of_the_target() -> None:
    common = journal(tensors("x"))
    own = journaled(common, Entry(2, "", tensors("y"), None, "http://a:1"))
    target = journaled(common, Entry(2, "", tensors("z"), None, "http://b:1"))
    kinds_of_way = [(step.head["kind"], step.head.get("names")) for step in way(own, target)]
    assert kinds_of_way == [
        ("base_weights", None),
        ("update_weights", ("x",)),
        ("update_weights", ("z",)),
    ]


def test_weights_on_their_way_have_no_label_of_the_fleet() -> None:
    target = journal(tensors("x", version="1"), tensors("y", version="2"))
    first, last = (step.head["version"] for step in way((), target))
    assert last == "2"
    assert first not in ("1", "2")
    assert first != way((), target)[0].head["version"]


def test_nothing_is_known_of_a_server_that_stopped_half_way() -> None:
    target = journal(LOAD, tensors("x"))
    assert way(target, target) == []
    assert [step.entry for step in way(target, target, is_mixed=True)] == list(target)
