"""The diagnosis as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlx_parallm.cli.doctor.advice import GIB, fastest
from mlx_parallm.cli.doctor.diagnosis import Diagnosis
from mlx_parallm.cli.doctor.kv_folder import kv_folder_text
from mlx_parallm.cli.doctor.system import SystemReport
from mlx_parallm.units import readable_bytes
from mlx_parallm.worker.attention.backend_choice import AttentionReport
from mlx_parallm.worker.device.kernels import CompilerReport
from mlx_parallm.worker.timing.products import ProductTimes

if TYPE_CHECKING:
    from mlx_parallm.distributed.diagnosis import WorldReport


def render(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis as lines of text."""
    device = diagnosis.device
    attention = {"attention": diagnosis.attention}
    attention |= {f"{name} KV": report for name, report in diagnosis.quantised_kv.items()}
    rows = [
        ("backend", device.backend),
        ("device", device.device),
        ("memory", f"{_gib(device.memory_total_bytes)}, free {_gib(device.memory_free_bytes)}"),
        ("BLAS", device.blas + (f" ({device.blas_path})" if device.blas_path else "")),
        ("matmul", f"{device.matmul_gflops:.0f} GFLOP/s (float32, 512 x 512)"),
        *((name, _self_test(report)) for name, report in attention.items()),
        ("sampling", diagnosis.sampling.backend),
        ("linear layers", diagnosis.linear.backend),
        ("packed weights", diagnosis.packed.backend),
        ("experts", diagnosis.experts.backend),
        ("recurrent layers", diagnosis.states.backend),
        ("adapters", diagnosis.adapters.backend),
        *_compiler_rows(diagnosis.compiler),
        *((f"KV of {name}", fit.text) for name, fit in diagnosis.kv.items()),
        *((f"tokenizer of {name}", text) for name, text in diagnosis.tokenizers.items()),
        *([("KV", diagnosis.kv_problem)] if diagnosis.kv_problem else []),
        *([("KV folder", kv_folder_text(diagnosis.kv_folder))] if diagnosis.kv_folder else []),
        ("images", _readable(diagnosis.pictures)),
        ("audio", _readable(diagnosis.audio)),
        *(_world_rows(diagnosis.world) if diagnosis.world else []),
        *_speed_rows(diagnosis),
        *_system_rows(diagnosis.system),
        *diagnosis.versions.items(),
    ]
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{width}}{value}" for name, value in rows]
    for name, reason in diagnosis.rejected.items():
        if name != "compiler":
            lines += ["", f"{name}: kernels of this device are not used: {reason}"]
    for kind, problems in (("images", diagnosis.pictures), ("audio", diagnosis.audio)):
        for name, problem in problems.items():
            if problem is not None:
                lines += ["", f"{kind}: {name} is not read: {problem}"]
    if diagnosis.world and diagnosis.world.difference:
        lines += ["", f"ranks: a server would be refused: {diagnosis.world.difference}"]
    lines += ["", *(f"advice: {line}" for line in diagnosis.advice or ("nothing to change",))]
    return lines


def _speed_rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return rows about what was timed."""
    rows: list[tuple[str, str]] = []
    compiled = [each for each in diagnosis.kernels if each.problem is None]
    if compiled:
        slowest = max(compiled, key=lambda each: each.compile_ms)
        total_s = sum(each.compile_ms for each in compiled) / 1e3
        rows.append(
            (
                "compiled",
                f"{len(compiled)} of {len(diagnosis.kernels)} kernels in {total_s:.1f} s, "
                f"{slowest.name} in {slowest.compile_ms / 1e3:.1f} s",
            )
        )
    best = fastest(diagnosis.tunings)
    for each in diagnosis.tunings:
        notes = [f"{each.launch_us:.0f} us" if each.problem is None else each.problem]
        notes += ["in use"] if each.is_shipped else []
        notes += ["fastest"] if each is best else []
        rows.append((each.name, ", ".join(notes)))
    rows += map(_product_row, diagnosis.products)
    speed = diagnosis.speed
    if speed is None:
        return rows
    if speed.problem is not None:
        return [*rows, ("tokens/s", speed.problem)]
    for name, model in (("kernels", speed.kernels), ("stock operations", speed.stock)):
        if model is not None:
            counts = f"{model.one_row:,.0f} with 1 row, {model.many_rows:,.0f} with 16"
            rows.append((f"tokens/s, {name}", f"{counts} (the demonstration model)"))
    before, after = map(readable_bytes, (speed.cache_before_bytes, speed.cache_after_bytes))
    return [*rows, ("MLX's cache", f"{before} before, {after} after")]


def _product_row(times: ProductTimes) -> tuple[str, str]:
    """Return a row about products of one kind of weight."""
    counts = ", ".join(f"{us:,.0f} us with {rows}" for rows, us in times.us.items())
    return f"product, {times.weights}", f"{counts} rows" + " (kernels)" * times.has_kernels


def _system_rows(system: SystemReport) -> list[tuple[str, str]]:
    """Return rows about the system under the process."""
    soft, hard = ("unlimited" if limit < 0 else f"{limit:,}" for limit in system.descriptors)
    rows = [("system", system.platform), ("open files", f"at most {soft}, can be raised to {hard}")]
    mac = system.mac
    if mac is not None:
        used, total = mac.swap_used_bytes, mac.swap_total_bytes
        wired = "chosen by macOS" if not mac.wired_limit_mb else f"{mac.wired_limit_mb:,} MiB"
        rows += [
            ("macOS", f"{mac.version} ({mac.build}) on {mac.model}"),
            ("swap", f"{_gib(used)} of {_gib(total)}"),
            ("wired limit", wired),
        ]
    return rows + [
        (name, f"{value} (the default)" if name in system.defaults else value)
        for name, value in system.variables.items()
    ]


def _world_rows(world: WorldReport) -> list[tuple[str, str]]:
    """Return rows about the ranks, and the links between them."""
    sums = world.sums
    large = f"{sums.large_bytes >> 20} MiB at {sums.large_gb_per_s:.2f} GB/s"
    return [
        ("ranks", f"{len(world.ranks)}, linked by {world.backend}"),
        ("sums over ranks", f"{sums.small_bytes >> 10} KiB in {sums.small_us:.0f} us; {large}"),
        ("log of ops", f"answers of all ranks within {world.log_us:.0f} us"),
        *(
            (f"rank {rank}", f"{each.host}, {each.device}, free {_gib(each.memory_free_bytes)}")
            for rank, each in enumerate(world.ranks)
        ),
    ]


def _readable(formats: Mapping[str, str | None]) -> str:
    return ", ".join(name for name, problem in formats.items() if problem is None) or "none"


def _compiler_rows(report: CompilerReport | None) -> list[tuple[str, str]]:
    """Return rows about the compiler of kernels; none unless the device is an NVIDIA GPU."""
    if report is None:
        return []
    if report.rejected is not None:
        return [("compiler", f"{report.compiler}, anew at every start: {report.rejected}")]
    return [("compiler", f"{report.compiler}, {report.num_kept} kernels kept in {report.folder}")]


def _self_test(report: AttentionReport) -> str:
    verdict = "passed" if report.passed else "FAILED"
    errors = f"error {report.max_error:.1e}, of order {report.order_error:.1e}"
    return f"{report.backend}, self-test {verdict} ({errors})"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIB:.1f} GiB"
