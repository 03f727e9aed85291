"""One of ART's models on a server, which is started, trained and updated with each step."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from mlx_parallm.art.config import Devices, ServerConfig, WeightSync
from mlx_parallm.art.interpreter import server_python
from mlx_parallm.art.server import BackendError, CheckpointError, ManagedServer, UnservedStepError
from mlx_parallm.art.training import ServerAddress
from mlx_parallm.client import RequestFailedError
from mlx_parallm.client.transport import Transport
from mlx_parallm.machine import VISIBLE, count_cuda_devices
from mlx_parallm.serving.local_ranks import nccl_ranks, ring_ranks

#: ``EMBEDDED_MODEL``: the name of the model in the package, which is served without ``--model``.
EMBEDDED_MODEL = "mlx-parallm-demo"
#: ``Train``: a function of a step, the previous checkpoint, and an empty folder for this step.
Train = Callable[[int, Path | None, Path], Awaitable[Mapping[str, float]]]
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The server's address and API key.

    Attributes:
        port: the port; None takes a free one.
        api_key: the key of clients and of the backend itself; None: no key is needed.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    api_key: str | None = None


class ServedPolicy:
    """A model, its checkpoints, and the server that serves the latest of them."""

    def __init__(
        self,
        name: str,
        base_model: str,
        folder: Path,
        config: ServerConfig,
        devices: Devices,
    ) -> None:
        """Create the policy without starting a server.

        Args:
            name: the model's name in requests.
            base_model: hub id or folder of the model to train.
            folder: the folder for checkpoints, logs and the server's data.
            config: how it is served and updated.
            devices: the devices, resolved on this machine.
        """
        self.name = name
        self.checkpoints = Checkpoints(folder)
        self._base_model = base_model
        self._log = folder / "logs" / "mlx_parallm.log"
        self._data = folder / "data"
        self._config = config
        self._devices = devices
        self._address = Address()
        self._server: ManagedServer | None = None
        self._control: ServerControl | None = None
        self._lock = asyncio.Lock()
        self._step = 0
        self._served_name = name

    @property
    def step(self) -> int:
        """The step that requests use by default."""
        return self._step

    @property
    def url(self) -> str:
        """The server's address; raises BackendError before ``start``."""
        if self._server is None:
            raise BackendError(f"{self.name} is not served: call start first.")
        return self._server.url

    @property
    def server(self) -> ServerAddress | None:
        """Its server's address and key; None while no server runs."""
        if self._server is None:
            return None
        return ServerAddress(self._server.url, self._address.api_key)

    def inference_name(self, step: int | None = None) -> str:
        """Return the model name for requests to a step, the latest by default.

        Raises:
            UnservedStepError: ``weight_sync_method`` keeps only the latest step, not this one.
        """
        requested_step = self._step if step is None else step
        if self._keeps_steps:
            return self._name_of(requested_step)
        if requested_step != self._step:
            raise UnservedStepError(
                f"Step {requested_step} of {self.name} is not served: weight_sync_method "
                f"{self._config.weight_sync_method} keeps only the latest step, {self._step}."
            )
        return self._served_name

    async def start(self, address: Address) -> None:
        """Start the server with the latest checkpoint, after stopping a running server."""
        async with self._lock:
            await self._stop()
            self._address = address
            await self._start(self.checkpoints.latest())

    async def stop(self) -> None:
        """Stop the server."""
        async with self._lock:
            await self._stop()

    async def train(
        self, train: Train, *, on_server: bool = False
    ) -> tuple[int, Mapping[str, float]]:
        """Train one step and serve it; return the step and its metrics.

        On its own device the trainer works while requests run, and so does one that trains
        ``on_server``. On the server's device the server frees its memory before training. If
        training fails, the previous step stays served.
        """
        async with self._lock:
            step = self.checkpoints.latest() + 1
            previous = self.checkpoints.folder(step - 1)
            async with nullcontext() if on_server else self._room():
                with self.checkpoints.writing(step) as target:
                    metrics = await train(step, previous, target)
                    self._check(target)
                if self._server is not None and not self._restarts:
                    await self._update(step)
            if self._restarts:
                await self._stop()
                await self._start(step)
            return step, metrics

    async def ensure_served(self, step: int) -> None:
        """Make sure that requests can name a step.

        Raises:
            UnservedStepError: see ``inference_name``.
            CheckpointError: the step's checkpoint is gone.
        """
        async with self._lock:
            self.inference_name(step)
            if self._keeps_steps and step:
                await self._load_adapter(step)

    async def forget(self, step: int) -> None:
        """Delete a checkpoint, and its adapter on the server."""
        async with self._lock:
            if self._control is not None:
                await self._control.unload_adapter(self._name_of(step))
            self.checkpoints.delete(step)

    @property
    def _restarts(self) -> bool:
        return self._config.weight_sync_method is WeightSync.RESTART

    @property
    def _keeps_steps(self) -> bool:
        """True if several steps can be served at once, each as an adapter."""
        return self._config.weight_sync_method is WeightSync.LORA

    def _name_of(self, step: int) -> str:
        return f"{self.name}@{step}"

    def _check(self, target: Path) -> None:
        method = self._config.weight_sync_method
        if method is WeightSync.LORA and not is_adapter(target):
            raise CheckpointError("weight_sync_method lora needs checkpoints that are adapters.")
        if method is WeightSync.DISK and is_adapter(target):
            raise CheckpointError("weight_sync_method disk needs checkpoints of the whole model.")

    @asynccontextmanager
    async def _room(self) -> AsyncGenerator[None]:
        """Let the server sleep while a trainer uses its device; always wake it up afterwards."""
        if self._devices.is_split or self._server is None or self._control is None:
            yield
        elif self._restarts:
            await self._stop()
            try:
                yield
            except BaseException:
                await self._start(self._step)
                raise
        else:
            await self._control.sleep()
            try:
                yield
            finally:
                await self._control.wake_up()

    async def _start(self, step: int) -> None:
        folder = self.checkpoints.folder(step)
        if step and folder is None:
            raise CheckpointError(f"There is no checkpoint of step {step} of {self.name}.")
        model_folder = folder if folder is not None and not is_adapter(folder) else None
        python = await asyncio.to_thread(server_python, self._config.python, os.environ, Path.cwd())
        address = self._address
        key = address.api_key
        secrets = {"MLX_PARALLM_API_KEY": key} if key else {}
        self._server = ManagedServer(
            self._flags(model_folder),
            host=address.host,
            port=address.port or 0,
            log=self._log,
            python=python,
            environment=secrets | self._visible_devices(),
            ranks=self._ranks(),
        )
        await self._server.wait_until_ready(self._config.start_timeout_s(os.environ))
        self._control = ServerControl(self._server.url, key)
        self._served_name = self.name
        if folder is not None and model_folder is None:
            await self._load_adapter(step)
            self._served_name = self._name_of(step)
        self._step = step

    def _flags(self, model_folder: Path | None) -> list[str]:
        # Step 0, before any training, is the base model.
        names = [self.name, self._name_of(0)] if self._keeps_steps else [self.name]
        model = model_folder or self._base_model
        model_flags = [] if model == EMBEDDED_MODEL else ["--model", str(model)]
        return [
            *model_flags,
            *("--served-model-name", *names),
            *("--allowed-adapter-roots", str(self.checkpoints.root)),
            # A data folder serves one server at a time, and the default one is the user's.
            *("--data-dir", str(self._data)),
            *self._config.to_flags(),
        ]

    def _visible_devices(self) -> dict[str, str]:
        """Return the variables that hide other devices from the server; none on a Mac."""
        if not self._devices.is_split:
            return {}
        return {VISIBLE: ",".join(map(str, self._devices.inference))}

    def _ranks(self) -> list[dict[str, str]]:
        """Return the variables of each process that computes the model; one without any."""
        size = self._config.tensor_parallel_size
        if size == 1:
            return [{}]
        if count_cuda_devices():
            return nccl_ranks([str(index) for index in self._devices.inference])
        self._log.parent.mkdir(parents=True, exist_ok=True)
        return ring_ranks(size, self._log.parent)

    async def _stop(self) -> None:
        if self._control is not None:
            await self._control.close()
        if self._server is not None:
            await self._server.stop()
        self._server = self._control = None

    async def _update(self, step: int) -> None:
        control = self._running()
        folder = self.checkpoints.folder(step)
        if self._keeps_steps:
            await self._load_adapter(step)
        elif folder is not None:
            await control.load_weights(folder, str(step))
        if self._config.flush_cache_on_sync:
            await control.reset_prefix_cache()
        self._step = step

    async def _load_adapter(self, step: int) -> None:
        folder = self.checkpoints.folder(step)
        if folder is None:
            raise CheckpointError(f"There is no checkpoint of step {step} of {self.name}.")
        await self._running().load_adapter(self._name_of(step), folder, str(step))

    def _running(self) -> ServerControl:
        if self._control is None:
            raise BackendError(f"{self.name} is not served: call start first.")
        return self._control


