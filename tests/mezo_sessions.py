"""How tests ask a server for training sessions."""

from __future__ import annotations

from typing import Any

import httpx2

SESSIONS = "/v1/mezo/sessions"


def asked(client: httpx2.Client, path: str, **body: Any) -> dict[str, Any]:
    """Return the answer to a body; check that it is not refused."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def begun(client: httpx2.Client, **body: Any) -> str:
    """Begin a session; return its path."""
    return f"{SESSIONS}/{asked(client, SESSIONS, **body)['id']}"
