"""ART's ``Backend`` on this server; only methods that need ART import it.

ART (Agent Reinforcement Trainer) runs agents and collects trajectories; a backend serves the model
and trains it. This one serves with ``mlx_parallm`` and trains with a function of the user.
It follows the Protocol ``art.backend.Backend`` of openpipe-art 0.5.23.
"""

# ART is optional: where it is not installed, its types are unknown.
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mlx_parallm.art.config import DeviceConfig, ServerConfig, WeightSync
from mlx_parallm.art.server import BackendError
from mlx_parallm.art.serving import Address, ServedPolicy
from mlx_parallm.art.training import ServerTrainer, Trainer, TrainJob
from mlx_parallm.confinement import is_spelled
from mlx_parallm.types.errors import ConfigError

if TYPE_CHECKING:
    from art.types import TrainResult  # pyright: ignore[reportMissingImports]

#: ``NO_KEY``: the key that ART's clients send to a server without keys.
NO_KEY = "default"


class MLXParallmBackend:
    """A backend with one server per model, which trains models between or beside rollouts.

    Example:
        >>> backend = MLXParallmBackend(trainer, server_config=ServerConfig(context_length=8192))
        >>> async with backend:
        ...     await model.register(backend)
        ...     result = await backend.train(model, groups)
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        path: str | Path = ".art",
        inference_device: int | None = None,
        training_devices: Sequence[int] | None = None,
        device_config: DeviceConfig | None = None,
        server_config: ServerConfig | None = None,
    ) -> None:
        """Create the backend; servers start when models register.

        Args:
            trainer: trains a step and writes its checkpoint.
            path: the folder of ART's projects.
            inference_device: index of the server's device, short for a ``device_config``.
            training_devices: indices of the trainer's devices, short for a ``device_config``.
            device_config: the devices of server and trainer; detected by default.
            server_config: how servers are started and updated.

        Raises:
            ConfigError: an index is none, or is named beside a ``device_config``; or the server
                cannot be trained as it is to be served.
        """
        named = DeviceConfig(inference_device=inference_device, training_devices=training_devices)
        if device_config is not None and named != DeviceConfig():
            raise ConfigError("Name devices by device_config or by themselves, not by both.")
        self._trainer = trainer
        self._trains_server = isinstance(trainer, ServerTrainer)
        self._path = Path(path).resolve()
        self._config = server_config or ServerConfig()
        if self._trains_server:
            _check_trained(self._config)
        self._devices = (device_config or named).resolved(num_engines=self._config.num_devices)
        self._policies: dict[Path, ServedPolicy] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop all servers."""
        for policy in self._policies.values():
            await policy.stop()

    async def register(self, model: Any) -> None:
        """Create a model's folder; ``model.register(backend)`` calls it.

        Raises:
            BackendError: on a disk that ignores case, the folder is another model's.
        """
        model.base_path = str(self._path)
        folder = self._folder(model)
        folder.mkdir(parents=True, exist_ok=True)
        if not is_spelled(folder.relative_to(self._path).as_posix(), self._path):
            raise BackendError(
                f"The folder of {model.name} is that of another model, whose name differs by case "
                "alone; this disk cannot distinguish them. Choose another name."
            )

    async def train(
        self, model: Any, trajectory_groups: Iterable[Any], **options: Any
    ) -> TrainResult:
        """Train one step from groups of trajectories with rewards, and serve it.

        ``options`` are passed to the trainer. In shared mode the server frees its memory during
        training and refuses requests.
        """
        from art.types import LocalTrainResult  # noqa: PLC0415  # pyright: ignore

        step, metrics = await self._train("rl", model, trajectory_groups, options)
        folder = self._policy(model).checkpoints.folder(step)
        return LocalTrainResult(step=step, metrics=dict(metrics), checkpoint_path=str(folder))

    async def _train_sft(
        self,
        model: Any,
        trajectories: Iterable[Any],
        config: Any,
        dev_config: Any,
        verbose: bool = False,
    ) -> AsyncIterator[dict[str, float]]:
        options = {"config": config, "dev_config": dev_config, "verbose": verbose}
        _, metrics = await self._train("sft", model, trajectories, options)
        yield dict(metrics)

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        from art.adapter_leases import pinned_inference_step  # noqa: PLC0415  # pyright: ignore

        requested_step = pinned_inference_step(model.name) if step is None else step
        return self._policy(model).inference_name(requested_step)

    async def _get_step(self, model: Any) -> int:
        return self._policy(model).checkpoints.latest()

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        policy = self._policy(model)
        for step in policy.checkpoints.steps():
            if step not in steps_to_keep and step != policy.step:
                await policy.forget(step)

    async def _prepare_backend_for_training(
        self, model: Any, config: Mapping[str, Any] | None = None
    ) -> tuple[str, str]:
        server_args: Mapping[str, Any] = (config or {}).get("server_args") or {}
        address = Address(
            host=server_args.get("host", Address().host),
            port=server_args.get("port"),
            api_key=server_args.get("api_key"),
        )
        policy = self._policy(model)
        await policy.start(address)
        return f"{policy.url}/v1", address.api_key or NO_KEY

    @asynccontextmanager
    async def exact_adapter_lease(self, model: Any, step: int) -> AsyncGenerator[None]:
        """Pin requests within the block that name no step to ``step``."""
        from art.adapter_leases import pin_inference_step  # noqa: PLC0415  # pyright: ignore

        await self._policy(model).ensure_served(step)
        async with pin_inference_step(model.name, step):
            yield

    async def _train(
        self, kind: Any, model: Any, data: Iterable[Any], options: Mapping[str, Any]
    ) -> tuple[int, Mapping[str, float]]:
        policy = self._policy(model)

        async def train(step: int, previous: Path | None, target: Path) -> Mapping[str, float]:
            job = TrainJob(
                kind=kind,
                model=model,
                data=list(data),
                step=step,
                previous=previous,
                target=target,
                devices=self._devices.training,
                options=options,
                server=policy.server,
            )
            return await self._trainer(job)

        return await policy.train(train, on_server=self._trains_server)

    def _policy(self, model: Any) -> ServedPolicy:
        folder = self._folder(model)
        if folder not in self._policies:
            if not getattr(model, "trainable", False):
                raise BackendError(f"{model.name} is not trainable: it has a server of its own.")
            self._policies[folder] = ServedPolicy(
                model.name, model.base_model, folder, self._config, self._devices
            )
        return self._policies[folder]

    def _folder(self, model: Any) -> Path:
        """Return a model's folder in ART's layout."""
        return self._path / model.project / "models" / model._storage_name()


def _check_trained(config: ServerConfig) -> None:
    """Raise ConfigError if a server of these settings cannot be trained itself."""
    if config.weight_sync_method is WeightSync.DISK:
        raise ConfigError("ServerTrainer writes adapters: weight_sync_method cannot be disk.")
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            "ServerTrainer needs a model in one process: tensor_parallel_size must be 1."
        )
