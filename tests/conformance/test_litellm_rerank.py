"""litellm's ``rerank`` as its providers for Cohere, Jina and vLLM send it."""

from __future__ import annotations

import litellm
import openai
import pytest

QUERY = "w10 w11 w12"
DOCUMENTS = ["w20 w21", "w10 w11 w12 w30 w31 w32 w33 w34", "w44"]
# What sentence-transformers says of these pairs: tests/golden/cross_encoder.json.
SCORES = [0.21047, 0.03664, 0.13011]
PROVIDERS = ["cohere", "jina_ai", "hosted_vllm"]


def rerank(server, provider, **options):
    """Cohere's and Jina's addresses end with the version, vLLM's does not."""
    base = server.url if provider == "hosted_vllm" else f"{server.base_url}/rerank"
    return litellm.rerank(
        model=f"{provider}/reranker",
        api_base=base,
        api_key=server.api_key,
        query=QUERY,
        documents=DOCUMENTS,
        **options,
    )


@pytest.mark.parametrize("provider", PROVIDERS)
def test_documents_come_back_sorted(server, provider):
    results = rerank(server, provider).results
    assert [result["index"] for result in results] == [0, 2, 1]
    for result in results:
        assert result["relevance_score"] == pytest.approx(SCORES[result["index"]], abs=1e-4)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_best_with_their_texts(server, provider):
    (best,) = rerank(server, provider, top_n=1, return_documents=True).results
    assert best["index"] == 0
    assert best["document"]["text"] == DOCUMENTS[0]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_unknown_model(server, provider):
    base = server.url if provider == "hosted_vllm" else f"{server.base_url}/rerank"
    # litellm gives the error of a ranking no class of its own.
    with pytest.raises(openai.OpenAIError, match="does not exist"):
        litellm.rerank(
            model=f"{provider}/no-such-model",
            api_base=base,
            api_key=server.api_key,
            query=QUERY,
            documents=DOCUMENTS,
            max_retries=0,
        )
