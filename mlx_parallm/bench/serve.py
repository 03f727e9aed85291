"""The command ``mlx_parallm bench serve``, which loads a running OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlx_parallm.bench.arguments import (
    FlagGroup,
    header,
    image_size,
    lengths,
    not_negative,
    not_negative_number,
    output_file,
    positive,
    positive_number,
)
from mlx_parallm.bench.client import LoadClient
from mlx_parallm.bench.engine_shares import (
    EngineShare,
    engine_shares,
    format_shares,
    read_counts,
)
from mlx_parallm.bench.http_stream import ResponseError, Target
from mlx_parallm.bench.images import DEFAULT_SIZE
from mlx_parallm.bench.load import closed_loop
from mlx_parallm.bench.process_usage import (
    ProcessCost,
    client_cost,
    format_costs,
    process_costs,
    read_usage,
)
from mlx_parallm.bench.processes import Load, send_by_processes
from mlx_parallm.bench.record import RequestRecord
from mlx_parallm.bench.report import (
    format_errors,
    format_short_outputs,
    format_table,
    to_json,
)
from mlx_parallm.bench.statistics import summarise
from mlx_parallm.bench.workload import Workload, make_lexicon, plan_requests
from mlx_parallm.types.errors import ConfigError

LEXICON_SIZE = 3000
LEXICON_SEED = 7
DEFAULT_CONCURRENCY = 32
LENGTHS_HELP = "N, uniform:LOW,HIGH or lognormal:MEDIAN,P99"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``mlx_parallm bench serve``."""
    _add_target_arguments(parser.add_argument_group("the server"))
    _add_workload_arguments(parser.add_argument_group("the requests"))
    _add_load_arguments(parser.add_argument_group("the load"))
    _add_result_arguments(parser.add_argument_group("the results"))


def _add_target_arguments(group: FlagGroup) -> None:
    group.add_argument(
        "--base-url",
        "--url",
        default="http://127.0.0.1:8000",
        help="of the server, with or without /v1 (default: %(default)s)",
    )
    group.add_argument("--model", help="default: the first in GET /v1/models")
    group.add_argument("--api-key", help="sent as a bearer token")
    group.add_argument(
        "--header",
        type=header,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="sent with each request, such as X-data-parallel-rank=1, which chooses the engine",
    )
    group.add_argument("--endpoint", choices=["chat", "completions"], default="completions")
    group.add_argument("--timeout-s", type=positive_number, default=600.0, help="per request")


def _add_workload_arguments(group: FlagGroup) -> None:
    group.add_argument("--num-requests", type=positive, default=128)
    group.add_argument(
        "--prompt-lengths", type=lengths, default="uniform:50,150", help=LENGTHS_HELP
    )
    group.add_argument("--output-lengths", type=lengths, default="uniform:32,96", help=LENGTHS_HELP)
    group.add_argument(
        "--token-ids",
        type=positive,
        metavar="VOCAB_SIZE",
        help="make prompts of random token ids below this instead of words (completions only)",
    )
    group.add_argument(
        "--shared-prefix-tokens",
        type=not_negative,
        default=0,
        help="words (or ids, with --token-ids) that all prompts begin with",
    )
    group.add_argument(
        "--images",
        type=not_negative,
        default=0,
        metavar="N",
        help="random images in each request, with --endpoint chat",
    )
    group.add_argument(
        "--image-size",
        type=image_size,
        default=str(DEFAULT_SIZE),
        metavar="WIDTHxHEIGHT",
        help="of these images (default: %(default)s)",
    )
    group.add_argument(
        "--distinct-images",
        type=positive,
        metavar="N",
        help="images in all, which requests take in turn (default: every image is new)",
    )
    group.add_argument("--temperature", type=not_negative_number, default=0.0)
    group.add_argument(
        "--seed-requests", action="store_true", help="give each request a seed of its own"
    )
    group.add_argument("--ignore-eos", action="store_true", help="always run to max_tokens")
    group.add_argument("--seed", type=int, default=0, help="seed of the workload")


def _add_load_arguments(group: FlagGroup) -> None:
    group.add_argument(
        "--concurrency",
        type=positive,
        help=f"clients of a closed loop (default {DEFAULT_CONCURRENCY}), or a cap on --rate",
    )
    group.add_argument(
        "--rate", type=positive_number, help="open loop: requests per second, a Poisson process"
    )
    group.add_argument(
        "--ramp-s",
        type=not_negative_number,
        default=0.5,
        help="closed loop: seconds over which the clients start",
    )
    group.add_argument(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="processes that share clients and requests: one is the limit of fast servers",
    )
    group.add_argument(
        "--num-warmups", type=not_negative, default=4, help="requests before the measurement"
    )


