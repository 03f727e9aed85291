"""The loop of ``mlx_parallm chat``: questions, answers and commands."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Generator, Mapping
from os.path import exists
from typing import Any

from mlx_parallm.cli.chat.conversation import Conversation
from mlx_parallm.cli.chat.terminal import BLOCK, Terminal
from mlx_parallm.cli.server_client import (
    ServerClient,
    add_server_arguments,
    first_generator,
    generators,
    server_of,
)
from mlx_parallm.cli.started_server import running_server
from mlx_parallm.types.errors import ConfigError, ParallmError

CHAT_PATH = "/v1/chat/completions"
#: ``COMMAND``: a word behind a slash; paths have more.
COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
HELP = f"""\
/image PATH   send an image (or URL) with the next question, as a path within a question does
/model NAME   go on with another model; /model alone lists them
/system TEXT  set the system prompt; /system alone removes it
/save FILE    write the conversation: messages for .json, else a text
/clear        forget the conversation
/help         show this
/exit         leave, as Ctrl-D does
{BLOCK} begins and ends a question of several lines. Ctrl-C stops an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``mlx_parallm chat``."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model of the server, or a hub id or folder for a new one (default: the first "
        "model that generates, or the embedded one)",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="of sampling (default: the model's)"
    )
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Chat until the user leaves; return the exit status."""
    models = [] if args.model is None else [args.model]
    with server_of(args) as place, running_server(place, models) as server:
        model = args.model or first_generator(server.url, server.models())
        conversation = Conversation(model, args.system, temperature=args.temperature)
        Chat(server, conversation, Terminal()).run()
    return 0


class Chat:
    """A conversation with a server in a terminal."""

    def __init__(
        self, server: ServerClient, conversation: Conversation, terminal: Terminal
    ) -> None:
        self._server = server
        self._conversation = conversation
        self._terminal = terminal
        self._commands: Mapping[str, Callable[[str], None]] = {
            "image": self._attach,
            "model": self._choose_model,
            "system": self._set_system,
            "save": self._save,
            "clear": self._clear,
            "help": lambda _text: terminal.say(HELP),
        }

    def run(self) -> None:
        """Read questions and answer them, until the input ends or the user leaves."""
        if self._terminal.is_interactive:
            self._terminal.say(f"{self._conversation.model} at {self._server.url}; /help for help")
        while True:
            try:
                line = self._terminal.read()
            except EOFError:
                self._terminal.end()
                return
            except KeyboardInterrupt:
                self._terminal.end("\nCtrl-D leaves")
                continue
            if line in {"/exit", "/quit", "/bye"}:
                return
            with self._reported():
                self._take(line)

    @contextlib.contextmanager
    def _reported(self) -> Generator[None]:
        try:
            yield
        except ParallmError as problem:
            if not self._terminal.is_interactive:
                raise
            self._terminal.end(f"error: {problem}")

    def _take(self, line: str) -> None:
        command = COMMAND.fullmatch(line)
        if command is not None and not exists(line):
            action = self._commands.get(command[1])
            if action is None:
                raise ConfigError(f"there is no /{command[1]}; /help shows all.")
            action((command[2] or "").strip())
            return
        question = self._conversation.attach_from(line)
        if question:
            self._ask(question)
        elif self._conversation.images:
            self._say_images()

    def _ask(self, question: str) -> None:
        """Show an answer as it comes; what came before Ctrl-C or an error stays."""
        parts: list[str] = []
        body = self._conversation.ask(question)
        events = self._server.events(CHAT_PATH, body, self._show_load)
        try:
            with contextlib.closing(events):
                for event in events:
                    self._show(event, parts)
        except KeyboardInterrupt:
            self._terminal.end(" (stopped)")
        else:
            self._terminal.end()
        finally:
            self._conversation.answer("".join(parts))

    def _show_load(self, comment: str) -> None:
        """Show how far the model's load is; other comments keep the connection open."""
        if self._terminal.is_interactive and comment.startswith(f"{self._conversation.model} "):
            self._terminal.say(f"({comment})")

    def _show(self, event: Mapping[str, Any], parts: list[str]) -> None:
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            if reasoning := delta.get("reasoning"):
                self._terminal.write(reasoning, is_dim=True)
            if content := delta.get("content"):
                # Ctrl-C may come at any point: what is shown is part of the conversation.
                parts.append(content)
                self._terminal.write(content)

    def _attach(self, path: str) -> None:
        self._conversation.attach(path)
        self._say_images()

    def _say_images(self) -> None:
        count = len(self._conversation.images)
        self._terminal.say(f"{count} image{'' if count == 1 else 's'} for the next question")

    def _choose_model(self, name: str) -> None:
        if name:
            self._conversation.model = name
            return
        for model in generators(self._server.models()):
            mark = "*" if model == self._conversation.model else " "
            self._terminal.say(f"{mark} {model}")

    def _set_system(self, text: str) -> None:
        self._conversation.system = text

    def _save(self, path: str) -> None:
        if not path:
            raise ConfigError("/save needs the name of a file.")
        self._conversation.save(path)

    def _clear(self, _text: str) -> None:
        self._conversation.messages.clear()
        self._conversation.images.clear()
