"""``POST /v1/mlm`` over HTTP, and that what needs a key needs it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.server_process import ServerProcess
from tests.task_folders import write_task_model
from tests.task_tokenizers import VOCAB_SIZE

KEY = {"authorization": "Bearer secret"}
TEXT = "the cat is [MASK] in paris."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_task_model(tmp_path_factory.mktemp("mlm"), "bert_masked_lm", {})
    process = ServerProcess(
        "--model", str(folder), "--served-model-name", "mlm", "--api-key", "secret"
    )
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def post(server: ServerProcess, path: str = "/v1/mlm", **body: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", json=body, headers=KEY)


def ask(server: ServerProcess, **body: Any) -> dict[str, Any]:
    answer = post(server, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def predictions(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    """Return the predictions for the only text."""
    (entry,) = ask(server, **body)["data"]
    return entry["predictions"]


def test_each_mask_has_its_likeliest_tokens(server: ServerProcess) -> None:
    texts = [TEXT, "the [MASK] is [MASK]"]
    answer = ask(server, texts=texts, return_top_k=2, request_ids=["a", "b"])
    assert [entry["request_id"] for entry in answer["data"]] == ["a", "b"]
    assert [len(entry["predictions"]) for entry in answer["data"]] == [1, 2]
    assert [prediction["position"] for prediction in answer["data"][1]["predictions"]] == [2, 4]
    assert answer["usage"]["prompt_tokens"] == 9 + 6
    assert answer["model"] == "mlm"
    body = {"inputs": TEXT, "parameters": {"top_k": 2}}
    pipeline = post(server, "/models/mlm", **body).json()
    assert answer["data"][0]["predictions"][0]["top_k"] == pipeline
    alone = predictions(server, texts=texts[1], return_top_k=2)
    for prediction, other in zip(alone, answer["data"][1]["predictions"], strict=True):
        assert [token["token"] for token in prediction["top_k"]] == [
            t["token"] for t in other["top_k"]
        ]


def test_what_was_asked_before_is_told_as_a_hit(server: ServerProcess) -> None:
    texts = ["my name is [MASK]", "my name was [MASK]"]
    first = ask(server, texts=texts[0])["data"][0]
    second = ask(server, texts=texts)["data"]
    assert [first["cache_hit"], *(entry["cache_hit"] for entry in second)] == [False, True, False]
    assert second[0]["predictions"] == first["predictions"]
    # A cached mask also serves requests for fewer tokens.
    (fewer,) = ask(server, texts=texts[0], return_top_k=2)["data"]
    assert fewer["cache_hit"]
    assert fewer["predictions"][0]["top_k"] == first["predictions"][0]["top_k"][:2]
    scored = [ask(server, texts="a goal", pseudo_log_likelihood=True)["data"][0] for _ in "12"]
    assert [entry["cache_hit"] for entry in scored] == [False, True]


def test_token_ids_are_the_same_as_their_text(server: ServerProcess) -> None:
    ids = [2, 5, 6, 41, 4, 21, 31, 59, 3]
    (by_ids,) = predictions(server, token_ids=ids)
    (by_text,) = predictions(server, texts=TEXT)
    assert [candidate["token"] for candidate in by_ids["top_k"]] == [
        candidate["token"] for candidate in by_text["top_k"]
    ]


def test_targets_are_shares_of_the_vocabulary_and_label_words_of_each_other(
    server: ServerProcess,
) -> None:
    words = ["good", "bad", "happy"]
    (plain,) = predictions(server, texts=TEXT, return_logits=True, return_top_k=0)
    logits = np.array(plain["logits"])
    assert logits.shape == (VOCAB_SIZE,)
    shares = np.exp(logits) / np.exp(logits).sum()
    (targets,) = predictions(server, texts=TEXT, targets=words, return_top_k=2)
    ids = [word["token"] for word in targets["words"]]
    assert [word["label"] for word in targets["words"]] == words
    np.testing.assert_allclose([word["score"] for word in targets["words"]], shares[ids], atol=1e-4)
    assert len(targets["top_k"]) == 2
    (labels,) = predictions(server, texts=TEXT, label_words=words, return_logits=True)
    np.testing.assert_allclose(labels["logits"], logits[ids], atol=1e-4)
    among = shares[ids] / shares[ids].sum()
    np.testing.assert_allclose([word["score"] for word in labels["words"]], among, atol=1e-4)
    assert labels["label"] == words[int(among.argmax())]
    (both,) = predictions(server, texts=TEXT, targets=words, return_logits=True)
    np.testing.assert_allclose(both["logits"], logits[ids], atol=1e-4)
    np.testing.assert_allclose([word["score"] for word in both["words"]], shares[ids], atol=1e-4)


def test_label_words_may_have_labels(server: ServerProcess) -> None:
    words = {"negative": "bad", "positive": 34}
    (prediction,) = predictions(server, texts=TEXT, label_words=words)
    assert [(word["label"], word["token"]) for word in prediction["words"]] == [
        ("negative", 39),
        ("positive", 34),
    ]
    assert prediction["label"] in words


def test_words_that_are_no_tokens_are_read_as_their_first_one_with_a_warning(
    server: ServerProcess,
) -> None:
    answer = ask(server, texts=TEXT, targets=["walking", "cat"])
    assert answer["warnings"] == [
        "'walking' is not in the vocabulary; its first token 'walk' is used."
    ]
    assert [word["label"] for word in answer["data"][0]["predictions"][0]["words"]] == [
        "walking",
        "cat",
    ]


def test_labels_of_the_same_word_are_told_as_one_with_a_warning(server: ServerProcess) -> None:
    answer = ask(server, texts=TEXT, label_words={"a": "good", "b": "good", "c": "bad"})
    assert answer["warnings"] == ["'b' and 'a' are the same token; it is returned once."]
    words = answer["data"][0]["predictions"][0]["words"]
    assert [word["label"] for word in words] == ["a", "c"]


def test_whole_texts_are_scored_token_by_token(server: ServerProcess) -> None:
    texts = ["the cat is good", "", "bad !"]
    entries = ask(server, texts=texts, pseudo_log_likelihood=True)["data"]
    assert [len(entry["logprobs"]) for entry in entries] == [4, 0, 2]
    assert entries[1]["pseudo_log_likelihood"] == 0
    for place, logprob in enumerate(entries[0]["logprobs"]):
        words = texts[0].split()
        words[place], word = "[MASK]", words[place]
        (alone,) = predictions(server, texts=" ".join(words), targets=word)
        assert math.isclose(alone["words"][0]["logprob"], logprob, abs_tol=1e-4)
    assert math.isclose(
        entries[0]["pseudo_log_likelihood"], sum(entries[0]["logprobs"]), abs_tol=1e-5
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": [TEXT], "token_ids": [4]}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": [5]}, "texts"),
        ({"texts": "no mask"}, "texts"),
        ({"texts": [TEXT, "no mask"]}, "texts"),
        ({"texts": f"{'cat ' * 50}[MASK]"}, "texts"),
        ({"texts": f"{'cat ' * 50}[MASK]", "truncate_prompt_tokens": 8}, "texts"),
        ({"texts": TEXT, "truncate_prompt_tokens": 99}, "truncate_prompt_tokens"),
        ({"token_ids": [[2, 3]]}, "token_ids"),
        ({"token_ids": [4, 99]}, "token_ids"),
        ({"token_ids": [4, "cat"]}, "token_ids"),
        ({"texts": TEXT, "targets": []}, "targets"),
        ({"texts": TEXT, "targets": [99]}, "targets"),
        ({"texts": TEXT, "targets": [True]}, "targets"),
        ({"texts": TEXT, "targets": [""]}, "targets"),
        ({"texts": TEXT, "targets": ["cat"], "label_words": ["cat"]}, "targets"),
        ({"texts": TEXT, "label_words": {"a": 0.5}}, "label_words"),
        ({"texts": TEXT, "return_top_k": -1}, "return_top_k"),
        ({"texts": TEXT, "return_logits": 1}, "return_logits"),
        ({"texts": TEXT, "request_ids": ["a", "b"]}, "request_ids"),
        (
            {"texts": TEXT, "pseudo_log_likelihood": True, "targets": ["cat"]},
            "pseudo_log_likelihood",
        ),
        ({"texts": ["cat " * 30] * 300, "pseudo_log_likelihood": True}, "texts"),
        ({"texts": ["[MASK] " * 30] * 1400, "return_logits": True}, "return_logits"),
    ],
)
def test_bad_requests_name_the_field(
    server: ServerProcess, body: dict[str, Any], param: str
) -> None:
    answer = post(server, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_the_page_needs_no_key_but_work_for_a_model_does(server: ServerProcess) -> None:
    assert httpx2.get(server.url).status_code == 200
    assert httpx2.head(server.url).status_code == 200
    for path in ("/", "/models/mlm", "/pipeline/fill-mask"):
        assert httpx2.post(f"{server.url}{path}", json={"inputs": TEXT}).status_code == 401
        assert post(server, path, inputs=TEXT).status_code == 200
