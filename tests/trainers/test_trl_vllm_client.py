"""TRL's ``VLLMClient``: health, models, generation, chat, scores, caches; not NCCL."""

from __future__ import annotations

import math

import pytest
import requests
from exercises import NO_THINKING, SUM, prompt_ids, user
from trl.generation.vllm_client import VLLMClient

GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def client(server):
    return VLLMClient(base_url=server.url, connection_timeout=10)


def test_health_and_model(client, server):
    client.check_server()
    assert client.model == server.model
    assert client.get_world_size() == server.num_ranks


def test_server_that_is_not_there():
    with pytest.raises(requests.ConnectionError, match="can't be reached"):
        VLLMClient(base_url="http://127.0.0.1:9", connection_timeout=0.0)


def test_generate_groups_of_token_prompts(client, server):
    prompts = [prompt_ids(server), prompt_ids(server, "What is 20 + 30?")]
    answer = client.generate(prompts, n=3, max_tokens=12, logprobs=0)
    assert answer["prompt_ids"] == prompts
    assert len(answer["completion_ids"]) == 6
    for ids, values, named in zip(
        answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
    ):
        assert len(ids) == len(values) == len(named)
        assert [names[0] for names in named] == ids
        assert all(
            len(entry) == 1 and math.isfinite(entry[0]) and entry[0] <= 0 for entry in values
        )


def test_generate_with_alternatives(client, server):
    answer = client.generate([prompt_ids(server)], max_tokens=8, logprobs=3, **GREEDY)
    (ids,), (values,), (named,) = (
        answer["completion_ids"],
        answer["logprobs"],
        answer["logprob_token_ids"],
    )
    assert len(ids) == len(values)
    for token, row, candidates in zip(ids, values, named, strict=True):
        assert 3 <= len(row) <= 4
        assert row == sorted(row, reverse=True)
        assert token in candidates


def test_generate_from_texts_is_seeded(client):
    options = {"max_tokens": 6, "generation_kwargs": {"seed": 2**62 + 7}}
    first = client.generate(["1, 2, 3,", "Monday, Tuesday,"], **options)
    again = client.generate(["1, 2, 3,", "Monday, Tuesday,"], **options)
    assert first["completion_ids"] == again["completion_ids"]
    assert [len(ids) > 0 for ids in first["prompt_ids"]] == [True, True]


def test_generate_by_a_regular_expression(client, server):
    answer = client.generate(
        [prompt_ids(server)], max_tokens=8, structured_outputs_regex="[a-c]{2}", **GREEDY
    )
    text = server.ok(
        "/detokenize", {"model": server.model, "tokens": answer["completion_ids"][0]}
    ).json()["prompt"]
    assert text.replace("<|im_end|>", "").strip("abc") == ""


def test_generate_through_tokens_in_tokens_out(client, server):
    """Generate through /inference/v1/generate, which TRL uses for prompts with features."""
    prompts = [prompt_ids(server), prompt_ids(server, "What is 20 + 30?")]
    answer = client.generate(prompts, features=[None, None], n=2, max_tokens=6, logprobs=1)
    assert answer["prompt_ids"] == prompts
    assert len(answer["completion_ids"]) == 4
    for ids, named in zip(answer["completion_ids"], answer["logprob_token_ids"], strict=True):
        assert len(ids) == len(named)
        assert all(token in names for token, names in zip(ids, named, strict=True))


def test_chat(client):
    answer = client.chat(
        [[user(SUM)], [user("What is 20 + 30?")]],
        n=2,
        max_tokens=10,
        logprobs=2,
        chat_template_kwargs=NO_THINKING,
    )
    assert len(answer["prompt_ids"]) == 2
    assert len(answer["completion_ids"]) == 4
    for ids, values, named in zip(
        answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
    ):
        assert len(ids) == len(values) == len(named)
        assert all(token in names for token, names in zip(ids, named, strict=True))


def test_chat_and_generate_agree(client, server):
    chat = client.chat([[user(SUM)]], max_tokens=8, chat_template_kwargs=NO_THINKING, **GREEDY)
    assert chat["prompt_ids"] == [prompt_ids(server)]
    tokens = client.generate(chat["prompt_ids"], max_tokens=8, **GREEDY)
    assert tokens["completion_ids"] == chat["completion_ids"]


def test_chat_with_a_function_as_tool(client):
    def get_weather(city: str) -> str:
        """Look up the weather.

        Args:
            city: Where.
        """
        return city

    with_tool = client.chat([[user(SUM)]], tools=[get_weather], max_tokens=4, **GREEDY)
    without = client.chat([[user(SUM)]], max_tokens=4, **GREEDY)
    assert len(with_tool["prompt_ids"][0]) > len(without["prompt_ids"][0])


@pytest.mark.parametrize("chunk_size", [0, 1])
def test_sequence_logprobs_are_those_of_sampling(client, server, chunk_size):
    prompts = [prompt_ids(server), prompt_ids(server, "What is 2 + 3?")]
    made = client.generate(prompts, max_tokens=8, temperature=1.0)
    sequences = [p + c for p, c in zip(prompts, made["completion_ids"], strict=True)]
    scored = client.get_sequence_logprobs(
        sequences, [len(p) for p in prompts], top_logprobs=100, chunk_size=chunk_size
    )
    for row, ids in enumerate(made["completion_ids"]):
        assert [names[0] for names in scored["actual_token_ids"][row]] == ids
        assert all(len(entry) == 100 for entry in scored["logprobs"][row])
        for got, sampled in zip(scored["logprobs"][row], made["logprobs"][row], strict=True):
            assert got == sorted(got, reverse=True)
            assert sampled[0] <= got[0] + 1e-4
        for got, sampled in zip(scored["actual_logprobs"][row], made["logprobs"][row], strict=True):
            # A token outside the 100 likeliest is -inf to TRL only if the server leaves it out.
            assert got[0] == pytest.approx(sampled[0], abs=1e-4)


def test_caches_are_reset(client):
    client.reset_prefix_cache()


def test_no_weights_by_nccl(client):
    """TRL stops by itself: the server names no weight-transfer engine."""
    info = client.get_server_info()
    assert info["weight_transfer_config"] is None
    with pytest.raises(RuntimeError, match="has no weight-transfer engine"):
        client.init_communicator(device="cpu")
