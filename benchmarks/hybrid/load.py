"""Parts of ``benchmarks.hybrid``: more chats than snapshots, speculation, and steps of 32 rows."""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import tempfile
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checks import Check
from benchmarks.host_cost import HERE, step_times
from benchmarks.hybrid.chat import Answer, Chat, Chats, ask
from benchmarks.make_hybrid import make_hybrid, state_bytes, successors
from benchmarks.measure import load_tokenizer, send_all
from benchmarks.servers import Server, mlx_parallm_server, server_environment
from mlx_parallm.bench.record import PlannedRequest, RequestRecord
from mlx_parallm.peers import child_process

NUM_CHATS, NUM_SNAPSHOTS, NUM_TURNS = 64, 16, 8
SYSTEM_TOKENS, TURN_TOKENS = 256, 128
# STAY: probability that the next request is of one of the last chats.
STAY = 0.6
# MOST_ANEW: tokens computed over those that no cache of 16 chats could have saved.
MOST_ANEW = 1.5
COPY_PROMPT, COPY_ANSWER = 128, 96
# ERRORS: share of a copying prompt's tokens that are not those of its answer.
ERRORS = 0.05
# LEAST_WITHOUT: rate with speculation over that without, where there is nothing to copy.
LEAST_WITHOUT = 0.97
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4}
# ROWS, ROW_PROMPT, STEPS: of the part decode.
ROWS, ROW_PROMPT, STEPS = 32, 32, 100
# MOST_STEP: a step over one of the other checkout.
MOST_STEP = 1.01

Measured = tuple[list[Check], dict[str, Any]]


def chats_part(args: Namespace) -> Measured:
    """Count the tokens that are computed while memory has fewer snapshots than there are chats."""
    model = make_hybrid(args.model)
    chats = Chats(model)
    order = sessions(args.num_requests)
    talks: dict[int, Chat] = {}
    answers: list[Answer] = []
    limit = str(NUM_SNAPSHOTS * state_bytes())
    with mlx_parallm_server(model, ["--state-cache-memory", limit]) as server:
        for number in order:
            if number not in talks:
                talks[number] = chats.chat(
                    f"chats {number}", system_tokens=SYSTEM_TOKENS, turn_tokens=TURN_TOKENS
                )
            chat = talks[number]
            chat.begin_turn()
            answers.append(ask(server, chat.messages))
            chat.end_turn(answers[-1].text)
    sizes = [answer.prompt_tokens for answer in answers]
    computed = sum(answer.computed_tokens for answer in answers)
    least = tokens_computed(order, sizes, kept_by_optimum(order, NUM_SNAPSHOTS))
    latest = tokens_computed(order, sizes, kept_by_age(order, NUM_SNAPSHOTS))
    return [
        Check("64 chats, 16 snapshots: requests", len(order)),
        Check("64 chats, 16 snapshots: tokens of all prompts", sum(sizes)),
        Check("64 chats, 16 snapshots: tokens computed", computed),
        Check("64 chats: tokens that the best cache of 16 chats computes", least),
        Check("64 chats: those of one that drops the least recently used", latest),
        Check("64 chats: tokens computed over the best cache's", computed / least, "<=", MOST_ANEW),
    ], {"order": order, "answers": [asdict(answer) for answer in answers]}


def sessions(count: int) -> list[int]:
    """Return the chats of so many requests: most go on in a recent one, none has many turns."""
    draw = random.Random("sessions")
    left = dict.fromkeys(range(NUM_CHATS), NUM_TURNS)
    recent: deque[int] = deque(maxlen=NUM_SNAPSHOTS)
    order: list[int] = []
    while len(order) < count:
        open_chats = [chat for chat in left if left[chat]]
        lately = sorted(chat for chat in set(recent) if left[chat])
        stays = bool(lately) and draw.random() < STAY
        chat = draw.choice(lately if stays else open_chats)
        left[chat] -= 1
        recent.append(chat)
        order.append(chat)
    return order


