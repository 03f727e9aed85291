"""Structured output: the share of honoured schemas, and the cost of constrained rows.

``python -m benchmarks.structured`` does both on the CPU. Schemas are those of ``json_schemas.py``.
The first part answers each by a model of random weights at temperature 1, in a batch. In the second
part every row of a batch answers a schema of its own that does not end, or is free; blocks of steps
take turns in one engine, with the embedded model.

``--gpu`` is the second part only, with a random model of ``--shape`` in bfloat16, a made-up
vocabulary of the model's size, and a batch of 64.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import mlx.core as mx

from benchmarks.checks import Check, conclude
from benchmarks.gpu.engines import BenchEngine, make_engine, random_prompts
from benchmarks.json_schemas import Schema, make_schemas
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.config import ModelConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.spec import json_schema
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.grammar import Grammar
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.weights.loader import LoadedModel, load_model
from tests.builders.random_models import SHAPES, RandomModel, random_model

PROMPT_TOKENS = 32
#: ``ENDLESS``: more values than a row can write in a block of steps.
ENDLESS = 100_000
EOS_ID = 0


def main() -> int:
    args = make_parser().parse_args()
    if args.gpu:
        checks, details = gpu_cost(args)
        return conclude("structured_gpu", checks, details)
    checks, details = honoured(args)
    more, cost = cpu_cost(args)
    return conclude("structured", checks + more, {"schemas": details, "cost": cost})


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="the cost on a GPU only")
    parser.add_argument("--shape", default="8B", choices=sorted(SHAPES), help="of --gpu")
    parser.add_argument("--batch", type=int, help="rows; 32, or 64 with --gpu")
    parser.add_argument("--schemas", type=int, default=300, help="how many schemas")
    parser.add_argument("--max-tokens", type=int, default=2000, help="of an answer to a schema")
    parser.add_argument("--steps", type=int, default=16, help="of a block")
    parser.add_argument("--blocks", type=int, default=40, help="of each kind")
    parser.add_argument("--limit", type=float, help="most tokens/s lost; 0.15, or 0.1 with --gpu")
    return parser


# The following functions measure the share of honoured schemas.


@dataclass(slots=True)
class Answer:
    """The result of one schema."""

    schema: Schema
    token_ids: list[int]
    end: str = ""
    is_valid: bool = False
    is_formatted: bool = False


def honoured(args: argparse.Namespace) -> tuple[list[Check], dict[str, Any]]:
    """Answer every schema by random weights."""
    tokenizer = load_tokenizer(DEMO_FOLDER)
    model = scrambled(load_model(ModelConfig(), DEMO_FOLDER))
    grammars = embedded_grammars(tokenizer)
    batch = args.batch or 32
    bench = make_engine(
        RandomModel(model, 0),
        max_num_seqs=batch,
        max_model_len=PROMPT_TOKENS + args.max_tokens,
        grammars=grammars,
    )
    answers, refused = _answer_all(bench, grammars, tokenizer, args)
    ends = Counter(answer.end for answer in answers)
    stopped = [answer for answer in answers if answer.end == "stop"]
    checks = [
        Check("schemas accepted, share", len(answers) / args.schemas, ">=", 0.95),
        Check("answers that end with stop, share", len(stopped) / len(answers), ">=", 0.9),
        Check("valid among these, share", sum(o.is_valid for o in stopped) / len(stopped), "==", 1),
    ]
    formatted = sum(answer.is_formatted for answer in stopped) / len(stopped)
    # jsonschema uses Python's dates, which lack RFC 3339's year 0.
    checks.append(Check("valid among these, formats checked by Python", formatted))
    lengths = [len(answer.token_ids) for answer in stopped]
    return checks, {
        "schemas": args.schemas,
        "batch": batch,
        "ends": ends,
        "refused": refused,
        "median tokens": statistics.median(lengths),
    }


def _answer_all(
    bench: BenchEngine,
    grammars: GrammarCompiler,
    tokenizer: ParallmTokenizer,
    args: argparse.Namespace,
) -> tuple[list[Answer], list[str]]:
    draw = random.Random(0)
    answers: dict[str, Answer] = {}
    refused: list[str] = []
    for number, schema in enumerate(make_schemas(args.schemas)):
        try:
            grammar = Grammar(text=grammars.compile(json_schema(schema)))
        except InvalidRequestError as refusal:
            refused.append(f"{refusal}: {json.dumps(schema)}")
            continue
        request_id = f"schema-{number}"
        answers[request_id] = Answer(schema, [])
        bench.engine.submit(
            GenerateRequest(
                request_id=request_id,
                model="bench",
                prompt_ids=tuple(draw.randrange(256) for _ in range(PROMPT_TOKENS)),
                params=SamplingParams(
                    temperature=1.0,
                    max_tokens=args.max_tokens,
                    seed=number,
                    grammar=grammar,
                    # The engine has no tokenizer that would provide them.
                    stop_token_ids=tuple(tokenizer.eos_ids),
                ),
            )
        )
    while bench.engine.has_work():
        for event in bench.engine.step() or ():
            _take(answers[event.request_id], event, tokenizer)
    return list(answers.values()), refused


def _take(answer: Answer, event: Any, tokenizer: ParallmTokenizer) -> None:
    if isinstance(event, ErrorEvent):
        answer.end = f"error: {event.error}"
    if not isinstance(event, TokenEvent):
        return
    answer.token_ids += event.token_ids
    if event.finish_reason is not None:
        answer.end = str(event.finish_reason)
        text = tokenizer.decode(answer.token_ids[:-1])
        if answer.end == "stop":
            answer.is_valid = _is_valid(text, answer.schema, formats=False)
            answer.is_formatted = answer.is_valid and _is_valid(text, answer.schema, formats=True)


def _is_valid(text: str, schema: Schema, *, formats: bool) -> bool:
    """True if ``jsonschema`` accepts the value; formats count only if ``formats``."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER if formats else None
    try:
        value = json.loads(text)
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"invalid: {text!r}: {str(error)[:200]}", file=sys.stderr)
        return False
    return True


