"""Ranking, scores and rewards over HTTP, by small models with golden values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mlx_parallm.client import RLClient
from tests.cross_encoder_folder import (
    read_cross_encoder,
    write_broken,
    write_cross_encoder,
    write_reward_model,
    write_step_model,
)
from tests.embedder_folder import write_embedder, write_encoder_of
from tests.server_process import ServerProcess, serving

DEMO = Path(__file__).parents[2] / "mlx_parallm" / "demo" / "model"
QUERY = "w10 w11 w12"
DOCUMENTS = ["w20 w21", "w10 w11 w12 w30 w31 w32 w33 w34", "w44"]
LOGITS = "torch.nn.modules.linear.Identity"


def write_models(folder: Path) -> dict[str, Path]:
    """By name; ``three`` is a classifier with three labels, ``demo`` generates."""
    return {
        "cross": write_cross_encoder(folder / "cross"),
        "logits": write_cross_encoder(
            folder / "logits", sbert_ce_default_activation_function=LOGITS
        ),
        "embedder": write_embedder(folder / "embedder"),
        "three": write_encoder_of(folder / "three", "bert_sequence"),
        "broken": write_broken(folder / "broken"),
        "reward": write_reward_model(folder / "reward"),
        "steps": write_step_model(folder / "steps"),
        "demo": DEMO,
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folders = write_models(tmp_path_factory.mktemp("models"))
    with serving(folders) as process:
        yield process


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    answer = httpx2.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: ServerProcess, path: str, body: dict[str, Any], status: int = 400) -> Any:
    """The error; the server goes on."""
    answer = httpx2.post(f"{server.url}{path}", json=body)
    assert answer.status_code == status, answer.text
    assert len(answer.text) < 2000
    assert httpx2.get(f"{server.url}/health").status_code == 200
    return answer.json()["error"]


def scores(results: list[dict[str, Any]], field: str = "relevance_score") -> list[float]:
    """By document."""
    return [one[field] for one in sorted(results, key=lambda one: one["index"])]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_scores_are_those_of_sentence_transformers(server: ServerProcess, path: str) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1], "title": "more"}, DOCUMENTS[2]]
    answer = post(server, path, {"query": QUERY, "documents": documents, "model": "cross"})
    assert answer["model"] == "cross"
    assert answer["id"].startswith("rerank-")
    results = answer["results"]
    assert scores(results) == pytest.approx(read_cross_encoder()["scores"][:3], abs=1e-4)
    assert [one["index"] for one in results] == [0, 2, 1]
    assert [one["document"] for one in results] == [{"text": DOCUMENTS[i]} for i in (0, 2, 1)]
    # [CLS] query [SEP] document [SEP].
    assert answer["usage"] == {"prompt_tokens": 8 + 14 + 7, "total_tokens": 29}


def test_logits_where_the_body_or_the_model_asks_for_them(server: ServerProcess) -> None:
    golden = read_cross_encoder()["logits"][:3]
    asked = {"query": QUERY, "documents": DOCUMENTS}
    raw = post(server, "/rerank", {**asked, "model": "cross", "use_activation": False})
    assert scores(raw["results"]) == pytest.approx(golden, abs=1e-4)
    own = post(server, "/rerank", {**asked, "model": "logits"})
    assert scores(own["results"]) == pytest.approx(golden, abs=1e-4)


def test_an_embedder_ranks_by_cosine(server: ServerProcess) -> None:
    asked = {"query": "w10 w11", "documents": ["w50 w51 w52", "w10 w11"], "model": "embedder"}
    answer = post(server, "/v1/rerank", {**asked, "top_n": 1, "return_documents": False})
    assert answer["results"] == [{"index": 1, "relevance_score": pytest.approx(1, abs=1e-5)}]
    assert answer["usage"]["prompt_tokens"] == 4 + 5 + 4
    vectors = post(
        server, "/v1/embeddings", {"input": ["w10 w11", "w50 w51 w52"], "model": "embedder"}
    )["data"]
    first, second = (one["embedding"] for one in vectors)
    cosine = sum(a * b for a, b in zip(first, second, strict=True))
    found = scores(post(server, "/v1/rerank", asked)["results"])
    assert found[0] == pytest.approx(cosine, abs=1e-4)


def test_equal_documents_keep_their_order(server: ServerProcess) -> None:
    asked = {"query": QUERY, "documents": ["w44", "w20 w21", "w44", "w20 w21"]}
    results = post(server, "/v1/rerank", asked)["results"]
    assert [one["index"] for one in results] == [1, 3, 0, 2]


def test_teis_form(server: ServerProcess) -> None:
    golden = read_cross_encoder()
    asked = {"query": QUERY, "texts": DOCUMENTS}
    found = post(server, "/rerank", asked)
    assert [sorted(one) for one in found] == [["index", "score"]] * 3
    assert [one["index"] for one in found] == [0, 2, 1]
    assert scores(found, "score") == pytest.approx(golden["scores"][:3], abs=1e-4)
    raw = post(server, "/rerank", {**asked, "raw_scores": True, "return_text": True})
    assert scores(raw, "score") == pytest.approx(golden["logits"][:3], abs=1e-4)
    assert [one["text"] for one in raw] == [DOCUMENTS[i] for i in (0, 2, 1)]


def test_the_document_of_a_long_pair_is_cut_where_that_is_asked(server: ServerProcess) -> None:
    long = "w20 w21" + " w30" * 60
    asked = {"query": QUERY, "documents": ["w7", long], "model": "cross"}
    error = refusal(server, "/rerank", asked)
    assert error["code"] == "context_length_exceeded"
    assert "documents 1 has 68" in error["message"]
    cut = post(server, "/rerank", {**asked, "truncate_prompt_tokens": 8})
    short = post(server, "/rerank", {**asked, "documents": ["w7", "w20 w21"]})
    assert scores(cut["results"]) == pytest.approx(scores(short["results"]), abs=1e-4)
    tei = post(server, "/rerank", {"query": QUERY, "texts": [long], "truncate": True})
    whole = post(server, "/rerank", {"query": QUERY, "documents": ["w20 w21" + " w30" * 32]})
    assert scores(tei, "score") == pytest.approx(scores(whole["results"]), abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "w5"}, "documents"),
        ({"documents": ["w5"]}, "query"),
        ({"query": "w5", "documents": []}, "documents"),
        ({"query": "w5", "texts": []}, "texts"),
        ({"query": "w5", "documents": ["w5"], "texts": ["w5"]}, "documents"),
        ({"query": "w5", "documents": ["w5"] * 10_000}, "documents"),
        ({"query": "w5", "documents": "w5"}, "documents"),
        ({"query": "w5", "documents": [5]}, "documents"),
        ({"query": "w5", "documents": [{"title": "w5"}]}, "documents"),
        ({"query": ["w5"], "documents": ["w5"]}, "query"),
        ({"query": "w5", "documents": ["w5"], "top_n": -1}, "top_n"),
        ({"query": "w5", "documents": ["w5"], "top_n": "1"}, "top_n"),
        ({"query": "w5", "documents": ["w5"], "truncate_prompt_tokens": 99}, "truncate"),
        ({"query": "w5", "texts": ["w5"], "truncation_direction": "Left"}, "truncation_direction"),
        ({"query": "w5", "documents": ["w5 " * 350_000]}, "documents"),
        ({"query": "w5", "documents": ["w5"], "model": "three"}, "model"),
    ],
)
def test_bad_rankings_name_the_field(
    server: ServerProcess, body: dict[str, Any], param: str
) -> None:
    assert refusal(server, "/v1/rerank", body)["param"].startswith(param)


def test_unknown_models_and_fields(server: ServerProcess) -> None:
    asked = {"query": QUERY, "documents": ["w5"]}
    assert httpx2.post(f"{server.url}/rerank", json={**asked, "model": "no"}).status_code == 404
    answer = httpx2.post(f"{server.url}/rerank", json={**asked, "max_chunks_per_doc": 10})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "max_chunks_per_doc"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score", "/v1/rewards/score"])
def test_results_that_are_no_numbers_fail_alone(server: ServerProcess, path: str) -> None:
    bodies = {
        "/v1/rerank": {"query": QUERY, "documents": DOCUMENTS},
        "/v1/score": {"text_1": QUERY, "text_2": DOCUMENTS},
        "/v1/rewards/score": {"texts": DOCUMENTS},
    }
    with ThreadPoolExecutor(4) as pool:
        good = pool.map(lambda _: post(server, path, {**bodies[path], "model": "cross"}), range(4))
        error = refusal(server, path, {**bodies[path], "model": "broken"}, 500)
        assert "not made of numbers" in error["message"]
        assert len(list(good)) == 4


@pytest.mark.parametrize(
    ("first", "second"),
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_pairs_under_all_their_names(server: ServerProcess, first: str, second: str) -> None:
    golden = read_cross_encoder()
    one = {first: QUERY, second: DOCUMENTS, "model": "cross"}
    answer = post(server, "/score", one)
    assert answer["object"] == "list"
    assert answer["model"] == "cross"
    assert [(each["index"], each["object"]) for each in answer["data"]] == [
        (place, "score") for place in range(3)
    ]
    assert scores(answer["data"], "score") == pytest.approx(golden["scores"][:3], abs=1e-4)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 29
    queries, documents = zip(*golden["pairs"], strict=True)
    every = {first: queries, second: documents, "model": "logits", "request_id": "a"}
    answer = post(server, "/v1/score", every)
    assert answer["id"] == "score-a"
    assert scores(answer["data"], "score") == pytest.approx(golden["logits"], abs=1e-4)


def test_an_embedders_score_is_the_cosine(server: ServerProcess) -> None:
    asked = {"text_1": ["w10 w11", "w50"], "text_2": ["w10 w11", "w51 w52"], "model": "embedder"}
    one, other = scores(post(server, "/score", asked)["data"], "score")
    assert one == pytest.approx(1, abs=1e-5)
    assert abs(other) < 0.999


def next_probabilities(server: ServerProcess, prompt: Any, labels: list[int]) -> list[float]:
    """As completions tell them."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body |= {"logprob_token_ids": labels, "return_tokens_as_token_ids": True}
    told = post(server, "/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"][0]
    return [math.exp(told[f"token_id:{one}"]) for one in labels]


