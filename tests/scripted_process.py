"""The process of engines over scripted runners, and actions for it.

It imports what the engines' process needs and no more: each test of one starts it anew.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.commands import LoopState
from mlx_parallm.engine.kind import BuiltModel
from mlx_parallm.engine.local_life import Build
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.engines import serve_engines
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.worker import Worker
from tests.fakes import ByteTokenizer, FakeRunner, spell


def builder(runner: FakeRunner, scheduler_class: Callable[..., Scheduler] = Scheduler) -> Build:
    def build(config: EngineConfig, families: MetricFamilies, *_: object) -> list[BuiltModel]:
        info = runner.info
        kv = KVCacheManager(info.num_blocks, info.block_size, enable_prefix_caching=True)
        scheduler = scheduler_class(config.scheduler, kv, max_model_len=info.max_model_len)
        tokenizer = ByteTokenizer()
        metrics = EngineMetrics(families, "m", info)
        engine = GenerationEngine(scheduler, runner, tokenizer, metrics)
        names = ("m", "alias")
        model = GenerationModel(names=names, root="m", created=0, tokenizer=tokenizer, info=info)
        return [BuiltModel(ModelConfig(), model, engine)]

    return build


def pid_of(loop: LoopState) -> int:
    """Return the id of the engine's process."""
    return os.getpid()


def something_local(loop: LoopState) -> Callable[[], None]:
    """Return something that cannot be pickled."""
    return lambda: None


class Unreadable:
    """An action that the engines' process cannot read; a reply that the server cannot."""

    def __reduce__(self) -> tuple[object, ...]:
        return __import__, ("no_such_module",)

    def __call__(self, loop: LoopState) -> None:
        raise AssertionError


def something_unreadable(loop: LoopState) -> Unreadable:
    """Return something that the server cannot unpickle."""
    return Unreadable()


def die(loop: LoopState) -> None:
    """End the engine."""
    raise Death


def never_return(loop: LoopState) -> None:
    """Hang, as a device may."""
    threading.Event().wait()


class Death(BaseException):
    """Ends the engine's thread."""


def main(script: str, *descriptors: str) -> int:
    """Be the process: "hello" is what its model says; some are never loaded."""
    if script == "before beats":
        os.kill(os.getpid(), signal.SIGSTOP)

    def build(
        config: EngineConfig, families: MetricFamilies, worker: Worker, on_progress: Callable
    ) -> list:
        on_progress("Loading m", 0.5)
        if script == "fails":
            raise ConfigError("too little memory")
        if script == "vanishes":
            os._exit(7)
        if script == "stays":
            signal.pause()
        text = "ab" * 60 if script == "long" else script
        return list(builder(FakeRunner(spell(text)))(config, families, worker, on_progress))

    ends = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    return serve_engines(Channel(*ends), build, is_elsewhere=len(ends) == 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