def scrambled(loaded: LoadedModel) -> LoadedModel:
    """Return the same architecture, with random weights."""
    mx.random.seed(0)
    model: Any = loaded.model
    for module in model.modules():
        for key, value in module.items():
            if isinstance(value, mx.array) and value.ndim > 1 and value.dtype == mx.float32:
                module[key] = mx.random.normal(value.shape) * value.shape[-1] ** -0.5
    mx.eval(model.parameters())
    return loaded


# The following functions measure the cost of constraints.


def embedded_grammars(tokenizer: ParallmTokenizer) -> GrammarCompiler:
    """Return the compiler of grammars for the embedded model."""
    size = tokenizer.vocab_size
    return GrammarCompiler(GrammarVocabulary(tokenizer.backend_json, tokenizer.eos_ids, size, size))


def cpu_cost(args: argparse.Namespace) -> tuple[list[Check], dict[str, Any]]:
    """Return the checks and figures of the embedded model."""
    batch = args.batch or 32
    grammars = embedded_grammars(load_tokenizer(DEMO_FOLDER))
    model = RandomModel(load_model(ModelConfig(), DEMO_FOLDER), 0)
    return _cost(args, model, grammars, batch, 0.15 if args.limit is None else args.limit)


def gpu_cost(args: argparse.Namespace) -> tuple[list[Check], dict[str, Any]]:
    """Return the checks and figures of a random model with a large vocabulary."""
    model = random_model(args.shape)
    size = model.vocab_size
    vocabulary = GrammarVocabulary(made_up_tokenizer(size), frozenset([EOS_ID]), size, size)
    limit = 0.1 if args.limit is None else args.limit
    return _cost(args, model, GrammarCompiler(vocabulary), args.batch or 64, limit)


