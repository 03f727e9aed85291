"""Decode speed with prompt lookup against the same engine without it.

``python -m benchmarks.speculation``. The model copies: a random Qwen3 or Qwen3.5 whose head maps
each token to its successor in a fixed order of the vocabulary. A prompt is such a text with errors,
and the answer the text without them, as when text is edited: a lookup is right until the next
error. ``--errors`` says how many tokens are wrong. Random weights alone would copy nothing. With
``--embedded`` it is the demonstration model, asked to repeat words, or to add numbers. Both engines
answer the same requests in turn, in alternating order, in one process.

``--draft-shape`` proposes by a draft model instead, of this shape, which goes on from ``--errors``
of all tokens in another way.

Three loads: copying by one and by several sequences (what is gained), text that is nowhere in the
prompt, and more sequences than may speculate (what is lost).
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from benchmarks.checks import Check, conclude
from benchmarks.gpu.engines import make_engine
from mlx_parallm.bench.workload import make_lexicon
from mlx_parallm.config import ModelConfig, SpeculativeConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.events import TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.weights.loader import load_model
from tests.builders.random_models import SHAPES, RandomModel, copying_model

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 200
# COPYING: shapes that ``copying_model`` takes.
COPYING = tuple(n for n, config in SHAPES.items() if config["model_type"] in ("qwen3", "qwen3_5"))


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that run at once; ``limit`` is the least ratio wanted."""

    name: str
    num_requests: int
    copies: bool
    limit: float | None


class Texts(Protocol):
    """A model and texts for it; ``end_ids`` end an answer."""

    end_ids: tuple[int, ...]

    def model(self) -> RandomModel:
        """Return a new model, because an engine changes some layers."""
        ...

    def prompt(self, errors: float, *, copies: bool) -> list[int]:
        """Return the next prompt; ``copies`` says whether its answer is in it."""
        ...


class EmbeddedTexts:
    """The demonstration model repeats words, or adds numbers."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._words = make_lexicon(500, seed)
        self._tokenizer = load_tokenizer(DEMO_FOLDER)
        self.end_ids = tuple(self._tokenizer.eos_ids)

    def model(self) -> RandomModel:
        """Return a random model with the loader's layers."""
        return RandomModel(load_model(ModelConfig(), DEMO_FOLDER), 0)

    def prompt(self, errors: float, *, copies: bool) -> list[int]:
        """Return a draft with the model's own errors; ``errors`` is not used."""
        del errors
        text = f"What is {self._random.randrange(900)} + {self._random.randrange(900)}?"
        if copies:
            text = "Repeat this: " + " ".join(self._random.choices(self._words, k=24))
        return self._tokenizer.encode_chat([{"role": "user", "content": text}])


