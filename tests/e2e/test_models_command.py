"""``mlx_parallm models``: ``ps``, ``load`` and ``unload`` against a server, and folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_parallm.cli.main import main
from mlx_parallm.cli.server_client import ADMIN_KEY_VARIABLES, KEY_VARIABLES, ServerClient
from tests.embedder_folder import write_embedder
from tests.pseudo_terminal import CTRL_D, PseudoTerminal
from tests.server_process import ROOT, ServerProcess

Output = pytest.CaptureFixture[str]
HEADING = ["NAME", "STATUS", "MEMORY", "SIZE", "PINNED", "TTL", "EXPIRES"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_embedder(root / "org" / "one")
    shutil.copytree(ROOT / "mlx_parallm" / "demo_models" / "chat", root / "org" / "talker")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    flags = ["--api-key", "key", "--admin-api-key", "admin", "--max-model-len", "256"]
    process = ServerProcess("--model", "mlx-parallm-demo", "--model-dir", str(root), *flags)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLES[0], "key,other")
    monkeypatch.setenv(ADMIN_KEY_VARIABLES[0], "admin")


def models(*arguments: str) -> int:
    return main(["models", *arguments])


def rows(output: Output) -> dict[str, list[str]]:
    """Return the cells of a table by name; cells have at most one space between words."""
    heading, *lines = output.readouterr().out.splitlines()
    assert heading.split() == HEADING
    return {line.split()[0]: line.split() for line in lines}


def test_a_model_is_loaded_shown_and_unloaded(server: ServerProcess, capsys: Output) -> None:
    url = ["--url", f"{server.url}/v1"]
    assert models("ps", *url) == 0
    assert rows(capsys).keys() == {"mlx-parallm-demo"}
    assert models("ps", "--all", *url) == 0
    shown = rows(capsys)
    assert shown.keys() == {"mlx-parallm-demo", "org/one", "org/talker"}
    assert shown["org/talker"][1] == "available"
    assert models("load", "org/talker", "--pin", "--ttl", "5m", *url) == 0
    assert rows(capsys)["org/talker"][1] == "loaded"
    assert models("ps", *url) == 0
    row = rows(capsys)["org/talker"]
    assert "yes" in row
    assert "300 s" in " ".join(row)
    assert models("unload", "org/talker", *url) == 0
    assert capsys.readouterr().out == "unloaded org/talker\n"
    assert models("ps", *url) == 0
    assert rows(capsys).keys() == {"mlx-parallm-demo"}


def test_chat_shows_that_its_model_is_loaded(server: ServerProcess, capsys: Output) -> None:
    command = ["mlx_parallm", "chat", "org/talker", "--temperature", "0", "--url", server.url]
    with PseudoTerminal(command) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("What is 17 + 25?\n")
        terminal.wait_for("(org/talker was loaded in ")
        terminal.wait_for("17 + 25 = 42")
        terminal.wait_for(">>> ")
        terminal.type(CTRL_D)
        assert terminal.wait_for_end() == 0
    assert models("unload", "org/talker", "--url", server.url) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ps", "--api-key", "wrong"], "API key"),
        (["load", "org/one", "--api-key", "key"], "admin"),
        (["load", "org/none"], "org/none"),
        (["load", "org/one", "--task", "dance"], "task"),
        (["unload", "none"], "`none` does not exist"),
    ],
)
def test_what_the_server_refuses_is_one_sentence(
    server: ServerProcess, capsys: Output, arguments: list[str], complaint: str
) -> None:
    assert models(*arguments, "--url", server.url) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert complaint in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("command", [["ps"], ["load", "x"], ["unload", "x"]])
def test_no_server_is_one_sentence(capsys: Output, command: list[str]) -> None:
    assert models(*command, "--url", "http://127.0.0.1:9") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("mlx_parallm models: No server answers at http://127.0.0.1:9")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_a_url_that_is_none_is_refused(capsys: Output, url: str) -> None:
    assert models("ps", "--url", url) == 2
    assert "--url" in capsys.readouterr().err


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with ServerClient(server.url, "key") as client:
        assert client.is_running()


def test_folders_are_listed(
    root: Path, capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_embedder(tmp_path / "deep" / "er" / "than" / "this")
    write_embedder(tmp_path / "plain")
    (tmp_path / "plain" / "loop").symlink_to(tmp_path)
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert models("list", "--model-dir", str(root), str(tmp_path)) == 0
    named = capsys.readouterr().out
    monkeypatch.setenv("MLX_PARALLM_MODEL_DIR", f"{root}, {tmp_path}")
    assert models("list") == 0
    shown = capsys.readouterr().out
    assert shown == named
    lines = [line.split() for line in shown.splitlines()]
    listed = {line[0]: line[-1] for line in lines if line[-1] in (str(root), str(tmp_path))}
    assert listed == {
        "org/one": str(root),
        "org/talker": str(root),
        "plain": str(tmp_path),
        "file.gguf": str(tmp_path),
    }
    assert models("list", "--model-dir", str(tmp_path / "none")) == 2
