"""``mlx_parallm models ps``, ``load`` and ``unload``: the models of a running server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.cli.models.subcommands import Subcommands, add_subcommand, table
from mlx_parallm.cli.server_client import add_server_arguments, server_of
from mlx_parallm.units import readable_bytes

HEADING = ("NAME", "STATUS", "MEMORY", "SIZE", "PINNED", "TTL", "EXPIRES")
#: ``AVAILABLE``: the status of models that were never loaded.
AVAILABLE = "available"
#: ``LOAD_FIELDS``: flags of ``load`` that are fields of ``POST /v1/models/load``.
LOAD_FIELDS = ("name", "task", "dtype", "revision", "max_model_len", "pin", "ttl")


def add_subcommands(kinds: Subcommands) -> None:
    """Add ``ps``, ``load`` and ``unload``."""
    ps = add_subcommand(kinds, "ps", "show the models of a running server", show)
    ps.add_argument("--all", action="store_true", help="also those that were never loaded")
    loading = add_subcommand(kinds, "load", "load a model into a running server", load)
    loading.add_argument("model", metavar="NAME", help="a served name, a folder or a hub id")
    loading.add_argument("--name", nargs="+", help="names for requests")
    loading.add_argument("--task", help="its task; by default what its files say")
    loading.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"))
    loading.add_argument("--revision", help="branch, tag or commit on the hub")
    loading.add_argument("--max-model-len", type=int, metavar="N", help="longest input in tokens")
    loading.add_argument("--pin", action="store_true", default=None, help="never evict it")
    loading.add_argument(
        "--ttl", metavar="TIME", help="how long it stays without use: seconds, 5m, or -1 for ever"
    )
    unloading = add_subcommand(kinds, "unload", "unload a model of a running server", unload)
    unloading.add_argument("model", metavar="NAME", help="one of its names")
    for parser in (ps, loading, unloading):
        add_server_arguments(parser)


def show(args: argparse.Namespace) -> int:
    """Print the models of the server as a table."""
    with server_of(args) as server:
        cards = server.models()
    shown = [card for card in cards if args.all or card.get("status") != AVAILABLE]
    print(table([HEADING, *map(_row, shown)]))
    return 0


def load(args: argparse.Namespace) -> int:
    """Load a model, and print its row once it is loaded."""
    values = {field: getattr(args, field) for field in LOAD_FIELDS}
    body = {"model": args.model} | {name: value for name, value in values.items() if value}
    with server_of(args, is_admin=True) as server:
        card = server.ask("POST", "/v1/models/load", body)
    print(table([HEADING, _row(card)]))
    return 0


def unload(args: argparse.Namespace) -> int:
    """Unload a model."""
    with server_of(args, is_admin=True) as server:
        answer = server.ask("POST", "/v1/models/unload", {"model": args.model})
    print(f"unloaded {answer['id']}")
    return 0


def _row(card: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a model's description; ``-`` stands for what a server does not say."""
    status, progress = str(card.get("status", "loaded")), card.get("progress")
    if status == "loading" and isinstance(progress, int | float):
        status = f"loading {progress:.0%}"
    memory: Mapping[str, int] = card.get("memory") or {}
    return (
        str(card["id"]),
        status,
        readable_bytes(sum(memory.values())) if memory else "-",
        _or_dash(card.get("size_bytes"), readable_bytes),
        _or_dash(card.get("pinned"), _yes_or_no),
        _or_dash(card.get("ttl"), _seconds),
        _or_dash(card.get("expires_in_s"), _seconds),
    )


def _or_dash(value: Any, text_of: Callable[[Any], str]) -> str:
    return "-" if value is None else text_of(value)


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def _seconds(count: float) -> str:
    return f"{count:.0f} s"
