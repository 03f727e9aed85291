"""The load test, which starts the server, loads it with locust, and checks its state afterwards.

``python -m loadtests.run`` serves the embedded model to 64 users for two minutes. The exit status
is 0 when there was no wrong answer, no error, no request left and no KV block in use, and the
server still answers right.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from benchmarks.checks import Check, conclude
from benchmarks.servers import SERVED_NAME, Server, mlx_parallm_server
from loadtests.cases import Case, make_cases
from loadtests.exchange import Answer, ask
from mlx_parallm.peers import child_process

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
LEFT_BEHIND = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
SETTLE_S = 10.0
# RECORDING_S: locust's run time includes the recording of right answers before the users begin.
RECORDING_S = 5
# FINISH_S: seconds that users get to finish their requests before locust ends.
FINISH_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: the embedded one")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--server-options", default="", help="more flags for the server")
    args = parser.parse_args()
    with mlx_parallm_server(args.model, shlex.split(args.server_options)) as server:
        probe = make_cases(SERVED_NAME, seed=1)[0]
        before = _ask(server, probe)
        totals = run_locust(server, args.users, args.seconds)
        left = wait_until_idle(server)
        after = _ask(server, probe)
        is_alive = server.process.poll() is None
        if totals["failures"] or not is_alive:
            print(server.log_tail())
    checks = [
        Check("requests", totals["requests"], ">=", 1),
        Check("wrong answers and errors", totals["failures"], "==", 0),
        *(Check(f"{name} at the end", left[name], "==", 0) for name in LEFT_BEHIND),
        Check("the next request is right", float(is_alive and before == after), "==", 1),
        Check("requests per second", totals["requests"] / args.seconds),
    ]
    return conclude("loadtest", checks, {"totals": totals})


def _ask(server: Server, case: Case) -> Answer:
    return ask(server.base_url, case.route, case.body)


def run_locust(server: Server, users: int, seconds: int) -> dict[str, int]:
    """Run locust in a process of its own and return the totals of its statistics."""
    with tempfile.TemporaryDirectory(prefix="loadtest-") as folder:
        target = ["locust", "--headless", "--only-summary"]
        target += ["--locustfile", str(LOCUSTFILE), "--host", server.base_url]
        target += ["--users", str(users), "--spawn-rate", str(users)]
        target += ["--run-time", f"{seconds + RECORDING_S}s", "--stop-timeout", str(FINISH_S)]
        target += ["--json-file", f"{folder}/load"]
        status = child_process.run(target).returncode
        path = Path(folder) / "load.json"
        rows = json.loads(path.read_text()) if path.exists() else []
    failures = sum(row["num_failures"] for row in rows)
    return {
        "requests": sum(row["num_requests"] for row in rows),
        # Locust's own exit status counts too, because it sees failures outside of requests.
        "failures": max(failures, int(status != 0)),
    }


def wait_until_idle(server: Server) -> dict[str, float]:
    """Return the gauges of what is left, once they are all 0 or a short time has passed."""
    deadline = time.monotonic() + SETTLE_S
    left = read_gauges(server)
    while any(left.values()) and time.monotonic() < deadline:
        time.sleep(0.2)
        left = read_gauges(server)
    return left


def read_gauges(server: Server) -> dict[str, float]:
    """Return each gauge in ``LEFT_BEHIND``."""
    return {name: read_gauge(server, f"vllm:{name}") for name in LEFT_BEHIND}


def read_gauge(server: Server, name: str) -> float:
    """Return the sum of a gauge over all models."""
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    pattern = rf"^{name}(?:\{{[^}}]*\}})? (\S+)$"
    values = re.findall(pattern, metrics, re.MULTILINE)
    if not values:
        raise SystemExit(f"/metrics has no {name}")
    return sum(float(value) for value in values)


if __name__ == "__main__":
    sys.exit(main())
