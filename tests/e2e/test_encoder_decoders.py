"""An encoder-decoder behind the server: by every client, many at once, and offline."""

from __future__ import annotations

import io
import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from benchmarks.make_seq2seq import make_seq2seq, random_weights
from mlx_parallm import LLM, SamplingParams
from mlx_parallm.config import CacheConfig
from mlx_parallm.peers import child_process
from mlx_parallm.types.errors import ConfigError, ContextLengthError
from tests.builders.seq2seq_folders import read_json, write_json, write_nllb
from tests.server_process import ROOT, ServerProcess

NAME, LANGUAGES = "org/translator", "org/languages"
MAX_SOURCE_LEN = 200
MEMORY = 32 << 20
POLL_S = 0.01
GREEDY = {"model": NAME, "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seq2seq(tmp_path_factory.mktemp("models") / "t5", "tiny-t5")


@pytest.fixture(scope="module")
def nllb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of random weights with NLLB's languages, and three beams in its files."""
    folder = write_nllb(tmp_path_factory.mktemp("nllb"))
    tokenizer = read_json(folder, "tokenizer.json")
    ids = [token["id"] for token in tokenizer["added_tokens"]]
    sides = ("encoder", "decoder")
    sizes = {"layers": 2, "ffn_dim": 48, "attention_heads": 2}
    config = {
        **read_json(folder, "config.json"),
        **{f"{side}_{name}": size for side in sides for name, size in sizes.items()},
        "d_model": 32,
        "max_position_embeddings": 64,
        "activation_function": "relu",
        "scale_embedding": True,
        "vocab_size": max(ids) + 1,
        "torch_dtype": "float32",
        "eos_token_id": 2,
        "pad_token_id": 1,
        "tie_word_embeddings": True,
    }
    write_json(folder, "config.json", config)
    generation = {"num_beams": 3, "max_length": 12, "decoder_start_token_id": 2}
    write_json(folder, "generation_config.json", generation)
    mx.save_safetensors(str(folder / "model.safetensors"), random_weights(config, 0))
    return folder


def flags(*folders: Path) -> list[str]:
    names = [f"{folder}={name}" for folder, name in zip(folders, (NAME, LANGUAGES), strict=False)]
    return [
        *("--model", *map(str, folders), "--served-model-name", *names, "--max-model-len", "256"),
        *("--max-source-len", str(MAX_SOURCE_LEN), "--kv-cache-memory-bytes", str(MEMORY)),
    ]


@pytest.fixture(scope="module")
def server(
    folder: Path, nllb: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    data = tmp_path_factory.mktemp("data")
    process = ServerProcess(*flags(folder, nllb), "--max-num-seqs", "8", "--data-dir", str(data))
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, str]:
    """Texts of the model for each source, one after the other, offline."""
    cache = CacheConfig(kv_cache_bytes=MEMORY)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), max_source_len=MAX_SOURCE_LEN, max_model_len=256, cache=cache) as llm:
        for prompt in ({"encoder_prompt": SOURCES[0], "decoder_prompt": None}, SOURCES[0]):
            (output,) = llm.generate(prompt, params)
            assert output.encoder_prompt_token_ids == (5, 6, 1)
            assert output.prompt_token_ids == (0,)
        with pytest.raises(ContextLengthError, match="The source has 301"):
            llm.generate("t5 " * 300)
        return {
            source: output.outputs[0].text
            for source in SOURCES
            for output in llm.generate(source, params)
        }


#: Sources of many lengths.
SOURCES = [
    " ".join(f"t{5 + (number * 7 + place) % 300}" for place in range(length))
    for number, length in enumerate((2, 1, 3, 9, 17, 40, 90, 150))
]


