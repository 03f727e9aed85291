"""Where the default bound of steps holds, and that it is logged."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any, NoReturn

import pytest

from mlx_parallm import llm
from mlx_parallm.bench import engine as bench_engine
from mlx_parallm.bench.step_trace import TraceRecorder
from mlx_parallm.config import EngineConfig, SchedulerConfig
from mlx_parallm.generation.assembly import CUDA_STALL_MS, default_stall_ms
from mlx_parallm.serving import build


class Opened(Exception):
    """Has the settings with which an engine would have been opened."""

    def __init__(self, config: EngineConfig, *_: Any, **__: Any) -> None:
        self.config = config


def refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise Opened(*args, **kwargs)


@pytest.mark.parametrize(
    ("scheduler", "bound"),
    [
        (None, 0),
        (SchedulerConfig(max_num_seqs=64), 0),
        (SchedulerConfig(max_decode_stall_ms=30), 30),
    ],
)
def test_offline_steps_have_no_bound_unless_one_is_given(
    monkeypatch: pytest.MonkeyPatch, scheduler: SchedulerConfig | None, bound: float
) -> None:
    monkeypatch.setattr(llm, "open_engine", refuse)
    with pytest.raises(Opened) as opened:
        llm.LLM("model", scheduler=scheduler)
    assert opened.value.config.scheduler.max_decode_stall_ms == bound
    if scheduler is not None:
        assert opened.value.config.scheduler.max_num_seqs == scheduler.max_num_seqs


def test_the_offline_benchmark_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_engines", refuse)
    monkeypatch.setattr(bench_engine, "prepare_device_process", lambda: None)
    args = Namespace(batch_size=4, prompt_tokens=8, steps=2, model="model", dtype=None)
    with pytest.raises(Opened) as opened:
        bench_engine._build(args, TraceRecorder())
    assert opened.value.config.scheduler.max_decode_stall_ms == 0


def test_the_default_bound_is_logged_where_it_holds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert default_stall_ms("m", SchedulerConfig(), "cpu") is None
        default_stall_ms("m", SchedulerConfig(max_decode_stall_ms=0), "cuda")
        assert not caplog.records
        assert default_stall_ms("m", SchedulerConfig(), "cuda") == CUDA_STALL_MS
    (record,) = caplog.records
    assert f"{CUDA_STALL_MS:g} ms" in record.getMessage()
