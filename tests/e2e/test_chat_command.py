"""``mlx_parallm chat`` in a pseudo-terminal, with real servers and one that never ends."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from mlx_parallm.peers import child_process
from tests.processes import are_gone
from tests.pseudo_terminal import CTRL_C, CTRL_D, PseudoTerminal
from tests.server_process import POOL, ServerProcess

PROMPT, MORE = ">>> ", "... "


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", "mlx-parallm-demo", "demo:see", "demo:embed")
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def draw_disc(path: Path) -> Path:
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).ellipse((4, 4, 24, 24), fill="red")
    image.save(path)
    return path


def chat(url: str, *arguments: str) -> PseudoTerminal:
    # What is sampled may be wrong.
    greedy = ["--temperature", "0"]
    return PseudoTerminal(["mlx_parallm", "chat", "--url", url, *greedy, *arguments])


def test_a_conversation(server: ServerProcess, tmp_path: Path) -> None:
    saved, text = tmp_path / "chat.json", tmp_path / "chat.md"
    image = draw_disc(tmp_path / "a disc.png")
    with chat(server.url) as terminal:
        assert "mlx-parallm-demo" in terminal.wait_for(PROMPT)
        terminal.type("What is 17 + 25?\n")
        assert "17 + 25 = 42" in terminal.wait_for(PROMPT)
        terminal.type('"""What is\n17 + 26?"""\n')
        terminal.wait_for(MORE)
        terminal.wait_for(PROMPT)
        terminal.type(f"/save {saved}\n/save {text}\n/save {text}\n")
        assert "File exists" in terminal.wait_for("File exists")
        terminal.type("/clear\n/model\n")
        terminal.wait_for("  demo:see")
        terminal.wait_for(PROMPT)
        terminal.type("/model demo:see\n")
        # Keys that come before a prompt are shown twice.
        terminal.wait_for(PROMPT)
        # Terminals write the path of a dropped file so.
        path = str(image).replace(" ", "\\ ")
        terminal.type(f"{path} What colour is it?\n")
        terminal.wait_for("it?")
        assert "red" in terminal.wait_for(PROMPT)
        terminal.type(f"/clear\n/image {image}\n")
        terminal.wait_for("1 image for the next question")
        terminal.wait_for(PROMPT)
        terminal.type("What shape is it?\n")
        terminal.wait_for("it?")
        assert "circle" in terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait_for_end() == 0
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[2]["content"] == "What is\n17 + 26?"
    assert text.read_text().startswith("## user\n\nWhat is 17 + 25?\n\n## assistant\n")


@pytest.mark.slow
def test_mistakes_end_nothing(server: ServerProcess, tmp_path: Path) -> None:
    with chat(server.url, "mlx-parallm-demo", "--system", "You are a calculator.") as terminal:
        terminal.wait_for(PROMPT)
        for line, complaint in (
            ("/nope", "there is no /nope"),
            # Longer than the name of a file may be.
            (f"/system {'Be brief. ' * 100}\n/system\n/nope", "there is no /nope"),
            ("/image", "is not an image"),
            (f"/image {tmp_path / 'none.png'}", "is not an image that can be read"),
            ("/save", "needs the name"),
            (f"/save {tmp_path}/no/file", "cannot be written"),
            ("/model none\nHello", "`none` does not exist"),
            ("/model demo:embed\nHello", "error: "),
        ):
            terminal.type(f"{line}\n")
            terminal.wait_for(complaint)
        terminal.type("/model mlx-parallm-demo\n/help\n")
        terminal.wait_for("Ctrl-C stops an answer.")
        terminal.type("What is 17 + 25?\n")
        terminal.wait_for("= 42")
        terminal.type("/exit\n")
        assert terminal.wait_for_end() == 0


def test_without_a_terminal_it_answers_lines(server: ServerProcess) -> None:
    done = child_process.run(
        ["mlx_parallm", "chat", "--url", server.url, "--temperature", "0"],
        data="What is 17 + 25?\n",
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    # Neither the prompt, nor the reasoning, nor anything for a terminal.
    assert done.stdout.strip() == "17 + 25 = 42"


@pytest.mark.slow
def test_without_a_terminal_an_error_ends_it(server: ServerProcess) -> None:
    done = child_process.run(
        ["mlx_parallm", "chat", "none", "--url", server.url],
        data="Hello\nAnd again\n",
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mlx_parallm chat: The model `none` does not exist.")
    assert done.stderr.count("\n") == 1


@dataclass
class Endless:
    """A server whose answers do not end; ``bodies`` are those of its requests."""

    bodies: list[Any] = field(default_factory=list)
    left: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@pytest.fixture
def endless() -> Iterator[tuple[Endless, str]]:
    state = Endless()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps({"data": [{"id": "talker", "tasks": ["generate"]}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            state.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            event = {"choices": [{"delta": {"content": "blah \x1b]0;title\x07"}}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            # The client's end of the connection closes once the answer is stopped.
            self.connection.recv(1)
            state.left.release()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield state, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(endless: tuple[Endless, str]) -> None:
    state, url = endless
    with chat(url) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("Talk\n")
        # What the model writes does not control the terminal.
        assert "\x1b]0;" not in terminal.wait_for("blah ]0;title")
        terminal.type(CTRL_C)
        terminal.wait_for("(stopped)")
        state.left.acquire()
        terminal.wait_for(PROMPT)
        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.wait_until_asleep()
        terminal.type(CTRL_C)
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for(PROMPT)
        terminal.type("Again\n")
        terminal.wait_for("blah")
        terminal.type(CTRL_C)
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait_for_end() == 0
    assert [message["content"][:5] for message in state.bodies[1]["messages"]] == [
        "Talk",
        "blah ",
        "Again",
    ]


def children(process: int) -> set[int]:
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    rows = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    return {pid for pid, parent in rows if parent == process}


@pytest.mark.slow
@pytest.mark.parametrize("end", ["ctrl-d", "kill"])
def test_a_server_that_it_starts_ends_with_it(end: str) -> None:
    terminal = PseudoTerminal(
        ["mlx_parallm", "chat", "mlx-parallm-demo", "--url", "http://127.0.0.1:9"],
        {**os.environ, **POOL},
    )
    with terminal:
        terminal.wait_for("no server runs: starting one")
        terminal.wait_for(PROMPT)
        servers = children(terminal.process.pid)
        assert servers
        terminal.type("What is 17 + 25?\n")
        terminal.wait_for("25?")
        terminal.wait_for(PROMPT)
        terminal.wait_until_asleep()
        # It is not the server that Ctrl-C interrupts.
        terminal.type(CTRL_C)
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for(PROMPT)
        terminal.type("What is 17 + 26?\n")
        terminal.wait_for("26?")
        terminal.wait_for(PROMPT)
        if end == "kill":
            terminal.process.kill()
        else:
            terminal.type(CTRL_D)
        assert (terminal.wait_for_end() == 0) is (end == "ctrl-d")
    while not are_gone(servers):
        pass


@pytest.mark.slow
def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    done = child_process.run(
        ["mlx_parallm", "chat", str(tmp_path), "--url", "http://127.0.0.1:9"],
        data="",
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 1
    assert "the server ended; the end of its log:" in done.stderr
    assert str(tmp_path) in done.stderr
