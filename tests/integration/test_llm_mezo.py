"""Training sessions in a program of the caller's, without a server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from mlx_parallm.adapters.formats import read_adapter_folder
from mlx_parallm.llm import LLM
from mlx_parallm.offline.training import OfflineSession
from mlx_parallm.training.records import GradientRecord, MezoRecord
from mlx_parallm.types.errors import InvalidRequestError, StorageInUseError
from mlx_parallm.types.request import SamplingParams

WORDS = {"good": "cat", "bad": "dog"}
OBJECTIVE = {"kind": "label_words", "template": "{text} It was [MASK].", "label_words": WORDS}
GOOD = ("a joyful film", "the cast shines", "a warm and clever story", "I loved every minute")
BAD = ("a dull film", "it drags on", "a cold and empty story", "I hated every minute")
ROWS = [{"text": text, "label": "good"} for text in GOOD] + [
    {"text": text, "label": "bad"} for text in BAD
]
SETTINGS: dict[str, Any] = {
    "trainable": {"layers": "top:1", "targets": ["value", "attention.output.dense"], "rank": 4},
    "estimator": {"learning_rate": 0.06, "decay_steps": 300},
    "batch_size": len(ROWS),
}


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[LLM]:
    with LLM("demo:mlm") as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Yield an engine that several tests share, and unload what a failed test has left on it."""
    yield shared_llm
    for name in ("film", "saved", "first"):
        with suppress(InvalidRequestError):
            shared_llm.unload_adapter(name)


@pytest.fixture
def session(llm: LLM) -> Iterator[OfflineSession]:
    with llm.mezo(OBJECTIVE, ROWS, **SETTINGS) as session:
        yield session


def served_loss(llm: LLM, adapter: str | None = None) -> float:
    """Return the mean cross-entropy in nats of the rows' label words."""
    prompts = [f"{row['text']} It was [MASK]." for row in ROWS]
    answers = llm.fill_mask(prompts, top_k=2, targets=list(WORDS.values()), adapter=adapter)
    losses: list[float] = []
    for answer, row in zip(answers, ROWS, strict=True):
        scores = {word["token_str"]: word["score"] for word in answer}
        losses.append(-math.log(scores[WORDS[row["label"]]] / sum(scores.values())))
    return fmean(losses)


