"""Settings of the backend: devices of server and trainer, and how the server is updated.

The names are those of the guide to ART's SGLang backend (OpenPipe/ART pull request 564,
``docs/sglang-integration.md``), so that a configuration written for it can be reused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from mlx_parallm.machine import count_cuda_devices
from mlx_parallm.types.errors import ConfigError

# TIMEOUT_VARIABLE: where ART's own services read how many seconds a server's start may take.
TIMEOUT_VARIABLE = "ART_SERVER_TIMEOUT"
# START_TIMEOUT_S: most seconds for a start if nothing says it.
START_TIMEOUT_S = 120.0


class WeightSync(StrEnum):
    """Transfer of a training step's weights to the server.

    lora: the checkpoint is an adapter; the server loads it as ``name@step`` beside the others.
    disk: the checkpoint is a whole model; the server replaces its weights between two steps.
    restart: the server is restarted with the checkpoint, an adapter or a whole model.
    """

    LORA = "lora"
    DISK = "disk"
    RESTART = "restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The devices of server and trainer.

    Attributes:
        inference_device: index of the server's device; of its first one if it has several.
        training_devices: indices of the trainer's devices; shared mode if the server's is one.
        auto_detect: choose by the number of devices: a single device (as on any Mac) is shared; of
            several, the server gets the first and the trainer the others.
        num_inference_devices: how many devices the server has: one for each of its engines or
            ranks. The backend sets it to ``ServerConfig.num_devices``.
    """

    inference_device: int = 0
    training_devices: tuple[int, ...] = (1,)
    auto_detect: bool = True
    num_inference_devices: int = 1

    def __post_init__(self) -> None:
        if self.inference_device < 0 or any(index < 0 for index in self.training_devices):
            raise ConfigError("Indices of devices must not be negative.")
        if not self.training_devices:
            raise ConfigError("training_devices must name at least one device.")

    def resolved(self, num_devices: int | None = None, *, num_engines: int = 1) -> DeviceConfig:
        """Return the devices on this machine, for a server with ``num_engines``.

        None for ``num_devices`` counts them. If the engines leave none, the trainer shares the
        first.
        """
        devices = replace(self, num_inference_devices=num_engines)
        if not self.auto_detect:
            return devices
        count = count_cuda_devices() if num_devices is None else num_devices
        training = tuple(range(num_engines, count)) or (0,)
        return replace(devices, inference_device=0, training_devices=training, auto_detect=False)

    @property
    def inference_devices(self) -> tuple[int, ...]:
        """The indices of the server's devices."""
        first = self.inference_device
        return tuple(range(first, first + self.num_inference_devices))

    @property
    def is_split(self) -> bool:
        """True if the trainer uses none of the server's devices."""
        return not set(self.inference_devices).intersection(self.training_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings for starting and updating the server.

    Attributes:
        mem_fraction_static: share of the free memory that KV may take.
        disable_radix_cache: True turns prefix caching off.
        max_loras_per_batch: most adapters in one batch.
        context_length: most tokens of a prompt and its answer; None: the model's own limit.
        weight_sync_method: how the server gets the weights of a training step.
        flush_cache_on_sync: drop cached prefixes with each step. Prefixes of another step are never
            used in any case.
        data_parallel_size: engines of the server. In split mode each has its own device.
        tensor_parallel_size: processes that compute the model together, each on its own GPU; not
            beside several engines.
        server_timeout: most seconds for a start; None: ``start_timeout_s`` decides.
        python: the interpreter of the server; None: the trainer's. ART and MLX need not be in the
            same environment.
        flags: further flags of ``mlx_parallm serve``.
    """

    mem_fraction_static: float = 0.9
    disable_radix_cache: bool = False
    max_loras_per_batch: int = 4
    context_length: int | None = None
    weight_sync_method: WeightSync = WeightSync.LORA
    flush_cache_on_sync: bool = False
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    server_timeout: float | None = None
    python: str | None = None
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.mem_fraction_static <= 1:
            raise ConfigError("mem_fraction_static must be above 0 and at most 1.")
        if self.max_loras_per_batch < 1:
            raise ConfigError("max_loras_per_batch must be at least 1.")
        if min(self.data_parallel_size, self.tensor_parallel_size) < 1:
            raise ConfigError("data_parallel_size and tensor_parallel_size must be at least 1.")
        if self.data_parallel_size > 1 and self.tensor_parallel_size > 1:
            raise ConfigError("data_parallel_size and tensor_parallel_size cannot both be above 1.")
        if self.context_length is not None and self.context_length < 1:
            raise ConfigError("context_length must be at least 1.")
        if self.server_timeout is not None and self.server_timeout <= 0:
            raise ConfigError("server_timeout must be above 0.")
        try:
            method = WeightSync(self.weight_sync_method)
        except ValueError:
            names = ", ".join(WeightSync)
            raise ConfigError(
                f"weight_sync_method must be one of {names}, not {self.weight_sync_method!r}."
            ) from None
        # The guide writes the method as plain text, such as "lora".
        object.__setattr__(self, "weight_sync_method", method)

    def start_timeout_s(self, environment: Mapping[str, str]) -> float:
        """Return ``server_timeout``, or what ART's own variable says, or the default.

        Raises:
            ConfigError: the variable is no number above 0.
        """
        if self.server_timeout is not None:
            return self.server_timeout
        text = environment.get(TIMEOUT_VARIABLE, str(START_TIMEOUT_S))
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = 0.0
        if not timeout_s > 0:
            raise ConfigError(f"{TIMEOUT_VARIABLE} is {text!r}, which is no number above 0.")
        return timeout_s

    @property
    def num_devices(self) -> int:
        """The number of devices that the server needs: one for each engine or rank."""
        return self.data_parallel_size * self.tensor_parallel_size

    def to_flags(self) -> list[str]:
        """Return these settings as flags of ``mlx_parallm serve``."""
        flags = [
            *("--kv-memory-fraction", str(self.mem_fraction_static)),
            *("--max-loras", str(self.max_loras_per_batch)),
            # The server sees a device for each engine, so a variable must not ask for others.
            *("--data-parallel-size", str(self.data_parallel_size)),
        ]
        if self.disable_radix_cache:
            flags.append("--no-enable-prefix-caching")
        if self.context_length is not None:
            flags += ["--max-model-len", str(self.context_length)]
        return [*flags, *self.flags]
