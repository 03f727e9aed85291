"""Spans of weight versions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.turns.samples import Sample, VersionSpans
from mlx_parallm.types.events import TokenEvent


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), max_size=12))
def test_spans_partition_the_tokens(parts: list[tuple[str, int]]) -> None:
    spans = VersionSpans()
    wanted: list[str] = []
    for version, count in parts:
        spans.add(version, count)
        wanted += [version] * count
    entries = spans.to_json()
    versions = [entry["version"] for entry in entries for _ in range(entry["start"], entry["end"])]
    assert versions == wanted
    assert [entry["start"] for entry in entries] == [0, *(entry["end"] for entry in entries)][
        : len(entries)
    ]
    assert all(entry["start"] < entry["end"] for entry in entries)
    assert all(label != other for label, other in zip(spans.labels, spans.labels[1:], strict=False))
    assert spans.labels == tuple(entry["version"] for entry in entries)


def test_a_sample_collects_them_from_its_events() -> None:
    sample = Sample()
    for version, ids in (("default", (1,)), ("default", (2, 3)), ("7", (4,)), ("7", ())):
        sample.add(TokenEvent(request_id="r", index=0, token_ids=ids, text="", version=version))
    assert sample.versions.to_json() == [
        {"version": "default", "start": 0, "end": 3},
        {"version": "7", "start": 3, "end": 4},
    ]