def test_steps_are_judged_by_a_file(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "others.jsonl"
    wrong = {"good": "bad", "bad": "good"}
    rows = [row | {"label": wrong[row["label"]]} for row in ROWS]
    path.write_text("\n".join(map(json.dumps, rows)))
    estimator = {"kind": "gradient", "learning_rate": 0.05}
    settings = SETTINGS | {"estimator": estimator, "validation": path, "eval_every": 2}
    with llm.mezo(OBJECTIVE, ROWS, **settings) as session:
        records = [each for each in session.run(9) if isinstance(each, GradientRecord)]
        judged = {
            each.step: each.validation_loss for each in records if each.validation_loss is not None
        }
        assert list(judged) == [2, 4, 6, 8, 9]
        assert session.best == min(judged, key=lambda step: judged[step])
        session.publish("film", step=session.best)
    path.write_text("{")
    with pytest.raises(InvalidRequestError, match="Line 1") as refusal:
        llm.mezo(OBJECTIVE, ROWS, **settings)
    assert refusal.value.param == "validation"


def test_a_session_learns_and_its_adapter_is_served(llm: LLM, session: OfflineSession) -> None:
    before, untrained = session.evaluate(ROWS), served_loss(llm)
    seen: list[int] = []
    records = session.run(300, on_step=lambda record: seen.append(record.step))
    assert [record.step for record in records] == seen == list(range(1, 301))
    after = session.evaluate(ROWS)
    # How far the loss falls depends on how sums are rounded, but much less than on training.
    assert after.loss < 0.6 * before.loss
    assert before.accuracy is not None
    assert after.accuracy is not None
    assert after.accuracy >= before.accuracy
    info = session.publish("film")
    assert (info.name, info.version) == ("film", "1")
    assert served_loss(llm, "film") == pytest.approx(after.loss, abs=1e-4)
    assert served_loss(llm) == untrained == pytest.approx(before.loss, abs=1e-4)
    assert session.publish("film", step=0).version == "2"
    assert served_loss(llm, "film") == pytest.approx(untrained, abs=1e-4)
    llm.unload_adapter("film")
    with pytest.raises(InvalidRequestError, match="film"):
        served_loss(llm, "film")


def test_a_step_may_have_rows_of_its_own(session: OfflineSession) -> None:
    record = session.step(ROWS[:3])
    assert (record.step, session.num_steps) == (1, 1)
    assert session.step().step == 2
    assert [each.step for each in session.records(after=1)] == [2]
    assert len(session.log()) == 2 * 12
    assert session.info.num_parameters == 4 * 96 * 2
    assert session.costs.lookups == 3 + len(ROWS)


@pytest.mark.parametrize("form", ["peft", "mlx"])
def test_the_adapter_is_saved_for_others(
    llm: LLM, session: OfflineSession, tmp_path: Path, form: Any
) -> None:
    session.run(20)
    folder = session.save(tmp_path / "film", format=form)
    saved = read_adapter_folder(folder, param="folder")
    info = session.publish("film")
    if form == "peft":
        assert replace(saved, of_checkpoint=False).digest == info.digest
    llm.load_adapter("saved", folder)
    prompts = ["a joyful film It was [MASK]."]
    scores = [
        [answer["score"] for answer in llm.fill_mask(prompts, adapter=name)[0]]
        for name in ("film", "saved")
    ]
    assert scores[0] == pytest.approx(scores[1])
    llm.unload_adapter("film")
    llm.unload_adapter("saved")


def test_a_folder_keeps_a_session_for_the_next_program(tmp_path: Path) -> None:
    path = tmp_path / "session"
    with LLM("demo:mlm") as llm:
        session = llm.mezo(OBJECTIVE, ROWS, path=path, **SETTINGS)
        session.run(5)
        with pytest.raises(StorageInUseError):
            llm.mezo(path=path)
        whole = llm.mezo(OBJECTIVE, ROWS, **SETTINGS)
        whole.run(9)
        session.close()
        session.close()
    with LLM("demo:mlm") as llm:
        with pytest.raises(InvalidRequestError, match="has a session already"):
            llm.mezo(OBJECTIVE, ROWS, path=path)
        again = llm.mezo(path=path)
        again.run(4)
        assert again.num_steps == 9
        assert again.log() == whole.log()
        again.close()
    whole.close()
    assert path.is_dir()


OF_A_HEAD: dict[str, Any] = {
    "objective": {"kind": "pairs"},
    "data": [{"chosen": good, "rejected": bad} for good, bad in zip(GOOD, BAD, strict=True)],
    "batch_size": 2,
    "trainable": {"layers": "top:1", "targets": ["value"], "head": "reward"},
    "estimator": {"kind": "gradient"},
    "seed": 3,
}


def test_a_new_head_is_the_same_in_the_next_program(llm: LLM, tmp_path: Path) -> None:
    pairs = OF_A_HEAD["data"]
    with llm.mezo(path=tmp_path / "session", **OF_A_HEAD) as session:
        before = session.evaluate(pairs)
    with llm.mezo(path=tmp_path / "session") as again:
        assert again.evaluate(pairs) == before
        again.run(4)
        after = again.evaluate(pairs)
    with llm.mezo(path=tmp_path / "session") as once_more, llm.mezo(**OF_A_HEAD) as whole:
        assert once_more.evaluate(pairs) == after
        whole.run(4)
        assert whole.evaluate(pairs) == after
    other: dict[str, Any] = OF_A_HEAD | {"seed": 4}
    with llm.mezo(**other) as drawn:
        assert drawn.evaluate(pairs) != before


def test_a_temporary_folder_goes_with_its_session(llm: LLM) -> None:
    session = llm.mezo(OBJECTIVE, ROWS, **SETTINGS)
    path = session.path
    assert path.is_dir()
    session.close()
    assert not path.exists()
    with pytest.raises(InvalidRequestError, match="closed"):
        session.step()


def test_data_may_be_a_file(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with (
        llm.mezo(OBJECTIVE, file, **SETTINGS) as session,
        llm.mezo(OBJECTIVE, ROWS, **SETTINGS) as other,
    ):
        scores = session.evaluate(file)
        assert scores == other.evaluate(ROWS)
    with pytest.raises(InvalidRequestError) as refusal:
        llm.mezo(OBJECTIVE, tmp_path / "nothing")
    assert refusal.value.param == "data"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"data": []}, "data"),
        ({"data": [{"text": "a", "label": "unknown"}] * 8}, "data"),
        ({"objective": {"kind": "labels"}}, "model"),
        ({"objective": OBJECTIVE | {"template": "none"}}, "objective.template"),
        ({"batch_size": 99}, "batch_size"),
        ({"trainable": {"targets": ["nothing"]}}, "trainable.targets"),
        ({"trainable": {"rank": 512}}, "trainable.rank"),
        ({"unknown": 1}, "unknown"),
        (OF_A_HEAD | {"trainable": {}}, "trainable.head"),
        (OF_A_HEAD | {"trainable": {"head": True}}, "trainable.head"),
        (OF_A_HEAD | {"objective": OBJECTIVE}, "trainable.head"),
    ],
)
def test_bad_input_is_refused_by_its_field(
    llm: LLM, tmp_path: Path, changes: dict[str, Any], param: str
) -> None:
    path = tmp_path / "session"
    with pytest.raises(InvalidRequestError) as refusal:
        llm.mezo(**({"objective": OBJECTIVE, "data": ROWS, "batch_size": 8} | changes), path=path)
    assert refusal.value.param == param
    assert not path.exists()


