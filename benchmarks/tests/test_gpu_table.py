"""The GPU table: every row runs at sizes for a CPU, results resume, tables render."""

from __future__ import annotations

import gc
import json

import mlx.core as mx
import pytest

from benchmarks.gpu.__main__ import attempt, choose, make_parser, run, time_limit
from benchmarks.gpu.bench import Bench, Outcome, Row, Sizes, Target, copy_bandwidth
from benchmarks.gpu.engines import engine_for, random_prompts
from benchmarks.gpu.parity import parting_gap
from benchmarks.gpu.rows import all_rows
from benchmarks.gpu.store import Results
from benchmarks.gpu.tables import PAGE, format_table, write_tables
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.types.errors import ConfigError

#: ``OUTSIDE``: rows that start processes.
OUTSIDE = {
    "parity",
    "kv-agreement",
    "server-128",
    "server-late-prompt",
    "speculation",
}
INSIDE = [row for row in all_rows() if row.name not in OUTSIDE]
ABOUT = {
    "machine": {"time": "2030-01-02T03", "commit": "abc", "device": "G", "mlx": "1", "mlx_lm": "2"},
    "environment": {},
}


@pytest.fixture(scope="module")
def bench():
    return Bench(Sizes.tiny())


# MORE: rows that others measure with other sizes.
MORE = {
    *("server-256", "server-256-two-engines", "decode-8B-bf16-1", "decode-8B-bf16-8"),
    *("decode-8B-bf16-128", "floor-8B-64x4096", "prefill-8B-bf16-64x100"),
    *("decode-8B-4-bit-1", "decode-8B-8-bit-1"),
}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.slow] * (row.name in MORE), id=row.name)
        for row in INSIDE
    ],
)
def test_every_row_measures_what_it_has_targets_for(bench, row):
    outcome = row.measure(bench)
    assert set(outcome.values) == {target.what for target in row.targets}
    assert all(value > 0 for value in (*outcome.values.values(), *outcome.figures.values()))
    assert outcome.details.get("path", "packed") == ("split" if "hybrid" in row.name else "packed")


def test_row_names_are_unique_and_every_table_has_its_place_on_the_page():
    rows = all_rows()
    assert len({row.name for row in rows}) == len(rows)
    text = PAGE.read_text()
    assert all(f"<!-- gpu: {row.table} -->" in text for row in rows)


def test_the_layers_are_stock_again_after_an_engine(bench):
    model = bench.model("8B", 4)
    before = [type(module) for module in model.model.modules()]
    with engine_for(model, max_num_seqs=2, max_model_len=64) as (_, layers):
        assert [type(module) for module in model.model.modules()] != before
        with layers.stock():
            assert [type(module) for module in model.model.modules()] == before
        assert [type(module) for module in model.model.modules()] != before
    assert [type(module) for module in model.model.modules()] == before


def test_a_load_counts_its_own_tokens_only_and_refuses_an_idle_engine(bench):
    model = bench.model("8B")
    with engine_for(model, max_num_seqs=3, max_model_len=64) as (engine, _):
        first = DecodeLoad(engine.engine, random_prompts(model, [5, 9]))
        first.prefill()
        second = DecodeLoad(engine.engine, random_prompts(model, [7], seed=1), name="late")
        second.prefill()
        assert second.num_tokens == 8
        assert engine.kv_bytes_held == 3 * engine.block_bytes
        first.end()
        assert engine.kv_bytes_held == engine.block_bytes
        second.end()
        with pytest.raises(ConfigError):
            second.step()


def a_row(name, measure=lambda bench: Outcome({"ratio": 2.0}, {"ms": 3.0}), table="decode"):
    return Row(name, table, f"row {name}", measure, (Target("ratio", ">=", 2.5),))


def test_a_run_goes_on_after_failures_and_resumes(tmp_path, bench, capsys):
    def broken(_):
        raise ValueError("no such luck")

    calls = []

    def counted(_):
        calls.append(1)
        return Outcome({"ratio": 2.0})

    rows = [a_row("bad", broken), a_row("good", counted)]
    path = tmp_path / "out" / "gpu.json"
    args = make_parser().parse_args(["--commit", "feed"])
    run(bench, rows, Results(path), args)
    results = Results(path)
    assert results.rows["bad"]["error"] == "ValueError: no such luck"
    assert results.rows["good"]["values"] == {"ratio": 2.0}
    assert results.rows["good"]["machine"]["commit"] == "feed"
    assert [row.name for row in choose(rows, ["*"], results)] == ["bad"]
    run(bench, choose(rows, ["good"], results), results, args)
    assert calls == [1]
    assert "no such luck" in capsys.readouterr().out


def test_a_row_leaves_no_kv_behind(bench):
    bench.model("8B")
    gc.collect()
    before = mx.get_active_memory()
    row = next(row for row in INSIDE if row.name == "decode-8B-bf16-32")
    outcome, error = attempt(bench, row, 60)
    assert outcome is not None, error
    assert outcome.figures["peak GB"] * 1e9 > before
    assert mx.get_active_memory() == before


