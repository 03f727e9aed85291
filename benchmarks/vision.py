"""Measure chats with images.

``python -m benchmarks.vision`` makes a Qwen2.5-VL with random weights and serves it. It measures
the second question about an image against the first one, 32 clients with an image each against
one at a time and against one image for all, what images that arrive do to 16 text streams,
beside what text prompts of as many tokens do, and texts alone against the same model without a
tower. ``--shape 3B`` has the shape of Qwen2.5-VL-3B, for a GPU. ``--mlx-vlm`` also measures
mlx-vlm's server, with the same folder and images of the same size. Nothing is downloaded.
"""

from __future__ import annotations

import asyncio
import shlex
import statistics
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.checks import Check, conclude
from benchmarks.make_vision_model import SHAPES, image_part, make_vision_model, words
from benchmarks.measure import first_text_ms, make_client, make_parser, send_all, with_model
from benchmarks.servers import Server, mlx_parallm_server, mlx_vlm_server
from mlx_parallm.bench.load import open_loop
from mlx_parallm.bench.record import PlannedRequest, RequestRecord

# MOST_SECOND, LEAST_AT_ONCE, MOST_GAP, LEAST_TEXT: the targets.
MOST_SECOND, LEAST_AT_ONCE, MOST_GAP, LEAST_TEXT = 0.25, 6.0, 1.2, 0.99
# LEAST_OVER_VLM, MOST_TTFT_OVER_VLM: the targets beside mlx-vlm.
LEAST_OVER_VLM, MOST_TTFT_OVER_VLM = 2.0, 0.5
TOWER_RUNS = "vllm:image_tower_runs_total"
NUM_CLIENTS, NUM_STREAMS, NUM_ARRIVALS = 32, 16, 8
# ROUNDS_BEFORE: questions before those that are measured.
ROUNDS_BEFORE = 24
QUESTION, ANSWER = 16, 32
ROWS = ("texts", "turns", "clients", "streams")
Content = str | list[dict[str, Any]]


class Round(NamedTuple):
    """Figures of 32 clients with an image each."""

    tokens_per_s: float
    ttft_p99_ms: float
    prompt_tokens: int


class Chats:
    """Makes requests; every image and text of one is new."""

    def __init__(self, width: int, height: int) -> None:
        """``width`` and ``height`` are those of all images, in pixels."""
        self._size = width, height
        self._seeds = count(1)

    def text(self, num_tokens: int) -> str:
        """Return a text that no other request has."""
        return words(num_tokens, next(self._seeds))

    def image(self) -> dict[str, Any]:
        """Return an image that no other request has."""
        return image_part(*self._size, next(self._seeds))

    def asking(self, image: dict[str, Any]) -> Content:
        """Return a question about an image."""
        return [image, {"type": "text", "text": self.text(QUESTION)}]