def post(server: ServerProcess, path: str, body: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", json=body)


def complete(server: ServerProcess, **fields: Any) -> Any:
    answer = post(server, "/v1/completions", GREEDY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_many_clients_get_what_each_gets_alone(
    server: ServerProcess, alone: dict[str, str]
) -> None:
    with ThreadPoolExecutor(16) as threads:
        answers = threads.map(lambda source: complete(server, prompt=source), SOURCES * 3)
        texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [alone[source] for source in SOURCES] * 3
    assert len(set(alone.values())) == len(SOURCES)


def test_openais_client(server: ServerProcess, alone: dict[str, str]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    fields: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 12}
    extra: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
    answer = client.completions.create(prompt=SOURCES[3], n=2, **fields, **extra)
    assert [choice.text for choice in answer.choices] == [alone[SOURCES[3]]] * 2
    assert answer.usage is not None
    # Nine words, an end token and a start token.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 24)
    with client.completions.create(prompt=SOURCES[3], stream=True, **fields, **extra) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == alone[SOURCES[3]]
    with pytest.raises(openai.BadRequestError, match="use /v1/completions"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hi"}])


def test_hugging_faces_client(server: ServerProcess, alone: dict[str, str]) -> None:
    client = InferenceClient(server.url)
    options = {"num_beams": 1, "max_new_tokens": 12}
    source = SOURCES[4]
    translated = client.translation(source, generate_parameters=options)
    assert translated.translation_text == alone[source]
    summary = client.summarization(source, generate_parameters=options)
    assert summary.summary_text == alone[source]
    assert client.text_generation(source, max_new_tokens=12) == alone[source]
    stream = client.text_generation(source, max_new_tokens=12, stream=True, details=True)
    *_, last = stream
    assert last.generated_text == alone[source]
    body = {"inputs": [source, SOURCES[0]], "parameters": options}
    answers = post(server, "/pipeline/summarization", body).json()
    assert answers == [{"summary_text": alone[source]}, {"summary_text": alone[SOURCES[0]]}]


def test_beams_of_a_task_share_a_source(server: ServerProcess) -> None:
    runs = "vllm:source_encoder_runs_total"
    before = server.metric(runs)
    beams = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 6}
    body = {"inputs": "t410 t411 t412", "parameters": beams}
    texts = post(server, f"/pipeline/translation/{NAME}", body).json()
    assert len({text["translation_text"] for text in texts}) == 3
    assert server.metric(runs) == before + 1


def test_languages(server: ServerProcess) -> None:
    """Each language begins its own output, and the source's changes the source."""
    client = InferenceClient(f"{server.url}/models/{LANGUAGES}")
    body = {"model": LANGUAGES, "prompt": "the cat sat", "max_tokens": 4, "return_token_ids": True}
    firsts: set[tuple[int, ...]] = set()
    for target in ("deu_Latn", "fra_Latn"):
        options: dict[str, Any] = {"src_lang": "eng_Latn", "tgt_lang": target}
        text = client.translation("the cat sat", **options).translation_text
        assert isinstance(text, str)
        answer = post(server, "/v1/completions", body | options).json()
        start, language = answer["choices"][0]["prompt_token_ids"]
        tokens = post(server, "/tokenize", {"model": LANGUAGES, "prompt": "the cat sat", **options})
        assert tokens.json()["tokens"][-1] == start == 2
        assert answer["usage"]["prompt_tokens"] == tokens.json()["count"] + 2
        firsts.add((start, language))
    assert len(firsts) == 2
    with pytest.raises(HfHubHTTPError, match="tgt_lang 'xx' is not a language"):
        client.translation("the cat sat", src_lang="eng_Latn", tgt_lang="xx")


def test_a_target_is_scored_as_it_was_generated(server: ServerProcess) -> None:
    (written,) = complete(server, prompt=SOURCES[2], logprobs=0, return_token_ids=True)["choices"]
    ids = [0, *written["token_ids"]]
    (scored,) = complete(
        server, prompt=SOURCES[2], decoder_input_ids=ids, max_tokens=0, echo=True, logprobs=0
    )["choices"]
    logprobs = scored["logprobs"]["token_logprobs"]
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(written["logprobs"]["token_logprobs"], abs=1e-4)
    # Given another source, the target is not so likely.
    (other,) = complete(
        server, prompt=SOURCES[5], decoder_input_ids=ids, max_tokens=0, echo=True, logprobs=0
    )["choices"]
    assert sum(other["logprobs"]["token_logprobs"][1:]) < sum(logprobs[1:]) - 0.01


@pytest.mark.parametrize("decoder", ["decoder_prompt", "decoder_input_ids"])
def test_the_start_token_takes_no_characters_of_an_echo(
    server: ServerProcess, decoder: str
) -> None:
    fields: dict[str, Any] = {"decoder_prompt": "t5 t6"}
    if decoder == "decoder_input_ids":
        (echo,) = complete(server, prompt=SOURCES[2], **fields, return_token_ids=True)["choices"]
        fields = {decoder: echo["prompt_token_ids"]}
    (choice,) = complete(
        server, prompt=SOURCES[2], **fields, max_tokens=3, echo=True, logprobs=0, min_tokens=3
    )["choices"]
    logprobs, text = choice["logprobs"], choice["text"]
    assert logprobs["tokens"][:3] == ["<pad>", "t5", "t6"]
    assert text.replace(" ", "").startswith("t5t6")
    lengths = [0, *(len(name) for name in logprobs["tokens"][1:-1])]
    assert logprobs["text_offset"] == [0, *accumulate(lengths)]


@pytest.mark.one_engine
def test_a_source_is_encoded_once_for_all_who_ask(server: ServerProcess) -> None:
    runs = "vllm:source_encoder_runs_total"
    source, before = "t400 t401 t402 t403", server.metric(runs)
    complete(server, prompt=source, n=4)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: complete(server, prompt=source), range(8)))
    assert server.metric(runs) == before + 1
    complete(server, prompt=source, cache_salt="other")
    assert server.metric(runs) == before + 2


