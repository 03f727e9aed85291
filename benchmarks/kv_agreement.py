"""Measure how often quantised KV changes the likeliest next token of the embedded model.

``python -m benchmarks.kv_agreement``. Conversations of the tasks that the model was trained on, of
more than 256 tokens, are run token by token (every token is one decode row, which reads all before
it from the pool) with KV in the model's dtype, in 8 bits and in 4. The next token is always the
conversation's own. Compared are the likeliest tokens at the last 256 positions of each. Runs on
whatever backend is there: bfloat16 on a GPU, float32 on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from benchmarks.checks import Check, conclude
from demo.packing import encode_conversations
from mlx_parallm.config import KV_CACHE_DTYPES, CacheConfig, ModelConfig, SchedulerConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.models.checkpoints.decoder_sizes import query_heads
from mlx_parallm.types.step import ScheduledBatch, ScheduledSequence, TokenLogprob
from mlx_parallm.worker.attention.backend_choice import choose_backend
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.generation.cache_layout import kv_shapes, probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import at_once
from mlx_parallm.worker.weights.loader import load_model

COMPARED = 256
LEAST_AGREEMENT = 0.99
DRAWN_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation's tokens, and how many of them precede the assistant's text."""

    token_ids: list[int]
    prompt_len: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="of the model; bfloat16 on a GPU, else float32")
    args = parser.parse_args()
    dtype = args.dtype or ("float32" if backend_name() == "cpu" else "bfloat16")
    texts = draw_conversations(args.num_prompts, args.seed)
    results = {name: Scored(name, dtype, texts) for name in KV_CACHE_DTYPES}
    exact = results["auto"]
    checks = [Check(f"tokens compared ({dtype}, {exact.backend})", COMPARED * len(texts))]
    if dtype != "float32":
        # This shows the effect of rounding without quantised KV, which bounds the figures below.
        finest = Scored("auto", "float32", texts)
        checks += [
            Check(f"{dtype}: same likeliest token as float32", agreement(finest, exact)),
            Check(f"{dtype}: mean change of a log-probability", mean_change(finest, exact)),
        ]
    for name in KV_CACHE_DTYPES[1:]:
        scored = results[name]
        limit = LEAST_AGREEMENT if name == "int8" else None
        checks += [
            Check(f"{name}: same likeliest token", agreement(exact, scored), ">=", limit),
            Check(f"{name}: same likeliest token, worst prompt", least_agreement(exact, scored)),
            Check(
                f"{name}: same likeliest token, assistant turns only",
                agreement(exact, scored, texts),
            ),
            Check(f"{name}: mean change of a log-probability", mean_change(exact, scored)),
            Check(f"{name}: KV bytes per token, relative to auto", scored.bytes / exact.bytes),
        ]
    details = {
        name: {"backend": result.backend, "dtype": dtype} for name, result in results.items()
    }
    return conclude("kv_agreement", checks, details)


def draw_conversations(count: int, seed: int) -> list[Conversation]:
    """Return ``count`` conversations of more than ``COMPARED`` tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    conversations: list[Conversation] = []
    while len(conversations) < count:
        pairs = encode_conversations(tokenizer, DRAWN_AT_ONCE, seed)
        conversations += [Conversation(*pair) for pair in pairs if len(pair[0]) > COMPARED]
        seed += 1
    return conversations[:count]


class Scored:
    """The model's scores of texts with one kind of KV.

    Attributes:
        backend: the attention backend used.
        bytes: size of a block of KV.
        entries: per text, one per token but the first: the token's log-probability, and the
            likeliest token.
    """

    def __init__(self, kv_cache_dtype: str, dtype: str, texts: Sequence[Conversation]) -> None:
        runner, self.bytes = embedded_runner(kv_cache_dtype, dtype, texts)
        self.backend = runner.info.attention_backend
        self.entries: list[list[TokenLogprob]] = [[] for _ in texts]
        longest = max(len(text.token_ids) for text in texts)
        width = -(-longest // runner.info.block_size)
        for start in range(longest - 1):
            rows = [
                ScheduledSequence(
                    seq_id=index,
                    slot=index,
                    start=start,
                    token_ids=(text.token_ids[start],),
                    target_ids=(text.token_ids[start + 1],),
                    prompt_logprobs=1,
                    block_table=tuple(range(index * width, (index + 1) * width)),
                )
                for index, text in enumerate(texts)
                if start + 1 < len(text.token_ids)
            ]
            output = runner.run(ScheduledBatch(step_id=start, sequences=tuple(rows)))
            for index, entries in output.prompt_logprobs.items():
                self.entries[index] += entries

    def likeliest(self, index: int) -> list[int]:
        """Return the likeliest token at each compared position of a text."""
        return [entry.top[0][0] for entry in self.entries[index][-COMPARED:]]


def embedded_runner(
    kv_cache_dtype: str, dtype: str, texts: Sequence[Conversation]
) -> tuple[ModelRunner, int]:
    """Return a runner of the embedded model with KV for all texts, and the bytes of a block."""
    loaded = load_model(ModelConfig(dtype=dtype), DEMO_FOLDER)
    layouts = probe_layout(loaded.model)
    cache = CacheConfig(kv_cache_dtype=kv_cache_dtype)
    backend = choose_backend(cache, kv_shapes(layouts), query_heads(loaded.config)).backend
    longest = max(len(text.token_ids) for text in texts)
    scheduler = SchedulerConfig(max_num_seqs=len(texts))
    plan = plan_kv(layouts, loaded.config, cache, scheduler, longest, backend)
    runner = at_once(make_runner)(loaded, layouts, plan, plan.wanted_blocks, backend)[0]
    return runner, plan.block_bytes


def agreement(
    exact: Scored, scored: Scored, answers_of: Sequence[Conversation] | None = None
) -> float:
    """Return the share of compared positions, or of answers', with the same likeliest token."""
    same: list[bool] = []
    for index in range(len(exact.entries)):
        pairs = zip(exact.likeliest(index), scored.likeliest(index), strict=True)
        equal = [token == other for token, other in pairs]
        if answers_of is not None:
            text = answers_of[index]
            equal = equal[-(len(text.token_ids) - text.prompt_len) :]
        same += equal
    return statistics.fmean(same)


def least_agreement(exact: Scored, scored: Scored) -> float:
    """Return the lowest share of a text."""
    shares = []
    for index in range(len(exact.entries)):
        pairs = zip(exact.likeliest(index), scored.likeliest(index), strict=True)
        shares.append(statistics.fmean(token == other for token, other in pairs))
    return min(shares)


def mean_change(exact: Scored, scored: Scored) -> float:
    """Return the mean absolute change of the log-probability of the texts' own tokens."""
    return statistics.fmean(
        abs(own.logprob - other.logprob)
        for mine, others in zip(exact.entries, scored.entries, strict=True)
        for own, other in zip(mine[-COMPARED:], others[-COMPARED:], strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