def test_labels_after_a_query_and_items(server: ServerProcess) -> None:
    labels = [70, 80, 90]
    items = ["1, 2, 3,", " what?"]
    asked = {"query": "Go on: ", "items": items, "label_token_ids": labels, "model": "demo"}
    answer = post(server, "/v1/score", asked)
    assert (answer["object"], answer["model"]) == ("scoring", "demo")
    wanted = [next_probabilities(server, f"Go on: {one}", labels) for one in items]
    for found, want in zip(answer["scores"], wanted, strict=True):
        assert found == pytest.approx(want, rel=1e-3)
    among = post(server, "/v1/score", {**asked, "apply_softmax": True})["scores"]
    for found, want in zip(among, wanted, strict=True):
        assert found == pytest.approx([one / sum(want) for one in want], rel=1e-3)
    turned = post(server, "/v1/score", {**asked, "item_first": True})["scores"][0]
    assert turned == pytest.approx(next_probabilities(server, "1, 2, 3,Go on: ", labels), rel=1e-3)
    ids = {"query": [1, 40, 41], "items": [[42], [43, 44]]}
    found = post(server, "/v1/score", {**asked, **ids})
    assert found["usage"]["prompt_tokens"] == 9
    assert found["scores"][1] == pytest.approx(
        next_probabilities(server, [1, 40, 41, 43, 44], labels), rel=1e-3
    )
    # vLLM's name for it tells the first label's share of all labels.
    answer = post(server, "/generative_scoring", {**asked, **ids})
    assert answer["object"] == "list"
    first = [one[0] / sum(one) for one in found["scores"]]
    assert scores(answer["data"], "score") == pytest.approx(first, rel=1e-3)


