"""The settings by which tools of others use a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

#: ``NO_KEY``: sent to servers without a key, because tools want one.
NO_KEY = "none"
PROVIDER = "mlx_parallm"
KEY_VARIABLE = "MLX_PARALLM_API_KEY"
#: ``CLAUDE_MODELS``: the variables that say which model Claude Code uses for what.
CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server.

    Attributes:
        url: the server's address, without ``/v1``.
        api_key: the key to it.
        model: the model's name.
        context: its longest sequence in tokens; None if unknown.
    """

    url: str
    api_key: str
    model: str
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Variables of the environment, and arguments before the user's own."""

    variables: Mapping[str, str]
    arguments: Sequence[str] = field(default=())


@dataclass(frozen=True, slots=True)
class Tool:
    """A program of others.

    Attributes:
        name: its name for people.
        program: its executable.
        install: a command that installs it.
        settings: returns its settings for a model.
    """

    name: str
    program: str
    install: str
    settings: Callable[[Target], Settings]


def claude_settings(target: Target) -> Settings:
    """Return the settings of Claude Code, which speaks Anthropic's messages."""
    return Settings(
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.api_key,
            # A key of the user's environment would go before the token.
            "ANTHROPIC_API_KEY": "",
            **dict.fromkeys(CLAUDE_MODELS, target.model),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # The header differs in every request, which defeats prefix caches.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }
    )


def codex_settings(target: Target) -> Settings:
    """Return the settings of Codex, which speaks OpenAI's responses."""
    provider = {
        "name": "mlx_parallm",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "env_key": KEY_VARIABLE,
    }
    values: dict[str, str | int] = {"model": target.model, "model_provider": PROVIDER}
    values |= {f"model_providers.{PROVIDER}.{key}": value for key, value in provider.items()}
    if target.context is not None:
        values["model_context_window"] = target.context
    # JSON's strings and numbers are TOML's too.
    arguments = [
        part for key, value in values.items() for part in ("-c", f"{key}={json.dumps(value)}")
    ]
    return Settings({KEY_VARIABLE: target.api_key}, arguments)


def opencode_settings(target: Target) -> Settings:
    """Return the settings of opencode, which speaks OpenAI's chats."""
    model: dict[str, object] = {"name": target.model}
    if target.context is not None:
        model["limit"] = {"context": target.context, "output": max(1, target.context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlx_parallm",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {target.model: model},
    }
    name = f"{PROVIDER}/{target.model}"
    content = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {PROVIDER: provider},
        "model": name,
        "small_model": name,
    }
    variables = {"OPENCODE_CONFIG_CONTENT": json.dumps(content), KEY_VARIABLE: target.api_key}
    return Settings(variables)


def open_webui_settings(target: Target) -> Settings:
    """Return the settings of Open WebUI, which speaks OpenAI's chats."""
    return Settings(
        {
            "OPENAI_API_BASE_URL": f"{target.url}/v1",
            "OPENAI_API_KEY": target.api_key,
            "DEFAULT_MODELS": target.model,
            "ENABLE_OLLAMA_API": "false",
            # Otherwise what it saved at its first start goes before these.
            "ENABLE_PERSISTENT_CONFIG": "false",
        },
        ["serve"],
    )


TOOLS: Mapping[str, Tool] = {
    "claude": Tool(
        "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", claude_settings
    ),
    "codex": Tool("Codex", "codex", "npm install -g @openai/codex", codex_settings),
    "opencode": Tool("opencode", "opencode", "npm install -g opencode-ai", opencode_settings),
    "open-webui": Tool("Open WebUI", "open-webui", "pip install open-webui", open_webui_settings),
}
