"""Measure what streams wait for beside a session that takes gradients of their own model.

``python -m benchmarks.gradients_beside`` decodes 8 streams of the embedded model in this process,
alone and beside a session, in turn. A gap is the processor time of this process between the ends
of two decode steps, so that other work of the machine hardly counts. The texts must be those
alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from benchmarks.checks import Check, conclude
from mlx_parallm import LLM, SamplingParams
from mlx_parallm.bench.statistics import percentile
from tests.engine_action import Do

MODEL = "mlx-parallm-demo"
NUM_STREAMS, NUM_TOKENS = 8, 400
# LEAD: gaps of each phase in which streams are prefilled and costs are learned.
LEAD = 50
ROWS = [{"text": f"{n},", "completion": f" {n + 1}, {n + 2}, {n + 3}"} for n in range(64)]
#: ``SESSIONS``: what is trained, by how reports call it.
SESSIONS: dict[str, dict[str, Any]] = {
    "all layers": {"rank": 8, "targets": ["q_proj", "v_proj"]},
    "the last layer": {"rank": 8, "layers": "top:1"},
}
BATCH_SIZE = 8
ESTIMATOR = {"kind": "gradient", "learning_rate": 1e-4, "checkpoint_every": 50}
MOST_GAPS = 2.0


class Trial:
    """The embedded model, whose decode steps are timed."""

    def __init__(self) -> None:
        """Load the model."""
        self.llm = LLM(MODEL)
        self._ends_s: list[float] = []
        self.llm._engine.call(lambda client: client.call(Do(self._install)))

    def gaps_ms(self) -> tuple[list[float], list[str]]:
        """Return the gaps of streams that run to their ends, and what they say."""
        self._ends_s.clear()
        prompts = [f"{number}," for number in range(NUM_STREAMS)]
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
        outputs = self.llm.generate(prompts, params)
        ends_s = self._ends_s[LEAD:-LEAD]
        gaps_ms = [1000 * (b - a) for a, b in pairwise(ends_s)]
        return gaps_ms, [output.outputs[0].text for output in outputs]

    def _install(self, loop: Any) -> None:
        (engine,) = loop.engines.values()
        original = engine.step

        def step(within_s: float | None = None) -> Any:
            events = original(within_s)
            self._ends_s.append(time.process_time())
            return events

        engine.step = step


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    trial = Trial()
    rounds = [measure_round(trial) for _ in range(args.rounds)]
    return conclude("gradients_beside", checks_of(rounds), {"rounds": rounds})


def measure_round(trial: Trial) -> dict[str, float]:
    """Return the figures of streams alone, and beside each kind of session."""
    figures = {"load": os.getloadavg()[0], "changed": 0.0}
    gaps_ms, expected = trial.gaps_ms()
    figures |= {"p50 alone": percentile(gaps_ms, 50), "p99 alone": percentile(gaps_ms, 99)}
    for name, trainable in SESSIONS.items():
        with ThreadPoolExecutor(1) as pool:
            session = trial.llm.mezo(
                {"kind": "completion"},
                ROWS,
                batch_size=BATCH_SIZE,
                trainable=trainable,
                estimator=ESTIMATOR,
            )
            session.run(2)
            streams = pool.submit(trial.gaps_ms)
            before = session.num_steps
            while not streams.done():
                session.run(1)
            gaps_ms, texts = streams.result()
            steps = session.num_steps - before
            session.close()
        figures[f"steps {name}"] = 100 * steps / len(gaps_ms)
        figures |= {f"p{p} {name}": percentile(gaps_ms, p) for p in (50, 99)}
        figures["changed"] += sum(a != b for a, b in zip(texts, expected, strict=True))
    print({name: round(value, 2) for name, value in figures.items()}, flush=True)
    return figures


def checks_of(rounds: list[dict[str, float]]) -> list[Check]:
    """Return medians over the rounds, and their targets."""

    def median(name: str) -> float:
        return statistics.median(figures[name] for figures in rounds)

    checks = [Check(f"8 streams alone: gap {p}, ms", median(f"{p} alone")) for p in ("p50", "p99")]
    for name in SESSIONS:
        ratio = statistics.median(each[f"p99 {name}"] / each["p99 alone"] for each in rounds)
        checks += [
            Check(f"beside gradients of {name}: gap p50, ms", median(f"p50 {name}")),
            Check(f"beside gradients of {name}: gap p99, ms", median(f"p99 {name}")),
            Check(f"gradients of {name}: gap p99 relative to alone", ratio, "<=", MOST_GAPS),
            Check(f"gradients of {name}: steps in 100 decode steps", median(f"steps {name}")),
        ]
    num_changed = sum(figures["changed"] for figures in rounds)
    return [
        *checks,
        Check("streams with other tokens than alone", num_changed, "==", 0),
        Check("load average of the machine", median("load")),
    ]


if __name__ == "__main__":
    sys.exit(main())
