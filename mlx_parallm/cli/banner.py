"""The text that a server shows people once it serves: addresses, models, memory, an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from mlx_parallm import __version__
from mlx_parallm.engine.status import ModelState, ModelStatus
from mlx_parallm.units import readable_bytes

#: ``HERE``: the address of this machine, by those that stand for all of a machine's addresses.
HERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
# MOST_MODELS: models that are shown; folders of models may have hundreds.
MOST_MODELS = 8
JSON = "-H 'content-type: application/json'"
KEY = '-H "authorization: Bearer $KEY" '


def banner(
    statuses: Sequence[ModelStatus], addresses: Sequence[tuple[str, int]], *, needs_key: bool
) -> str:
    """Return the lines, which end with a line break.

    Args:
        statuses: all models that requests may name.
        addresses: hosts and ports of the listeners, at least one.
        needs_key: True if requests need an API key.
    """
    url = url_of(*addresses[0])
    shown = sorted(statuses, key=lambda status: status.state is not ModelState.LOADED)[:MOST_MODELS]
    width = max((len(status.names[0]) for status in shown), default=0)
    models = [f"{status.names[0]:{width}}  {_state(status)}" for status in shown]
    if len(shown) < len(statuses):
        models.append(f"and {len(statuses) - len(shown)} more: {url}/v1/models")
    memory = readable_bytes(sum(map(_num_bytes, statuses)))
    rows = [
        ("page", [f"{url_of(*address)}/" for address in addresses]),
        ("API", [f"{url}/v1" + " (with a key)" * needs_key]),
        ("models", models or ["none"]),
        ("memory", [f"{memory} of weights and KV"]),
        ("try", [_example(statuses, url, KEY if needs_key else "")]),
    ]
    lines = [f"mlx_parallm {__version__}"]
    for label, values in rows:
        lines += [f"  {label if place == 0 else '':7}{value}" for place, value in enumerate(values)]
    return "\n".join(lines) + "\n"


def url_of(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a listener."""
    host = HERE.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def _state(status: ModelStatus) -> str:
    if status.state is not ModelState.LOADED:
        return str(status.state)
    return f"{status.state}, {readable_bytes(_num_bytes(status))}" + ", pinned" * status.is_pinned


def _num_bytes(status: ModelStatus) -> int:
    """Return the memory of a model; 0 if it is not loaded."""
    if status.state is not ModelState.LOADED:
        return 0
    return sum(astuple(status.model.memory))


def _example(statuses: Sequence[ModelStatus], url: str, key: str) -> str:
    """Return a command that asks the first model that generates or embeds."""
    for status in statuses:
        if status.is_default:
            body = '{"messages": [{"role": "user", "content": "What is 17 + 25?"}]}'
            return f"curl {url}/v1/chat/completions {key}{JSON} -d '{body}'"
        if status.model is not None and "embed" in status.model.tasks:
            body = f'{{"model": "{status.names[0]}", "input": "A cat sleeps."}}'
            return f"curl {url}/v1/embeddings {key}{JSON} -d '{body}'"
    return f"curl {url}/v1/models {key}".rstrip()
