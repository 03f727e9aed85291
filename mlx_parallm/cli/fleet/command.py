"""``mlx_parallm fleet status``, ``apply`` and ``drain``: servers that change together."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.cli.models.subcommands import add_subcommand, table
from mlx_parallm.cli.server_client import ServerClient, add_server_arguments, server_of
from mlx_parallm.client.errors import RequestFailedError
from mlx_parallm.types.errors import ConfigError

HEADING = ("SERVER", "CHANGE", "READY", "WEIGHTS", "ADAPTERS")
NOT_FOUND = 404


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their flags."""
    # Without this, a subcommand's --help would begin with the usage of its parent.
    kinds = parser.add_subparsers(required=True, metavar="WHAT", prog=parser.prog)
    status = add_subcommand(kinds, "status", "show the servers that change together", show)
    applying = add_subcommand(kinds, "apply", "make servers alike that changed apart", apply)
    applying.add_argument(
        "--force",
        action="store_true",
        help="let the others change without servers that do not answer now, until these are back",
    )
    draining = add_subcommand(
        kinds, "drain", "send a server no more requests; those that it has go on", drain
    )
    draining.add_argument("server", nargs="?", metavar="URL", help="default: that of --url")
    draining.add_argument("--undo", action="store_true", help="let it be sent requests again")
    for each in (status, applying, draining):
        add_server_arguments(each)


def run(args: argparse.Namespace) -> int:
    """Run a subcommand and return the exit status."""
    return args.action(args)


def show(args: argparse.Namespace) -> int:
    """Print the servers; the exit status is 1 if some are not ready."""
    with server_of(args, is_admin=True) as server:
        return _print(_asked(server, "GET", "/v1/peers"))


def apply(args: argparse.Namespace) -> int:
    """Make the fleet alike, and print its servers."""
    with server_of(args, is_admin=True) as server:
        path = f"/v1/peers/apply?force={str(args.force).lower()}"
        return _print(_asked(server, "POST", path))


def drain(args: argparse.Namespace) -> int:
    """Let ``/ready`` of a server be 503, or end that."""
    args.url = args.server or args.url
    with server_of(args, is_admin=True) as server:
        _asked(server, "POST", f"/v1/peers/drain?draining={str(not args.undo).lower()}")
        print(f"{server.url} {'may be sent requests' if args.undo else 'is not ready'}")
    return 0


def _asked(server: ServerClient, method: str, path: str) -> Any:
    try:
        return server.ask(method, path)
    except RequestFailedError as failure:
        if failure.status == NOT_FOUND:
            raise ConfigError(f"{server.url} has no peers: start it with --peers.") from failure
        raise


def _print(answer: Mapping[str, Any]) -> int:
    rows: Sequence[Mapping[str, Any]] = answer["data"]
    print(table([HEADING, *map(_row, rows)]))
    for row in rows:
        if row.get("reason"):
            print(f"{row['url']}: {row['reason']}")
    return 0 if all(row["ready"] for row in rows) else 1


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a server; ``-`` stands for what is not known."""
    return (
        row["url"] or "this server",
        "-" if row["number"] is None else str(row["number"]),
        "yes" if row["ready"] else "no",
        _labels(row.get("models")),
        _labels(row.get("adapters")),
    )


def _labels(labels: Mapping[str, str] | None) -> str:
    return ", ".join(f"{name} {label}" for name, label in (labels or {}).items()) or "-"
