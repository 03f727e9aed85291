"""JSON schemas from the world in ``strict``: how many are accepted, and whether all is enforced.

``python -m benchmarks.maskbench FOLDER`` reads MaskBench's ``data`` folder, a file per schema
(https://github.com/guidance-ai/jsonschemabench). Its instances go through the grammars, and random
texts of the grammars through ``jsonschema``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import validator_for

from benchmarks.checks import Check, conclude
from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.spec import json_schema
from mlx_parallm.types.errors import InvalidRequestError
from tests.byte_vocabulary import END, ByteVocabulary

MAX_BYTES = 400
# LATE: bytes of a text after which it is led to its end.
LATE = 120
MAX_REASON_CHARS = 90


@dataclass(slots=True)
class Counts:
    """Results of all schemas."""

    accepted: int = 0
    slowest_s: float = 0.0
    instances: Counter[str] = field(default_factory=Counter[str])
    violations: list[str] = field(default_factory=list[str])
    texts: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.maskbench", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schemas", type=int, default=600, help="how many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", type=int, default=3, help="random texts of a grammar")
    args = parser.parse_args()
    files = sorted(args.folder.glob("*.json"))
    chosen = random.Random(args.seed).sample(files, min(args.schemas, len(files)))
    counts, vocabulary = Counts(), ByteVocabulary()
    for file in chosen:
        _measure(json.loads(file.read_text()), file.name, vocabulary, args.texts, counts)
    checks = [
        Check("schemas accepted, share", counts.accepted / len(chosen), ">=", 0.94),
        Check("invalid instances accepted", counts.instances["invalid accepted"]),
        Check("invalid texts generated", len(counts.violations), "==", 0),
        Check("slowest schema, s", counts.slowest_s, "<=", 10),
    ]
    details = {
        "instances": dict(counts.instances),
        "texts": counts.texts,
        "refused": dict(counts.refused.most_common()),
        "violations": counts.violations,
    }
    return conclude("maskbench", checks, details)


def _measure(
    document: dict[str, Any], name: str, vocabulary: ByteVocabulary, texts: int, counts: Counts
) -> None:
    """Count what a schema's grammar accepts and writes."""
    schema, compiler = document["schema"], vocabulary.compiler
    begun = time.perf_counter()
    try:
        grammar = compiler.compile(json_schema(schema))
    except InvalidRequestError as refusal:
        counts.refused[str(refusal).split("\n")[0][:MAX_REASON_CHARS]] += 1
        return
    finally:
        counts.slowest_s = max(counts.slowest_s, time.perf_counter() - begun)
    counts.accepted += 1
    for test in document["tests"]:
        kind = "valid" if test["valid"] else "invalid"
        text = json.dumps(test["data"], ensure_ascii=False)
        is_taken = _takes(vocabulary, grammar, text)
        counts.instances[f"{kind} {'accepted' if is_taken else 'refused'}"] += 1
    draw = random.Random(name)
    for _ in range(texts):
        written = _written(compiler, grammar, draw)
        if written is not None:
            counts.texts += 1
            counts.violations += _violations(schema, written, name)


def _takes(vocabulary: ByteVocabulary, grammar: str, text: str) -> bool:
    matcher = vocabulary.compiler.matcher(grammar)
    ids = vocabulary.ids_of(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _written(compiler: GrammarCompiler, grammar: str, draw: random.Random) -> bytes | None:
    """Return a random text of a grammar; None if it does not end, or is no UTF-8."""
    matcher, text = compiler.matcher(grammar), b""
    while len(text) < MAX_BYTES:
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        # A grammar that has become too complex allows the end; the server fails the request.
        if matcher.is_error():
            return None
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist()
        if END in allowed and (len(allowed) == 1 or draw.random() < 0.5):
            return text if text.decode(errors="ignore").encode() == text else None
        options = [each for each in allowed if each != END]
        if not options:
            return None
        pieces = [compiler.vocabulary.token_bytes(each) for each in options]
        weights = [_weight(piece, is_late=len(text) > LATE) for piece in pieces]
        (place,) = draw.choices(range(len(options)), weights)
        matcher.consume_token(options[place])
        text += pieces[place]
    return None


def _weight(piece: bytes, *, is_late: bool) -> float:
    """Return how likely a byte is: what ends values is likelier, white space and escapes rare."""
    if piece in (b'"', b"]", b"}"):
        return 12 if is_late else 4
    if not piece.isascii() or piece.isspace() or piece == b"\\":
        return 0.02
    return 0.3 if piece == b"," and is_late else 1


def _violations(schema: Any, text: bytes, name: str) -> list[str]:
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        error = next(iter(kind(schema).iter_errors(json.loads(text))), None)
    except ValueError as failure:
        return [f"{name}: {failure}"]
    except Exception:  # noqa: BLE001 - references and expressions that Python cannot follow
        return []
    return [] if error is None else [f"{name}: {error.message[:200]}"]


if __name__ == "__main__":
    sys.exit(main())
