"""Figures of the load client, against values worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.bench.record import RequestRecord
from mlx_parallm.bench.report import finite, format_errors, format_table, to_json
from mlx_parallm.bench.statistics import (
    Spread,
    percentile,
    summarise,
    token_gaps_s,
    tokens_per_chunk,
)

times = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


def make_record(index=0, start=0.0, chunks=(1.0, 2.0), tokens=2, **more):
    known = more.pop("chunk_tokens", [None] * len(chunks))
    end = chunks[-1] if chunks else start
    return RequestRecord(
        index=index,
        start_s=start,
        end_s=more.pop("end", end),
        chunk_times_s=list(chunks),
        chunk_tokens=known,
        output_tokens=tokens,
        status=200,
        **more,
    )


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 10), (25, 17.5), (50, 25), (90, 37), (100, 40)]
)
def test_percentile_is_linear_between_neighbours(percent, expected):
    assert percentile([40, 10, 30, 20], percent) == pytest.approx(expected)


def test_percentile_of_nothing_is_nan():
    assert math.isnan(percentile([], 50))


def test_percentile_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="101"):
        percentile([1.0], 101)


@given(times, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_grow_with_the_percent_and_stay_within_the_values(values, percent, other):
    low, high = sorted((percent, other))
    assert min(values) <= percentile(values, low) <= percentile(values, high) * (1 + 1e-9)
    assert percentile(values, high) <= max(values)


def test_tokens_of_one_chunk_share_the_gap_before_it():
    assert token_gaps_s([1.0, 2.0, 5.0], [1, 1, 3]) == pytest.approx([1.0, 1.0, 1.0, 1.0])


def test_the_gap_of_a_chunk_without_a_token_goes_to_the_next():
    assert token_gaps_s([1.0, 2.0, 4.0], [1, 0, 2]) == pytest.approx([1.5, 1.5])


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=20))
def test_token_gaps_add_up_to_the_time_after_the_first_chunk(chunks):
    now, times_s = 0.0, []
    for gap, _ in chunks:
        now += gap
        times_s.append(now)
    tokens = [count for _, count in chunks]
    gaps = token_gaps_s(times_s, tokens)
    assert len(gaps) == sum(tokens[1:])
    assert sum(gaps) == pytest.approx(times_s[-1] - times_s[0])


def test_running_counts_say_which_chunk_brought_how_many_tokens():
    record = make_record(chunks=(1.0, 2.0), tokens=5, chunk_tokens=[4, 1])
    assert tokens_per_chunk(record) == [4, 1]


@given(st.integers(0, 100), st.integers(1, 30))
def test_without_running_counts_tokens_are_spread_evenly(tokens, chunks):
    record = make_record(chunks=tuple(float(place) for place in range(chunks)), tokens=tokens)
    shares = tokens_per_chunk(record)
    assert sum(shares) == tokens
    assert max(shares) - min(shares) <= 1


def test_summary_counts_from_sending_to_text_and_over_the_whole_run():
    summary = summarise(
        [
            make_record(0, start=0.0, chunks=(0.5, 1.0, 1.5), tokens=3, prompt_tokens=7),
            make_record(1, start=1.0, chunks=(2.0, 4.0), tokens=2, prompt_tokens=5),
        ]
    )
    assert summary.duration_s == pytest.approx(4.0)
    assert summary.output_tokens_per_s == pytest.approx(5 / 4)
    assert summary.prompt_tokens == 12
    assert summary.ttft_ms.p50 == pytest.approx(750)
    assert summary.itl_ms.count == 3
    assert summary.itl_ms.max == pytest.approx(2000)
    assert summary.tpot_ms.mean == pytest.approx((500 + 2000) / 2)
    assert summary.latency_ms.max == pytest.approx(3000)


def test_failed_requests_are_counted_and_kept_out_of_the_times():
    summary = summarise([make_record(0), make_record(1, chunks=(9.0,), error="broke", end=2.0)])
    assert (summary.num_requests, summary.num_failed) == (2, 1)
    assert summary.output_tokens == 2
    assert summary.ttft_ms.count == 1


def test_a_run_in_which_everything_failed_has_a_table_and_json():
    records = [make_record(0, chunks=(), tokens=0, error="refused", end=1.0)]
    summary = summarise(records)
    assert math.isnan(summary.ttft_ms.p99)
    assert "1 failed" in format_table(summary)
    assert to_json({}, summary, records)["summary"]["ttft_ms"]["p99"] is None
    assert format_errors(records) == "1 x refused"


def test_finite_replaces_what_json_cannot_write_at_any_depth():
    assert finite({"a": {"b": math.nan, "c": math.inf}, "d": 1.5}) == {
        "a": {"b": None, "c": None},
        "d": 1.5,
    }


def test_spread_has_the_mean_and_the_largest():
    spread = Spread.of([1.0, 2.0, 6.0])
    assert (spread.count, spread.mean, spread.p50, spread.max) == (3, 3.0, 2.0, 6.0)
