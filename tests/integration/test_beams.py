"""Beam search over tiny decoders against transformers', whose results are golden values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config import CacheConfig
from mlx_parallm.llm import LLM
from mlx_parallm.offline.beams import BeamSearchParams
from mlx_parallm.offline.completions import RequestOutput
from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.request import SamplingParams
from tests.decoder_folders import write_words
from tests.encoder_folders import write_golden
from tests.golden_searches import DECODERS, differences, params_of, read_searches

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[tuple[str, LLM]]:
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    golden = json.loads((GOLDEN / "families" / f"{name}.json").read_text(encoding="utf-8"))
    write_golden(folder, golden)
    write_words(folder, golden["config"]["vocab_size"])
    with LLM(str(folder), dtype="float32", cache=CacheConfig(kv_cache_bytes=4 << 20)) as llm:
        yield name, llm


def results_of(output: RequestOutput) -> list[tuple[Sequence[int], float]]:
    """Return the tokens of each result, and the sum of their log-probabilities."""
    return [(each.token_ids, each.cumulative_logprob or 0.0) for each in output.outputs]


def test_beams_are_those_of_transformers(decoder: tuple[str, LLM]) -> None:
    name, llm = decoder
    searches = read_searches(name)
    wide = [search for search in searches if search["width"] > 1]
    outputs = llm.generate(
        [search["prompt"] for search in wide], [params_of(search) for search in wide]
    )
    wrong = {
        number: apart
        for number, (search, output) in enumerate(zip(wide, outputs, strict=True))
        if (apart := list(differences(search, results_of(output))))
    }
    assert not wrong
    assert {search["width"] for search in wide} == set(range(2, 9))


def test_one_beam_is_greedy(decoder: tuple[str, LLM]) -> None:
    name, llm = decoder
    # Penalties change logits for greedy rows, and log-probabilities for beams.
    searches = [
        search
        for search in read_searches(name)
        if search["width"] == 1 and "repetition_penalty" not in search
    ]
    params = [params_of(search) for search in searches]
    for output, search in zip(
        llm.generate([search["prompt"] for search in searches], params), searches, strict=True
    ):
        assert list(output.outputs[0].token_ids) == search["hypotheses"][0][0]


def test_greedy_samples_beside_beams_have_their_tokens(decoder: tuple[str, LLM]) -> None:
    name, llm = decoder
    wide = [search for search in read_searches(name) if search["width"] > 4][:8]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [search["prompt"] for search in wide]
    alone = llm.generate(prompts, greedy)
    mixed = llm.generate(
        [*prompts, *prompts], [*(params_of(search) for search in wide), *(greedy for _ in wide)]
    )
    assert [each.outputs[0].token_ids for each in mixed[len(wide) :]] == [
        each.outputs[0].token_ids for each in alone
    ]
    for search, output in zip(wide, mixed[: len(wide)], strict=True):
        assert not list(differences(search, results_of(output)))


def test_more_beams_than_kernels_report_tokens_for(decoder: tuple[str, LLM]) -> None:
    """Stock operations find more than 32 likeliest tokens."""
    _, llm = decoder
    narrow, wide = (
        llm.beam_search([[5, 6, 7]], BeamSearchParams(beam_width=width, max_tokens=1))[0]
        for width in (20, 40)
    )
    first = [(each.tokens, each.cum_logprob) for each in wide.sequences[:20]]
    assert [tokens for tokens, _ in first] == [each.tokens for each in narrow.sequences]
    assert [value for _, value in first] == pytest.approx(
        [each.cum_logprob for each in narrow.sequences], abs=1e-5
    )
    assert len(wide.sequences) == 40


def test_the_results_of_an_llm_are_in_order_and_have_their_sums(decoder: tuple[str, LLM]) -> None:
    _, llm = decoder
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.0, ignore_eos=True)
    (output,) = llm.beam_search([[5, 6, 7]], params)
    sums = [each.cum_logprob for each in output.sequences]
    assert sums == sorted(sums, reverse=True)
    for each in output.sequences:
        assert each.tokens[:3] == [5, 6, 7]
        assert each.cum_logprob == pytest.approx(sum(entry.logprob for entry in each.logprobs))
        assert each.text == llm.tokenizer.decode(each.tokens, skip_special_tokens=False)
        assert (each.finish_reason, len(each.tokens)) == ("length", 8)


def test_no_repeated_runs_for_greedy_and_drawn_samples(decoder: tuple[str, LLM]) -> None:
    _, llm = decoder
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature, max_tokens=30, ignore_eos=True, no_repeat_ngram_size=2, seed=3
        )
        (output,) = llm.generate([[5, 6, 5]], params)
        pairs = list(pairwise([5, 6, 5, *output.outputs[0].token_ids]))
        assert len(set(pairs)) == len(pairs)


def test_a_forced_end_comes_at_the_last_place_only(decoder: tuple[str, LLM]) -> None:
    _, llm = decoder
    free = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    forced = replace(free, forced_eos_id=2)
    ended = replace(forced, stop_token_ids=(2,))
    beams = replace(ended, beams=BeamParams(width=2), n=2)
    free_output, *outputs = llm.generate([[5, 6, 7]] * 4, [free, forced, ended, beams])
    tokens, text = free_output.outputs[0].token_ids[:5], free_output.outputs[0].text
    for output in outputs[:2]:
        assert list(output.outputs[0].token_ids) == [*tokens, 2]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)
    # The text has no end token, though the length ended it.
    assert text.startswith(outputs[1].outputs[0].text)
    for each in outputs[2].outputs:
        assert (each.token_ids[-1], len(each.token_ids)) == (2, 6)
        assert (each.finish_reason, each.stop_reason) == ("length", None)


def test_fewer_results_are_the_first_of_all(decoder: tuple[str, LLM]) -> None:
    name, llm = decoder
    search = next(search for search in read_searches(name) if search["width"] == 8)
    params = params_of(search)
    all_of_them, few = llm.generate([search["prompt"]] * 2, [params, replace(params, n=3)])
    assert [each.token_ids for each in few.outputs] == [
        each.token_ids for each in all_of_them.outputs[:3]
    ]


def test_normalising_again_makes_a_ban_raise_the_others(decoder: tuple[str, LLM]) -> None:
    _, llm = decoder
    (free,) = llm.beam_search([[5, 6, 7]], BeamSearchParams(beam_width=1, max_tokens=1))
    best, logprob = free.sequences[0].tokens[-1], free.sequences[0].cum_logprob
    sums = []
    for renormalizes in (False, True):
        params = SamplingParams(
            temperature=0.0,
            beams=BeamParams(width=2, renormalizes=renormalizes),
            max_tokens=1,
            logprobs=0,
            logit_bias=((best, -float("inf")),),
        )
        (output,) = llm.generate([[5, 6, 7]], params)
        sums.append(output.outputs[0].cumulative_logprob)
    # What was left of the probability is all of it now.
    assert sums[1] - sums[0] == pytest.approx(-math.log1p(-math.exp(logprob)), abs=1e-4)
