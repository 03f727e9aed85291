"""Time to the first token of later turns of chats with a hybrid model, in this process.

    python -m benchmarks.gpu.hybrid

A random model has chats of 8 turns of 500 tokens over a system prompt of 20,000. Each later turn is
also asked with a salt of its own, which finds nothing in the prefix cache. The two take turns in
being first. On a CPU: ``--shape "tiny hybrid" --system-tokens 600 --turn-tokens 100 --chats 1``.

``python -m benchmarks.speculation --shape hybrid`` and ``python -m benchmarks.gpu --rows
'decode-hybrid*'`` measure what else a GPU decides of such a model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx

from benchmarks.checks import Check, conclude
from benchmarks.gpu.engines import BenchEngine, MeasureError, engine_for
from mlx_parallm.types.events import ErrorEvent, PromptEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.device.properties import backend_name
from tests.builders.random_models import random_model

ANSWER_TOKENS = 16
# STEP_TOKENS: the token budget of a server's step on an NVIDIA GPU.
STEP_TOKENS = 2048
# NUM_SNAPSHOTS: what a server keeps by default, where its memory allows.
NUM_SNAPSHOTS = 64
# POOL: prompts that the KV pool holds.
POOL = 6
# MOST: time to the first token of a later turn over that of a cold one.
MOST = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the engine.

    Attributes:
        first_s: seconds until its first token.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those that were not computed.
        token_ids: the answer.
    """

    first_s: float
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]


class Asker:
    """Asks an engine for one answer at a time."""

    def __init__(self, bench: BenchEngine) -> None:
        self._engine = bench.engine
        self._count = 0

    def ask(self, prompt: Sequence[int], *, salt: str | None = None) -> Answer:
        """Return the greedy answer to a prompt; another salt finds nothing of other prompts.

        Raises:
            MeasureError: the engine has nothing to run.
            ParallmError: the request failed.
        """
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        started, first_s, cached = time.perf_counter(), 0.0, 0
        self._engine.submit(
            GenerateRequest(
                request_id=str(self._count),
                model="bench",
                prompt_ids=tuple(prompt),
                params=params,
                cache_salt=salt,
            )
        )
        tokens: list[int] = []
        while self._engine.has_work():
            events = self._engine.step()
            if events is None:
                raise MeasureError("no request could run")
            for event in events:
                match event:
                    case ErrorEvent():
                        raise event.error
                    case PromptEvent():
                        cached = event.num_cached_tokens
                    case TokenEvent():
                        first_s = first_s or time.perf_counter() - started
                        tokens += event.token_ids
                    case _:
                        pass
        return Answer(first_s, len(prompt), cached, tuple(tokens))


def main() -> int:
    args = make_parser().parse_args()
    dtype = mx.float32 if backend_name() == "cpu" else mx.bfloat16
    model = random_model(args.shape, dtype=dtype)
    draw = random.Random("hybrid")
    room = args.system_tokens + (args.turns + 1) * args.turn_tokens
    with engine_for(
        model,
        max_num_seqs=4,
        max_model_len=room,
        kv_tokens=POOL * room,
        step_tokens=STEP_TOKENS,
        num_snapshots=NUM_SNAPSHOTS,
    ) as (bench, _):
        asker = Asker(bench)
        # The first chat compiles what is needed.
        chats = [
            talk(asker, model.vocab_size, draw, number, args) for number in range(-1, args.chats)
        ]
        details = {"engine": bench.facts(), "peak GB": mx.get_peak_memory() / 1e9}
    details["device"] = str(dict(mx.device_info()).get("device_name", "?"))
    details["chats"] = [
        [{"warm": asdict(warm), "cold": asdict(cold)} for warm, cold in turns]
        for turns in chats[1:]
    ]
    return conclude("hybrid_gpu", figures(chats[1:]), details)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.hybrid",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="hybrid")
    parser.add_argument("--system-tokens", type=int, default=20_000)
    parser.add_argument("--turn-tokens", type=int, default=500)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--chats", type=int, default=3)
    return parser


def talk(
    asker: Asker, vocab_size: int, draw: random.Random, number: int, args: argparse.Namespace
) -> list[tuple[Answer, Answer]]:
    """Return the answers of a chat's turns, with the chat's salt and with one of the turn's own."""
    prompt = draw_tokens(draw, vocab_size, args.system_tokens)
    turns: list[tuple[Answer, Answer]] = []
    for turn in range(args.turns):
        prompt += draw_tokens(draw, vocab_size, args.turn_tokens - ANSWER_TOKENS)
        salts = {"warm": f"chat {number}", "cold": f"chat {number}, turn {turn}"}
        names = list(salts) if turn % 2 else list(reversed(salts))
        answers = {name: asker.ask(prompt, salt=salts[name]) for name in names}
        turns.append((answers["warm"], answers["cold"]))
        prompt += answers["warm"].token_ids
        print(
            f"chat {number}, turn {turn + 1}: {len(prompt)} tokens,",
            *(f"{name} {1e3 * each.first_s:.1f} ms" for name, each in answers.items()),
            f"{answers['warm'].cached_tokens} cached",
            flush=True,
        )
    return turns


def draw_tokens(draw: random.Random, vocab_size: int, count: int) -> list[int]:
    """Return random token ids."""
    return [draw.randrange(vocab_size) for _ in range(count)]


def figures(chats: Sequence[Sequence[tuple[Answer, Answer]]]) -> list[Check]:
    """Return what later turns took, beside the cold ones to the same prompts."""
    firsts = [turns[0] for turns in chats]
    later = [pair for turns in chats for pair in turns[1:]]
    ratios = [warm.first_s / cold.first_s for warm, cold in later]
    tokens = sum(warm.prompt_tokens for warm, _ in later)
    computed = tokens - sum(warm.cached_tokens for warm, _ in later)
    return [
        Check("tokens of the second turn's prompt", chats[0][1][0].prompt_tokens),
        Check("tokens of the last turn's prompt", chats[0][-1][0].prompt_tokens),
        Check("first turn: TTFT, ms", 1e3 * statistics.median(warm.first_s for warm, _ in firsts)),
        Check("later turns: TTFT cold, ms", 1e3 * statistics.median(c.first_s for _, c in later)),
        Check("later turns: TTFT, ms", 1e3 * statistics.median(warm.first_s for warm, _ in later)),
        Check("later turns: TTFT over cold", statistics.median(ratios), "<=", MOST),
        Check("later turns: largest TTFT over cold", max(ratios)),
        Check("later turns: share of tokens computed", computed / tokens),
        Check("cold turns: cached tokens", sum(cold.cached_tokens for _, cold in later), "==", 0),
        Check(
            "later turns: answers other than cold",
            sum(warm.token_ids != cold.token_ids for warm, cold in later),
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
