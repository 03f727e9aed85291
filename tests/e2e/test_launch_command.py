"""``mlx_parallm launch``: the settings that tools get, and what they reach with them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from mlx_parallm.cli.launch.tools import TOOLS
from mlx_parallm.cli.main import main
from mlx_parallm.peers import child_process
from tests.server_process import ServerProcess

Output = pytest.CaptureFixture[str]
MODEL = "mlx-parallm-demo"
KEY = "a key's text"
RECORDER = f"""#!{sys.executable}
import json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open(os.environ["RECORD"], "w"))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", "demo:embed", MODEL, "--api-key", KEY)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PARALLM_API_KEY", KEY)


def printed(output: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the command that shell lines stand for."""
    variables: dict[str, str] = {}
    command: list[str] = []
    for line in output.splitlines():
        words = shlex.split(line)
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            variables[name] = value
        else:
            command = words
    return variables, command


def toml_of(command: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of Codex that its arguments are."""
    lines = [text for flag, text in pairwise(command) if flag == "-c"]
    return tomllib.loads("\n".join(lines))


def settings_of(
    tool: str, variables: Mapping[str, str], command: Sequence[str]
) -> tuple[str, str, str]:
    """Return the address, key and model that a tool would use."""
    match tool:
        case "claude":
            names = {text for name, text in variables.items() if name.endswith("_MODEL")}
            (model,) = names
            return variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_AUTH_TOKEN"], model
        case "codex":
            config = toml_of(command)
            provider = config["model_providers"][config["model_provider"]]
            return provider["base_url"], variables[provider["env_key"]], config["model"]
        case "opencode":
            config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
            name, _, model = config["model"].partition("/")
            options = config["provider"][name]["options"]
            assert model in config["provider"][name]["models"]
            key = options["apiKey"].removeprefix("{env:").removesuffix("}")
            return options["baseURL"], variables[key], model
        case _:
            address = variables["OPENAI_API_BASE_URL"]
            return address, variables["OPENAI_API_KEY"], variables["DEFAULT_MODELS"]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_client_with_the_printed_settings_is_answered(
    server: ServerProcess, capsys: Output, tool: str
) -> None:
    assert main(["launch", tool, "--print", "--url", server.url]) == 0
    variables, command = printed(capsys.readouterr().out)
    address, key, model = settings_of(tool, variables, command)
    assert (key, model) == (KEY, MODEL)
    if tool == "claude":
        with anthropic.Anthropic(base_url=address, auth_token=key) as client:
            turn = [{"role": "user", "content": "What is 17 + 25?"}]
            message = client.messages.create(model=model, max_tokens=100, messages=turn)  # type: ignore[arg-type]
            assert message.content
        return
    with openai.OpenAI(base_url=address, api_key=key) as client:
        if tool == "codex":
            assert client.responses.create(model=model, input="What is 17 + 25?").output
        else:
            turns: Any = [{"role": "user", "content": "What is 17 + 25?"}]
            answer = client.chat.completions.create(model=model, messages=turns)
            assert answer.choices[0].message.content


def test_tools_learn_the_length_of_a_context(server: ServerProcess, capsys: Output) -> None:
    assert main(["launch", "codex", "--print", "--url", server.url]) == 0
    _, command = printed(capsys.readouterr().out)
    assert toml_of(command)["model_context_window"] == 8192
    assert main(["launch", "opencode", "--print", "--url", server.url]) == 0
    variables, _ = printed(capsys.readouterr().out)
    (provider,) = json.loads(variables["OPENCODE_CONFIG_CONTENT"])["provider"].values()
    assert provider["models"][MODEL]["limit"] == {"context": 8192, "output": 2048}


@pytest.mark.parametrize("tool", TOOLS)
def test_settings_of_a_named_model_are_printed_without_a_server(capsys: Output, tool: str) -> None:
    name = 'org/a "model"'
    place = ["--url", "http://127.0.0.1:9/v1/"]
    assert main(["launch", tool, "--print", "--model", name, *place, "--", "-p", "a b"]) == 0
    variables, command = printed(capsys.readouterr().out)
    assert command[0] == TOOLS[tool].program
    assert command[-2:] == ["-p", "a b"]
    address, _, model = settings_of(tool, variables, command)
    assert address.removesuffix("/v1") == "http://127.0.0.1:9"
    assert model == name


def launch(*arguments: str, path: Path, record: Path) -> subprocess.CompletedProcess[str]:
    return child_process.run(
        ["mlx_parallm", "launch", *arguments],
        env={**os.environ, "PATH": str(path), "RECORD": str(record)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    "tool",
    ["codex", *(pytest.param(name, marks=pytest.mark.slow) for name in TOOLS if name != "codex")],
)
def test_the_tool_gets_what_is_printed(server: ServerProcess, tmp_path: Path, tool: str) -> None:
    program, record = tmp_path / TOOLS[tool].program, tmp_path / "record"
    program.write_text(RECORDER)
    program.chmod(0o700)
    arguments = [tool, "--url", server.url, "--", "--model", "x y", "--", "z"]
    shown = launch(*arguments[:3], "--print", *arguments[3:], path=tmp_path, record=record)
    done = launch(*arguments, path=tmp_path, record=record)
    # The command is the tool from then on.
    assert done.returncode == 7, done.stderr
    passed, environment = json.loads(record.read_text())
    variables, command = printed(shown.stdout)
    assert [program.name, *passed] == command
    assert passed[-4:] == ["--model", "x y", "--", "z"]
    assert variables.items() <= environment.items()


def test_a_tool_that_is_not_installed(server: ServerProcess, tmp_path: Path) -> None:
    done = launch("codex", "--url", server.url, path=tmp_path, record=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "Codex is not installed: `npm install -g @openai/codex` installs it.\n"
    assert printed(done.stdout)[1][0] == "codex"


@pytest.mark.parametrize("arguments", [[], ["--print"], ["--model", MODEL]])
def test_no_server_is_one_sentence(capsys: Output, arguments: list[str]) -> None:
    assert main(["launch", "claude", "--url", "http://127.0.0.1:9", *arguments]) == 1
    assert capsys.readouterr().err.count("\n") == 1
