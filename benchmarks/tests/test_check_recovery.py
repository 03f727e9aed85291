"""The verdict of ``benchmarks.gpu.check_recovery``, with an error in place of too little memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from benchmarks.gpu import check_recovery
from benchmarks.gpu.engines import BenchEngine
from mlx_parallm.worker.device import faults
from tests.builders.random_models import random_model


def fail_once(bench: BenchEngine) -> None:
    """Let the tenth step from now raise what MLX does if memory ends."""
    path, left = check_recovery.runner_of(bench)._path, [10]
    forward = path.logits

    def starved(*arguments: Any, **named: Any) -> mx.array:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return forward(*arguments, **named)

    path.logits = starved


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="there is a GPU")
def test_it_refuses_to_starve_a_host() -> None:
    with pytest.raises(SystemExit, match="no GPU"):
        check_recovery.main()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_device_that_is_wrongly_taken_for_lost_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    model = random_model("tiny", bits=None, dtype=mx.float32)
    monkeypatch.setattr(check_recovery, "random_model", lambda *_, **__: model)
    monkeypatch.setattr(check_recovery, "starve", fail_once)
    if is_lost:
        monkeypatch.setattr(faults, "why_lost", lambda: RuntimeError("no answer"))
    assert check_recovery.verdict() == is_lost
