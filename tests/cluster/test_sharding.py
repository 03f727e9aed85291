"""Models in parts, computed by ranks together, against the same ops in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mlx_parallm.distributed.leading import LOST
from mlx_parallm.types.step import StepOutput
from tests.builders.architectures.configs import config_of
from tests.cluster import sharded_models
from tests.cluster.rank_processes import run_ranks
from tests.cluster.sharded_models import write_model, write_unreadable
from tests.cluster.sharded_ops import run_all
from tests.server_process import ServerProcess

MODULE = "tests.cluster.sharded_ops"
#: TOLERANCE of log-probabilities: sums over ranks add in another order.
TOLERANCE = 1e-4
#: INT8_TOLERANCE allows for keys and values that another order rounds to the next integer.
INT8_TOLERANCE = 2e-3
#: MODELS, with their bits, that run everything.
MODELS: dict[str, tuple[dict[str, Any], int | None]] = {
    "dense": (sharded_models.DENSE, None),
    "experts": (sharded_models.EXPERTS, None),
    "packed": (sharded_models.DENSE, 4),
}

#: OTHERS: models with other layers, with their quantisation: bits and mode. The names with "packed"
#: stay quantised on a CPU.
OTHERS: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "tied-packed-8": (sharded_models.TIED, 8, "affine"),
    "packed-mxfp4": (sharded_models.WIDE_EXPERTS, 4, "mxfp4"),
    "hybrid": (sharded_models.HYBRID, None, "affine"),
    "latent": (sharded_models.LATENT, None, "affine"),
}

# SCENARIOS of dense models that run one thing.
SCENARIOS = {"ahead": "ahead", "int8": "base", "embeds": "embeds"}
# LATER: models that only ``make test-slow`` runs; their ranks are started once more.
LATER = ("experts", "packed", "tied-packed-8", "packed-mxfp4", "latent")

Results = dict[str, dict[str, Any]]


def later(names: Iterable[str]) -> list[Any]:
    """Return names of models as parameters; those ``LATER`` are slow."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in LATER else n for n in names]


class Compared(NamedTuple):
    """The results of the same ops.

    Attributes:
        alone: those of one process.
        ranks: those of each rank.
    """

    alone: Results
    ranks: list[Results]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Compared]:
    """Return a function that gives the results of the models ``LATER``, or of all others."""

    @cache
    def compare(is_later: bool) -> Compared:
        folder = tmp_path_factory.mktemp("pair")
        names = [name for name in (*MODELS, *OTHERS, *SCENARIOS) if (name in LATER) == is_later]
        return _compare(2, folder, *(write_scenario(folder, name) for name in names))

    return compare


@pytest.fixture
def pair(request: pytest.FixtureRequest, compared: Callable[[bool], Compared]) -> Compared:
    """Return the results of one process and of two ranks, for the test's model and others."""
    callspec = getattr(request.node, "callspec", None)
    return compared(callspec is not None and callspec.params["model"] in LATER)


def write_scenario(folder: Path, name: str) -> str:
    """Write a model; return what to run with it."""
    if name in MODELS:
        config, bits = MODELS[name]
        write_model(folder / f"{name}-other", config, bits=bits, seed=4)
        return f"everything={write_model(folder / name, config, bits=bits)}"
    config, bits, mode = OTHERS.get(name, (sharded_models.DENSE, None, "affine"))
    written = write_model(folder / name, config, bits=bits, mode=mode)
    return f"{SCENARIOS.get(name, 'base')}={written}"


def _compare(size: int, folder: Path, *scenarios: str) -> Compared:
    return Compared(run_all(None, list(scenarios)), run_ranks(size, folder, [MODULE, *scenarios]))


@pytest.mark.parametrize("model", later(MODELS))
def test_exact_tokens_are_those_of_one_process(pair: Compared, model: str) -> None:
    assert pair.ranks[0][model]["path"] == pair.alone[model]["path"] == "packed"
    _assert_same_steps(pair, model, "base")


@pytest.mark.parametrize("model", later(MODELS))
def test_adapters_give_the_tokens_of_one_process(pair: Compared, model: str) -> None:
    _assert_same_steps(pair, model, "adapters", "replaced", "beneath", "awake")


@pytest.mark.parametrize("model", later(MODELS))
def test_updates_give_the_tokens_of_one_process(pair: Compared, model: str) -> None:
    names = ("after tensors", "after sleep 1", "after sleep 2", "after folder")
    _assert_same_steps(pair, model, *names)


@pytest.mark.parametrize("model", later(OTHERS))
def test_exact_tokens_of_other_layers(pair: Compared, model: str) -> None:
    _assert_same_steps(pair, model, "base")
    for rank in pair.ranks:
        assert rank[model] == {**rank[model], **_digests(pair.alone[model])}


def _assert_same_steps(pair: Compared, model: str, *names: str) -> None:
    for name in names:
        _assert_alike(pair.ranks[0][model][name], pair.alone[model][name])


def test_exact_tokens_of_adapters_in_compiled_steps_that_run_ahead(pair: Compared) -> None:
    assert all(rank["ahead"]["runs ahead"] for rank in pair.ranks)
    _assert_same_steps(pair, "ahead", "alone", "adapters", "replaced")


@pytest.mark.parametrize("model", later([*MODELS, "latent", "int8", "ahead"]))
def test_each_rank_gets_its_part_of_a_block_back(pair: Compared, model: str) -> None:
    for results in (pair.alone, *pair.ranks):
        _assert_moved(results[model]["moves"])
    first, second = (rank[model]["moves"][0] for rank in pair.ranks)
    assert first == second, "a row has the parts of all ranks"
    num_bytes = len(pair.alone[model]["moves"][0][0])
    # Both ranks have all of a latent.
    assert len(first[0]) == (2 * num_bytes if model == "latent" else num_bytes)


