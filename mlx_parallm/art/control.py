"""A client of the server's control routes: adapters, weights and sleep."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

from mlx_parallm.client import RequestFailedError
from mlx_parallm.client.transport import Transport


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