def _add_result_arguments(group: FlagGroup) -> None:
    group.add_argument("--output", type=output_file, help="write everything to this JSON file")
    group.add_argument("--plot", type=output_file, help="draw a plot (needs the extra 'plot')")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; return 1 if a request failed, else 0.

    Raises:
        ConfigError: a flag's value is invalid, or the server cannot be reached.
    """
    try:
        outcome = _measure(_load(args), args)
    except (OSError, ValueError, ResponseError) as error:
        raise ConfigError(f"cannot measure {args.base_url}: {error}") from error
    records = outcome.records
    summary = summarise(records)
    print(format_table(summary))
    print("\n" + format_costs(outcome.costs))
    if outcome.shares:
        print("\n" + format_shares(outcome.shares))
    if note := format_short_outputs(records, ignores_eos=args.ignore_eos):
        print(note, file=sys.stderr)
    if args.output:
        content = to_json(_settings(args), summary, records)
        content["engines"] = [asdict(share) for share in outcome.shares]
        content["processes"] = [asdict(cost) for cost in outcome.costs]
        args.output.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot:
        _plot(records, args)
    if summary.num_failed:
        print(format_errors(records), file=sys.stderr)
    return 1 if summary.num_failed else 0


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The measurements of a run.

    Attributes:
        records: of each request.
        shares: what each of several engines did; empty if there are not several.
        costs: what the processes of the server, if it reports that, and the load client used.
    """

    records: list[RequestRecord]
    shares: list[EngineShare]
    costs: list[ProcessCost]


def _measure(load: Load, args: argparse.Namespace) -> _Outcome:
    load, before = asyncio.run(_begin(load, args))
    began_cpu_s = client_cost().cpu_s
    if args.processes > 1:
        records = send_by_processes(load, args.processes)
    else:
        records = asyncio.run(load.send())
    own = client_cost(began_cpu_s)
    after = asyncio.run(_metrics(load.client))
    return _Outcome(
        records,
        engine_shares(read_counts(before), read_counts(after)),
        [*process_costs(read_usage(before), read_usage(after)), own],
    )


async def _begin(load: Load, args: argparse.Namespace) -> tuple[Load, str]:
    """Warm the server up; return the load with its requests, and the metrics before it."""
    client = load.client
    model = args.model or await _first_model(client)
    warmups = plan_requests(make_workload(args, model, is_warmup=True))
    await closed_loop(warmups, client.send, concurrency=max(1, len(warmups)))
    requests = plan_requests(make_workload(args, model))
    return replace(load, requests=requests), await _metrics(client)


def _load(args: argparse.Namespace) -> Load:
    """Return the load of the flags, without its requests."""
    concurrency = DEFAULT_CONCURRENCY if not args.rate else None
    return Load(
        target=Target.from_url(args.base_url),
        requests=(),
        concurrency=args.concurrency or concurrency,
        is_open=bool(args.rate),
        ramp_s=args.ramp_s,
        timeout_s=args.timeout_s,
        api_key=args.api_key,
        headers=dict(args.header),
    )


async def _metrics(client: LoadClient) -> str:
    """Return the server's metrics; empty if it has none."""
    try:
        return await client.get_text("/metrics")
    except (OSError, ResponseError):
        return ""


async def _first_model(client: LoadClient) -> str | None:
    """Return the first model's name; None, which leaves the field out, if there is none."""
    try:
        models = (await client.get_json("/v1/models")).get("data")
    except (ResponseError, ValueError):
        return None
    return models[0]["id"] if models else None


def make_workload(
    args: argparse.Namespace, model: str | None, *, is_warmup: bool = False
) -> Workload:
    """Return the workload of the flags; a warm-up has other prompts of the same kind."""
    return Workload(
        endpoint=args.endpoint,
        model=model,
        num_requests=args.num_warmups if is_warmup else args.num_requests,
        prompt_lengths=args.prompt_lengths,
        output_lengths=args.output_lengths,
        words=make_lexicon(LEXICON_SIZE, LEXICON_SEED),
        token_ids=range(args.token_ids) if args.token_ids else None,
        shared_prefix_length=args.shared_prefix_tokens,
        num_images=args.images,
        image_size=args.image_size,
        num_distinct_images=args.distinct_images,
        temperature=args.temperature,
        seed_requests=args.seed_requests,
        seed=args.seed - 1 if is_warmup else args.seed,
        rate=args.rate,
        extra={"ignore_eos": True} if args.ignore_eos else {},
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    hidden = {"api_key", "header", "output", "plot"}
    return {
        name: value if isinstance(value, int | float | None) else str(value)
        for name, value in vars(args).items()
        if name not in hidden and not callable(value)
    }


def _plot(records: Sequence[RequestRecord], args: argparse.Namespace) -> None:
    # matplotlib is optional: only the flag that needs it loads it.
    try:
        plot = importlib.import_module("mlx_parallm.bench.plot")
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'mlx-parallm[plot]'") from error
    plot.plot_run(records, args.plot, args.base_url)