#: Bodies, the field that the error names, and a part of what it says.
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "t5 " * 300}, "200 tokens. The source has 301"),
    ("/v1/completions", {"prompt": ""}, "must not be empty"),
    ("/v1/completions", {"prompt": [512]}, "512; this model's ids are 0 to 511"),
    ("/v1/completions", {"prompt": "t5", "decoder_input_ids": [7]}, "must begin with [0]"),
    ("/v1/completions", {"prompt": "t5", "src_lang": "en"}, "takes no languages"),
    ("/v1/completions", {"prompt": "t5", "suffix": "t6"}, "suffix is not for"),
    ("/v1/completions", {"prompt": "t5", "max_tokens": 999}, "256 tokens"),
    ("/", {"inputs": "t5", "num_beams": 65}, "num_beams"),
    ("/", {"inputs": "t5", "num_beams": 0}, "num_beams"),
    ("/", {"inputs": "t5", "num_beams": 2, "num_return_sequences": 3}, "2 beams"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "t5"}], "max_tokens": 9}, "/v1/"),
    ("/v1/responses", {"input": "t5"}, "/v1/completions"),
    ("/generate", {"text": "t5"}, f"{NAME} is an encoder-decoder"),
]


@pytest.mark.parametrize(("path", "body", "message"), BAD)
def test_bad_input_leaves_the_server_as_it_was(
    server: ServerProcess, alone: dict[str, str], path: str, body: dict[str, Any], message: str
) -> None:
    named = {} if path == "/" else {"model": NAME}
    answer = post(server, path, named | body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert complete(server, prompt=SOURCES[1])["choices"][0]["text"] == alone[SOURCES[1]]


def test_a_long_source_is_cut_where_the_body_says_so(server: ServerProcess) -> None:
    whole, cut = "t5 " * 300, "t5 " * (MAX_SOURCE_LEN - 1)
    answer = complete(server, prompt=whole, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == MAX_SOURCE_LEN + 1
    assert answer["choices"] == complete(server, prompt=cut)["choices"]
    body = {"inputs": whole, "parameters": {"truncation": "only_first", "max_new_tokens": 12}}
    assert len(post(server, "/", body).json()) == 1


def lines_of(sources: list[str]) -> str:
    return "\n".join(
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": GREEDY | {"prompt": source},
            }
        )
        for number, source in enumerate(sources)
    )


def texts_of(answers: str) -> dict[str, str]:
    rows = map(json.loads, answers.splitlines())
    return {
        SOURCES[int(row["custom_id"])]: row["response"]["body"]["choices"][0]["text"]
        for row in rows
    }


def test_a_batch_of_a_file(folder: Path, tmp_path: Path, alone: dict[str, str]) -> None:
    target = tmp_path / "out.jsonl"
    ended = child_process.run(
        ["mlx_parallm", "batch", "/dev/stdin", str(target), *flags(folder)],
        data=lines_of(SOURCES),
        text=True,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr
    assert texts_of(target.read_text()) == alone


def test_a_batch_of_the_server(server: ServerProcess, alone: dict[str, str]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    upload = io.BytesIO(lines_of(SOURCES).encode())
    file = client.files.create(file=("in.jsonl", upload), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed"):
        time.sleep(POLL_S)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None, batch
    assert texts_of(client.files.content(batch.output_file_id).text) == alone


@pytest.mark.engines
def test_several_engines_and_http_processes(folder: Path, alone: dict[str, str]) -> None:
    several = ("--data-parallel-size", "2", "--api-server-count", "2")
    process = ServerProcess(*flags(folder), *several)
    try:
        process.wait_until_ready()
        with ThreadPoolExecutor(8) as threads:
            answers = threads.map(lambda source: complete(process, prompt=source), SOURCES * 4)
            texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts == [alone[source] for source in SOURCES] * 4
        output = InferenceClient(process.url).text_generation(SOURCES[4], max_new_tokens=12)
        assert output == alone[SOURCES[4]]
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--enable-prompt-embeds"], "--enable-prompt-embeds: {folder} is an encoder-decoder"),
        (
            ["--speculative-config", '{"method": "draft_model", "model": "FOLDER"}'],
            "--speculative-config: {folder} is an encoder-decoder",
        ),
    ],
)
def test_settings_that_do_not_suit_are_refused_at_the_start(
    folder: Path, more: list[str], message: str
) -> None:
    words = [word.replace("FOLDER", str(folder)) for word in more]
    server = ServerProcess(*flags(folder), *words)
    status = server.process.wait()
    log = server.log
    server.stop()
    assert (status, message.format(folder=folder) in log) == (2, True), log


@pytest.mark.parametrize("setting", ["max_source_len", "max_model_len"])
def test_lengths_beyond_learned_positions_are_refused(tmp_path: Path, setting: str) -> None:
    bart = make_seq2seq(tmp_path / "bart", "tiny-bart")
    flag = f"--{setting.replace('_', '-')} is 2048"
    lengths: dict[str, Any] = {setting: 2048}
    with pytest.raises(ConfigError, match=f"{flag}; .* 1024 tokens"):
        LLM(str(bart), **lengths)
