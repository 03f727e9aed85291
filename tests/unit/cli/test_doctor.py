"""The report of ``doctor`` on a Mac: its facts, what is advised, and the exit status."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlx_parallm.cli.doctor import diagnosis, speed
from mlx_parallm.cli.doctor.advice import mac_advice, rejection_advice, speed_advice
from mlx_parallm.cli.doctor.command import FAILED, REJECTED
from mlx_parallm.cli.doctor.speed import ModelSpeed, SpeedReport, speed_report
from mlx_parallm.cli.doctor.system import (
    HIDDEN,
    MacReport,
    mac_report,
    shown_value,
    system_report,
)
from mlx_parallm.cli.doctor.text import _system_rows
from mlx_parallm.cli.main import main
from mlx_parallm.cli.settings import SETTINGS
from mlx_parallm.config import ModelConfig
from mlx_parallm.process_setup.device_process import set_mlx_variables
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.timing import products, tunings
from mlx_parallm.worker.timing.kernels import KernelTime
from mlx_parallm.worker.timing.tunings import TuningTime
from mlx_parallm.worker.worker import Worker
from tests.fake_mac.mac import ALL, GIB, WORKING_SETS, FakeMac
from tests.kernels.shim_compile import require_compiler

Become = Callable[..., FakeMac]

SYSCTL = """\
kern.osproductversion: 15.5
kern.osversion: 24F74
hw.model: Mac14,9
hw.memsize: 17179869184
iogpu.wired_limit_mb: 0
vm.swapusage: total = 2048.00M  used = 1536.25M  free = 511.75M  (encrypted)
sysctl.proc_translated: 0
"""
MAC = MacReport(
    version="15.5",
    build="24F74",
    model="Mac14,9",
    memory_bytes=16 * GIB,
    wired_limit_mb=0,
    swap_total_bytes=2 * GIB,
    swap_used_bytes=1536 * 2**20 + 2**18,
    is_translated=False,
)
# OF_MODELS: attention in bfloat16 with heads of 128 numbers, four for each KV head.
OF_MODELS = r"(?s)^paged_attend_\w+\s+using T = bfloat16_t;.* D = 128;.* BITS 0\n.* SHARE = 4;"
# FAST: kernels that are worth it. The real model takes minutes on a fake Mac.
FAST = SpeedReport(
    kernels=ModelSpeed(attention="metal", one_row=200, many_rows=2000),
    stock=ModelSpeed(attention="reference", one_row=100, many_rows=400),
)


@pytest.fixture
def report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[], tuple[int, dict[str, Any]]]:
    """Return what runs ``doctor --json`` with small measurements, and returns status and report."""
    for name, value in {"NUM_ROWS": 2, "NUM_KEYS": 32, "NUM_LAUNCHES": 1, "NUM_ROUNDS": 1}.items():
        monkeypatch.setattr(tunings, name, value)
    monkeypatch.setattr(products, "GPU_SHAPE", (64, 512))
    # The speed of a shim says nothing.
    monkeypatch.setattr(tunings, "_launch_s", _equal(tunings._launch_s))
    monkeypatch.setattr(speed, "speed_report", lambda: FAST)

    def run() -> tuple[int, dict[str, Any]]:
        status = main(["doctor", "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def _equal(launch_s: Callable[..., float]) -> Callable[..., float]:
    def launch(backend: Any) -> float:
        launch_s(backend)
        return 1e-4

    return launch


@pytest.mark.parametrize(
    "memory_gb",
    [pytest.param(size, marks=[pytest.mark.slow] * (size != 16)) for size in WORKING_SETS],
)
def test_every_kernel_rejected_is_an_exit_status_and_advice(
    fake_mac: Become, report: Callable[[], tuple[int, dict[str, Any]]], memory_gb: int
) -> None:
    mac = fake_mac(memory_gb=memory_gb, rejects=ALL, outputs={"sysctl": SYSCTL})
    status, content = report()
    assert status == REJECTED
    assert list(content["rejected"]) == ["attention", "int8 KV", "int4 KV", "sampling", "adapters"]
    assert all("Unable to build" in reason for reason in content["rejected"].values())
    assert "please open an issue" in content["advice"][0]
    assert content["attention"]["backend"] == "reference"
    assert content["device"]["info"] == mac.device_info()
    assert content["device"]["memory_total_bytes"] == memory_gb * GIB
    assert content["system"]["mac"]["build"] == "24F74"
    problems = {each["problem"] for each in content["kernels"]}
    assert len(problems) == 1
    assert "Unable to build" in problems.pop()
    assert all("Unable to build" in each["problem"] for each in content["tunings"])


@pytest.mark.slow
def test_a_mac_whose_kernels_are_right_has_nothing_to_change(
    fake_mac: Become, report: Callable[[], tuple[int, dict[str, Any]]]
) -> None:
    require_compiler()
    fake_mac()
    status, content = report()
    assert (status, content["rejected"]) == (0, {})
    assert content["advice"] == []
    assert content["attention"]["backend"] == "metal"
    assert content["attention"]["order_error"] < 2e-3
    assert {each["name"].rpartition("_")[0] for each in content["kernels"]} >= {
        "paged_write",
        "paged_quantise",
        "paged_attend",
        "paged_merge",
        "paged_gather",
        "paged_copy",
        "sampling_draw",
        "sampling_logprobs",
        "adapters_shrink",
        "adapters_expand",
    }
    assert len({each["name"] for each in content["kernels"]}) == len(content["kernels"])
    assert all(each["problem"] is None and each["run_us"] > 0 for each in content["kernels"])
    assert len(content["tunings"]) == 3
    assert [each["is_shipped"] for each in content["tunings"]] == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "rejected"),
    [
        ("adapters_expand", "adapters"),
        ("sampling_draw", "sampling"),
        ("paged_merge", "attention"),
    ],
)
def test_a_kernel_with_wrong_numbers_is_named(
    fake_mac: Become,
    report: Callable[[], tuple[int, dict[str, Any]]],
    kernel: str,
    rejected: str,
) -> None:
    require_compiler()
    fake_mac(wrong=kernel)
    status, content = report()
    assert status == REJECTED
    assert rejected in content["rejected"]
    assert rejected in content["advice"][0]
    assert {name.split()[-1] for name in content["rejected"]} <= {rejected, "KV"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rejects", "names"),
    [
        (OF_MODELS, ["attention"]),
        (r"constexpr int SCORE_LANES = 8;", ["tile 4, 8 lanes, 2 heads"]),
    ],
)
def test_what_no_check_in_float32_compiles_is_a_rejection(
    fake_mac: Become,
    report: Callable[[], tuple[int, dict[str, Any]]],
    rejects: str,
    names: list[str],
) -> None:
    require_compiler()
    fake_mac(rejects=rejects)
    status, content = report()
    assert status == REJECTED
    assert list(content["rejected"]) == names
    assert "Unable to build" in content["rejected"][names[0]]
    assert f"({', '.join(names)})" in content["advice"][0]


def test_a_kernel_that_could_not_be_timed_is_a_rejection(
    fake_mac: Become,
    report: Callable[[], tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_mac(rejects=ALL)
    times = (KernelTime(name="paged_attend_1", problem="RuntimeError: lost"), KernelTime(name="2"))
    monkeypatch.setattr(diagnosis, "time_kernels", lambda: times)
    status, content = report()
    assert status == REJECTED
    assert content["rejected"].pop("paged_attend_1") == "RuntimeError: lost"
    assert "2" not in content["rejected"]


def test_a_model_that_fails_is_a_failure(
    fake_mac: Become,
    monkeypatch: pytest.MonkeyPatch,
    report: Callable[[], tuple[int, dict[str, Any]]],
) -> None:
    fake_mac(rejects=ALL)
    monkeypatch.setattr(speed, "speed_report", lambda: SpeedReport(problem="TypeError: no"))
    status, content = report()
    assert status == FAILED
    assert "The demonstration model fails (TypeError: no)" in content["advice"][-1]


def test_a_rejection_is_text_too(fake_mac: Become, capsys: pytest.CaptureFixture[str]) -> None:
    fake_mac(rejects=ALL, outputs={"sysctl": SYSCTL})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "speed_report", lambda: FAST)
        patch.setattr(products, "GPU_SHAPE", (64, 512))
        assert main(["doctor"]) == REJECTED
    text = capsys.readouterr().out
    assert "sampling: kernels of this device are not used: RuntimeError" in text
    assert "advice: Kernels of this device are rejected (attention, int8 KV" in text
    assert "nothing to change" not in text
    assert "15.5 (24F74) on Mac14,9" in text
    assert "1.5 GiB of 2.0 GiB" in text


def test_what_would_not_start_comes_before_what_is_slow(fake_mac: Become) -> None:
    fake_mac(rejects=ALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "speed_report", lambda: FAST)
        patch.setattr(products, "GPU_SHAPE", (64, 512))
        assert main(["doctor", "--kv-cache-memory-bytes", "900TiB"]) == FAILED


@pytest.mark.parametrize(
    ("output", "mac"),
    [
        (SYSCTL, MAC),
        (SYSCTL.replace(".00M", ",00M").replace(".25M", ",25M"), MAC),
        (SYSCTL.replace("translated: 0", "translated: 1"), replace(MAC, is_translated=True)),
        ("", MacReport()),
        ("hw.memsize: many\nvm.swapusage: none", MacReport()),
    ],
)
def test_sysctl_is_read(output: str, mac: MacReport) -> None:
    assert mac_report(output) == mac


def test_a_mac_without_an_answer_is_reported(fake_mac: Become) -> None:
    fake_mac(outputs={"sysctl": ""})
    system = system_report({})
    assert (system.machine, system.mac) == ("arm64", MacReport())


def test_variables_of_mlx_are_shown_and_keys_are_not() -> None:
    report = system_report(
        {
            "MLX_MAX_OPS_PER_BUFFER": "100",
            "MLX_PARALLM_API_KEY": "key",
            "MLX_PARALLM_ADMIN_API_KEY": "key",
            "HF_TOKEN": "token",
        }
    )
    assert report.variables == {
        "MLX_MAX_OPS_PER_BUFFER": "100",
        "MLX_PARALLM_ADMIN_API_KEY": HIDDEN,
        "MLX_PARALLM_API_KEY": HIDDEN,
    }
    soft, hard = report.descriptors
    assert soft > 0
    assert hard in (-1, max(soft, hard))
    assert report.mac is None


@pytest.mark.parametrize("name", ["MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"])
@pytest.mark.parametrize("value", [None, "7"])
def test_what_the_user_set_differs_from_what_the_program_sets(
    fake_mac: Become, monkeypatch: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    fake_mac(outputs={"sysctl": ""})
    # A copy, which is dropped when the test has ended.
    monkeypatch.setattr(os, "environ", {} if value is None else {name: value})
    set_mlx_variables()
    report = system_report(os.environ)
    assert len(report.variables) == 2
    assert set(report.variables) - set(report.defaults) == (set() if value is None else {name})
    lines = dict(_system_rows(report))
    assert lines[name] == (value or f"{report.variables[name]} (the default)")


def test_of_all_settings_keys_alone_are_hidden() -> None:
    report = system_report({setting.variable: "7" for setting in SETTINGS})
    hidden = [name for name, value in report.variables.items() if value == HIDDEN]
    keys = ("ADMIN_API_KEY", "API_KEY", "PEER_KEY")
    assert hidden == [f"MLX_PARALLM_{key}" for key in keys]
    assert report.variables["MLX_PARALLM_MAX_NUM_BATCHED_TOKENS"] == "7"
    assert len(report.variables) == len(SETTINGS)


@pytest.mark.parametrize(
    "name", ["MLX_PARALLM_API_KEYS", "MLX_PARALLM_HF_TOKEN", "MLX_SECRET", "MLX_PASSWORD"]
)
def test_variables_that_may_hold_secrets_are_hidden(name: str) -> None:
    assert shown_value(name, "secret") == HIDDEN


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("https://h/x", "https://h/x"),
        ("https://u:pw@h/x?token=pw", "https://...@h/x?..."),
        ("https://u:pw@h:8/x#pw", "https://...@h:8/x#..."),
        ("https://pw@h", "https://...@h"),
        ("https://u:pw@pw/pw?pw#pw@h/x", "https://...@h/x"),
        (
            "https://h?a=pw,pw,https://u:pw@i, http://j/?pw",
            "https://h?...,https://...@i, http://j/?...",
        ),
        ("https://h?a=pw http://u:pw@j", "https://h?... http://...@j"),
        ('["https://u:pw@h/x?pw", "http://j"]', '["https://...@h/x?... "http://j"]'),
        ("what? user@host #3", "what? user@host #3"),
        ("1000", "1000"),
    ],
)
def test_urls_are_shown_without_secrets(value: str, shown: str) -> None:
    assert shown_value("MLX_PARALLM_VERIFIER_URLS", value) == shown


@pytest.mark.parametrize(
    ("mac", "words"),
    [
        (None, []),
        (replace(MAC, swap_used_bytes=0), []),
        (MAC, ["macOS has swapped out 1.5 GiB"]),
        (MacReport(is_translated=True), ["runs under Rosetta"]),
        (MacReport(), []),
    ],
)
def test_advice_about_a_mac(mac: MacReport | None, words: list[str]) -> None:
    advice = mac_advice(mac)
    assert len(advice) == len(words)
    assert all(word in line for word, line in zip(words, advice, strict=True))


def _tuning(
    launch_us: float, *, is_shipped: bool = False, problem: str | None = None
) -> TuningTime:
    return TuningTime(
        tile=4,
        score_lanes=8,
        max_heads=2,
        quantised_vector=16,
        is_shipped=is_shipped,
        launch_us=launch_us,
        problem=problem,
    )


SLOW = replace(FAST, stock=ModelSpeed(attention="reference", one_row=150, many_rows=3000))


@pytest.mark.parametrize(
    ("timed", "measured", "words"),
    [
        ([], None, []),
        ([_tuning(100, is_shipped=True), _tuning(95)], FAST, []),
        ([_tuning(100, is_shipped=True), _tuning(80)], FAST, ["80 us with tile 4, 8 lanes"]),
        ([_tuning(100, is_shipped=True), _tuning(0, problem="no")], FAST, []),
        ([_tuning(0, is_shipped=True, problem="no"), _tuning(80)], FAST, []),
        ([], SLOW, ["With 16 rows, kernels generate 2000 tokens/s and stock operations 3000"]),
        ([], SpeedReport(problem="no memory"), ["model fails (no memory): please open an issue"]),
    ],
)
def test_advice_about_speed(
    timed: list[TuningTime], measured: SpeedReport | None, words: list[str]
) -> None:
    advice = speed_advice(timed, measured)
    assert len(advice) == len(words)
    assert all(word in line for word, line in zip(words, advice, strict=True))


def test_nothing_rejected_is_no_advice() -> None:
    assert rejection_advice({}) == []


def test_the_model_is_measured_with_kernels_and_without(
    fake_mac: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_compiler()
    fake_mac()
    for name, value in {
        "MANY_ROWS": 2,
        "PROMPT_TOKENS": 3,
        "NUM_TOKENS": 2,
        "MEASURED_S": 0,
    }.items():
        monkeypatch.setattr(speed, name, value)
    measured = speed_report(ModelConfig(dtype="float32"))
    assert measured is not None
    assert measured.problem is None
    kernels, stock = measured.kernels, measured.stock
    assert kernels is not None
    assert stock is not None
    assert (kernels.attention, stock.attention) == ("metal", "reference")
    assert min(kernels.one_row, kernels.many_rows, stock.one_row, stock.many_rows) > 0


def test_cuda_measures_no_stock_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = list[type[Worker]]()

    def record(model: ModelConfig, worker: Worker) -> ModelSpeed:
        workers.append(type(worker))
        return ModelSpeed(attention="cuda", one_row=1, many_rows=1)

    monkeypatch.setattr(speed, "backend_name", lambda: "cuda")
    monkeypatch.setattr(speed, "_measured", record)
    measured = speed_report()
    assert measured is not None
    assert measured.kernels is not None
    assert measured.stock is None
    assert workers == [Worker]


def test_a_model_that_cannot_be_loaded_is_reported(fake_mac: Become) -> None:
    fake_mac()
    measured = speed_report(ModelConfig(path="/no/model"))
    assert measured is not None
    assert "There is no folder /no/model" in (measured.problem or "")


@pytest.mark.parametrize("error", MODEL_ERRORS)
def test_a_model_that_raises_does_not_end_the_report(
    fake_mac: Become, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> ModelSpeed:
        raise error("planted")

    fake_mac()
    monkeypatch.setattr(speed, "_measured", fail)
    assert speed_report() == SpeedReport(problem=f"{error.__name__}: planted")


def test_products_of_packed_weights_are_timed_beside_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "CPU_SHAPE", (64, 512))
    times = {each.weights: each for each in products.time_products()}
    assert list(times) == ["bfloat16", "float32", "4-bit", "8-bit", "mxfp4"]
    for each in times.values():
        assert list(each.us) == [1, 8, 32, 128]
        assert all(us > 0 for us in each.us.values())
        assert not each.has_kernels


def test_a_processor_has_no_kernels_to_compare() -> None:
    assert speed_report() is None