def _cost(
    args: argparse.Namespace,
    model: RandomModel,
    grammars: GrammarCompiler,
    batch: int,
    limit: float,
) -> tuple[list[Check], dict[str, Any]]:
    began = time.perf_counter()
    constrained = [{"grammar": grammar} for grammar in endless_grammars(grammars, batch)]
    compile_s = time.perf_counter() - began
    # The last step of aborted requests may still be in flight when the next block is admitted.
    room = PROMPT_TOKENS + args.steps + 16
    bench = make_engine(model, max_num_seqs=batch, max_model_len=room, grammars=grammars)
    prompts = random_prompts(model, [PROMPT_TOKENS] * batch)
    free: list[dict[str, Any]] = [{}] * batch
    times: dict[str, list[float]] = {"free": [], "constrained": []}
    work: dict[str, list[float]] = {"free": [], "constrained": []}
    for number in range(args.blocks + 1):
        kinds = [("free", free), ("constrained", constrained)]
        for name, params in kinds if number % 2 else reversed(kinds):
            took, worked = _block(bench, prompts, params, f"{name}-{number}", args.steps)
            # The first block of each kind warms up.
            if number:
                times[name].append(took)
                work[name].append(worked)
    ratios = [
        free_ms / constrained_ms
        for free_ms, constrained_ms in zip(times["free"], times["constrained"], strict=True)
    ]
    lost = 1 - statistics.median(ratios)
    more_work = statistics.median(work["constrained"]) / statistics.median(work["free"]) - 1
    details = {
        "batch": batch,
        "vocabulary": model.vocab_size,
        "free ms": statistics.median(times["free"]),
        "constrained ms": statistics.median(times["constrained"]),
        "ratios": ratios,
        "compile ms a grammar": compile_s / batch * 1e3,
        "facts": bench.facts(),
    }
    print(json.dumps(details))
    return [
        Check(f"tokens/s lost, {batch} of {batch} rows constrained", lost, "<=", limit),
        Check("increase of CPU time per step, all threads", more_work),
        Check("step of unconstrained rows, ms", details["free ms"]),
        Check("step of constrained rows, ms", details["constrained ms"]),
    ], details


def _block(
    bench: BenchEngine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[dict[str, Any]],
    name: str,
    steps: int,
) -> tuple[float, float]:
    """Return median and processor milliseconds of a block's steps after its warm-up steps."""
    load = DecodeLoad(bench.engine, prompts, params, name, temperature=1.0, seed=7)
    load.prefill()
    load.decode(2)
    before = time.process_time()
    taken = statistics.median(load.decode(steps))
    worked = (time.process_time() - before) / steps * 1e3
    load.end()
    mx.synchronize()
    return taken, worked


def endless_grammars(grammars: GrammarCompiler, count: int) -> list[Grammar]:
    """Return grammars of endless arrays, with values of different schemas."""
    return [
        Grammar(
            text=grammars.compile(
                json_schema({"type": "array", "items": inlined(schema), "minItems": ENDLESS})
            )
        )
        for schema in make_schemas(count, seed=1)
    ]


def inlined(schema: Schema) -> Schema:
    """Return the schema as a part of another, with an identity for its own references."""
    return schema | {"$id": "https://example.com/item"}


def made_up_tokenizer(size: int) -> str:
    """Return a byte-level ``tokenizer.json`` of so many tokens: words, numbers and punctuation."""
    draw = random.Random(0)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [*map(chr, printable), *(chr(0x100 + index) for index in range(len(others)))]
    tokens = dict.fromkeys(["<|end|>", *alphabet])
    tokens |= dict.fromkeys(f"{n}" for n in range(1000))
    space, line = "\u0120", "\u010a"
    tokens |= dict.fromkeys(mark * n for mark in (space, line, "\u0109") for n in range(1, 65))
    marks = ['"', "{", "}", "[", "]", ":", ",", ".", "-", "/", "\\", "_", "(", ")", space, line]
    tokens |= dict.fromkeys(a + b for a in marks for b in marks)
    tokens |= dict.fromkeys(a + b + c for a in marks for b in marks for c in marks)
    while len(tokens) < size:
        word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 10)))
        word = draw.choice([word, word.title(), word.upper()])
        tokens[draw.choice(["", space, space]) + word + draw.choice(["", "", '"', "_"])] = None
    vocab = {token: number for number, token in enumerate(list(tokens)[:size])}
    end = {"id": EOS_ID, "content": "<|end|>", "special": True, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [end | dict.fromkeys(["single_word", "lstrip", "rstrip"], False)],
            "pre_tokenizer": byte_level | {"use_regex": True},
            "decoder": byte_level | {"use_regex": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
    )


if __name__ == "__main__":
    sys.exit(main())
