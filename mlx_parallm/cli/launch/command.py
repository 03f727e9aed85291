"""The flags of ``mlx_parallm launch``, and the start of a tool."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence

from mlx_parallm.cli.launch.tools import NO_KEY, TOOLS, Settings, Target, Tool
from mlx_parallm.cli.server_client import (
    ServerClient,
    add_server_arguments,
    first_generator,
    server_of,
)
from mlx_parallm.client.errors import ServerUnreachableError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each tool."""
    # Without this, a subcommand's --help would begin with the usage of its parent.
    kinds = parser.add_subparsers(required=True, metavar="TOOL", prog=parser.prog)
    for name, tool in TOOLS.items():
        text = f"run {tool.name} with a model of a running server"
        kind = kinds.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        kind.add_argument("--model", metavar="NAME", help="default: the first that generates")
        kind.add_argument("--print", action="store_true", help="only print its settings")
        add_server_arguments(kind)
        kind.add_argument("arguments", nargs="*", metavar="ARGS", help="behind --: for the tool")
        kind.set_defaults(tool=tool)


def run(args: argparse.Namespace) -> int:
    """Become the tool, or print its settings; return 1 if it is not installed."""
    tool: Tool = args.tool
    with server_of(args) as server:
        settings = tool.settings(find_target(server, args.model, needs_server=not args.print))
    lines = shell_lines(tool, settings, args.arguments)
    if not args.print and shutil.which(tool.program) is not None:
        command = [tool.program, *settings.arguments, *args.arguments]
        os.execvpe(tool.program, command, {**os.environ, **settings.variables})
    print("\n".join(lines))
    if args.print:
        return 0
    print(f"{tool.name} is not installed: `{tool.install}` installs it.", file=sys.stderr)
    return 1


def find_target(server: ServerClient, model: str | None, *, needs_server: bool) -> Target:
    """Return a model of the server: the wanted one, or the first that generates.

    Raises:
        ServerUnreachableError: none runs, and one is needed, or its first model.
    """
    context = None
    try:
        cards = server.models()
        model = model or first_generator(server.url, cards)
        context = next((card.get("max_model_len") for card in cards if card["id"] == model), None)
    except ServerUnreachableError:
        if needs_server or model is None:
            raise
    return Target(server.url, server.api_key or NO_KEY, model, context)


def shell_lines(tool: Tool, settings: Settings, arguments: Sequence[str]) -> list[str]:
    """Return what starts the tool from a shell."""
    exports = [f"export {name}={shlex.quote(text)}" for name, text in settings.variables.items()]
    return [*exports, shlex.join([tool.program, *settings.arguments, *arguments])]