def test_a_classifiers_labels_are_its_own(server: ServerProcess) -> None:
    asked = {"query": "w10 w11 ", "items": ["w20", "w30"], "model": "three"}
    logits = post(server, "/v1/score", asked)["scores"]
    whole = {"input": ["w10 w11 w20", "w10 w11 w30"], "model": "three"}
    plain = post(server, "/classify", {**whole, "use_activation": False})["data"]
    for found, want in zip(logits, plain, strict=True):
        assert found == pytest.approx(want["probs"], abs=1e-4)
    shares = post(server, "/v1/score", {**asked, "apply_softmax": True})["scores"]
    for found, want in zip(shares, post(server, "/classify", whole)["data"], strict=True):
        assert found == pytest.approx(want["probs"], abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "w5"}, "text_1"),
        ({"text_1": "w5", "documents": "w5"}, "documents"),
        ({"text_1": [], "text_2": "w5"}, "text_1"),
        ({"text_1": ["w5", "w6"], "text_2": ["w5"]}, "text_1"),
        ({"text_1": "w5", "text_2": ["w5"] * 10_000}, "text_2"),
        ({"text_1": "w5", "text_2": [5]}, "text_2"),
        ({"text_1": "w5", "text_2": "w5 " * 350_000}, "text_2"),
        ({"queries": "w5", "items": [[5]]}, "items"),
        ({"text_1": "w5", "text_2": "w5", "model": "three"}, "model"),
        ({"text_1": "w5", "text_2": "w5", "model": "demo"}, "model"),
        (
            {
                "text_1": "w5",
                "text_2": "w5",
                "truncate_prompt_tokens": 3,
                "truncation_side": "left",
            },
            "truncation_side",
        ),
        ({"query": "w5"}, "items"),
        ({"query": "w5", "items": []}, "items"),
        ({"query": "w5", "items": ["w5"]}, "label_token_ids"),
        ({"query": "w5", "items": ["w5"], "label_token_ids": [10**9]}, "label_token_ids"),
        ({"query": "w5", "items": ["w5"], "label_token_ids": [-1]}, "label_token_ids"),
        ({"query": "w5", "items": ["w5"], "label_token_ids": [1], "model": "cross"}, "label"),
        ({"query": "w5", "items": ["w5"] * 8000, "label_token_ids": [1]}, "items"),
        ({"query": [5], "items": ["w5"], "model": "cross"}, "items"),
        ({"query": 5, "items": ["w5"]}, "query"),
        ({"query": "w5", "items": "w5", "label_token_ids": [1], "truncate_prompt_tokens": 2}, "tr"),
    ],
)
def test_bad_scores_name_the_field(server: ServerProcess, body: dict[str, Any], param: str) -> None:
    assert refusal(server, "/v1/score", body)["param"].startswith(param)


