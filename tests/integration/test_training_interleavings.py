"""Kept states are never a wrong answer, in whatever order things happen."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.types.errors import SessionLostError
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import (
    Distribution,
    PairResult,
    Segment,
    Step,
    TrainableSpec,
)
from mlx_parallm.worker.ops import (
    Load,
)
from mlx_parallm.worker.pooling.loading import PoolingLoader
from mlx_parallm.worker.pooling.plan import PoolingSpec
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.training_ops import (
    ApplySteps,
    CloseTraining,
    ForgetTraining,
    OpenTraining,
    PairForward,
)
from mlx_parallm.worker.worker import Worker
from tests.encoder_folders import golden_arrays, read_golden, write_encoder

pytestmark = pytest.mark.slow

NUM_HISTORIES, LONGEST_HISTORY = 500, 6
# ALONE: the same model, whose sessions keep nothing.
MODEL, ALONE = "model", "alone"
NUM_LAYERS, WIDTH = 3, 32
# CACHES: bytes of the pool: room for everything, for some texts, for one, and for none.
CACHES = (1 << 20, 16 * WIDTH * 4, 5 * WIDTH * 4, 64)
WORDS = (3, 9)
TEXTS = ((5, 6, 7, 4), (8, 9, 4), (5, 6, 7, 8, 4), (6, 5, 7, 4), (4,), (12, 3, 12, 9, 10, 4))
# SECOND_AT: index of the first token of the second part: the same tokens with other types.
INPUTS = [
    PoolingInput(text, "mlm", second_at=second, places=(len(text) - 1,), candidates=WORDS)
    for text in TEXTS
    for second in (None, 1)
    if second is None or len(text) > 3
]
# LAYERS: the trained layers of each session; pairs of them have the same lowest one.
LAYERS = {"a": (2,), "b": (1, 2), "c": (2,), "d": (1,)}
Key = tuple[int, tuple[int, ...], int | None]


def write_models(folder: Path) -> list[Path]:
    """Write two encoders of three layers, which differ in the weights of their first one."""
    golden = read_golden("bert_masked_lm")
    weights: dict[str, mx.array] = {}
    for name, array in golden_arrays(golden).items():
        weights[name] = array
        if ".layer.1." in name:
            weights[name.replace(".layer.1.", ".layer.2.")] = 0.9 * array
    config = golden["config"] | {"num_hidden_layers": NUM_LAYERS}
    other = {name: 1.1 * array if ".layer.0." in name else array for name, array in weights.items()}
    return [
        write_encoder(folder / str(number), config, each)
        for number, each in enumerate((weights, other))
    ]


class History:
    """Sessions on one encoder, and twins of them on another one, whose pool has no room.

    Attributes:
        hits: texts that were found, in all forwards.
    """

    def __init__(self, worker: Worker, folders: list[Path], draw: random.Random) -> None:
        self.hits = 0
        self._worker = worker
        self._folders = folders
        self._draw = draw
        self._cache_bytes = draw.choice(CACHES)
        self._steps: dict[str, list[Step]] = {name: [] for name in LAYERS}
        self._open: set[str] = set()
        # What may be found: the texts that a forward has computed with these weights.
        self._computed: set[Key] = set()

    def act(self) -> None:
        """Do one thing at random."""
        session = self._draw.choice(list(LAYERS))
        actions = (self._forward, self._step, self._close)
        action = self._draw.choices((*actions, None), (8, 3, 1, 2))[0]
        if action is not None:
            action(session)
        elif self._draw.random() < 0.5:
            self.load(self._draw.randrange(2))
        else:
            for model in (MODEL, ALONE):
                self._worker.execute(ForgetTraining(model=model))
            self._lose()

    def end(self) -> None:
        """Close all sessions."""
        for session in LAYERS:
            self._close(session)

    def load(self, number: int) -> None:
        """Replace the model, by one of other weights or of the same."""
        folder = self._folders[number]
        config = ModelConfig(path=str(folder))
        spec = PoolingSpec(config=config, path=folder, task="auto", chosen=(), free_bytes=None)
        for model in (MODEL, ALONE):
            self._worker.execute(Load(model=model, spec=spec))
        self._lose()

    def _lose(self) -> None:
        for session in self._open:
            with pytest.raises(SessionLostError):
                self._pair(MODEL, session, INPUTS[:1], 0)
        self._open.clear()
        self._computed.clear()

    def _reopen(self, session: str) -> None:
        if session in self._open:
            return
        self._open.add(session)
        for model, cache_bytes in ((MODEL, self._cache_bytes), (ALONE, 1), (ALONE, 0)):
            opening = OpenTraining(
                model=model,
                session=_name(session, cache_bytes),
                spec=TrainableSpec(targets=("query", "value"), layers=LAYERS[session], rank=2),
                distribution=Distribution.RADEMACHER,
                cache_bytes=cache_bytes,
            )
            info = self._worker.execute(opening)
            assert info.keeps_prefix is (cache_bytes > 0)
        self._apply(session, self._steps[session])

    def _apply(self, session: str, steps: list[Step]) -> None:
        for model, name in _all(session):
            self._worker.execute(ApplySteps(model=model, session=name, steps=steps))

    def _close(self, session: str) -> None:
        for model, name in _all(session):
            self._worker.execute(CloseTraining(model=model, session=name))
        self._open.discard(session)
        if not self._open:
            self._computed.clear()

    def _step(self, session: str) -> None:
        self._reopen(session)
        step = Step(self._draw.randrange(2**32), [self._draw.uniform(-0.05, 0.05)])
        self._steps[session].append(step)
        self._apply(session, [step])

    def _forward(self, session: str) -> None:
        """Run a batch with and without what is kept; compare the results, and what was found."""
        self._reopen(session)
        batch = self._draw.choices(INPUTS, k=self._draw.randint(1, 4))
        seed = self._draw.randrange(2**32)
        kept, alone, full = (self._pair(*place, batch, seed) for place in _all(session))
        for result, expected, other in zip(kept.results, alone.results, full.results, strict=True):
            # What is found has the bits of what is computed; all layers in one forward round
            # otherwise.
            np.testing.assert_array_equal(result, expected)
            np.testing.assert_allclose(result, other, atol=1e-5, rtol=0)
        assert alone.hits == len(batch) - len({(item.token_ids, item.second_at) for item in batch})
        assert (full.lookups, full.hits) == (0, 0)
        keys = [(min(LAYERS[session]), item.token_ids, item.second_at) for item in batch]
        new = {key for key in keys if key not in self._computed}
        assert kept.hits <= kept.lookups - len(new)
        assert kept.lookups == len(batch)
        if self._cache_bytes == CACHES[0]:
            assert kept.hits == kept.lookups - len(new)
        self._computed |= new
        self.hits += kept.hits

    def _pair(self, model: str, session: str, batch: list[PoolingInput], seed: int) -> PairResult:
        rows = tuple(range(len(batch)))
        return self._worker.execute(
            PairForward(
                model=model,
                session=session,
                inputs=batch,
                segments=(Segment(0, 1, rows), Segment(0, -1, rows)),
                seed=seed,
                num_directions=1,
                epsilon=0.05,
            )
        )


def _name(session: str, cache_bytes: int) -> str:
    return session if cache_bytes else f"{session}, all layers"


def _all(session: str) -> list[tuple[str, str]]:
    """Return model and name of a session, of one that keeps nothing, and of one without a pool."""
    return [(MODEL, session), (ALONE, session), (ALONE, _name(session, 0))]


@pytest.fixture
def worker() -> Worker:
    worker = Worker()
    worker.install(PoolingSpec, PoolingLoader(TrainingSessions))
    return worker


def test_kept_states_are_those_of_the_text_layer_and_weights(
    worker: Worker, tmp_path: Path
) -> None:
    folders = write_models(tmp_path)
    hits = 0
    for seed in range(NUM_HISTORIES):
        draw = random.Random(seed)
        history = History(worker, folders, draw)
        if seed == 0:
            history.load(0)
        for _ in range(draw.randint(2, LONGEST_HISTORY)):
            history.act()
        history.end()
        hits += history.hits
    assert hits > NUM_HISTORIES / 2
