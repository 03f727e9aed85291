"""``mlx_parallm doctor --engines``: how many engines of a model pay on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from mlx_parallm.config import EngineConfig
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.machine import num_processors, visible_devices
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.parallel_engines import parallel_life, spawned_life
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.units import readable_bytes

NUM_STREAMS = 32
# NUM_TOKENS: tokens of each prompt, and of each answer.
NUM_TOKENS = 64
# NUM_ROUNDS: the fastest of them counts, because other programs only make a round slower.
NUM_ROUNDS = 3
# MIN_GAIN: more engines must generate so many times the tokens of fewer.
MIN_GAIN = 1.1
ACTIVE_BYTES = re.compile(r"^mlx_parallm:active_memory_bytes(?:\{.*\})? (\S+)$", re.MULTILINE)

# MAC_WARNING: https://github.com/ml-explore/mlx/issues/3186 and the threads that it links.
MAC_WARNING = (
    "several engines on one Mac each hold a copy of the weights in the memory that its programs "
    "share, and macOS was reported to crash while several processes used its GPU."
)

#: Measures so many engines.
Measure = Callable[[int], "EngineCount"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCount:
    """The measurement of one number of engines.

    Attributes:
        engines: how many.
        tokens_per_s: generated tokens of all streams per second.
        memory_bytes: the arrays of all engines: weights, KV and work space.
        problem: why so many engines cannot be started; None if they were measured.
    """

    engines: int
    tokens_per_s: float = 0.0
    memory_bytes: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAdvice:
    """The measurements, and the number of engines to use.

    Attributes:
        model: the measured model's name.
        streams: how many requests ran at once.
        tokens: tokens of each prompt, and of each answer.
        rows: what was measured, by the number of engines.
        recommended: the number of engines; None if none could be measured.
        flags: the flags of ``serve`` for it.
        warning: what speaks against several engines on this machine; None if nothing does.
    """

    model: str
    streams: int
    tokens: int
    rows: tuple[EngineCount, ...]
    recommended: int | None
    flags: str
    warning: str | None = None


def run(engine_config: EngineConfig, server_config: ServerConfig, *, as_json: bool) -> int:
    """Measure, print a table and a recommendation; return 1 if no engine could be measured."""
    gpus = visible_devices(os.environ)
    counts = candidates(len(gpus), num_processors(), sys.platform)
    warning = MAC_WARNING if sys.platform == "darwin" else None
    if warning and not as_json:
        print(f"warning: {warning}", file=sys.stderr)

    def measure(count: int) -> EngineCount:
        config = with_count(server_config, count, len(gpus))
        if not as_json:
            print(f"measuring {count} of up to {counts[-1]} engines", file=sys.stderr)
        return measured(engine_config, config)

    rows = tuple(rows_while_faster(counts, measure))
    best = recommended(rows)
    advice = EngineAdvice(
        model=engine_config.models[0].path or "mlx-parallm-demo",
        streams=NUM_STREAMS,
        tokens=NUM_TOKENS,
        rows=rows,
        recommended=best,
        flags="" if best is None else flags_of(with_count(server_config, best, len(gpus))),
        warning=warning,
    )
    print(json.dumps(asdict(advice), indent=2) if as_json else "\n".join(render(advice)))
    return int(best is None)


def candidates(num_gpus: int, num_cores: int, system: str) -> list[int]:
    """Return the numbers of engines to measure, ascending.

    Two engines may share one GPU, so that one prepares steps while the other computes.
    """
    has_gpu = num_gpus > 0 or system == "darwin"
    most = max(2, num_gpus) if has_gpu else num_cores
    doubled = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*doubled, most]


def with_count(config: ServerConfig, count: int, num_gpus: int) -> ServerConfig:
    """Return the settings of a server with so many engines; those beyond the GPUs share them."""
    is_shared = 0 < num_gpus < count
    devices = tuple(str(rank % num_gpus) for rank in range(count)) if is_shared else ()
    return replace(
        config,
        data_parallel_size=count,
        data_parallel_devices=devices,
        engines=(),
        log_level="warning",
    )


def flags_of(config: ServerConfig) -> str:
    """Return the flags of ``serve`` for the engines of a configuration."""
    flags = f"--data-parallel-size {config.data_parallel_size}"
    if config.data_parallel_devices:
        flags += f" --data-parallel-devices {' '.join(config.data_parallel_devices)}"
    return flags


def rows_while_faster(counts: Sequence[int], measure: Measure) -> Iterator[EngineCount]:
    """Yield measurements of ascending numbers of engines, up to the first that is no gain."""
    best = 0.0
    for count in counts:
        row = measure(count)
        yield row
        if row.problem is not None or row.tokens_per_s < MIN_GAIN * best:
            return
        best = row.tokens_per_s


def recommended(rows: Sequence[EngineCount]) -> int | None:
    """Return the fewest engines whose rate is not exceeded by ``MIN_GAIN``; None without a rate."""
    rates = {row.engines: row.tokens_per_s for row in rows if row.problem is None}
    return next(
        (count for count, rate in rates.items() if rate * MIN_GAIN >= max(rates.values())), None
    )


def measured(engine_config: EngineConfig, server_config: ServerConfig) -> EngineCount:
    """Return what the engines of a configuration do; they have ended afterwards."""
    count = server_config.data_parallel_size
    try:
        engine = _engines(engine_config, server_config)
        engine.start()
    except ParallmError as problem:
        return EngineCount(engines=count, problem=str(problem))
    try:
        rate, memory_bytes = asyncio.run(_measure(engine))
    except ParallmError as problem:
        return EngineCount(engines=count, problem=str(problem))
    finally:
        engine.stop()
    return EngineCount(engines=count, tokens_per_s=round(rate, 1), memory_bytes=memory_bytes)


def _engines(engine_config: EngineConfig, server_config: ServerConfig) -> AsyncEngine:
    if server_config.data_parallel_size > 1:
        life = parallel_life(engine_config, server_config, _ignore)
    else:
        life = spawned_life(engine_config, server_config, _ignore)
    return AsyncEngine(engine_config, life=life)


async def _measure(engine: AsyncEngine) -> tuple[float, int]:
    """Return the tokens per second of the fastest round, and the bytes of all arrays."""
    model = GENERATION.client(engine).first_model()
    chance = random.Random(0)
    rates: list[float] = []
    # Round 0 compiles kernels, and does not count.
    for number in range(NUM_ROUNDS + 1):
        requests = [_request(model, f"{number}-{index}", chance) for index in range(NUM_STREAMS)]
        start_s = time.perf_counter()
        counts = await asyncio.gather(*(_count_tokens(engine, request) for request in requests))
        rates.append(sum(counts) / (time.perf_counter() - start_s))
    text, _ = await engine.render_metrics()
    memory_bytes = sum(float(value) for value in ACTIVE_BYTES.findall(text.decode()))
    return max(rates[1:]), int(memory_bytes)


def _request(model: GenerationModel, name: str, chance: random.Random) -> GenerateRequest:
    """Return a request with a random prompt, which is in no cache."""
    length = min(NUM_TOKENS, model.info.max_model_len // 2)
    return GenerateRequest(
        request_id=name,
        model=model.names[0],
        prompt_ids=tuple(chance.randrange(model.info.vocab_size) for _ in range(length)),
        params=SamplingParams(temperature=0, max_tokens=length, ignore_eos=True),
    )


async def _count_tokens(engine: AsyncEngine, request: GenerateRequest) -> int:
    handle, count = await GENERATION.client(engine).submit(request), 0
    async for event in handle.events:
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, TokenEvent):
            count += len(event.token_ids)
    return count


def render(advice: EngineAdvice) -> list[str]:
    """Return the advice as lines of text."""
    lines = [
        f"{advice.model}: {advice.streams} streams, each {advice.tokens} prompt tokens and "
        f"{advice.tokens} generated tokens",
        "",
        f"{'engines':>7}  {'tokens/s':>9}  {'of one':>6}  {'memory':>10}",
    ]
    first = advice.rows[0].tokens_per_s
    for row in advice.rows:
        if row.problem is not None:
            lines.append(f"{row.engines:>7}  {row.problem}")
            continue
        memory = readable_bytes(row.memory_bytes)
        share = row.tokens_per_s / first
        lines.append(f"{row.engines:>7}  {row.tokens_per_s:>9,.0f}  {share:>6.2f}  {memory:>10}")
    advised = advice.flags or "none: no engine could be started"
    warnings = [f"warning: {advice.warning}"] if advice.warning else []
    return [*lines, "", *warnings, f"recommended: {advised}"]


def _ignore(_text: str, _share: float) -> None:
    """Show no progress of the load: the table is what counts."""