class ServerControl:
    """The control routes of one server."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        # Updates have no timeout, because the disk decides how long they take.
        self._transport = Transport(base_url, api_key, timeout_s=None)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def load_adapter(self, name: str, folder: Path, version: str) -> None:
        """Serve an adapter under a name, replacing an adapter of that name."""
        body = {"lora_name": name, "lora_path": str(folder), "version": version}
        await self._transport.ask("POST", "/update_weights_from_lora", json=body)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; a missing one is no error."""
        try:
            await self._transport.ask("POST", "/unload_lora_adapter", json={"lora_name": name})
        except RequestFailedError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    async def load_weights(self, folder: Path, version: str) -> None:
        """Replace the model's weights between two steps; running requests continue with them."""
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": False}
        await self._transport.ask("POST", "/update_weights_from_disk", json=body)

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        await self._transport.ask("POST", "/reset_prefix_cache")

    async def sleep(self) -> None:
        """Wait for running requests, then free memory and refuse new requests."""
        await self._transport.ask("POST", "/sleep", params={"level": 1, "mode": "wait"})

    async def wake_up(self) -> None:
        """Allocate memory again and resume serving."""
        await self._transport.ask("POST", "/wake_up")


class Checkpoints:
    """The completed steps of one model."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is the model's folder, ``.art/PROJECT/models/NAME``."""
        self.root = (folder / "checkpoints").resolve()
        self.root.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        """Return the steps in ascending order."""
        names = [folder.name for folder in self.root.iterdir() if folder.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())

    def latest(self) -> int:
        """Return the last step; 0 before the first."""
        return max(self.steps(), default=0)

    def folder(self, step: int) -> Path | None:
        """Return a step's folder; None if it was not trained, or was deleted."""
        folder = self._path(step)
        return folder if folder.is_dir() else None

    @contextmanager
    def writing(self, step: int) -> Generator[Path]:
        """Yield an empty folder that becomes the step's if the block ends without an error.

        Raises:
            CheckpointError: the block wrote nothing.
        """
        begun = self.root / f".{step:04d}.begun"
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir()
        try:
            yield begun
            if not any(begun.iterdir()):
                raise CheckpointError(f"Training wrote nothing for step {step}.")
            begun.rename(self._path(step))
        finally:
            shutil.rmtree(begun, ignore_errors=True)

    def delete(self, step: int) -> None:
        """Remove a step's folder."""
        shutil.rmtree(self._path(step))

    def _path(self, step: int) -> Path:
        return self.root / f"{step:04d}"


def is_adapter(folder: Path) -> bool:
    """True if a checkpoint is an adapter of PEFT or mlx-lm; if not, it is a whole model."""
    return (folder / ADAPTER_CONFIG).is_file()
