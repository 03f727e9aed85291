"""Clients that name three models at random, on a server with memory for two."""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.adapter_swap import adapter_body
from benchmarks.checks import Check
from benchmarks.make_model import MAX_MODEL_LEN, make_model
from benchmarks.measure import BenchmarkError, load_tokenizer, text_of_tokens
from benchmarks.model_swap.http import Answer, complete, get, load, post
from benchmarks.model_swap.streams import TWENTY_MILLION
from benchmarks.servers import Server, server_of_folder
from mlx_parallm.bench.statistics import percentile

NAMES = ("first", "second", "third")
RANK = 8
NUM_PROMPTS = 12
SHORTEST, LONGEST = 20, 200
OUTPUT_TOKENS = 24
# ROOM: the models that fit, with one context each; the half is for what else they take.
ROOM = 2.5
# MOST_SPREAD: the 99th percentile of waits for a load over the median.
MOST_SPREAD = 3.0
ENGINES = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run the part.

    Attributes:
        has_adapters: True if half of the requests name an adapter.
        num_engines: of the server.
    """

    has_adapters: bool = False
    num_engines: int = 1


VARIANTS = {
    "plain": Variant(),
    "adapters": Variant(has_adapters=True),
    "engines": Variant(num_engines=ENGINES),
}
#: ``Request``: the name of a model or an adapter, and the number of a prompt.
Request = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Models:
    """The models by name, with their adapters and the prompts.

    Attributes:
        folders: of the models.
        adapters: folders by the name of the adapter, with its model's name.
        prompts: of all of them.
    """

    folders: Mapping[str, Path]
    adapters: Mapping[str, tuple[str, Path]]
    prompts: Sequence[str]

    def names(self, model: str, variant: Variant) -> list[str]:
        """Return what requests may name of a model."""
        own = [name for name, (base, _) in self.adapters.items() if base == model]
        return [model, *(own if variant.has_adapters else [])]

    def body(self, request: Request) -> dict[str, Any]:
        """Return a request."""
        name, number = request
        return {
            "model": name,
            "prompt": self.prompts[number],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }


def room_part(args: Namespace) -> tuple[list[Check], dict[str, Any]]:
    """Run the variants, each against the answers of servers of one model."""
    models = make_models(args.folder)
    expected = expected_answers(models, args)
    checks: list[Check] = []
    details: dict[str, Any] = {}
    for name in args.variants:
        answers, first_loads_s = _run(models, VARIANTS[name], args)
        checks += room_checks(name, answers, expected, first_loads_s)
        details[name] = {"answers": [asdict(each) for _, each in answers]}
    return checks, details


def make_models(folder: Path) -> Models:
    """Return three models of 22 million parameters, with an adapter each."""
    folders = {
        name: make_model(folder / "room" / name, seed=seed, config=TWENTY_MILLION).resolve()
        for seed, name in enumerate(NAMES, 1)
    }
    adapters = {
        f"{name}-adapter": (name, _write_adapter(folder / f"{name}-adapter", seed))
        for seed, name in enumerate(NAMES)
    }
    draw, tokenizer = random.Random(1), load_tokenizer(folders[NAMES[0]])
    sizes = [draw.randint(SHORTEST, LONGEST) for _ in range(NUM_PROMPTS)]
    prompts = [text_of_tokens(tokenizer, size, seed) for seed, size in enumerate(sizes)]
    return Models(folders, adapters, prompts)


def _write_adapter(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    body = adapter_body(TWENTY_MILLION, RANK, "float32", seed)
    (folder / "adapter_model.safetensors").write_bytes(body)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder.resolve()


def room_bytes(folder: Path, config: Mapping[str, Any], count: float = ROOM) -> int:
    """Return the memory of so many models: their weights and the KV of one context, in float32."""
    weights = (folder / "model.safetensors").stat().st_size
    width = config["num_key_value_heads"] * config["head_dim"]
    context = MAX_MODEL_LEN * config["num_hidden_layers"] * 2 * width * 4
    return int(count * (weights + context))


def expected_answers(models: Models, args: Namespace) -> dict[Request, str]:
    """Return the texts of servers that have one model each."""
    texts: dict[Request, str] = {}
    every = Variant(has_adapters=True)
    for model in NAMES:
        with server_of_folder(args.folder / "room", _options(args)) as server:
            _load(server, model, models, every)
            for name in models.names(model, every):
                for number in range(NUM_PROMPTS):
                    answer = complete(server, models.body((name, number)))
                    if answer.error is not None:
                        raise BenchmarkError(f"{model}: {answer.error}\n{server.log_tail()}")
                    texts[name, number] = answer.text
    return texts


def _options(args: Namespace) -> list[str]:
    return [*args.server_options.split(), "--allowed-adapter-roots", str(args.folder.resolve())]


def _load(server: Server, model: str, models: Models, variant: Variant) -> float:
    """Load a model and its adapters; return the seconds that the model took."""
    load_s = load(server, model)
    for name in models.names(model, variant)[1:]:
        body = {"lora_name": name, "lora_path": str(models.adapters[name][1])}
        post(server, "/v1/load_lora_adapter", body | {"base_model_name": model})
    return load_s


@contextmanager
def _serving(models: Models, variant: Variant, args: Namespace) -> Iterator[Server]:
    memory = variant.num_engines * room_bytes(models.folders[NAMES[0]], TWENTY_MILLION)
    options = [*_options(args), "--memory", str(memory)]
    if variant.num_engines > 1:
        options += ["--data-parallel-size", str(variant.num_engines)]
    with server_of_folder(args.folder / "room", options) as server:
        yield server


def _run(
    models: Models, variant: Variant, args: Namespace
) -> tuple[list[tuple[Request, Answer]], list[float]]:
    """Return the answers to all clients, and the seconds of loads beside no others."""
    with _serving(models, variant, args) as server:
        loads_s = [_load(server, model, models, variant) for model in NAMES]
        end_s = time.perf_counter() + args.room_seconds

        def client(seed: int) -> list[tuple[Request, Answer]]:
            draw, answers = random.Random(seed), list[tuple[Request, Answer]]()
            while time.perf_counter() < end_s:
                name = draw.choice(models.names(draw.choice(NAMES), variant))
                request = (name, draw.randrange(NUM_PROMPTS))
                answers.append((request, complete(server, models.body(request))))
            return answers

        with ThreadPoolExecutor(args.clients) as pool:
            answers = [each for own in pool.map(client, range(args.clients)) for each in own]
        print(json.dumps(get(server, "/v1/memory")), flush=True)
    return answers, loads_s


def room_checks(
    what: str,
    answers: Sequence[tuple[Request, Answer]],
    expected: Mapping[Request, str],
    loads_s: Sequence[float],
) -> list[Check]:
    """Return the figures of a run.

    Args:
        what: its name.
        answers: to all clients, with what they requested.
        expected: the texts of servers of one model.
        loads_s: the seconds of loads that nothing disturbed.
    """
    failed = [answer for _, answer in answers if answer.error is not None]
    for answer in failed[:3]:
        print(f"{what}: {answer.error}", flush=True)
    complete_ = [(request, answer) for request, answer in answers if answer.error is None]
    differing = sum(answer.text != expected[request] for request, answer in complete_)
    waits = [answer.first_s for _, answer in complete_ if answer.load_s is not None]
    rest = [answer.total_s for _, answer in complete_ if answer.load_s is None]
    longest = max(rest, default=float("nan")) + max(loads_s)
    counts: dict[str, int] = defaultdict(int)
    for (name, _), _ in complete_:
        counts[name.partition("-")[0]] += 1
    return [
        Check(f"{what}: requests", len(answers)),
        Check(f"{what}: errors", len(failed), "==", 0),
        Check(f"{what}: answers other than those of one model", differing, "==", 0),
        Check(f"{what}: requests that waited for a load", len(waits)),
        Check(f"{what}: fewest requests of a model over the most", _evenness(counts)),
        Check(f"{what}: longest request without a load, and longest undisturbed load, s", longest),
        Check(f"{what}: longest wait for a load over these", max_over(waits, longest), "<=", 1.0),
        Check(f"{what}: wait for a load, s: median", percentile(waits, 50)),
        Check(
            f"{what}: wait for a load: p99 over the median",
            percentile(waits, 99) / percentile(waits, 50) if waits else float("nan"),
            "<=",
            MOST_SPREAD,
        ),
    ]


def max_over(values: Sequence[float], other: float) -> float:
    """Return the largest value over another one; NaN without values."""
    return max(values, default=float("nan")) / other


def _evenness(counts: Mapping[str, int]) -> float:
    return min(counts.values(), default=0) / max(counts.values(), default=1)