def logits_of(server: ServerProcess, ids: list[list[int]]) -> list[float]:
    """Of the reward model."""
    body = {"input": ids, "model": "reward", "use_activation": False}
    return [one["probs"][0] for one in post(server, "/classify", body)["data"]]


def test_rewards_of_texts_and_conversations(server: ServerProcess) -> None:
    plain = post(server, "/v1/rewards/score", {"texts": ["w20 w21", "w44"], "model": "reward"})
    wanted = logits_of(server, [[2, 20, 21, 3], [2, 44, 3]])
    assert scores(plain["data"], "reward") == pytest.approx(wanted, abs=1e-4)
    assert plain["usage"]["prompt_tokens"] == 7
    chats = [
        [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "w21 w22"}],
        [{"role": "user", "content": "w30"}],
    ]
    asked = {"chats": chats, "model": "reward"}
    wanted = logits_of(server, [[90, 20, 91, 21, 22], [90, 30]])
    found = post(server, "/v1/rewards/score", asked)["data"]
    assert scores(found, "reward") == pytest.approx(wanted, abs=1e-4)
    shares = post(server, "/rewards/score", {**asked, "sigmoid": True})["data"]
    logistic = [1 / (1 + math.exp(-one)) for one in wanted]
    assert scores(shares, "reward") == pytest.approx(logistic, abs=1e-4)


def test_rewards_of_completions(server: ServerProcess) -> None:
    asked = {"prompt": "w20 ", "completions": ["w21", "w22 w23"], "model": "reward"}
    found = post(server, "/v1/rewards/score", asked)["data"]
    wanted = logits_of(server, [[2, 20, 21, 3], [2, 20, 22, 23, 3]])
    assert scores(found, "reward") == pytest.approx(wanted, abs=1e-4)
    chat = [{"role": "user", "content": "w20"}]
    turns = [{"role": "assistant", "content": "w23"}]
    several = [
        {"prompt": chat, "completions": ["w21", turns]},
        {"prompt": "w20 ", "completions": ["w21"]},
    ]
    found = post(server, "/v1/rewards/score", {"prompts": several, "model": "reward"})["data"]
    assert [(one["prompt_index"], one["index"]) for one in found] == [(0, 0), (0, 1), (1, 0)]
    wanted = logits_of(server, [[90, 20, 91, 21], [90, 20, 91, 23], [2, 20, 21, 3]])
    assert [one["reward"] for one in found] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("token", ["w50", 50])
