"""What the backend asks of its server: adapters, weights, sleep."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

from mlx_parallm.client import RequestFailedError
from mlx_parallm.client.transport import Transport


class ServerControl:
    """The control routes of one server."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        # An update takes as long as the disk does.
        self._transport = Transport(base_url, api_key, timeout_s=None)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def load_adapter(self, name: str, folder: Path, version: str) -> None:
        """Serve an adapter under a name, in place of one of this name."""
        body = {"lora_name": name, "lora_path": str(folder), "version": version}
        await self._transport.ask("POST", "/update_weights_from_lora", json=body)

    async def unload_adapter(self, name: str) -> None:
        """Serve it no more; one that is not there is no error."""
        try:
            await self._transport.ask("POST", "/unload_lora_adapter", json={"lora_name": name})
        except RequestFailedError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    async def load_weights(self, folder: Path, version: str) -> None:
        """Replace the model's weights between two steps; requests that run go on with them."""
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": False}
        await self._transport.ask("POST", "/update_weights_from_disk", json=body)

    async def reset_prefix_cache(self) -> None:
        """Forget what was computed before."""
        await self._transport.ask("POST", "/reset_prefix_cache")

    async def sleep(self) -> None:
        """Let requests end, then give back memory and refuse new ones."""
        await self._transport.ask("POST", "/sleep", params={"level": 1, "mode": "wait"})

    async def wake_up(self) -> None:
        """Serve again."""
        await self._transport.ask("POST", "/wake_up")
