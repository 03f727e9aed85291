"""Addresses of engines on other machines, and the key that both ends know."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.types.errors import ConfigError

# LEAST_KEY_BYTES: who hears a handshake can try short keys.
LEAST_KEY_BYTES, MOST_KEY_BYTES = 16, 4096
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    @property
    def pair(self) -> tuple[str, int]:
        """Return it as sockets take it."""
        return self.host, self.port

    @property
    def is_loopback(self) -> bool:
        """True if only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        """Return ``HOST:PORT``, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str, flag: str) -> Address:
    """Return the address of ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        ConfigError: it is none.
    """
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if is_bracketed else host
    is_port = port.isascii() and port.isdigit() and int(port[:6]) <= MAX_PORT
    if not bare or not is_port or is_bracketed != (":" in bare) or any(map(str.isspace, text)):
        raise ConfigError(f"{flag} must be HOST:PORT, or [IPV6]:PORT, not {text!r}.")
    return Address(bare, int(port))


def read_key(path: Path | None) -> bytes:
    """Return the bytes of a key file without white space around them; none without a file.

    Raises:
        ConfigError: it cannot be read, or the key is too short or too long.
    """
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            key = file.read(MOST_KEY_BYTES + 1)
    except OSError as problem:
        raise ConfigError(f"--peer-key-file: {path}: {problem.strerror}.") from None
    if len(key) > MOST_KEY_BYTES or len(key.strip()) < LEAST_KEY_BYTES:
        raise ConfigError(
            f"--peer-key-file: {path} must have {LEAST_KEY_BYTES} to {MOST_KEY_BYTES} bytes, such "
            "as those of `openssl rand -hex 32`."
        )
    return key.strip()


def check_reach(address: Address, key_file: Path | None, flag: str) -> None:
    """Raise ConfigError if an address that other machines reach is to be used without a key."""
    if key_file is None and not address.is_loopback:
        raise ConfigError(
            f"{flag} {address} needs --peer-key-file: without a key, only this machine's loopback "
            "addresses can be used, such as 127.0.0.1."
        )
