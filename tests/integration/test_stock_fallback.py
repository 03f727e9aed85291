"""Models on a fake Mac whose kernels cannot be used: stock operations give the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.config import CacheConfig, SchedulerConfig
from tests.fake_mac.mac import ALL, FakeMac
from tests.kernels.shim_compile import require_compiler

PROMPTS = ["1, 2, 3,", "What is", "The"]
# PLACES: what is said not to be used, by the kernels that are faulty.
slow = pytest.mark.slow
PLACES = {
    "attend": "attention kernels",
    "copy": "attention kernels",
    "draw": "sampling kernels",
    "expand": "adapter kernels",
}


def generated() -> list[Sequence[int]]:
    """Return the tokens of a greedy sample of each prompt, and of three forks of the first."""
    llm = LLM(
        dtype="float32",
        cache=CacheConfig(kv_cache_bytes=32 << 20),
        scheduler=SchedulerConfig(max_num_seqs=8),
    )
    greedy = SamplingParams(max_tokens=8, temperature=0)
    forks = SamplingParams(max_tokens=8, temperature=0, n=3)
    outputs = llm.generate(PROMPTS, greedy) + llm.generate(PROMPTS[:1], forks)
    return [sample.token_ids for output in outputs for sample in output.outputs]


@pytest.fixture(scope="module")
def wanted() -> list[Sequence[int]]:
    return generated()


def test_a_mac_whose_compiler_rejects_all_kernels_serves(
    fake_mac: Callable[..., FakeMac],
    wanted: list[Sequence[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake_mac(rejects=ALL)
    with caplog.at_level(logging.WARNING):
        assert generated() == wanted
    for place in PLACES.values():
        assert f"{place} are not used: RuntimeError: [metal::Device] Unable" in caplog.text


@pytest.mark.parametrize(
    "kernel",
    ["attend", "expand", *(pytest.param(name, marks=slow) for name in ("copy", "draw"))],
)
def test_one_kernel_with_wrong_numbers_changes_no_token(
    fake_mac: Callable[..., FakeMac],
    wanted: list[Sequence[int]],
    caplog: pytest.LogCaptureFixture,
    kernel: str,
) -> None:
    require_compiler()
    fake_mac(wrong=f"_{kernel}_")
    with caplog.at_level(logging.WARNING):
        assert generated() == wanted
    for place in PLACES.values():
        assert (f"{place} are not used" in caplog.text) == (place == PLACES[kernel])
