"""Lines of a chat: images by their paths, commands, and what is kept of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_parallm.cli.chat.conversation import Conversation, transcript
from mlx_parallm.types.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"
URL = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "two words.png", "it's.PNG", "notes.txt"):
        (tmp_path / name).write_bytes(PNG)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "text", "num_images"),
    [
        ("{}/a.png What is it?", "What is it?", 1),
        ("What is {}/a.png", "What is", 1),
        (r"{}/two\ words.png and {}/a.png: alike?", "and {}/a.png: alike?", 1),
        (r"{}/two\ words.png {}/a.png alike?", "alike?", 2),
        ("'{}/two words.png' what?", "what?", 1),
        ('"{}/two words.png" what?', "what?", 1),
        (r"{}/it\'s.PNG what?", "what?", 1),
        ("{}/notes.txt stays", "{}/notes.txt stays", 0),
        ("{}/none.png stays", "{}/none.png stays", 0),
        ("it's a.png? don't", "it's a.png? don't", 0),
        ("~nobody-of-this-name/a.png", "~nobody-of-this-name/a.png", 0),
        ("x" * 5000 + ".png", "x" * 5000 + ".png", 0),
        ("a\0.png", "a\0.png", 0),
        ("2 + 2 \\", "2 + 2 \\", 0),
    ],
)
def test_images_whose_paths_are_in_a_line(
    folder: Path, line: str, text: str, num_images: int
) -> None:
    conversation = Conversation("m")
    place = str(folder)
    assert conversation.attach_from(line.replace("{}", place)) == text.replace("{}", place)
    assert conversation.images == [URL] * num_images


def test_images_go_with_one_question(folder: Path) -> None:
    conversation = Conversation("m", "Be brief.")
    conversation.attach(str(folder / "a.png"))
    conversation.attach("https://host/b.png")
    body = conversation.ask("Alike?")
    system, question = body["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert [part.get("image_url", part.get("text")) for part in question["content"]] == [
        {"url": URL},
        {"url": "https://host/b.png"},
        "Alike?",
    ]
    conversation.answer("No.")
    assert conversation.ask("Sure?")["messages"][-1] == {"role": "user", "content": "Sure?"}
    # A question without an answer is taken back, or two turns of the user would follow each other.
    conversation.answer("")
    assert [each["role"] for each in conversation.messages] == ["user", "assistant"]
    assert transcript(conversation.turns()) == (
        "## system\n\nBe brief.\n\n## user\n\n(an image)\n(an image)\nAlike?\n\n"
        "## assistant\n\nNo.\n"
    )


def test_a_temperature_is_sent_if_it_is_set() -> None:
    assert "temperature" not in Conversation("m").ask("Hello")
    assert Conversation("m", temperature=0.0).ask("Hello")["temperature"] == 0.0


@pytest.mark.parametrize("path", ["", "none.png", "~nobody-of-this-name/a.png", "x" * 5000, "\0"])
def test_an_image_that_cannot_be_read(path: str) -> None:
    with pytest.raises(ConfigError, match="is not an image that can be read"):
        Conversation("m").attach(path)


@pytest.mark.parametrize("path", ["/none/x", "~nobody-of-this-name/x/y", "x" * 5000, "."])
def test_a_file_that_cannot_be_written(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        Conversation("m").save(path)