def chat(index: int, contents: Sequence[Content], max_tokens: int) -> PlannedRequest:
    """Return a streamed chat whose turns have these contents, the user's first."""
    roles = ("user", "assistant")
    body = {
        "messages": [
            {"role": roles[turn % 2], "content": content} for turn, content in enumerate(contents)
        ],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return PlannedRequest(
        index=index, route="/v1/chat/completions", body=body, max_tokens=max_tokens
    )


def main() -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(model=None, repetitions=2)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--size", default="", help="of images: WIDTHxHEIGHT in pixels")
    parser.add_argument("--max-tokens", type=int, default=0, help="new tokens of an answer")
    parser.add_argument("--mlx-vlm", action="store_true", help="measure mlx-vlm too; it is needed")
    parser.add_argument(
        "--mlx-vlm-options", default="", help="flags of its server, in one argument"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="what is measured")
    parser.add_argument("--interval", type=float, default=0.3, help="between arrivals, seconds")
    args = parser.parse_args()
    is_tiny = args.shape == "tiny"
    width, height = map(int, (args.size or ("448x336" if is_tiny else "1024x768")).split("x"))
    args.max_tokens = args.max_tokens or (32 if is_tiny else 128)
    whole, text = make_vision_model(args.model or Path(f"results/vision_{args.shape}"), args.shape)
    options = shlex.split(args.server_options)
    chats = Chats(width, height)
    text_model_rate = 0.0
    checks: list[Check] = []
    peer = mlx_vlm_round(whole, chats, args) if args.mlx_vlm and "clients" in args.rows else None
    if "texts" in args.rows:
        with mlx_parallm_server(text, options) as server:
            text_model_rate = text_rate(server, chats, args)
    with mlx_parallm_server(whole, options) as server:
        if "texts" in args.rows:
            checks += texts_alone(text_model_rate, text_rate(server, chats, args))
        if "turns" in args.rows:
            checks += turns(server, chats, args)
        if "clients" in args.rows:
            checks += at_once(server, chats, args, peer)
        if "streams" in args.rows:
            checks += beside_streams(server, chats, args)
    return conclude(f"vision{'' if is_tiny else '_gpu'}", checks, {"size": [width, height]})


def texts_alone(text: float, vision: float) -> list[Check]:
    """Compare the tokens a second of the text model and of the model with a tower."""
    return [
        Check("texts alone, text model: tokens/s", text),
        Check("texts alone, vision model: tokens/s", vision),
        Check("texts alone, vision over text model", vision / text, ">=", LEAST_TEXT),
    ]


def text_rate(server: Server, chats: Chats, args: Namespace) -> float:
    """Return the tokens a second of 32 clients with texts; the first round warms up."""
    rates: list[float] = []
    for _ in range(args.repetitions + 1):
        requests = [
            chat(index, [chats.text(100)], args.max_tokens) for index in range(2 * NUM_CLIENTS)
        ]
        rates.append(rate(send_all(server, requests, NUM_CLIENTS)))
    return max(rates[1:])


def turns(server: Server, chats: Chats, args: Namespace) -> list[Check]:
    """Return times to the first token of first and second questions about an image.

    A server compiles steps of usual shapes in its first seconds; the first rounds last as long.
    """
    firsts: list[RequestRecord] = []
    seconds: list[RequestRecord] = []
    for _ in range(ROUNDS_BEFORE + 3 * args.repetitions):
        question = chats.asking(chats.image())
        (first,) = send_all(server, [chat(0, [question], 8)], 1)
        later = [question, chats.text(8), chats.text(QUESTION)]
        (second,) = send_all(server, [chat(0, later, 8)], 1)
        firsts.append(first)
        seconds.append(second)
    medians = [
        statistics.median(map(first_text_ms, records[ROUNDS_BEFORE:]))
        for records in (firsts, seconds)
    ]
    return [
        Check("tokens of an image's prompt", firsts[0].prompt_tokens),
        Check("first question: TTFT, ms", medians[0]),
        Check("second question: TTFT, ms", medians[1]),
        Check("second question over first", medians[1] / medians[0], "<=", MOST_SECOND),
    ]


def mlx_vlm_round(folder: Path, chats: Chats, args: Namespace) -> Round:
    """Return what 32 clients with an image each get of mlx-vlm's server, the better of rounds."""
    rounds: list[Round] = []
    with mlx_vlm_server(folder, shlex.split(args.mlx_vlm_options)) as server:
        send_all(server, apart(chats, args), NUM_CLIENTS)
        for _ in range(args.repetitions):
            records = send_all(server, apart(chats, args), NUM_CLIENTS)
            rounds.append(Round(rate(records), latest(records), records[0].prompt_tokens))
    return max(rounds)


def tower_runs(server: Server) -> float:
    """Return for how many images the server computed features so far."""
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(TOWER_RUNS))


def apart(chats: Chats, args: Namespace, number: int = NUM_CLIENTS) -> list[PlannedRequest]:
    """Return questions about as many images."""
    return [chat(index, [chats.asking(chats.image())], args.max_tokens) for index in range(number)]


