"""A conversation: its messages, its requests, and its text in files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import expanduser, isfile
from pathlib import Path
from typing import Any

from mlx_parallm.media.image_file import image_url, is_url
from mlx_parallm.types.errors import ConfigError

Message = dict[str, Any]
#: ``IMAGES``: endings of files that are taken for images in a line.
IMAGES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
#: ``WORD``: words as terminals write the paths of dropped files: quoted, or with ``\`` escapes.
WORD = re.compile(r"'[^']+'|\"[^\"]+\"|(?:\\.|\S)+")


@dataclass(slots=True)
class Conversation:
    """Turns of the user and the model, and what is sent with the next question.

    Attributes:
        model: the model that answers.
        system: the system prompt; empty for none.
        messages: turns of the user and the model, in OpenAI's form.
        images: URLs of images of the next question.
        temperature: of sampling; None for the model's own.
    """

    model: str
    system: str = ""
    messages: list[Message] = field(default_factory=list[Message])
    images: list[str] = field(default_factory=list[str])
    temperature: float | None = None

    def ask(self, text: str) -> dict[str, Any]:
        """Add a question with the images, and return the body of its request."""
        parts: list[Message] = [
            {"type": "image_url", "image_url": {"url": url}} for url in self.images
        ]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        self.messages.append({"role": "user", "content": content})
        self.images = []
        body = {"model": self.model, "messages": self.turns(), "stream": True}
        return body if self.temperature is None else body | {"temperature": self.temperature}

    def answer(self, text: str) -> None:
        """Add an answer; without any, take its question back."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def turns(self) -> list[Message]:
        """Return the messages with the system prompt before them."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def attach(self, path: str) -> None:
        """Add an image, by its path or URL, to the next question.

        Raises:
            ConfigError: the file is not there, or cannot be read.
        """
        try:
            self.images.append(image_url(path if is_url(path) else Path(expanduser(path))))
        except (OSError, ValueError) as problem:
            raise ConfigError(f"{path} is not an image that can be read: {problem}") from None

    def attach_from(self, line: str) -> str:
        """Add the images whose paths are in a line; return the line without them."""
        for word in WORD.findall(line):
            path = unescaped(word)
            # Unlike the methods of Path, these take what a line holds, whatever its length.
            if Path(path).suffix.lower() in IMAGES and isfile(expanduser(path)):
                self.attach(path)
                line = line.replace(word, "", 1)
        return line.strip()

    def save(self, path: str) -> None:
        """Write the conversation: the messages for ``.json``, else a text.

        Raises:
            ConfigError: the file exists, or cannot be written.
        """
        file = Path(expanduser(path))
        is_json = file.suffix == ".json"
        content = self._to_json() if is_json else transcript(self.turns())
        try:
            with file.open("x", encoding="utf-8") as output:
                output.write(content)
        except OSError as problem:
            raise ConfigError(f"{file} cannot be written: {problem.strerror}") from None

    def _to_json(self) -> str:
        content = {"model": self.model, "messages": self.turns()}
        return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def unescaped(word: str) -> str:
    """Return a path as the file system knows it."""
    if word[0] in "'\"":
        return word[1:-1]
    return re.sub(r"\\(.)", r"\1", word)


def transcript(messages: Sequence[Message]) -> str:
    """Return messages as Markdown, with a heading for each."""
    return "\n".join(f"## {each['role']}\n\n{_text(each['content'])}\n" for each in messages)


def _text(content: str | list[Message]) -> str:
    if isinstance(content, str):
        return content
    texts = (part.get("text", "(an image)") for part in content)
    return "\n".join(texts)
