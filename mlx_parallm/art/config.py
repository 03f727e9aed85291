"""Settings of the backend: devices of server and trainer, and how the server is updated.

The names are those of the guide to ART's SGLang backend (OpenPipe/ART pull request 564,
``docs/sglang-integration.md``), so that a configuration written for it can be reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Devices:
    """The indices of the devices of server and trainer, one for each engine or rank."""

    inference: tuple[int, ...]
    training: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        """True if the trainer uses none of the server's devices."""
        return not set(self.inference).intersection(self.training)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The devices of server and trainer; those that it names are never replaced.

    Attributes:
        inference_device: index of the server's device; of its first one if it has several.
        training_devices: indices of the trainer's devices; shared mode if the server's is one.
        auto_detect: choose what is not named by the number of devices: a single device (as on any
            Mac) is shared; of several, the server gets the first and the trainer the others.
            False: 0 for the server and 1 for the trainer.
    """

    inference_device: int | None = None
    training_devices: Sequence[int] | None = None
    auto_detect: bool = True

    def __post_init__(self) -> None:
        inference = [] if self.inference_device is None else [self.inference_device]
        training = () if self.training_devices is None else _indices(self.training_devices)
        for index in (*inference, *training):
            # An index is checked as text of the configuration may be: "1" and True are none.
            if type(index) is not int or index < 0:
                raise ConfigError(f"Indices of devices are whole numbers from 0, not {index!r}.")
        if self.training_devices is not None:
            if not training:
                raise ConfigError("training_devices must name at least one device.")
            object.__setattr__(self, "training_devices", training)

    def resolved(self, num_devices: int | None = None, *, num_engines: int = 1) -> Devices:
        """Return the devices on this machine, for a server with ``num_engines``.

        None for ``num_devices`` counts them. If the engines leave none, the trainer shares the
        first.
        """
        training = None if self.training_devices is None else tuple(self.training_devices)
        if not self.auto_detect:
            return Devices(_span(self.inference_device or 0, num_engines), training or (1,))
        count = count_cuda_devices() if num_devices is None else num_devices
        first = self.inference_device
        if first is None:
            first = _first_free(count, num_engines, training or ())
        inference = _span(first, num_engines)
        others = tuple(index for index in range(count) if index not in inference)
        return Devices(inference, training or others or (first,))


def _indices(devices: Sequence[object]) -> tuple[object, ...]:
    """Return the indices of a sequence; a single index is refused by name."""
    if not isinstance(devices, (list, tuple, range)):
        raise ConfigError(f"training_devices must be a list of indices, not {devices!r}.")
    return tuple(devices)


def _span(first: int, num_engines: int) -> tuple[int, ...]:
    return tuple(range(first, first + num_engines))


def _first_free(count: int, num_engines: int, training: Sequence[int]) -> int:
    """Return where the server's devices begin: clear of the trainer's if possible, else at 0."""
    starts = range(count - num_engines + 1)
    return next(
        (first for first in starts if not set(_span(first, num_engines)).intersection(training)), 0
    )


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
        python: the interpreter of the server, as ART and MLX need not be in the same environment;
            None: the variable ``MLX_PARALLM_PYTHON``, then ``.venv-mlx-parallm-server/bin/python``
            in the current folder, then the trainer's.
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
