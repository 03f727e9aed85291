"""MLX's variables have this platform's values, unless the user says otherwise."""

from __future__ import annotations

import os

import pytest

from mlx_parallm.process_setup import device_process
from mlx_parallm.process_setup.device_process import mb_per_buffer, set_mlx_variables

OPS, MB = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
GRAPHS = "MLX_USE_CUDA_GRAPHS"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def a_mac_of_16_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 16 * GIB // 16384}
    monkeypatch.setattr(device_process.sys, "platform", "darwin")
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    for name in (OPS, MB, GRAPHS):
        # Set before deletion, so that all are as before when the test has ended.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_mac_fills_larger_command_buffers() -> None:
    set_mlx_variables()
    assert (os.environ[OPS], os.environ[MB]) == ("1000", "256")


@pytest.mark.parametrize("name", [OPS, MB])
def test_a_value_of_the_user_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "7")
    set_mlx_variables()
    values = {each: os.environ[each] for each in (OPS, MB)}
    assert values == {OPS: "1000", MB: "256"} | {name: "7"}


def test_other_systems_launch_without_graphs_and_note_often_how_far_the_device_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_process.sys, "platform", "linux")
    set_mlx_variables()
    assert os.environ[OPS] == "32"
    assert MB not in os.environ
    assert os.environ[GRAPHS] == "0"
    monkeypatch.setenv(GRAPHS, "1")
    set_mlx_variables()
    assert os.environ[GRAPHS] == "1"


@pytest.mark.parametrize(("memory_gb", "expected"), [(8, 128), (24, 384), (25, 400), (512, 400)])
def test_small_macs_fill_smaller_ones(memory_gb: int, expected: int) -> None:
    assert mb_per_buffer(memory_gb * GIB) == expected
