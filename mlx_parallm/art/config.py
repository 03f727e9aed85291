"""Which devices the server and the trainer have, and how the server is started and updated.

The names are those of the guide to ART's SGLang backend (OpenPipe/ART pull request 564,
``docs/sglang-integration.md``), so that a configuration written for it can be kept.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mlx_parallm.types.errors import ConfigError

NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")


class WeightSync(StrEnum):
    """How a step of training reaches the server.

    lora: the checkpoint is an adapter; the server loads it as ``name@step`` beside the others.
    disk: the checkpoint is a whole model; the server replaces its weights between two steps.
    restart: the server is started anew with the checkpoint, whichever of the two it is.
    """

    LORA = "lora"
    DISK = "disk"
    RESTART = "restart"


def count_cuda_devices(
    environment: Mapping[str, str] = os.environ, devices: Path = NVIDIA_DEVICES
) -> int:
    """How many NVIDIA devices this process may use; 0 on a Mac, whose one GPU is shared."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    return len(list(devices.iterdir())) if devices.is_dir() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Which device serves and which ones train.

    Attributes:
        inference_device: index of the server's.
        training_devices: indices of the trainer's; the server's among them is shared mode.
        auto_detect: whether to find out: one device (as on any Mac) is shared, of several the
            server has the first and the trainer the others.
    """

    inference_device: int = 0
    training_devices: tuple[int, ...] = (1,)
    auto_detect: bool = True

    def __post_init__(self) -> None:
        if self.inference_device < 0 or any(one < 0 for one in self.training_devices):
            raise ConfigError("Indices of devices are not negative.")
        if not self.training_devices:
            raise ConfigError("training_devices must name at least one device.")

    def resolved(self, num_devices: int | None = None) -> DeviceConfig:
        """As it is on this machine; ``num_devices`` is counted unless it is given."""
        if not self.auto_detect:
            return self
        count = count_cuda_devices() if num_devices is None else num_devices
        others = tuple(range(1, count)) or (0,)
        return DeviceConfig(inference_device=0, training_devices=others, auto_detect=False)

    @property
    def is_split(self) -> bool:
        """Whether the trainer leaves the server's device alone."""
        return self.inference_device not in self.training_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server is started and updated.

    Attributes:
        mem_fraction_static: share of the free memory that KV may take.
        disable_radix_cache: whether equal prefixes are computed each time.
        max_loras_per_batch: most adapters in one batch.
        context_length: most tokens of a prompt and its answer; None is the model's.
        weight_sync_method: how a step of training reaches the server.
        flush_cache_on_sync: whether cached prefixes are forgotten with each step. None of another
            step is ever used in any case.
        server_timeout: seconds a start may take.
        python: the interpreter that serves; None is the trainer's. ART and MLX need not live in
            one environment.
        flags: further flags of ``mlx_parallm serve``.
    """

    mem_fraction_static: float = 0.9
    disable_radix_cache: bool = False
    max_loras_per_batch: int = 4
    context_length: int | None = None
    weight_sync_method: WeightSync = WeightSync.LORA
    flush_cache_on_sync: bool = False
    server_timeout: float = 120.0
    python: str | None = None
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.mem_fraction_static <= 1:
            raise ConfigError("mem_fraction_static must be above 0 and at most 1.")
        if self.max_loras_per_batch < 1:
            raise ConfigError("max_loras_per_batch must be at least 1.")
        if self.context_length is not None and self.context_length < 1:
            raise ConfigError("context_length must be at least 1.")
        if self.server_timeout <= 0:
            raise ConfigError("server_timeout must be above 0.")
        try:
            method = WeightSync(self.weight_sync_method)
        except ValueError:
            names = ", ".join(WeightSync)
            raise ConfigError(
                f"weight_sync_method must be one of {names}, not {self.weight_sync_method!r}."
            ) from None
        # "lora" as a plain text, as the guide writes it.
        object.__setattr__(self, "weight_sync_method", method)

    def to_flags(self) -> list[str]:
        """The flags of ``mlx_parallm serve`` that say the same."""
        flags = [
            *("--kv-memory-fraction", str(self.mem_fraction_static)),
            *("--max-loras", str(self.max_loras_per_batch)),
        ]
        if self.disable_radix_cache:
            flags.append("--no-enable-prefix-caching")
        if self.context_length is not None:
            flags += ["--max-model-len", str(self.context_length)]
        return [*flags, *self.flags]
