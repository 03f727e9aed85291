"""Learning curves of the embedded masked LM, whose label words mean nothing to it before.

``python -m benchmarks.mezo_learning`` trains on 1,024 reviews of the generator that
``examples.mezo`` uses and evaluates on 512 others, with three seeds that no setting was chosen by:
MeZO as published (``preset: paper``), the same with a learning rate for this model, the defaults of
sessions with random first factors, from ``activations``, which is the default, and from these with
four directions a step, the objective ``error``, which has no gradient, and first order. Curves are
written to ``results/mezo_learning_curves.json`` with a plot beside it.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from random import Random

from benchmarks.check_mezo import run
from benchmarks.checks import Check, conclude
from benchmarks.curve_file import CurveFile, forwards_until
from benchmarks.measure import make_parser
from benchmarks.mezo_curves import Learner, Method, Problem
from examples.mezo.task import LABELS, reviews, split
from mlx_parallm import demo_models
from mlx_parallm.config import ModelConfig
from mlx_parallm.pooling.kind import tokenizer_of
from mlx_parallm.pooling.pending import pooling_spec
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.training.objectives import Measure
from mlx_parallm.training.records import Example
from mlx_parallm.training.settings import PAPER, MezoSettings
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import FirstFactors, TrainableSpec
from mlx_parallm.worker.device.cpu_process import keep_freed_memory
from mlx_parallm.worker.pooling.loading import open_runner

FOLDER = Path(demo_models.__file__).parent / "mlm"
CURVES = Path("results/mezo_learning_curves.json")
# NUM_TRAIN, NUM_TEST, DATA_SEED: the reviews.
NUM_TRAIN, NUM_TEST, DATA_SEED = 1024, 512, 0
TARGETS = ("query", "value", "output.dense")
# PAPER_RATE: learning rate of paper on this model; its own is for RoBERTa-large. 3e-3 had the
# lowest loss of 1e-3, 3e-3 and, on query and value alone, 1e-2 to 0.3, on other reviews and seeds.
PAPER_RATE = 3e-3
TEXT, WORDS = "{text} It was [MASK].", ("cat", "dog")
PAPER_SETTINGS, PAPER_TUNED, RANDOM, ACTIVATIONS, MORE, ERROR, FIRST_ORDER = (
    "paper",
    "paper, tuned rate",
    "random factors",
    "activations",
    "4 directions",
    "error",
    "first order",
)
CACHE_BYTES = 256 << 20
# LEAST_ACCURACY, MOST_SECONDS: of four directions after all steps; LEAST_COUNTED: of error.
LEAST_ACCURACY, MOST_SECONDS, LEAST_COUNTED = 0.84, 60.0, 0.79
# MOST_SHARE: of tuned paper's forwards, in which activations reach its final loss.
MOST_SHARE = 0.25


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=CURVES)
    args = parser.parse_args()
    keep_freed_memory()
    config = ModelConfig(path=str(FOLDER))
    tokenizer = tokenizer_of(config, FOLDER)
    runner = open_runner(pooling_spec(config, FOLDER, tokenizer)).finish()
    learner = Learner(runner.adapters, problem_of(tokenizer), CACHE_BYTES)
    methods = methods_of(args.steps)
    curves = CurveFile(args.out, {name: dataclasses.asdict(each) for name, each in methods.items()})
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name, method in methods.items():
            if not curves.has(name, seed):
                run(learner, curves, name, seed, method)
    args.out.with_suffix(".svg").write_text(curves.plot())
    print(curves.table())
    return conclude("mezo_learning", checks_of(curves), {"curves": str(args.out)})


def methods_of(steps: int) -> dict[str, Method]:
    """Return the methods by name."""
    both = TrainableSpec(targets=TARGETS, top=1, rank=8, alpha=16.0, trains_first=True)
    second = dataclasses.replace(both, trains_first=False)
    measured = dataclasses.replace(second, init=FirstFactors.ACTIVATIONS)
    ours = MezoSettings(learning_rate=1e-2, decay_steps=steps)
    base = Method(spec=measured, estimator=ours, steps=steps, batch_size=16, evaluate_every=25)
    counted = dataclasses.replace(ours, epsilon=3e-2, decay_steps=steps // 4)
    return {
        PAPER_SETTINGS: dataclasses.replace(base, spec=both, estimator=PAPER),
        PAPER_TUNED: dataclasses.replace(
            base,
            spec=both,
            estimator=dataclasses.replace(PAPER, learning_rate=PAPER_RATE),
        ),
        RANDOM: dataclasses.replace(base, spec=second),
        ACTIVATIONS: base,
        MORE: dataclasses.replace(base, estimator=dataclasses.replace(ours, num_directions=4)),
        ERROR: dataclasses.replace(
            base,
            estimator=counted,
            measure=Measure.ERROR,
            steps=steps // 4,
            batch_size=64,
        ),
        FIRST_ORDER: dataclasses.replace(base, spec=both, estimator=None, steps=steps // 2),
    }


def problem_of(tokenizer: EncoderTokenizer) -> Problem:
    """Return the reviews as examples."""
    rng = Random(DATA_SEED)
    train, test = split(reviews(rng, NUM_TRAIN + NUM_TEST), NUM_TEST, rng)
    words = tuple(tokenizer.encode([word], add_special_tokens=False)[0][0] for word in WORDS)
    mask = tokenizer.token_id(tokenizer.mask_token or "")

    def example(text: str, label: str) -> Example:
        (ids,) = tokenizer.encode([TEXT.replace("{text}", text)])
        places = tuple(place for place, token in enumerate(ids) if token == mask)
        return Example(
            PoolingInput(tuple(ids), "mlm", places=places, candidates=words), LABELS.index(label)
        )

    return Problem(
        [example(row["text"], row["label"]) for row in train],
        [example(row["text"], row["label"]) for row in test],
    )


def checks_of(curves: CurveFile) -> list[Check]:
    """Return the figures of the ends of the curves, and their targets."""
    checks: list[Check] = []
    least: dict[str, float] = {MORE: LEAST_ACCURACY, ERROR: LEAST_COUNTED}
    for name in dict.fromkeys(each["method"] for each in curves.runs):
        ends = [each["points"][-1] for each in curves.runs if each["method"] == name]
        mean = {key: statistics.fmean(end[key] for end in ends) for key in ends[0]}
        checks += [
            Check(f"{name}: accuracy", mean["accuracy"], ">=", least.get(name)),
            Check(f"{name}: loss", mean["loss"]),
            Check(f"{name}: forwards", mean["forwards"]),
            Check(f"{name}: share of steps without a slope", mean["zero_steps"] / mean["step"]),
            Check(
                f"{name}: seconds",
                mean["seconds"],
                "<=",
                MOST_SECONDS if name == MORE else None,
            ),
        ]
    start = curves.runs[0]["points"][0]
    lines = curves.lines("loss")
    final = next(check.value for check in checks if check.what == f"{PAPER_TUNED}: loss")
    total = lines[PAPER_TUNED][0][-1][0]
    for name, limit in ((RANDOM, None), (ACTIVATIONS, MOST_SHARE)):
        reached = forwards_until(lines[name], final)
        share = float("nan") if reached is None else reached / total
        checks.append(
            Check(f"{name}: share of tuned paper's forwards to its loss", share, "<=", limit)
        )
    return [Check("before: accuracy", start["accuracy"]), *checks]


if __name__ == "__main__":
    raise SystemExit(main())
