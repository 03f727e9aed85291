"""Vocabularies in GGUF files of llama.cpp encode its own test texts as its tokens say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mlx_parallm.models.gguf.fields import Fields
from mlx_parallm.models.gguf.header import read_header
from mlx_parallm.models.gguf.tokenizer import tokenizer_files
from mlx_parallm.types.errors import ModelLoadError
from tests.corpus.fetch import unpacked
from tests.corpus.sources import LLAMA_CPP

pytestmark = pytest.mark.sample

#: SEPARATOR: between the texts of a file, one of which has a line of tokens in another file.
SEPARATOR = "\n__ggml_vocab_test__\n"
FOLDER = unpacked(LLAMA_CPP) / "vendor" / "llama.cpp" / "models"
NAMES = sorted(path.stem for path in FOLDER.glob("ggml-vocab-*.gguf.out"))
#: SERVED: vocabularies of families that are served, or that have their kind of tokenizer.
SERVED = {
    "ggml-vocab-gpt-2.gguf",
    "ggml-vocab-llama-bpe.gguf",
    "ggml-vocab-llama-spm.gguf",
    "ggml-vocab-phi-3.gguf",
    "ggml-vocab-qwen2.gguf",
}


def encoder_of(path: Path) -> Tokenizer:
    fields = Fields(read_header(path))
    return Tokenizer.from_str(json.dumps(tokenizer_files(fields, 1 << 20).tokenizer))


def test_there_are_vocabularies() -> None:
    assert set(NAMES) >= SERVED


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_the_tokens_of_llama_cpp(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    path = FOLDER / name
    record_property("case", name.removeprefix("ggml-vocab-").removesuffix(".gguf"))
    if name not in SERVED:
        record_property("outcome", "refused")
        with pytest.raises(ModelLoadError):
            encoder_of(path)
        return
    record_property("outcome", "the same")
    texts = path.with_name(f"{name}.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = path.with_name(f"{name}.out").read_text(encoding="utf-8").splitlines()
    own = encoder_of(path)
    for text, line in zip(texts, lines, strict=False):
        tokens = own.encode(text, add_special_tokens=False).ids
        assert tokens == [int(token) for token in line.split()], text
