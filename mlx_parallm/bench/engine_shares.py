"""Counts the tokens of each engine of a server in a run, by the metric label ``engine``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SAMPLE = re.compile(
    r"^vllm:(generation_tokens|prompt_tokens|(?:external_)?prefix_cache_hits)_total\{(.*)\} (\S+)$",
    re.MULTILINE,
)
_ENGINE = re.compile(r'(?:^|,)engine="(\d+)"')

#: ``Counts``: by the engine's number, the total of each counter over all models.
Counts = Mapping[int, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShare:
    """The tokens of one engine, for the requests of all clients.

    Attributes:
        engine: its number.
        output_tokens: tokens that it generated.
        prompt_tokens: tokens of its prompts.
        cached_tokens: how many of these it found in its prefix cache, on disk or in host memory.
    """

    engine: int
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int


def read_counts(metrics: str) -> Counts:
    """Return the counters in a text of Prometheus metrics; empty if they name no engine."""
    counts: dict[int, Counter[str]] = {}
    for name, labels, value in _SAMPLE.findall(metrics):
        if engine := _ENGINE.search(labels):
            counts.setdefault(int(engine[1]), Counter())[name] += int(float(value))
    return counts


def engine_shares(before: Counts, after: Counts) -> list[EngineShare]:
    """Return what each of several engines did meanwhile; empty if there are not several."""
    if len(after) < 2:
        return []
    return [_share(engine, before.get(engine, {}), after[engine]) for engine in sorted(after)]


def format_shares(shares: Sequence[EngineShare]) -> str:
    """Return one line for each engine."""
    total = sum(share.output_tokens for share in shares) or 1
    return "\n".join(
        f"engine {share.engine:<6} {share.output_tokens} output tokens"
        f" ({share.output_tokens / total:.0%}), {share.prompt_tokens} prompt tokens"
        f" ({share.cached_tokens} cached)"
        for share in shares
    )


def _share(engine: int, before: Mapping[str, int], after: Mapping[str, int]) -> EngineShare:
    def growth(name: str) -> int:
        first, last = before.get(name, 0), after.get(name, 0)
        # An engine that was restarted counts from 0.
        return last - first if last >= first else last

    return EngineShare(
        engine=engine,
        output_tokens=growth("generation_tokens"),
        prompt_tokens=growth("prompt_tokens"),
        cached_tokens=growth("prefix_cache_hits") + growth("external_prefix_cache_hits"),
    )
