"""Measure chats of a hybrid model: prefixes that are found again, evicted, and proposed from.

``python -m benchmarks.hybrid``, with a model of Qwen3.5's shape that ``benchmarks.make_hybrid``
makes. Its parts, all by default:

- ``turns``: chats of 8 turns of 500 tokens over a system prompt of 4,000, by a server with the
  prefix cache, by one without it, and by ``mlx_lm.server``; each turn is asked of all of them.
- ``kill``: the same by a server with ``--kv-disk`` that is killed with SIGKILL and started anew
  before each turn.
- ``chats``: 64 chats in sessions that overlap, while memory has room for 16 snapshots of states.
- ``speculation``: a model that copies, by a server with ``--speculative-config`` and by one
  without, for 1 and 16 clients; prompts have the answer in them, with some errors, or do not.

``--against TREE`` adds the part ``decode``: steps of 32 rows, of the model and without one, in this
checkout and in another one, in turns. ``--mlx-vlm PYTHON`` adds its server to ``turns``, run by a
Python that has it.

Answers are greedy and in float32, so texts are compared too. Times of a busy machine vary, so
processor time of the server until the first token stands beside them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checks import Check, conclude
from benchmarks.host_cost import HERE
from benchmarks.hybrid.chat import (
    Answer,
    Chat,
    Chats,
    ask,
    computed_share,
    median_ms,
    ratio,
    used_ratio,
)
from benchmarks.hybrid.load import chats_part, decode_part, speculation_part
from benchmarks.make_hybrid import make_hybrid
from benchmarks.servers import (
    Server,
    ServerError,
    mlx_lm_server,
    mlx_parallm_server,
    mlx_vlm_server,
)
from mlx_parallm.peers import child_process

# MOST_CACHED, MOST_KILLED: time to the first token of a later turn over that of a cold one.
MOST_CACHED, MOST_KILLED = 0.15, 0.2
# SETTLE_S: seconds in which an idle server writes what it has to write.
SETTLE_S = 3.0
COLD = "cold"

Measured = tuple[list[Check], dict[str, Any]]
Part = Callable[[Namespace], Measured]


def main() -> int:
    args = make_parser().parse_args()
    names = [*args.parts, *(["decode"] if args.against else [])]
    checks: list[Check] = []
    details: dict[str, Any] = {}
    for name in names:
        try:
            measured, details[name] = PARTS[name](args)
        except ServerError as refused:
            print(f"{name}: not available: {refused}", flush=True)
            details[name] = {"not available": str(refused)}
            continue
        checks += measured
    return conclude("hybrid", checks, details)


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m benchmarks.hybrid",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    usual = [name for name in PARTS if name != "decode"]
    parser.add_argument("--parts", nargs="*", default=usual, choices=usual)
    parser.add_argument(
        "--model", type=Path, default=Path("results/hybrid"), help="made if missing"
    )
    parser.add_argument("--num-chats", type=int, default=2, help="of the part turns")
    parser.add_argument("--num-turns", type=int, default=8)
    parser.add_argument("--system-tokens", type=int, default=4000)
    parser.add_argument("--turn-tokens", type=int, default=500)
    parser.add_argument("--num-requests", type=int, default=512, help="of 64 chats")
    parser.add_argument("--repetitions", type=int, default=5, help="of speculation and decode")
    parser.add_argument("--mlx-vlm", type=Path, metavar="PYTHON", help="measure mlx-vlm too")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another checkout")
    parser.add_argument("--folder", type=Path, help="parent of the store's folder")
    return parser


def turns_part(args: Namespace) -> Measured:
    """Compare turns of chats whose earlier turns are cached with the same ones without a cache."""
    model = make_hybrid(args.model)
    chats = Chats(model)
    with ExitStack() as stack:
        servers = {
            "own": stack.enter_context(mlx_parallm_server(model)),
            COLD: stack.enter_context(mlx_parallm_server(model, ["--no-enable-prefix-caching"])),
            "mlx_lm.server": stack.enter_context(mlx_lm_server(model)),
        }
        if args.mlx_vlm is not None:
            servers |= _mlx_vlm(stack, model, args.mlx_vlm)
        chats.warm_up(*servers.values())
        answers: dict[str, list[list[Answer]]] = {name: [] for name in servers}
        for number in range(args.num_chats):
            chat = _chat(chats, f"turns {number}", args)
            for name, turns in _in_turns(servers, chat, args.num_turns).items():
                answers[name].append(turns)
    later = {name: _later(turns) for name, turns in answers.items()}
    firsts = {name: [turns[0] for turns in of_chats] for name, of_chats in answers.items()}
    own, cold = later["own"], later[COLD]
    checks = [
        Check("tokens of the second turn's prompt", answers[COLD][0][1].prompt_tokens),
        Check("tokens of the last turn's prompt", answers[COLD][0][-1].prompt_tokens),
        Check("first turn: TTFT over cold", ratio(firsts["own"], firsts[COLD])),
        *_against_cold("later turns", own, cold, MOST_CACHED),
    ]
    for name in [each for each in servers if each not in ("own", COLD)]:
        checks += [
            Check(f"{name}: first turn: TTFT, ms", median_ms(firsts[name])),
            Check(f"{name}: later turns: TTFT, ms", median_ms(later[name])),
            Check(f"{name}: later turns: share of tokens computed", computed_share(later[name])),
            Check(f"later turns: TTFT over that of {name}", ratio(own, later[name])),
        ]
    return checks, _record(answers)


def _against_cold(
    what: str, answers: Sequence[Answer], cold: Sequence[Answer], most: float
) -> list[Check]:
    """Return what answers took, beside the cold ones to the same prompts."""
    pairs = zip(answers, cold, strict=True)
    return [
        Check(f"{what}: TTFT cold, ms", median_ms(cold)),
        Check(f"{what}: TTFT, ms", median_ms(answers)),
        Check(f"{what}: TTFT over cold", ratio(answers, cold), "<=", most),
        Check(f"{what}: processor time over cold", used_ratio(answers, cold)),
        Check(f"{what}: share of tokens computed", computed_share(answers)),
        Check(f"{what}: answers other than cold", _differing(pairs), "==", 0),
    ]


def kill_part(args: Namespace) -> Measured:
    """Compare turns right after SIGKILL and a new start, with a disk store, with cold ones."""
    model = make_hybrid(args.model)
    chats = Chats(model)
    chat = _chat(chats, "kill", args)
    answers: dict[str, list[Answer]] = {"disk": [], COLD: []}
    with (
        tempfile.TemporaryDirectory(prefix="hybrid-", dir=args.folder) as folder,
        mlx_parallm_server(model, ["--no-enable-prefix-caching"]) as cold,
    ):
        chats.warm_up(cold)
        for _ in range(args.num_turns):
            with mlx_parallm_server(model, ["--kv-disk", folder]) as server:
                chats.warm_up(server)
                servers = {"disk": server, COLD: cold}
                for name, (answer,) in _in_turns(servers, chat, 1).items():
                    answers[name].append(answer)
                time.sleep(SETTLE_S)
                server.kill()
    return _against_cold(
        "after SIGKILL, from disk", answers["disk"][1:], answers[COLD][1:], MOST_KILLED
    ), {name: [asdict(answer) for answer in each] for name, each in answers.items()}


def _mlx_vlm(stack: ExitStack, model: Path, python: Path) -> dict[str, Server]:
    """Return mlx-vlm's server with its prefix cache, of the same model with a vision tower."""
    folder = model.resolve().with_name(f"{model.name}_vlm")
    make = ["benchmarks.make_hybrid_vlm", str(model), str(folder)]
    env = {"PYTHONPATH": str(HERE)}
    python = python.absolute()
    child_process.run(make, python=str(python), env=os.environ | env).check_returncode()
    settings = env | {"APC_ENABLED": "1", "APC_DISK_ENABLED": "0"}
    server = stack.enter_context(mlx_vlm_server(folder, python=python, env=settings))
    return {server.name: server}