def test_failed_rows_come_last_and_patterns_choose(tmp_path):
    rows = [a_row("a-1"), a_row("a-2"), a_row("b-1")]
    results = Results(tmp_path / "gpu.json")
    results.begin("a-1")
    assert [row.name for row in choose(rows, ["*"], results)] == ["a-2", "b-1", "a-1"]
    assert [row.name for row in choose(rows, ["b*", "a-1"], results)] == ["b-1", "a-1"]
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert "ended" in content["rows"]["a-1"]["error"]


def test_what_is_published_stays_until_there_are_newer_figures(tmp_path):
    published, results = Results(tmp_path / "published.json"), Results(tmp_path / "gpu.json")
    for name, ratio in (("a", 1.0), ("b", 2.0)):
        published.add(name, Outcome({"ratio": ratio}), ABOUT)
    results.add("a", Outcome({"ratio": 3.0}, details={"steps": [1, 2]}), ABOUT)
    results.fail("b", "broke", ABOUT)
    results.fail("c", "broke", ABOUT)
    published.take(results)
    assert published.rows["c"]["error"] == "broke"
    results.add("b", Outcome({}, {"ms": 2.0}, missing="the other server ended"), ABOUT)
    results.add("c", Outcome({}, {"ms": 2.0}, missing="the other server ended"), ABOUT)
    older = {**ABOUT, "machine": {**ABOUT["machine"], "time": "2029-12-31"}}
    results.add("a", Outcome({"ratio": 9.0}), older)
    published.take(results)
    assert [row.name for row in choose([a_row("b"), a_row("c")], ["*"], results)] == ["b", "c"]
    rows = Results(tmp_path / "published.json").rows
    assert rows["c"]["figures"] == {"ms": 2.0}
    assert "other server" in format_table([a_row("c")], rows)
    assert rows["a"] == {"values": {"ratio": 3.0}, "figures": {}, **ABOUT}
    assert rows["b"]["values"] == {"ratio": 2.0}


def test_no_row_begins_when_the_budget_is_spent(tmp_path, bench):
    results = Results(tmp_path / "gpu.json")
    run(bench, [a_row("a")], results, make_parser().parse_args(["--budget-s", "-1"]))
    assert results.rows == {}


def test_a_row_that_takes_too_long_is_given_up(bench):
    def endless(_):
        while True:
            try:
                sum(range(100))
            except Exception:  # noqa: BLE001 - as an engine's step does
                continue

    assert attempt(bench, a_row("a", endless), 0.05) == (None, "not done in 0.05 s")
    with time_limit(60):
        pass


def test_a_table_is_blank_where_nothing_was_measured():
    record = {"values": {"ratio": 2.0}, "figures": {"ms": 1234.5}, **ABOUT}
    table = format_table([a_row("a"), a_row("b")], {"a": record, "b": {"error": "broke"}})
    assert table.splitlines() == [
        "| what | ms | figure | measured | target |  |",
        "|---|---|---|---|---|---|",
        "| row a | 1,234 | ratio | 2 | >= 2.5 | FAIL |",
        "| row b |  | ratio |  | >= 2.5 |  |",
        "",
        "Not measured: row b (broke).",
        "",
        "2030-01-02, commit abc, G, mlx 1, mlx-lm 2.",
    ]


def test_figures_of_different_runs_are_told_apart():
    def record(environment):
        return {"values": {"ratio": 3.0}, "figures": {}, **ABOUT, "environment": environment}

    rows = [a_row("a"), a_row("b"), a_row("c")]
    records = {"a": record({}), "c": record({"MLX_USE_CUDA_GRAPHS": "0"})}
    lines = format_table(rows, records).splitlines()
    assert lines[2:5] == [
        "| row a | ratio | 3 | >= 2.5 | PASS | a |",
        "| row b | ratio |  | >= 2.5 |  |  |",
        "| row c | ratio | 3 | >= 2.5 | PASS | b |",
    ]
    assert lines[-1] == "b: 2030-01-02, commit abc, G, mlx 1, mlx-lm 2, `MLX_USE_CUDA_GRAPHS=0`."


def test_tables_go_between_their_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("x\n<!-- gpu: decode -->\nold\n<!-- end -->\ny\n")
    write_tables([a_row("a")], {}, page)
    text = page.read_text()
    assert "old" not in text
    assert "| row a | ratio |  | >= 2.5 |  |" in text
    assert (text[0], text[-2]) == ("x", "y")


def test_a_parting_is_judged_where_it_begins():
    assert parting_gap([1, 2, 3], [1, 2, 3], [0.1, 0.2, 0.3]) is None
    assert parting_gap([1, 9, 9], [1, 2, 3], [0.1, 0.2, 0.3]) == 0.2


def test_the_bandwidth_of_a_copy_is_positive():
    assert copy_bandwidth(1 << 12) > 0
