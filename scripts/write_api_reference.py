"""The generator of docs/api-reference.md from the OpenAPI document and its examples.

    PYTHONPATH=. python scripts/write_api_reference.py            # the page
    PYTHONPATH=. python scripts/write_api_reference.py --record   # the examples' answers, then it

Recording starts a server of the embedded models, sends it every example and writes what it
answers into the slices' `examples.json`; ids, times and durations are fixed, so that recording
twice changes nothing. A test sends the examples too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mlx_parallm.api.app import SLICES, STORING_SLICES, examples_of
from mlx_parallm.api.http.openapi import FILE_NAME
from scripts.api_reference import render
from scripts.compact_json import compact_json
from scripts.example_requests import ExampleSender, example_server

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "api-reference.md"
# MOST_ITEMS: recorded lists with more items keep the first KEPT_ITEMS.
MOST_ITEMS, KEPT_ITEMS = 8, 4


def main() -> None:
    """Write the page, and the answers of the examples if that is asked for."""
    parser = argparse.ArgumentParser(description="Write docs/api-reference.md.")
    parser.add_argument("--record", action="store_true", help="record the examples' answers first")
    parser.add_argument("--only", default="", help="record only operations whose key has this")
    arguments = parser.parse_args()
    if arguments.record:
        with example_server() as (client, places):
            examples = examples_of(SLICES + STORING_SLICES)
            record(ExampleSender(client, examples, places), arguments.only)
    TARGET.write_text(render(), encoding="utf-8")


def record(sender: ExampleSender, only: str) -> None:
    """Write what a server answers into the files of the examples.

    Args:
        sender: of the examples.
        only: part of the "METHOD path" of those that are recorded.
    """
    for file in sorted((ROOT / "mlx_parallm" / "api").rglob(FILE_NAME)):
        entries = json.loads(file.read_text(encoding="utf-8"))
        for key, entry in entries.items():
            if only not in key:
                continue
            answer = sender.send(key)
            entry["answer"] = {"status": answer.status}
            if answer.media_type is not None:
                body = shortened(answer.body)
                entry["answer"] |= {"media_type": answer.media_type, "body": body}
            if "stream" in entry:
                entry["events"] = sender.send(key, stream=True).body
        file.write_text(compact_json(entries) + "\n", encoding="utf-8")


def shortened(value: Any) -> Any:
    """Return an answer with the first items of each long list: readers need no more of them.

    Lists of objects keep one object of each set of keys.
    """
    if isinstance(value, dict):
        return {name: shortened(item) for name, item in value.items()}
    if not isinstance(value, list) or len(value) <= MOST_ITEMS:
        return [shortened(item) for item in value] if isinstance(value, list) else value
    kinds: dict[Any, Any] = {}
    for item in value:
        kind = tuple(sorted(item)) if isinstance(item, dict) else type(item)
        kinds.setdefault(kind, item)
    kept = value[:KEPT_ITEMS]
    return [
        shortened(item) for item in kept + [item for item in kinds.values() if item not in kept]
    ]


if __name__ == "__main__":
    main()
