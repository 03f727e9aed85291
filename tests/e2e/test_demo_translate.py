"""``demo:translate`` writes numbers in words and reads them, for several clients at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from huggingface_hub import InferenceClient

from tests.server_process import ServerProcess

MODEL = "demo:translate"
EXAMPLES = (
    ("71,080", "digits", "en", "seventy-one thousand eighty"),
    ("71,080", "digits", "de", "einundsiebzigtausendachtzig"),
    ("71,080", "digits", "fr", "soixante et onze mille quatre-vingts"),
    ("1984-05-03", "digits", "de", "der dritte Mai neunzehnhundertvierundachtzig"),
    ("cent un euros et vingt centimes", "fr", "digits", "€101.20"),
    ("two dollars and one cent", "en", "digits", "$2.01"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", MODEL)
    process.wait_until_ready()
    yield process
    process.stop()


def test_it_translates_for_several_clients(server: ServerProcess) -> None:
    client = InferenceClient(f"{server.url}/models/{MODEL}")

    def translated(text: str, src_lang: str, tgt_lang: str) -> str:
        answer = client.translation(text, src_lang=src_lang, tgt_lang=tgt_lang)
        return answer.translation_text

    with ThreadPoolExecutor(len(EXAMPLES)) as pool:
        answers = list(pool.map(lambda example: translated(*example[:3]), EXAMPLES))
    assert answers == [right for *_, right in EXAMPLES]


def test_a_completion_has_the_prefix_in_its_prompt(server: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": "translate digits to English: 1,984", "temperature": 0}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "one thousand nine hundred eighty-four"
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_pair_that_it_does_not_translate_is_refused_with_those_it_does(
    server: ServerProcess,
) -> None:
    body = {"inputs": "deux", "parameters": {"src_lang": "fr", "tgt_lang": "de"}}
    answer = httpx2.post(f"{server.url}/models/{MODEL}", json=body)
    assert answer.status_code == 400
    assert "fr to digits" in answer.text
