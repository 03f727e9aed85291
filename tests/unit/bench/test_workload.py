"""Workloads: the same seed gives the same requests, and lengths follow what was asked."""

import random
from statistics import median

import pytest

from mlx_parallm.bench.workload import Lengths, Workload, make_lexicon, plan_requests

WORDS = make_lexicon(50, seed=1)


def make_workload(**changes):
    settings = {
        "num_requests": 40,
        "prompt_lengths": Lengths("uniform", 5, 15),
        "output_lengths": Lengths("uniform", 3, 9),
        "words": WORDS,
    }
    return Workload(**(settings | changes))


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("64", Lengths("fixed", 64, 64)),
        ("uniform:32,96", Lengths("uniform", 32, 96)),
        ("lognormal:64,512", Lengths("lognormal", 64, 512)),
    ],
)
def test_lengths_parse_and_print_alike(text, lengths):
    assert Lengths.parse(text) == lengths
    assert str(lengths) == text


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "x", "uniform:9,3", "uniform:3", "uniform:0,4", "normal:3,4"]
)
def test_lengths_that_make_no_sense_are_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - int() words some of the messages
        Lengths.parse(text)


def test_uniform_lengths_reach_both_ends():
    source = random.Random(0)
    drawn = {Lengths("uniform", 2, 4).draw(source) for _ in range(200)}
    assert drawn == {2, 3, 4}


def test_lognormal_lengths_have_the_median_and_percentile_they_name():
    source = random.Random(0)
    lengths = Lengths("lognormal", 100, 1000)
    drawn = [lengths.draw(source) for _ in range(20_000)]
    assert median(drawn) == pytest.approx(100, rel=0.05)
    assert sum(length <= 1000 for length in drawn) / len(drawn) == pytest.approx(0.99, abs=0.003)


def test_the_same_seed_plans_the_same_requests_and_another_seed_others():
    assert plan_requests(make_workload(seed=4)) == plan_requests(make_workload(seed=4))
    assert plan_requests(make_workload(seed=4)) != plan_requests(make_workload(seed=5))


def test_prompts_have_the_words_and_outputs_the_tokens_asked_for():
    for planned in plan_requests(make_workload()):
        assert 5 <= len(planned.body["prompt"].split()) <= 15
        assert 3 <= planned.max_tokens <= 9
        assert planned.body["max_tokens"] == planned.max_tokens
        assert planned.body["stream_options"] == {"include_usage": True}


def test_a_shared_prefix_begins_every_prompt():
    requests = plan_requests(make_workload(shared_prefix_length=8))
    assert len({tuple(r.body["prompt"].split()[:8]) for r in requests}) == 1
    assert len({r.body["prompt"] for r in requests}) == len(requests)


def test_chat_prompts_are_a_user_message():
    planned = plan_requests(make_workload(endpoint="chat"))[0]
    assert planned.route == "/v1/chat/completions"
    assert [message["role"] for message in planned.body["messages"]] == ["user"]


def test_token_id_prompts_are_lists_of_ids_within_the_range():
    for planned in plan_requests(make_workload(token_ids=range(10, 20))):
        assert all(10 <= token_id < 20 for token_id in planned.body["prompt"])


def test_token_ids_are_refused_for_chat():
    with pytest.raises(ValueError, match="token ids"):
        plan_requests(make_workload(endpoint="chat", token_ids=range(10)))


def test_each_request_gets_its_own_seed_only_when_asked():
    seeded = plan_requests(make_workload(seed=100, seed_requests=True, num_requests=3))
    assert [planned.body["seed"] for planned in seeded] == [100, 101, 102]
    assert "seed" not in plan_requests(make_workload())[0].body


def test_arrivals_of_an_open_loop_keep_the_mean_rate():
    requests = plan_requests(make_workload(num_requests=4000, rate=8.0))
    arrivals = [planned.arrival_s for planned in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / len(arrivals) == pytest.approx(1 / 8, rel=0.05)


def test_extra_fields_win():
    planned = plan_requests(make_workload(extra={"ignore_eos": True, "temperature": 0.5}))[0]
    assert planned.body["ignore_eos"] is True
    assert planned.body["temperature"] == 0.5


def test_a_lexicon_has_different_words_and_no_silly_size():
    assert len(set(make_lexicon(2000, seed=3))) == 2000
    with pytest.raises(ValueError, match="lexicon"):
        make_lexicon(0, seed=3)
