"""Sessions that take gradients lose no bit to kills, evictions and other weights, under traffic."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import httpx2
import pytest
from safetensors.numpy import load_file, save_file

from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_FOLDERS
from tests.mezo_sessions import MODEL, OBJECTIVE, ROWS, asked, events
from tests.processes import engines_of, is_replaced
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

SESSIONS = "/v1/training/sessions"
GENERATOR, CLASSIFIER = "streams", "demo:sentiment"
NUM_KILLS, NUM_STEPS = 20, 100
NUM_CLIENTS = 3
# MOST_ANSWERS: of the traffic, before a kill.
MOST_ANSWERS = 60
# STEPS_BETWEEN: two changes of weights; more than are made from one checkpoint to the next.
STEPS_BETWEEN = 8
ESTIMATOR = {"kind": "gradient", "learning_rate": 1e-3, "warmup_steps": 2, "checkpoint_every": 7}
PAIRS = [
    {"prompt": f"{number} and {number}: ", "chosen": "joyful", "rejected": "dull and empty"}
    for number in range(6)
]
# BODIES: sessions of a model that reads, and of the model whose streams run beside them.
BODIES: tuple[dict[str, Any], ...] = (
    {
        "model": MODEL,
        "objective": OBJECTIVE,
        "data": ROWS,
        "batch_size": 4,
        "trainable": {"layers": "top:1", "targets": ["value", "output.dense"], "rank": 4},
        "estimator": ESTIMATOR,
    },
    {
        "model": GENERATOR,
        "objective": {"kind": "pairs"},
        "data": PAIRS,
        "batch_size": 2,
        "trainable": {"layers": "top:1", "rank": 4},
        "estimator": ESTIMATOR,
    },
)
#: ``Learnt``: for each session the SHA-256 of its parameters and moments, and its records.
Learnt = list[tuple[str, list[tuple[float, ...]]]]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the generator, and with one that differs in a tensor."""
    root = tmp_path_factory.mktemp("generators")
    for name in ("first", "second"):
        shutil.copytree(DEMO_FOLDER, root / name)
    (path,) = (root / "second").glob("*.safetensors")
    tensors = load_file(path)
    changed = min(tensors)
    save_file(tensors | {changed: tensors[changed] + tensors[changed].dtype.type(0.5)}, path)
    return root