def tokens_computed(order: Sequence[int], sizes: Sequence[int], kept: Sequence[bool]) -> int:
    """Return the tokens that are computed if each request finds its chat's last prompt, or not.

    Args:
        order: the chat of each request.
        sizes: tokens of its prompt.
        kept: True where its chat is in the cache.
    """
    total, last = 0, dict[int, int]()
    for chat, size, is_kept in zip(order, sizes, kept, strict=True):
        total += size - (last.get(chat, 0) if is_kept else 0)
        last[chat] = size
    return total


def kept_by_age(order: Sequence[int], room: int) -> list[bool]:
    """Return which requests find their chat if the least recently used one is dropped."""
    cached: list[int] = []
    kept: list[bool] = []
    for chat in order:
        kept.append(chat in cached)
        cached = [*(other for other in cached if other != chat), chat][-room:]
    return kept


def kept_by_optimum(order: Sequence[int], room: int) -> list[bool]:
    """Return which requests find their chat if the one that is asked last is dropped (Belady)."""
    cached: set[int] = set()
    kept: list[bool] = []
    for number, chat in enumerate(order):
        kept.append(chat in cached)
        cached.add(chat)
        if len(cached) > room:
            coming = order[number + 1 :]
            cached.remove(
                max(cached, key=lambda each: coming.index(each) if each in coming else len(order))
            )
    return kept


def speculation_part(args: Namespace) -> Measured:
    """Compare tokens/s of a server that speculates with those of one that does not."""
    model = make_hybrid(args.model.with_name(f"{args.model.name}_copies"), copies=True)
    texts = CopyingTexts(successors(load_tokenizer(model)))
    checks: list[Check] = []
    details: dict[str, Any] = {}
    options = ["--speculative-config", json.dumps(SPECULATIVE)]
    with mlx_parallm_server(model) as off, mlx_parallm_server(model, options) as on:
        for clients in (1, 16):
            for copies in (True, False):
                what = f"{'copying' if copies else 'nothing to copy'}, {clients} clients"
                pairs = _compare(off, on, texts, clients, copies, args.repetitions)
                checks += _speculation_checks(what, pairs, None if copies else LEAST_WITHOUT)
                details[what] = [[asdict(without), asdict(with_)] for without, with_ in pairs]
                print(f"{what}: {checks[-3].value:.3f}", flush=True)
    return checks, details


@dataclass(frozen=True, slots=True)
class Copied:
    """Answers of a server to requests that were sent at once.

    Attributes:
        tokens_per_s: see ``decode_rate``.
        processor_s: processor time of the server, prompts included.
        texts: the answers.
    """

    tokens_per_s: float
    processor_s: float
    texts: list[str]


def _speculation_checks(
    what: str, pairs: Sequence[tuple[Copied, Copied]], least: float | None
) -> list[Check]:
    """Return rates without and with speculation."""
    ratios = [with_.tokens_per_s / without.tokens_per_s for without, with_ in pairs]
    used = [with_.processor_s / without.processor_s for without, with_ in pairs]
    differ = sum(without.texts != with_.texts for without, with_ in pairs)
    without_s = statistics.median(without.tokens_per_s for without, _ in pairs)
    with_s = statistics.median(with_.tokens_per_s for _, with_ in pairs)
    return [
        Check(f"{what}: tokens/s without", without_s),
        Check(f"{what}: tokens/s with", with_s),
        Check(f"{what}: with over without", statistics.median(ratios), ">=", least),
        Check(f"{what}: processor time with over without", statistics.median(used)),
        Check(f"{what}: repetitions with other answers", differ, "==", 0),
    ]


class CopyingTexts:
    """Prompts for the model that copies."""

    def __init__(self, successor: Mapping[int, int]) -> None:
        self._random = random.Random("copies")
        self._tokens = list(successor)
        self._successor = successor

    def prompt(self, *, copies: bool) -> list[int]:
        """Return a text with errors, and its first token; unless ``copies``, in another order."""
        text = [self._random.choice(self._tokens)]
        while len(text) < COPY_PROMPT:
            text.append(self._successor[text[-1]])
        first = text[0]
        if not copies:
            self._random.shuffle(text)
        noisy = [
            self._random.choice(self._tokens) if self._random.random() < ERRORS else token
            for token in text
        ]
        return [*noisy, first]


