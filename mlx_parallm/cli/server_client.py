"""A blocking client of a running server, for commands."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httpx2

from mlx_parallm.client.errors import (
    ServerUnreachableError,
    UnexpectedAnswerError,
    failure_in,
    failure_of,
)
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.json_values import is_object

DEFAULT_URL = "http://127.0.0.1:8000"
#: ``KEY_VARIABLES``: variables with keys, in the order of preference.
KEY_VARIABLES = ("MLX_PARALLM_API_KEY",)
ADMIN_KEY_VARIABLES = ("MLX_PARALLM_ADMIN_API_KEY", *KEY_VARIABLES)
CONNECT_TIMEOUT_S = 10.0
_DATA = "data:"
_DONE = "[DONE]"


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a running server."""
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        help="of the server, with or without /v1 (default: %(default)s)",
    )
    parser.add_argument("--api-key", help=f"default: the first of {KEY_VARIABLES[0]}")


def server_of(
    args: argparse.Namespace,
    *,
    is_admin: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> ServerClient:
    """Return a client of the server that flags or variables name; ``is_admin``: with its key."""
    variables = ADMIN_KEY_VARIABLES if is_admin else KEY_VARIABLES
    keys = (environment.get(name, "").partition(",")[0].strip() for name in variables)
    return ServerClient(args.url, args.api_key or next(filter(None, keys), None))


class ServerClient:
    """A server's address and the key to it.

    Attributes:
        url: the server's address, without ``/v1``.
        api_key: the key, or None.
        is_here: True if the server runs on this machine.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        host = urlsplit(self.url).hostname
        if host is None or not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url: {url!r} is not the address of a server.")
        self.is_here = is_loopback(host)
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http = httpx2.Client(
            base_url=self.url,
            headers=headers,
            # A load or a long prompt takes minutes.
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
            # A proxy of the environment cannot reach this machine's loopback interface.
            trust_env=not self.is_here,
        )

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._http.close()

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of an answer.

        Raises:
            RequestFailedError: the server refused.
            ServerUnreachableError: there was no answer.
            UnexpectedAnswerError: the answer is not JSON.
        """
        with self._reported():
            response = self._http.request(method, path, json=body)
        if response.is_error:
            raise failure_of(response.status_code, response.content)
        return self._decoded(path, response.content)

    def models(self) -> list[dict[str, Any]]:
        """Return the descriptions of the models that the server has, or could load.

        Raises:
            UnexpectedAnswerError: the server is not one that lists models.
        """
        answer = self.ask("GET", "/v1/models")
        cards = answer.get("data") if is_object(answer) else None
        if not isinstance(cards, list):
            raise UnexpectedAnswerError(f"{self.url} lists no models.")
        return cast("list[dict[str, Any]]", cards)

    def is_running(self) -> bool:
        """True if a server answers at the address, whatever it says."""
        try:
            with self._reported():
                self._http.get("/health")
        except ServerUnreachableError:
            return False
        return True

    def events(
        self, path: str, body: Mapping[str, Any], on_comment: Callable[[str], object] = len
    ) -> Generator[dict[str, Any]]:
        """Yield the JSON of each server-sent event of an answer; closing it ends the request.

        Args:
            path: of the route.
            body: of the request.
            on_comment: called with each comment, such as how far the model's load is.

        Raises:
            RequestFailedError: the server refused, or the stream has an error.
            ServerUnreachableError: there was no answer, or it broke off.
        """
        with self._reported(), self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                raise failure_of(response.status_code, response.read())
            for line in response.iter_lines():
                data = line.removeprefix(_DATA).strip() if line.startswith(_DATA) else ""
                if line.startswith(":"):
                    on_comment(line.removeprefix(":").strip())
                if data == _DONE:
                    return
                if data:
                    event = self._decoded(path, data)
                    if failure := failure_in(0, event):
                        raise failure
                    yield event
        raise ServerUnreachableError(f"{self.url}: the answer broke off.")

    @staticmethod
    def _decoded(path: str, content: bytes | str) -> Any:
        try:
            return json.loads(content)
        except ValueError:
            raise UnexpectedAnswerError(f"The answer of {path} is not JSON.") from None

    @contextlib.contextmanager
    def _reported(self) -> Generator[None]:
        try:
            yield
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachableError(f"No server answers at {self.url}: {reason}") from error


def generators(cards: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of models that generate; those that were never loaded may."""
    return [card["id"] for card in cards if "generate" in (card.get("tasks") or ("generate",))]


def first_generator(url: str, cards: Iterable[Mapping[str, Any]]) -> str:
    """Return the first model of a server that generates.

    Raises:
        ConfigError: there is none.
    """
    for name in generators(cards):
        return name
    raise ConfigError(f"No model of {url} generates.")


def is_loopback(host: str) -> bool:
    """True if a host is this machine's loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