def _chat(chats: Chats, seed: str, args: Namespace) -> Chat:
    return chats.chat(seed, system_tokens=args.system_tokens, turn_tokens=args.turn_tokens)


def _in_turns(servers: Mapping[str, Server], chat: Chat, count: int) -> dict[str, list[Answer]]:
    """Ask all servers for each turn of a chat, another one first each time.

    The chat goes on with the answer of the first server.
    """
    answers: dict[str, list[Answer]] = {name: [] for name in servers}
    names = list(servers)
    for _ in range(count):
        first = chat.num_turns % len(names)
        chat.begin_turn()
        for name in names[first:] + names[:first]:
            answers[name].append(ask(servers[name], chat.messages))
        chat.end_turn(answers[names[0]][-1].text)
        _say(chat.num_turns, {name: each[-1] for name, each in answers.items()})
    return answers


def _say(number: int, answers: Mapping[str, Answer]) -> None:
    """Print a line about a turn."""
    times = ", ".join(
        f"{name} {1e3 * answer.first_s:.0f} ms ({answer.computed_tokens} of {answer.prompt_tokens})"
        for name, answer in answers.items()
    )
    print(f"turn {number}: TTFT (tokens computed): {times}", flush=True)


def _later(chats: Sequence[Sequence[Answer]]) -> list[Answer]:
    return [answer for turns in chats for answer in turns[1:]]


def _differing(pairs: Iterator[tuple[Answer, Answer]]) -> int:
    return sum(mine.text != other.text for mine, other in pairs)


def _record(answers: Mapping[str, Sequence[Sequence[Answer]]]) -> dict[str, Any]:
    return {
        name: [[asdict(answer) for answer in turns] for turns in chats]
        for name, chats in answers.items()
    }


PARTS: dict[str, Part] = {
    "turns": turns_part,
    "kill": kill_part,
    "chats": chats_part,
    "speculation": speculation_part,
    "decode": decode_part,
}

if __name__ == "__main__":
    sys.exit(main())