def test_rewards_of_steps(server: ServerProcess, token: str | int) -> None:
    texts = ["w20 w50 w21 w50", "w50"]
    asked = {"texts": texts, "step_token": token, "sigmoid": True}
    found = post(server, "/v1/rewards/score", asked)
    assert found["model"] == "steps"
    first, second = (one["steps"] for one in found["data"])
    assert (len(first), len(second)) == (2, 1)
    alone = post(server, "/v1/rewards/score", {**asked, "texts": texts[:1], "sigmoid": False})
    (raw,) = alone["data"]
    assert [1 / (1 + math.exp(-one)) for one in raw["steps"]] == pytest.approx(first, abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": "w5"}, "texts"),
        ({"texts": [5]}, "texts"),
        ({"texts": ["w5"], "chats": [[{"role": "user", "content": "w5"}]]}, "chats"),
        ({"texts": ["w5"] * 10_000}, "texts"),
        ({"texts": ["w5 " * 350_000]}, "texts"),
        ({"texts": ["w5"], "model": "three"}, "model"),
        ({"texts": ["w5"], "model": "embedder"}, "model"),
        ({"texts": ["w5"], "prompt": "w5"}, "texts"),
        ({"prompt": "w5"}, "texts"),
        ({"completions": ["w5"]}, "completions"),
        ({"prompt": "w5", "completions": []}, "completions"),
        ({"prompt": "w5", "completions": [[{"role": "user", "content": "a"}]]}, "completions"),
        ({"prompts": [{"prompt": "a", "completions": ["w5"] * 5000}] * 2}, "prompts"),
        ({"prompts": [{"prompt": "a"}]}, "prompts"),
        ({"chats": [[{"role": "king", "content": "a"}]], "model": "reward"}, "chats"),
        ({"chats": [[{"role": "system", "content": "a"}]], "model": "reward"}, "chats"),
        ({"chats": [[{"role": "user", "content": "a"}]], "model": "cross"}, "chats"),
        ({"chats": [[]], "model": "reward"}, "chats"),
        ({"texts": ["w5"], "step_token": "no such"}, "step_token"),
        ({"texts": ["w5"], "step_token": 10**9}, "step_token"),
        ({"texts": ["w50", "w5"], "step_token": "w50"}, "texts"),
        ({"texts": ["w50"], "step_token": "w50", "model": "reward"}, "model"),
        ({"texts": ["w5"], "step_token": "w5", "truncate_prompt_tokens": 9}, "truncate"),
        ({"texts": ["w5"], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
def test_bad_rewards_name_the_field(
    server: ServerProcess, body: dict[str, Any], param: str
) -> None:
    assert refusal(server, "/v1/rewards/score", body)["param"].startswith(param)


CHAT = [{"role": "user", "content": "What is 3 + 4?"}]
PROMPTS: list[Any] = [
    "1, 2, 3,",
    CHAT,
    [1, 40, 41],
    {"text": "1, 2,", "reward_prompt": "w20 "},
    {"messages": CHAT, "reward_prompt": [{"role": "user", "content": "w20 w21"}]},
]


def what_was_read(prompt: Any, text: str, token_text: str) -> dict[str, Any]:
    """The fields of a request for the reward of a sample."""
    before: Any = prompt["reward_prompt"] if isinstance(prompt, dict) else prompt
    if isinstance(before, str):
        return {"texts": [before + text]}
    if isinstance(before[0], int):
        return {"texts": [token_text + text]}
    return {"prompt": before, "completions": [text]}


@pytest.mark.parametrize("streams", [False, True])
def test_rollouts_come_with_their_rewards(server: ServerProcess, streams: bool) -> None:
    asked: dict[str, Any] = {"prompts": PROMPTS, "n": 2, "max_tokens": 6, "seed": 1}
    asked |= {"model": "demo", "reward_model": {"model": "reward", "sigmoid": True}}
    samples = rollout_samples(server, asked, streams=streams)
    assert len(samples) == 2 * len(PROMPTS)
    ids = {"tokens": PROMPTS[2], "model": "demo"}
    token_text = post(server, "/detokenize", ids)["prompt"]
    for number, sample in samples:
        assert sample["reward_error"] is None
        read = what_was_read(PROMPTS[number], sample["text"], token_text)
        wanted = post(server, "/v1/rewards/score", {**read, "model": "reward", "sigmoid": True})[
            "data"
        ][0]["reward"]
        assert sample["reward"] == pytest.approx(wanted, abs=1e-4)


def rollout_samples(
    server: ServerProcess, asked: dict[str, Any], *, streams: bool
) -> list[tuple[int, dict[str, Any]]]:
    """Each with the number of its prompt."""
    if not streams:
        groups = post(server, "/v1/rl/rollout", asked)["groups"]
        return [(group["index"], one) for group in groups for one in group["samples"]]
    answer = httpx2.post(f"{server.url}/v1/rl/rollout", json={**asked, "stream": True})
    lines = [one for one in answer.text.splitlines() if one.startswith("data: ")]
    told = [json.loads(one.removeprefix("data: ")) for one in lines]
    assert told[-1]["type"] == "usage"
    return [(one["prompt_index"], one) for one in told if one["type"] == "sample"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("model", "why"), [("broken", "numbers"), ("cross", "maximum context")])
def test_samples_outlive_their_reward_model(
    server: ServerProcess, model: str, why: str, streams: bool
) -> None:
    prompts = [{"text": "1, 2,", "reward_prompt": "w20 " * (50 if model == "cross" else 1)}, "1,"]
    asked: dict[str, Any] = {"prompts": prompts, "n": 2, "max_tokens": 4, "model": "demo"}
    samples = rollout_samples(server, {**asked, "reward_model": {"model": model}}, streams=streams)
    assert len(samples) == 4
    for number, sample in samples:
        assert sample["token_ids"]
        if model == "broken" or number == 0:
            assert sample["reward"] is None
            assert why in sample["reward_error"]
        else:
            assert isinstance(sample["reward"], float)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reward_model": {"model": "no"}}, "reward_model"),
        ({"reward_model": {"model": "demo"}}, "reward_model"),
        ({"reward_model": {"model": "three"}}, "reward_model"),
        ({"reward_model": {}}, "reward_model"),
        ({"reward_model": "reward"}, "reward_model"),
        ({"reward_model": {"model": "reward", "truncate_prompt_tokens": 41}}, "reward_model"),
        ({"reward_model": {"model": "cross"}, "prompts": [CHAT]}, "prompts"),
        ({"reward_model": {"model": "cross"}, "verifier": {"url": "http://a"}}, "reward_model"),
        (
            {
                "reward_model": {"model": "reward"},
                "prompts": [{"text": "a", "reward_prompt": [{"role": "king", "content": "b"}]}],
            },
            "prompts",
        ),
    ],
)
def test_bad_reward_models_are_refused_before_anything_is_sampled(
    server: ServerProcess, body: dict[str, Any], param: str
) -> None:
    asked = {"prompts": ["1, 2,"], "max_tokens": 4, "model": "demo", **body}
    status = 404 if body["reward_model"] == {"model": "no"} else 400
    assert refusal(server, "/v1/rl/rollout", asked, status)["param"] == param


def test_reward_models_are_told(server: ServerProcess) -> None:
    told = httpx2.get(f"{server.url}/v1/rl/capabilities").json()["reward_models"]
    assert told == ["cross", "logits", "broken", "reward"]


async def test_the_clients_rewards(server: ServerProcess) -> None:
    async with RLClient(server.url) as client:
        first, second = await client.rewards(["w20", "w21 w22"], model="reward")
        assert [first, second] == pytest.approx(
            logits_of(server, [[2, 20, 3], [2, 21, 22, 3]]), abs=1e-4
        )
        (chat,) = await client.rewards([[{"role": "user", "content": "w20"}]], model="reward")
        assert chat == pytest.approx(logits_of(server, [[90, 20]])[0], abs=1e-4)
        rollout = await client.rollout(
            ["1, 2,"], model="demo", max_tokens=4, reward_model={"model": "reward"}
        )
        (sample,) = rollout.samples
        assert isinstance(sample.reward, float)
        assert sample.reward_error is None
        streamed = client.stream_rollout(
            ["1, 2,"], model="demo", max_tokens=4, reward_model={"model": "broken"}
        )
        (sample,) = [one async for one in streamed]
        assert sample.reward is None
        assert "numbers" in (sample.reward_error or "")


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}),
        ("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("/v1/rewards/score", {"texts": DOCUMENTS}),
    ],
)
def test_batches_of_scores(server: ServerProcess, endpoint: str, body: dict[str, Any]) -> None:
    body = {**body, "model": "cross"}
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        content = json.dumps(line).encode()
        given = client.files.create(file=("lines.jsonl", content), purpose="batch")
        asked: Any = {"input_file_id": given.id, "endpoint": endpoint}
        batch = client.batches.create(completion_window="24h", **asked)
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None, batch
        told = json.loads(client.files.content(batch.output_file_id).text)
    wanted = post(server, endpoint, body)
    field = "results" if endpoint == "/v1/rerank" else "data"
    assert told["response"]["body"][field] == wanted[field]
