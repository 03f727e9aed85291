"""The two helpers that TRL takes from vLLM."""

import socket


def get_ip() -> str:
    """Return this machine's address for the other ranks."""
    return "127.0.0.1"


def get_open_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