def at_once(server: Server, chats: Chats, args: Namespace, peer: Round | None) -> list[Check]:
    """Return what 32 clients get with an image each, one after the other, and with one for all.

    ``peer`` is what they get of mlx-vlm; None if it is not measured.
    """
    send_all(server, apart(chats, args), NUM_CLIENTS)
    alone = send_all(server, apart(chats, args, 4), 1)
    rounds = [send_all(server, apart(chats, args), NUM_CLIENTS) for _ in range(args.repetitions)]
    own = max(Round(rate(each), latest(each), each[0].prompt_tokens) for each in rounds)
    before = tower_runs(server)
    image = chats.image()
    shared = [chat(i, [chats.asking(image)], args.max_tokens) for i in range(NUM_CLIENTS)]
    same = send_all(server, shared, NUM_CLIENTS)
    return [
        Check("one at a time: tokens/s", rate(alone)),
        Check("32 clients: tokens/s", own.tokens_per_s),
        Check("32 clients over one at a time", own.tokens_per_s / rate(alone), ">=", LEAST_AT_ONCE),
        Check("32 clients: TTFT p99, ms", own.ttft_p99_ms),
        Check("32 clients, one image: tokens/s", rate(same)),
        Check("32 clients, one image: TTFT p99, ms", latest(same)),
        Check("32 clients, one image: tower runs", tower_runs(server) - before, "<=", 1),
        *beside_mlx_vlm(own, peer),
    ]


def beside_mlx_vlm(own: Round, peer: Round | None) -> list[Check]:
    """Compare 32 clients with an image each with what they get of mlx-vlm."""
    if peer is None:
        return []
    over, ttft = own.tokens_per_s / peer.tokens_per_s, own.ttft_p99_ms / peer.ttft_p99_ms
    return [
        Check("32 clients, mlx-vlm: tokens of a prompt", peer.prompt_tokens),
        Check("32 clients, mlx-vlm: tokens/s", peer.tokens_per_s),
        Check("32 clients, mlx-vlm: TTFT p99, ms", peer.ttft_p99_ms),
        Check("32 clients over mlx-vlm", over, ">=", LEAST_OVER_VLM),
        Check("32 clients: TTFT p99 over mlx-vlm's", ttft, "<=", MOST_TTFT_OVER_VLM),
    ]


def beside_streams(server: Server, chats: Chats, args: Namespace) -> list[Check]:
    """Return the gaps of streams while prompts with images, and texts as long, arrive."""
    (example,) = send_all(server, [chat(0, [chats.asking(chats.image())], 1)], 1)
    gaps: dict[str, list[float]] = {"nothing": [], "texts": [], "images": []}
    for repetition in range(args.repetitions + 1):
        for name, own in gaps.items():
            contents: list[Content] = []
            if name == "texts":
                contents = [chats.text(example.prompt_tokens - 2) for _ in range(NUM_ARRIVALS)]
            if name == "images":
                contents = [chats.asking(chats.image()) for _ in range(NUM_ARRIVALS)]
            measured = asyncio.run(stream_gaps_ms(server, chats, contents, args))
            if repetition:
                own += measured
    p99 = {name: statistics.quantiles(own, n=100)[98] for name, own in gaps.items()}
    return [
        *(Check(f"streams beside {name}: gap p99, ms", value) for name, value in p99.items()),
        Check("gap p99 beside images over texts", p99["images"] / p99["texts"], "<=", MOST_GAP),
    ]


async def stream_gaps_ms(
    server: Server, chats: Chats, contents: Sequence[Content], args: Namespace
) -> list[float]:
    """Return the gaps of 16 streams while prompts of these contents arrive one after the other."""
    length = 3 * args.max_tokens
    streams = [chat(index, [chats.text(100)], length) for index in range(NUM_STREAMS)]
    arrivals = [
        replace(chat(NUM_STREAMS + index, [content], 1), arrival_s=args.interval * (index + 1))
        for index, content in enumerate(contents)
    ]
    requests = [with_model(each, server.model) for each in (*streams, *arrivals)]
    records = await open_loop(requests, make_client(server).send)
    failed = next((record.error for record in records if record.error), None)
    if failed:
        raise RuntimeError(failed)
    last = max((record.end_s for record in records[NUM_STREAMS:]), default=float("inf"))
    return [
        1000 * (after - before)
        for record in records[:NUM_STREAMS]
        for before, after in pairwise(record.chunk_times_s)
        if after <= last
    ]


def rate(records: Sequence[RequestRecord]) -> float:
    """Return the tokens a second of all requests together."""
    begin = min(record.start_s for record in records)
    end = max(record.end_s for record in records)
    return sum(record.output_tokens for record in records) / (end - begin)


def latest(records: Sequence[RequestRecord]) -> float:
    """Return the 99th percentile of times to the first token, in ms."""
    return statistics.quantiles(map(first_text_ms, records), n=100, method="inclusive")[98]


if __name__ == "__main__":
    raise SystemExit(main())
