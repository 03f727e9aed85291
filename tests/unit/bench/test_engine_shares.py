"""The shares of engines in a run, from the metrics before and after it."""

from __future__ import annotations

from mlx_parallm.bench.engine_shares import engine_shares, read_counts

BEFORE = """\
# HELP vllm:generation_tokens_total Tokens generated.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="a"} 10.0
vllm:generation_tokens_total{engine="1",model_name="a"} 40.0
vllm:generation_tokens_created{engine="1",model_name="a"} 1.7e9
vllm:prompt_tokens_total{engine="0",model_name="a"} 100.0
"""
AFTER = """\
vllm:generation_tokens_total{engine="0",model_name="a"} 30.0
vllm:generation_tokens_total{model_name="b",engine="0"} 5.0
vllm:generation_tokens_total{engine="1",model_name="a"} 7.0
vllm:prompt_tokens_total{engine="0",model_name="a"} 1.5e+03
vllm:prefix_cache_hits_total{engine="0",model_name="a"} 64.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="a"} 16.0
"""


def test_counters_grow_over_all_models_and_restart_at_zero() -> None:
    first, second = engine_shares(read_counts(BEFORE), read_counts(AFTER))
    assert (first.engine, first.output_tokens) == (0, 25)
    assert (first.prompt_tokens, first.cached_tokens) == (1400, 80)
    # Engine 1 was restarted.
    assert (second.engine, second.output_tokens, second.prompt_tokens) == (1, 7, 0)


def test_an_engine_alone_and_other_servers_have_no_shares() -> None:
    alone = 'vllm:generation_tokens_total{engine="0"} 3.0\n'
    assert engine_shares({}, read_counts(alone)) == []
    assert read_counts("vllm:generation_tokens_total 3.0\n") == {}
    assert read_counts('{"data": []}') == {}