@pytest.fixture(scope="module")
def undisturbed(roots: Path, tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    """Return what is learnt without kills and without traffic."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with served(folder, roots) as (_, client):
        return learnt(folder, client, begun(client))


@contextmanager
def served(folder: Path, roots: Path, *flags: str) -> Iterator[tuple[ServerProcess, httpx2.Client]]:
    """Yield a server whose sessions are in a folder."""
    names = ("--served-model-name", f"{roots / 'first'}={GENERATOR}")
    models = ("--model", str(roots / "first"), MODEL, CLASSIFIER)
    process = ServerProcess(*models, *names, "--data-dir", str(folder), *flags)
    process.wait_until_ready()
    with httpx2.Client(base_url=process.url) as client:
        yield process, client
    process.stop()


def begun(client: httpx2.Client, num_steps: int = NUM_STEPS) -> list[str]:
    """Begin the sessions and their runs of so many steps; return their paths."""
    paths = [f"{SESSIONS}/{asked(client, SESSIONS, **body)['id']}" for body in BODIES]
    for path in paths:
        asked(client, f"{path}/run", steps=num_steps)
    return paths


def learnt(folder: Path, client: httpx2.Client, paths: Sequence[str]) -> Learnt:
    """Return what sessions have learnt at the end of their runs."""
    results: Learnt = []
    for path in paths:
        assert len(events(client, path)) == NUM_STEPS
        # It is answered once the end of the run is on disk.
        asked(client, f"{path}/checkpoint")
        answer = client.get(path).json()
        assert (answer["status"], answer["warning"]) == ("ready", None)
        (own,) = folder.rglob(answer["id"])
        arrays = (own / f"checkpoint-{NUM_STEPS:08d}.safetensors").read_bytes()
        records = map(json.loads, (own / "steps.jsonl").read_text().splitlines())
        fields = ("step", "loss", "norm", "learning_rate", "tokens")
        numbers = [tuple(record[field] for field in fields) for record in records]
        results.append((hashlib.sha256(arrays).hexdigest(), numbers))
    return results


class Traffic:
    """Clients whose requests change all the time, until the server is gone."""

    def __init__(self, url: str, seed: int, pool: ThreadPoolExecutor) -> None:
        """Begin."""
        self._url = url
        self._is_over = Event()
        # The chunks and answers that clients got; or how a client has failed.
        self._answers: SimpleQueue[BaseException | None] = SimpleQueue()
        for number in range(NUM_CLIENTS):
            asking = pool.submit(self._ask, random.Random(NUM_CLIENTS * seed + number))
            asking.add_done_callback(lambda ended: self._answers.put(ended.exception()))

    def take(self, count: int) -> None:
        """Return once clients got so many answers."""
        for _ in range(count):
            failure = self._answers.get()
            if failure is not None:
                raise failure

    def end(self) -> None:
        """Let clients ask nothing more."""
        self._is_over.set()

    def _ask(self, draw: random.Random) -> None:
        # The server may be killed.
        with suppress(httpx2.TransportError), httpx2.Client(base_url=self._url) as client:
            while not self._is_over.is_set():
                self._ask_once(client, draw)

    def _ask_once(self, client: httpx2.Client, draw: random.Random) -> None:
        """Ask for a stream, or have texts read."""
        if draw.random() < 0.3:
            texts = ["a film [MASK]."] * draw.randrange(1, 9)
            client.post("/v1/mlm", json={"model": MODEL, "texts": texts})
            self._answers.put(None)
            return
        body = {"model": GENERATOR, "prompt": f"{draw.randrange(100)},", "stream": True}
        body |= {"max_tokens": draw.randrange(1, 60), "n": draw.randrange(1, 4), "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                self._answers.put(None)


@contextmanager
def traffic(url: str, seed: int) -> Iterator[Traffic]:
    """Run traffic during a block."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        own = Traffic(url, seed, pool)
        try:
            yield own
        finally:
            own.end()


def run_up_to(client: httpx2.Client, paths: Sequence[str], until: int) -> None:
    """Let sessions make steps up to this one, unless they run or are there."""
    for path in paths:
        answer = client.get(path).json()
        if answer["status"] != "running" and answer["step"] < until:
            asked(client, f"{path}/run", steps=until - answer["step"])


def test_killed_servers_change_no_bit(tmp_path: Path, roots: Path, undisturbed: Learnt) -> None:
    """Kill a server at random moments, also while it opens sessions and makes steps again."""
    draw, paths = random.Random(1), []
    part = NUM_STEPS // NUM_KILLS
    for number in range(NUM_KILLS):
        with served(tmp_path, roots) as (process, client), traffic(process.url, number) as clients:
            clients.take(1)
            paths = paths or begun(client, part)
            run_up_to(client, paths, (number + 1) * part)
            clients.take(draw.randrange(1, MOST_ANSWERS))
            process.process.send_signal(signal.SIGKILL)
    with served(tmp_path, roots) as (_, client):
        for path in paths:
            events(client, path)
        run_up_to(client, paths, NUM_STEPS)
        assert learnt(tmp_path, client, paths) == undisturbed


def test_killed_engines_change_no_bit(tmp_path: Path, roots: Path, undisturbed: Learnt) -> None:
    """Kill an engine in each of as many runs; a run ends before the next one begins."""
    draw = random.Random(2)
    part = NUM_STEPS // NUM_KILLS
    with served(tmp_path, roots, "--data-parallel-size", "2") as (process, client):
        paths = begun(client, part)
        with traffic(process.url, NUM_KILLS) as clients:
            for number in range(NUM_KILLS):
                for path in paths if number else ():
                    asked(client, f"{path}/run", steps=part)
                until = number * part + draw.randrange(part)
                while min(client.get(path).json()["step"] for path in paths) < until:
                    clients.take(1)
                clients.take(draw.randrange(1, MOST_ANSWERS // part))
                kill_engine(process, client, clients, draw)
                for path in paths:
                    events(client, path)
        assert learnt(tmp_path, client, paths) == undisturbed


def kill_engine(
    process: ServerProcess, client: httpx2.Client, clients: Traffic, draw: random.Random
) -> None:
    """Kill one of two engines; return once another has taken its place."""
    killed = draw.choice(engines_of(process.process.pid))
    os.kill(killed, signal.SIGKILL)
    # The server ends when it has no engine left.
    while not is_replaced(process.process.pid, killed):
        clients.take(1)
    while client.get("/ready").json()["ready"] != 2:
        clients.take(1)


def test_evictions_and_other_weights_change_no_bit(
    tmp_path: Path, roots: Path, undisturbed: Learnt
) -> None:
    """Evict the model of one session, and replace the weights of the other's, amid their runs."""
    sizes = (
        sum(path.stat().st_size for path in DEMO_FOLDERS[name].glob("*.safetensors"))
        for name in (MODEL, CLASSIFIER)
    )
    flags = ("--pooling-memory-bytes", str(2 * max(sizes)), "--allowed-adapter-roots", str(roots))
    with served(tmp_path, roots, *flags) as (_, client):
        paths = begun(client)
        for number in range(6):
            while client.get(paths[1]).json()["step"] < STEPS_BETWEEN * number:
                continue
            # A session that runs keeps its model in memory. The other's run must not end here, so
            # it is paused first: a pause waits for a step, which may load a model.
            for path in reversed(paths):
                asked(client, f"{path}/pause")
            before = client.get(paths[1]).json()["step"]
            asked(client, "/classify", model=CLASSIFIER, input=[f"a film {number}"])
            # All steps are left at first: the weights may change in the middle of a run.
            for path in paths if number == 0 else paths[:1]:
                asked(client, f"{path}/resume")
            replaced(client, roots / "second")
            asked(client, f"{paths[1]}/resume")
            # It finds out at its next step.
            events(client, paths[1], after=before)
            answer = client.get(paths[1]).json()
            assert (answer["status"], "other weights" in answer["reason"]) == ("paused", True)
            replaced(client, roots / "first")
            asked(client, f"{paths[1]}/resume")
        assert learnt(tmp_path, client, paths) == undisturbed


def replaced(client: httpx2.Client, folder: Path) -> None:
    """Have the generator take the weights of a folder."""
    asked(client, "/update_weights_from_disk", model_path=str(folder))
