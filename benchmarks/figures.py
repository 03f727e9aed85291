"""Put the figures of the latest runs into ``docs/performance.md``.

``python -m benchmarks.figures`` replaces what stands between ``<!-- figures: NAME -->`` and
``<!-- end -->`` by the table of ``results/NAME.json``, for every result there is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.checks import RESULTS

PAGE = Path("docs/performance.md")


def main() -> None:
    text = PAGE.read_text()
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        if "checks" in content:
            text = replace_marked(text, f"figures: {path.stem}", format_result(content))
    PAGE.write_text(text)


def replace_marked(text: str, mark: str, table: str) -> str:
    """Return ``text`` with the table between ``<!-- MARK -->`` and the end, if it has them."""
    pattern = rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda match: f"{match[1]}{table}{match[2]}", text, flags=re.DOTALL)


def format_result(content: dict[str, Any]) -> str:
    """Return one benchmark's figures as a Markdown table, with what they were measured on."""
    machine = content["machine"]
    rows = ["| what | measured | target | |", "|---|---|---|---|"]
    for check in content["checks"]:
        limit = check["limit"]
        target = "" if limit is None else f"{check['relation']} {limit:g}"
        value = "none" if check["value"] is None else f"{check['value']:.4g}"
        rows.append(f"| {check['what']} | {value} | {target} | {check['verdict']} |")
    about = (
        f"{machine['time'][:10]}, commit {machine['commit']}, {machine['cores']} cores of "
        f"{machine['processor']}, mlx {machine['mlx']}, mlx-lm {machine['mlx_lm']}."
    )
    return "\n".join([*rows, "", about, ""])


if __name__ == "__main__":
    main()