class CopyingTexts:
    """A model that says the next token of an order, and parts of that order."""

    end_ids: tuple[int, ...] = ()

    def __init__(self, shape: str, dtype: mx.Dtype, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._shape = shape
        self._dtype = dtype
        self._order = list(range(int(SHAPES[shape]["vocab_size"])))
        self._random.shuffle(self._order)
        self._successor = [0] * len(self._order)
        for token, following in zip(self._order, self._order[1:] + self._order[:1], strict=True):
            self._successor[token] = following

    def model(self) -> RandomModel:
        """Return a model whose next token follows a fixed order."""
        return copying_model(self._shape, mx.array(self._successor), dtype=self._dtype)

    def draft_model(self, shape: str, errors: float) -> RandomModel:
        """Return a model of a shape with the same vocabulary that is wrong after some tokens."""
        wrong = [t for t in range(len(self._order)) if self._random.random() < errors]
        successor = list(self._successor)
        for token, other in zip(wrong, wrong[1:] + wrong[:1], strict=True):
            successor[token] = self._successor[other]
        return copying_model(shape, mx.array(successor), dtype=self._dtype)

    def prompt(self, errors: float, *, copies: bool) -> list[int]:
        """Return a text and its first token; unless ``copies``, another text and that token."""
        first = self._random.randrange(len(self._order))
        places = [(first + i) % len(self._order) for i in range(PROMPT_TOKENS)]
        if not copies:
            self._random.shuffle(places)
        text = [self._order[place] for place in places]
        wrong = [self._random.random() < errors for _ in text]
        noisy = [
            self._random.choice(self._order) if bad else t
            for bad, t in zip(wrong, text, strict=True)
        ]
        return [*noisy, self._order[first]]


def main() -> int:
    args = make_parser().parse_args()
    copying = None if args.embedded else CopyingTexts(args.shape, getattr(mx, args.dtype))
    texts: Texts = copying or EmbeddedTexts()
    draft = None
    if args.draft_shape and copying is not None:
        draft = copying.draft_model(args.draft_shape, args.errors)
    speculative = SpeculativeConfig(
        method="ngram" if draft is None else "draft_model",
        model=None if draft is None else args.draft_shape,
        num_speculative_tokens=args.num_speculative_tokens,
        disable_by_batch_size=args.disable_by_batch_size,
    )
    most = max(*args.batches, args.full_batch)
    engines = {
        name: make_engine(
            texts.model(),
            max_num_seqs=most,
            max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS + 32,
            speculative=config,
            draft=None if config is None else draft,
        ).engine
        for name, config in (("off", None), ("on", speculative))
    }
    gains = dict(zip(args.batches, args.gains, strict=False))
    loads = [Load(f"copying, {n}", n, True, gains.get(n)) for n in args.batches]
    if draft is None:
        loads += [Load(f"nothing to copy, {n}", n, False, args.least) for n in args.batches]
    loads.append(Load(f"full batch, {args.full_batch}", args.full_batch, True, 0.97))
    checks: list[Check] = []
    details: dict[str, Any] = {"settings": vars(args)}
    for load in loads:
        rates, accepted = compare(engines, texts, load, args)
        off, on = (statistics.median(rates[name]) for name in ("off", "on"))
        checks += [
            Check(f"{load.name}: tokens/s without", off),
            Check(f"{load.name}: tokens/s with", on),
            Check(f"{load.name}: ratio", on / off, ">=", load.limit),
        ]
        details[load.name] = {"tokens_per_s": rates, "accepted_per_draft": accepted}
        print(f"{load.name}: {off:.0f} -> {on:.0f} tokens/s, {accepted:.2f} accepted a draft")
    return conclude("speculation", checks, details)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.6B", choices=COPYING)
    parser.add_argument("--embedded", action="store_true", help="the demonstration model instead")
    parser.add_argument("--draft-shape", choices=COPYING, help="of the same vocabulary")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--gains", nargs="+", type=float, default=[1.8, 1.3], help="least ratios")
    parser.add_argument("--least", type=float, default=0.95, help="with nothing to copy")
    parser.add_argument("--full-batch", type=int, default=64)
    parser.add_argument("--errors", type=float, default=0.05, help="share of wrong tokens")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--disable-by-batch-size", type=int)
    parser.add_argument("--repetitions", type=int, default=5)
    return parser


def compare(
    engines: dict[str, GenerationEngine], texts: Texts, load: Load, args: argparse.Namespace
) -> tuple[dict[str, list[float]], float]:
    """Return tokens/s of each engine by repetition, and accepted tokens per draft."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    before = engines["on"].stats.speculation
    for number in range(args.repetitions + 1):
        prompts = [texts.prompt(args.errors, copies=load.copies) for _ in range(load.num_requests)]
        names = list(engines) if number % 2 else list(engines)[::-1]
        answers = {}
        for name in names:
            rate, answers[name] = run(engines[name], prompts, texts.end_ids)
            if number:  # the first repetition warms up
                rates[name].append(rate)
        if answers["off"] != answers["on"]:
            raise SystemExit("the answers differ")
    after = engines["on"].stats.speculation
    drafts = after.num_drafts - before.num_drafts
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return rates, accepted / max(drafts, 1)


def run(
    engine: GenerationEngine, prompts: Sequence[Sequence[int]], end_ids: tuple[int, ...]
) -> tuple[float, dict[str, list[int]]]:
    """Return tokens/s from the last prompt's first token to the end, and the answers."""
    params = SamplingParams(temperature=0.0, stop_token_ids=end_ids, max_tokens=OUTPUT_TOKENS)
    for number, prompt in enumerate(prompts):
        engine.submit(
            GenerateRequest(
                request_id=str(number), model="bench", prompt_ids=tuple(prompt), params=params
            )
        )
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    gc.collect()
    started, counted = 0.0, 0
    while engine.has_work():
        for event in engine.step() or []:
            if isinstance(event, TokenEvent):
                answers[event.request_id] += event.token_ids
        if not started and all(answers.values()):
            started = time.perf_counter()
            counted = sum(map(len, answers.values()))
    elapsed = time.perf_counter() - started
    return (sum(map(len, answers.values())) - counted) / elapsed, answers


if __name__ == "__main__":
    sys.exit(main())
