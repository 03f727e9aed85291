"""The command ``python -m examples.policies.train``; README.md beside this file describes it."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from examples.policies.cartpole import Carts
from examples.policies.networks import Memory, Network, Perceptron, save
from examples.policies.ppo import Settings, Trainer, train
from examples.policies.rollouts import WrongVersionError, evaluate
from examples.policies.served import ServedPolicy
from mlx_parallm.client import ClientError, SyncRLClient

# SETTINGS: the gradients of an LSTM by time bear a higher rate.
SETTINGS = {
    "cartpole": Settings(updates=100),
    "memory": Settings(updates=200, learning_rate=3e-3),
}
# HELD_OUT_SEED: of the carts of an evaluation; trained ones have small seeds.
HELD_OUT_SEED = 10**6
NUM_EPISODES = 100


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Trains a served policy to balance a pole.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--api-key", help="its admin key, if it has one")
    parser.add_argument(
        "--task",
        choices=tuple(SETTINGS),
        default="cartpole",
        help="memory shows no velocities, so the policy is an LSTM",
    )
    parser.add_argument("--model", help="name of the served model; default: demo:TASK")
    parser.add_argument("--updates", type=int, help="default: 100, and 200 for memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report-every", type=int, default=10, help="updates")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the trained folder")
    parser.add_argument(
        "--new", type=Path, metavar="FOLDER", help="write an untrained folder to serve, and stop"
    )
    return parser.parse_args(arguments)


def report(policy: ServedPolicy, trainer: Trainer, network: Network, seed: int) -> None:
    """Print what episodes with the likeliest actions return."""
    is_memory = bool(network.state_shapes)
    for keeps_states in (True, False) if is_memory else (True,):
        carts = Carts(NUM_EPISODES, HELD_OUT_SEED + seed, shows_velocities=not is_memory)
        zeros = trainer.zeros(NUM_EPISODES)
        mean = evaluate(policy, carts, zeros, keeps_states=keeps_states)
        note = "" if keeps_states else " without states"
        print(f"likeliest actions{note}: {mean:.1f} steps, mean of {NUM_EPISODES} episodes")


def main(options: argparse.Namespace) -> None:
    """Train, report and save."""
    network = Memory() if options.task == "memory" else Perceptron()
    settings = SETTINGS[options.task]
    settings = replace(settings, updates=options.updates or settings.updates)
    trainer = Trainer(network, settings, options.seed)
    if options.new:
        save(network, trainer.weights, options.new)
        return
    began_s = time.monotonic()
    model = options.model or f"demo:{options.task}"
    with SyncRLClient(options.url, api_key=options.api_key) as client:
        client.wait_until_ready()
        policy = ServedPolicy(client, model)
        carts = Carts(settings.carts, options.seed, shows_velocities=not network.state_shapes)
        for update in train(policy, trainer, carts, settings, options.seed):
            if update.number % options.report_every == 0 or update.number == settings.updates:
                elapsed_s = time.monotonic() - began_s
                print(
                    f"update {update.number}: {update.steps} steps, {elapsed_s:.0f} s, "
                    f"mean return {update.mean_return:.1f}, mismatch {update.mismatch:.0e}",
                    flush=True,
                )
        report(policy, trainer, network, options.seed)
    if options.save:
        save(network, trainer.weights, options.save)


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except (ClientError, WrongVersionError) as error:
        sys.exit(str(error))