def _compare(
    off: Server, on: Server, texts: CopyingTexts, clients: int, copies: bool, repetitions: int
) -> list[tuple[Copied, Copied]]:
    """Return what the server without speculation and the one with it did.

    Both get the same prompts, another one first each time; the first time is not counted.
    """
    pairs: list[tuple[Copied, Copied]] = []
    for number in range(repetitions + 1):
        requests = [_completion(index, texts.prompt(copies=copies)) for index in range(clients)]
        done: dict[str, Copied] = {}
        for server in (off, on) if number % 2 else (on, off):
            before_s = server.processor_s()
            records = send_all(server, requests, clients)
            used_s = server.processor_s() - before_s
            answers = [record.text for record in records]
            done[server.base_url] = Copied(decode_rate(records), used_s, answers)
        pairs.append((done[off.base_url], done[on.base_url]))
    return pairs[1:]


def _completion(index: int, prompt: Sequence[int]) -> PlannedRequest:
    body = {
        "prompt": prompt,
        "max_tokens": COPY_ANSWER,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return PlannedRequest(index=index, route="/v1/completions", body=body, max_tokens=COPY_ANSWER)


def decode_rate(records: Sequence[RequestRecord]) -> float:
    """Return tokens/s from the moment when all requests have a token to the end."""
    begin = max(record.chunk_times_s[0] for record in records)
    end = max(record.end_s for record in records)
    tokens = sum(
        count or 0
        for record in records
        for at_s, count in zip(record.chunk_times_s, record.chunk_tokens, strict=True)
        if at_s > begin
    )
    return tokens / (end - begin)


def decode_part(args: Namespace) -> Measured:
    """Compare steps of 32 rows that share nothing with those of another checkout."""
    model = make_hybrid(args.model).resolve()
    steps: dict[str, Callable[[Path], float]] = {
        "of the model": lambda tree: step_ms(tree, model),
        "without a model": host_ms,
    }
    trees = {"other": args.against.resolve(), "own": HERE}
    checks: list[Check] = []
    details: dict[str, Any] = {}
    for what, measure in steps.items():
        times: dict[str, list[float]] = {name: [] for name in trees}
        for number in range(args.repetitions):
            for name in list(trees) if number % 2 else reversed(trees):
                times[name].append(measure(trees[name]))
                print(f"{name}: a step {what} takes {times[name][-1]:.3f} ms", flush=True)
        ratios = [own / other for own, other in zip(times["own"], times["other"], strict=True)]
        least = min(times["own"]) / min(times["other"])
        about = f"{ROWS} rows, a step {what}"
        checks += [
            Check(f"{about}: the other, ms", min(times["other"])),
            Check(f"{about}: median ratio", statistics.median(ratios), "<=", MOST_STEP),
            Check(f"{about}: ratio of the least", least, "<=", MOST_STEP),
        ]
        details[what] = times
    return checks, details


def host_ms(tree: Path) -> float:
    """Return the milliseconds of a step of a runner that computes nothing, as a tree measures."""
    with tempfile.TemporaryDirectory() as folder:
        return step_times(tree, ["--rows", str(ROWS)], Path(folder))[str(ROWS)] / 1e3


def step_ms(tree: Path, model: Path) -> float:
    """Return the median milliseconds of a step, as a checkout's ``bench engine`` measures it."""
    command = ["mlx_parallm", "bench", "engine", "--model", str(model), "--batch-size", str(ROWS)]
    command += ["--prompt-tokens", str(ROW_PROMPT), "--steps", str(STEPS)]
    done = child_process.run(
        command,
        cwd=tree,
        env=server_environment() | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        text=True,
    )
    done.check_returncode()
    (row,) = re.findall(r"^step +(\S+)", done.stdout, re.MULTILINE)
    return float(row)
