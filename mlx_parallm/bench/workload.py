"""The generator of a benchmark's requests; equal seeds give equal requests."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_parallm.bench.images import DEFAULT_SIZE, ImageSize, random_image_url
from mlx_parallm.bench.record import PlannedRequest

Endpoint = Literal["chat", "completions"]
ROUTES: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
ONSETS = ("b", "br", "d", "dr", "f", "g", "gl", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t")
NUCLEI = ("a", "e", "i", "o", "u", "ai", "ou")
CODAS = ("", "", "n", "r", "s", "l")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers ≥ 1.

    Attributes:
        kind: "fixed" (``low``), "uniform" (``low`` to ``high``, both included) or "lognormal"
            (median ``low``, 99th percentile ``high``).
        low: see ``kind``.
        high: see ``kind``.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse ``64``, ``uniform:32,96`` or ``lognormal:64,512``.

        Raises:
            ValueError: the text has none of these forms.
        """
        kind, separator, numbers = text.rpartition(":")
        if not separator:
            return cls("fixed", _positive(numbers), _positive(numbers))
        low, _, high = numbers.partition(",")
        bounds = _positive(low), _positive(high)
        if bounds[0] > bounds[1]:
            raise ValueError(f"{text!r}: the first number exceeds the second")
        if kind == "uniform":
            return cls("uniform", *bounds)
        if kind == "lognormal":
            return cls("lognormal", *bounds)
        raise ValueError(f"{text!r} is none of N, uniform:LOW,HIGH and lognormal:MEDIAN,P99")

    def __str__(self) -> str:
        """Return the text that parses to this."""
        return str(self.low) if self.kind == "fixed" else f"{self.kind}:{self.low},{self.high}"

    def draw(self, source: random.Random) -> int:
        """Return one number."""
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            return source.randint(self.low, self.high)
        # The 99th percentile of a normal distribution is 2.3263 standard deviations above the mean.
        sigma = math.log(self.high / self.low) / 2.3263
        return max(1, round(source.lognormvariate(math.log(self.low), sigma)))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{text!r} is not positive")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests to send to a server.

    Attributes:
        model: the model's name; None leaves the field out.
        prompt_lengths: lengths of prompts, in words or token ids, without the shared prefix.
        output_lengths: values of ``max_tokens``.
        words: the words of prompts if ``token_ids`` is None.
        token_ids: the range of ids in prompts; completions only.
        shared_prefix_length: number of words or ids with which every prompt begins.
        seed_requests: give request i the seed ``seed + i``.
        num_images: random images of each request, before its text; chat only.
        image_size: their width and height.
        num_distinct_images: how many images there are in all, which requests take in turn; None:
            every image is shown once.
        rate: mean arrivals per second of a Poisson process; None is a closed loop.
        extra: further fields of every body, such as ``{"ignore_eos": True}``.
    """

    endpoint: Endpoint = "completions"
    model: str | None = None
    num_requests: int
    prompt_lengths: Lengths
    output_lengths: Lengths
    words: Sequence[str] = ()
    token_ids: range | None = None
    shared_prefix_length: int = 0
    temperature: float = 0.0
    seed_requests: bool = False
    seed: int = 0
    num_images: int = 0
    image_size: ImageSize = DEFAULT_SIZE
    num_distinct_images: int | None = None
    rate: float | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


def plan_requests(workload: Workload) -> list[PlannedRequest]:
    """Return the workload's requests in the order they are sent.

    Raises:
        ValueError: the chat endpoint was combined with token ids, or another one with images.
    """
    if workload.token_ids is not None and workload.endpoint == "chat":
        raise ValueError("chat takes text, not token ids")
    if workload.num_images and workload.endpoint != "chat":
        raise ValueError("images need the endpoint chat")
    source = random.Random(workload.seed)
    images = _images(workload)
    prefix = _draw_units(workload, workload.shared_prefix_length, source)
    arrival_s = 0.0
    requests: list[PlannedRequest] = []
    for index in range(workload.num_requests):
        units = prefix + _draw_units(workload, workload.prompt_lengths.draw(source), source)
        max_tokens = workload.output_lengths.draw(source)
        requests.append(
            PlannedRequest(
                index=index,
                route=ROUTES[workload.endpoint],
                body=_body(workload, index, units, max_tokens, images),
                max_tokens=max_tokens,
                arrival_s=arrival_s,
            )
        )
        arrival_s += source.expovariate(workload.rate) if workload.rate else 0.0
    return requests


def _draw_units(workload: Workload, length: int, source: random.Random) -> list[Any]:
    return source.choices(workload.token_ids or workload.words, k=length)


def _images(workload: Workload) -> Iterator[str]:
    """Yield the URL of each image, without end."""
    # A seed of their own keeps the texts equal with and without images.
    source = random.Random(f"pictures {workload.seed}")
    if workload.num_distinct_images is not None:
        kept = [
            random_image_url(source, workload.image_size)
            for _ in range(workload.num_distinct_images)
        ]
        yield from itertools.cycle(kept)
    while True:
        yield random_image_url(source, workload.image_size)


def _content(prompt: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    if not images:
        return prompt
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return [*parts, {"type": "text", "text": prompt}]


def _body(
    workload: Workload, index: int, units: list[Any], max_tokens: int, images: Iterator[str]
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": workload.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if workload.model is not None:
        body["model"] = workload.model
    if workload.seed_requests:
        body["seed"] = workload.seed + index
    prompt = units if workload.token_ids is not None else " ".join(units)
    if workload.endpoint == "chat":
        content = _content(str(prompt), list(itertools.islice(images, workload.num_images)))
        body["messages"] = [{"role": "user", "content": content}]
    else:
        body["prompt"] = prompt
    return body | workload.extra


def make_lexicon(size: int, seed: int) -> list[str]:
    """Return ``size`` different words of two or three syllables.

    Raises:
        ValueError: ``size`` is not between 1 and 50000.
    """
    if not 0 < size <= 50_000:
        raise ValueError(f"a lexicon has between 1 and 50000 words, not {size}")
    draw = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < size:
        words["".join(_syllable(draw) for _ in range(draw.choice((2, 2, 3))))] = None
    return list(words)


def _syllable(draw: random.Random) -> str:
    return draw.choice(ONSETS) + draw.choice(NUCLEI) + draw.choice(CODAS)