def test_a_name_of_the_model_cannot_be_published(session: OfflineSession) -> None:
    with pytest.raises(InvalidRequestError, match="name of the model"):
        session.publish("demo:mlm")


def test_a_closed_llm_has_no_sessions() -> None:
    llm = LLM("demo:mlm")
    session = llm.mezo(OBJECTIVE, ROWS, **SETTINGS)
    llm.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        session.step()
    session.close()
    assert not session.path.exists()


def test_a_caller_may_have_initialised_distributed_mlx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mx = pytest.importorskip("mlx.core")
    monkeypatch.setenv("MLX_RANK", "0")
    group = mx.distributed.init()
    with LLM("demo:mlm") as llm, llm.mezo(OBJECTIVE, ROWS, **SETTINGS) as session:
        session.run(3)
        assert session.num_steps == 3
    assert group.size() == 1


def test_a_record_is_as_in_the_log(session: OfflineSession) -> None:
    record = session.step()
    (stored,) = session.records()
    assert isinstance(stored, MezoRecord)
    assert stored == replace(record, gradients=stored.gradients)


def test_a_session_goes_on_from_a_published_adapter(llm: LLM, session: OfflineSession) -> None:
    session.run(20)
    session.publish("first")
    learnt = session.evaluate(ROWS)
    with llm.mezo(OBJECTIVE, ROWS, adapter="first", batch_size=len(ROWS)) as warm:
        assert warm.evaluate(ROWS) == learnt
        assert warm.info.paths == session.info.paths
    llm.unload_adapter("first")
    with pytest.raises(InvalidRequestError, match="no loaded adapter"):
        llm.mezo(OBJECTIVE, ROWS, adapter="first")


GENERATOR = "mlx-parallm-demo"
#: ``SUMS``: a format that the model never saw.
SUMS = [{"text": f"{a} + {b} is", "completion": f" <{a + b}>"} for a in (2, 3) for b in (2, 3, 4)]
FILMS = [{"text": text, "label": "good"} for text in GOOD]


@pytest.fixture(scope="module")
def generator() -> Iterator[LLM]:
    with LLM(GENERATOR) as llm:
        yield llm


def continued(llm: LLM, adapter: str | None = None) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=6, temperature=0)
    outputs = llm.generate([row["text"] for row in SUMS], params, adapter=adapter)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_a_generator_learns_completions_and_generates_with_them(generator: LLM) -> None:
    trainable = {"targets": ["q_proj", "v_proj", "down_proj"], "rank": 4}
    settings: dict[str, Any] = {"trainable": trainable, "batch_size": len(SUMS)}
    base = continued(generator)
    with generator.mezo({"kind": "completion"}, SUMS, **settings) as session:
        before = session.evaluate(SUMS)
        assert (before.accuracy, before.f1) == (None, None)
        session.run(60)
        assert session.evaluate(SUMS).loss < before.loss - 0.5
        session.publish("start", step=0)
        session.publish("sums")
        assert continued(generator, "start") == continued(generator) == base
        assert continued(generator, "sums") != base
    generator.unload_adapter("start")
    generator.unload_adapter("sums")
    assert continued(generator) == base


def test_a_generator_learns_to_choose(generator: LLM) -> None:
    objective = {"kind": "candidates", "candidates": {"good": " a joy", "bad": " very dull"}}
    trainable = {"layers": "top:1", "targets": ["q_proj", "v_proj"], "rank": 4}
    with generator.mezo(objective, FILMS, trainable=trainable, batch_size=2) as session:
        before = session.evaluate(FILMS)
        session.run(40)
        assert session.evaluate(FILMS).loss < before.loss - 0.01
        # Each text is looked up once for both signs.
        assert session.costs.hits > 0.8 * session.costs.lookups


@pytest.mark.parametrize(
    ("objective", "param"),
    [
        (OBJECTIVE, "objective"),
        ({"kind": "caller"}, "objective"),
        ({"kind": "reward", "reward_model": {"model": "demo:reward"}}, "objective"),
        ({"kind": "candidates", "candidates": {"good": "", "bad": "b"}}, "objective.candidates"),
    ],
)
def test_what_a_generator_cannot_learn_is_refused(
    generator: LLM, objective: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        generator.mezo(objective, FILMS, batch_size=1)
    assert refusal.value.param == param
