"""`mlx_parallm`, which says what threads and routes its process has; see ``ASK``."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from mlx_parallm.cli.main import main

#: ASK, ANSWER: variables with the paths of two named pipes.
ASK, ANSWER = "SERVING_FACTS_ASK", "SERVING_FACTS_ANSWER"
#: OWN: the thread that says so.
OWN = "serving-facts"
APPS: list[FastAPI] = []


def answer_all() -> None:
    """Write the facts into a second pipe each time that somebody has opened the first."""
    ask, answer = (os.environ[name] for name in (ASK, ANSWER))
    while True:
        Path(ask).read_bytes()
        Path(answer).write_text(json.dumps(facts()))


def facts() -> dict[str, Any]:
    """Return the names of threads, without their numbers, and the paths of routes."""
    names = {thread.name for thread in threading.enumerate() if thread.name != OWN}
    paths = {getattr(route, "path", "") for app in APPS for route in app.router.routes}
    return {
        "threads": sorted({re.sub(r"[-_ ]?\d+", "", name) for name in names}),
        "routes": sorted(paths),
    }


def note_applications() -> None:
    """Have ``APPS`` filled."""
    set_up = FastAPI.setup

    def setup(app: FastAPI) -> None:
        APPS.append(app)
        set_up(app)

    FastAPI.setup = setup  # type: ignore[method-assign]


if __name__ == "__main__":
    note_applications()
    threading.Thread(target=answer_all, name=OWN, daemon=True).start()
    sys.exit(main())