def test_each_rank_gets_its_part_of_a_state_back(pair: Compared) -> None:
    for results in (pair.alone, *pair.ranks):
        _assert_moved(results["hybrid"]["states"])
    first, second = (rank["hybrid"]["states"][0] for rank in pair.ranks)
    assert first == second, "a row has the parts of all ranks"
    assert len(first[0]) >= len(pair.alone["hybrid"]["states"][0][0])


def test_exact_tokens_with_quantised_kv(pair: Compared) -> None:
    wanted, actual = pair.alone["int8"]["base"], pair.ranks[0]["int8"]["base"]
    _assert_alike(actual, wanted, tolerance=INT8_TOLERANCE)
    assert wanted[-1].tokens != pair.alone["dense"]["base"][-1].tokens


def test_exact_tokens_of_prompts_with_embeddings(pair: Compared) -> None:
    wanted, actual = pair.alone["embeds"], pair.ranks[0]["embeds"]
    _assert_alike(actual["embeds"], wanted["embeds"])
    assert wanted["embeds"][-1].tokens[0] != wanted["base"][-1].tokens[0]
    assert wanted["embeds"][-1].tokens[1] == wanted["base"][-1].tokens[1]


@pytest.mark.parametrize("model", later(MODELS))
def test_digests_of_updates_are_those_of_whole_weights(pair: Compared, model: str) -> None:
    wanted = _digests(pair.alone[model])
    first, before, after, *_, folder, last = wanted.values()
    assert len(first) > 20
    assert first == before != after != folder == last
    for rank in pair.ranks:
        assert _digests(rank[model]) == wanted


def _assert_moved(moves: tuple[Any, Any, Any]) -> None:
    """Assert that blocks were saved, and that steps are alike before and after they came back."""
    saved, before, after = moves
    assert len(set(map(bytes, saved))) == len(saved) > 2
    assert before == after


def _digests(results: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {name: value for name, value in results.items() if name.startswith("digests")}


@pytest.mark.parametrize("model", later(MODELS))
def test_updates_are_refused_as_by_one_process(pair: Compared, model: str) -> None:
    wanted = pair.alone[model]
    for results in (wanted, *(rank[model] for rank in pair.ranks)):
        assert results["tensors"] is results["folder"] is results["update"] is None
        for name in ("wrong shape", "unknown", "not finite"):
            assert results[name] == wanted[name] is not None


@pytest.mark.parametrize("model", later(MODELS))
def test_updates_of_other_files_on_another_machine_are_refused(pair: Compared, model: str) -> None:
    refusals = [rank[model]["other files"] for rank in pair.ranks]
    assert all(refusal.startswith("Rank 1 has other files in ") for refusal in refusals)


@pytest.mark.parametrize("model", later(MODELS))
def test_adapters_of_one_part_do_not_fit_the_whole_model(pair: Compared, model: str) -> None:
    wanted = pair.alone[model]["unfit"]
    assert "does not fit" in wanted
    for rank in pair.ranks:
        assert rank[model]["unfit"] == wanted


@pytest.mark.parametrize("model", later(MODELS))
def test_adapters_change_what_the_model_answers(pair: Compared, model: str) -> None:
    results = pair.ranks[0][model]
    names = ("base", "adapters", "replaced", "beneath", "after tensors", "after folder")
    answers = [[token.logprob for token in results[name][-1].tokens] for name in names]
    for answer, other in itertools.combinations(answers, 2):
        assert answer != other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "scenario", "config"),
    [(3, "some", sharded_models.THIRDS), (4, "base", sharded_models.DENSE)],
)
def test_exact_tokens_of_more_ranks(
    tmp_path: Path, size: int, scenario: str, config: dict[str, Any]
) -> None:
    model = write_model(tmp_path / "model", config)
    alone, ranks = _compare(size, tmp_path, f"{scenario}={model}")
    for name, wanted in alone["model"].items():
        if isinstance(wanted, list):
            _assert_alike(ranks[0]["model"][name], wanted)
        elif name == "moves":
            for rank in ranks:
                _assert_moved(rank["model"][name])
        else:
            assert [rank["model"][name] for rank in ranks] == [wanted] * size


def test_a_model_without_shard_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = write_unreadable(tmp_path / "model", config_of("gemma"))
    server = ServerProcess("--model", str(folder), num_ranks=2)
    assert [rank.wait() for rank in server.ranks] == [2, LOST]
    refusal = (
        f"{folder} (gemma, num_attention_heads 4, num_key_value_heads 2) cannot be computed by 2 "
        "ranks: mlx_lm has no method shard for this architecture."
    )
    log = server.log
    server.stop()
    assert f"mlx_parallm serve: error: {refusal}" in log.splitlines()
    assert "Traceback" not in log


def _assert_alike(
    actual: list[StepOutput], expected: list[StepOutput], tolerance: float = TOLERANCE
) -> None:
    """Check tokens and their likeliest alternatives."""
    for step, wanted in zip(actual, expected, strict=True):
        assert [token.token_id for token in step.tokens] == [
            token.token_id for token in wanted.tokens
        ]
        for token, other in zip(step.tokens, wanted.tokens, strict=True):
            assert token.logprob is not None
            assert other.logprob is not None
            assert dict(token.logprob.top) == pytest.approx(dict(other.logprob.top), abs=tolerance)
