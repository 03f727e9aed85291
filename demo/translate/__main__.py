"""The command line: ``python -m demo.translate {train,evaluate}``."""

from __future__ import annotations

import argparse

from demo.translate import evaluate, train


def main() -> None:
    """Train or evaluate the model that translates."""
    parser = argparse.ArgumentParser(description="The model that translates numbers.")
    commands = parser.add_subparsers(required=True)
    for name, module in (("train", train), ("evaluate", evaluate)):
        command = commands.add_parser(name, help=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
