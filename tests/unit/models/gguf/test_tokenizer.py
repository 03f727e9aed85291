"""Tokenizers of GGUF files against the libraries that their vocabularies come from."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from gguf import TokenType
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from mlx_parallm.models.gguf.fields import Fields
from mlx_parallm.models.gguf.header import read_header
from mlx_parallm.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from mlx_parallm.models.gguf.tokenizer import TokenizerFiles, tokenizer_files
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.errors import ModelLoadError

HARD_TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n  \n",
    "a",
    " a",
    "  a  b   c    ",
    "Hello, world! It's 12345 o'clock; we're late, THEY'LL see.",
    "\tdef f(x):\n\t\treturn x ** 2  # comment\n\n\n",
    "1234567890 12 123 1,234.56",
    "Zürich, naïve café, e\u0301a\u0300 (combining), ﬁ ligature, Å vs A\u030a",
    "日本語のテキスト、中文文本\uff0c한국어 텍스트",
    "שלום עולם مرحبا بالعالم",
    "emoji 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 \U0001f9ff",
    "\u200b\ufeff\u00a0\u2028\x00\x01\x7f",
    "<|im_start|>user\nhi<|im_end|>",
    "<s>a</s> <unk> <|endoftext|>",
    "'s'S'T'll 'LL",
    "don\u2019t “quote” — dash…",
    "x" * 300,
    "▁already▁escaped ▁ Ġ Ċ",
    "\r\n\r\n mixed \r endings \n",
    "<0x41> <0x0A>",
]
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dogs that are there " * 3,
    "It's 1234 and we're here; they'll see that don't matter, 'LL and 'Ve, 100 200 300",
    "  indented   text\n\n\twith tabs and  many    spaces\r\n and newlines\n\n\n",
    "日本語 テキスト 中文 文本 한국어 naïve café Zürich e\u0301 e\u0301 Å A\u030a",
    "def function(argument): return argument ** 2 + 17 != 3 -- // comments {} [] ()",
]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def write_file(path: Path, arch: str, add: Mapping[str, Any]) -> Path:
    """Write a file without tensors; ``add`` are calls of the writer."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(512)
    for method, value in add.items():
        getattr(writer, method)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def files_of(path: Path, vocab_size: int = 100_000) -> TokenizerFiles:
    return tokenizer_files(Fields(read_header(path)), vocab_size)


def encoder_of(path: Path) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(files_of(path).tokenizer))


# Byte-level vocabularies: the references are written as their folders have them.


def split(pattern: str) -> list[dict[str, Any]]:
    cut = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [{"type": "Split", **cut}, level(uses_pattern=False)]


def level(*, uses_pattern: bool) -> dict[str, Any]:
    options = {"add_prefix_space": False, "trim_offsets": True, "use_regex": uses_pattern}
    return {"type": "ByteLevel", **options}


REFERENCES: dict[str, dict[str, Any]] = {
    "gpt-2": {"pre": [level(uses_pattern=True)]},
    "smollm": {"pre": [{"type": "Digits", "individual_digits": True}, level(uses_pattern=True)]},
    "llama-bpe": {"pre": split(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), "ignores": True},
    "smaug-bpe": {"pre": split(GGUF_PRE_TOKENIZER_SPLITS["smaug-bpe"]), "ignores": True},
    "tekken": {"pre": split(GGUF_PRE_TOKENIZER_SPLITS["tekken"]), "ignores": True},
    "qwen2": {"pre": split(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]), "normalizer": {"type": "NFC"}},
    "deepseek-r1-qwen": {"pre": split(GGUF_PRE_TOKENIZER_SPLITS["deepseek-r1-qwen"])},
}


def trained(name: str) -> Tokenizer:
    reference = REFERENCES[name]
    alphabet = sorted(gguf.vocab.bytes_to_unicode().values())
    empty = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": reference.get("normalizer"),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": reference["pre"]},
        "post_processor": None,
        "decoder": level(uses_pattern=True),
        "model": json.loads(Tokenizer(BPE(ignore_merges=reference.get("ignores", False))).to_str())[
            "model"
        ],
    }
    tokenizer = Tokenizer.from_str(json.dumps(empty))
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜end▁of▁x｜>"])
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def write_bytes(path: Path, tokenizer: Tokenizer, pre: str, **add: Any) -> Path:
    """Write a byte-level tokenizer as llama.cpp's converter does."""
    content = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    kinds = {each["content"]: each["special"] for each in content["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    types = [
        TokenType.NORMAL
        if token not in kinds
        else TokenType.CONTROL
        if kinds[token]
        else TokenType.USER_DEFINED
        for token in tokens
    ]
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    calls: dict[str, Any] = {
        "add_tokenizer_model": "gpt2",
        "add_tokenizer_pre": pre,
        "add_token_list": tokens,
        "add_token_types": types,
        "add_token_merges": merges,
        "add_eos_token_id": ids["<|endoftext|>"],
        "add_bos_token_id": ids["<|im_start|>"],
    }
    arch = "qwen2" if pre.endswith(("qwen2", "qwen")) else "llama"
    kept = {name: value for name, value in {**calls, **add}.items() if value is not None}
    return write_file(path, arch, kept)


@pytest.mark.parametrize("pre", REFERENCES)
def test_byte_level_texts_are_encoded_as_by_the_folder(tmp_path: Path, pre: str) -> None:
    reference = trained(pre)
    own = encoder_of(write_bytes(tmp_path / "t.gguf", reference, pre))
    for text in [*HARD_TEXTS, *CORPUS, "a<｜end▁of▁x｜>b<think> c"]:
        expected = reference.encode(text).ids
        assert own.encode(text).ids == expected, text
        assert own.decode(expected, skip_special_tokens=False) == reference.decode(
            expected, skip_special_tokens=False
        )


def test_all_known_pre_tokenizers_have_a_reference() -> None:
    aliases = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}
    assert PRE_TOKENIZERS.keys() == REFERENCES.keys() | aliases.keys()
    for name, same in aliases.items():
        assert PRE_TOKENIZERS[name] == PRE_TOKENIZERS[same]


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = trained("gpt-2")
    for name in ("default", "gpt-4o"):
        with pytest.raises(ModelLoadError, match=name):
            files_of(write_bytes(tmp_path / f"{name}.gguf", tokenizer, name))


def test_a_file_that_does_not_name_its_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    """Older converters wrote no name, and texts were cut wrongly (llama.cpp#7476)."""
    tokenizer = trained("gpt-2")
    path = write_bytes(tmp_path / "t.gguf", tokenizer, "gpt-2", add_tokenizer_pre=None)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre"):
        files_of(path)


# Vocabularies of sentencepiece: the reference is that library.


def pieces(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines() if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_pieces(
    path: Path, library: sentencepiece.SentencePieceProcessor, arch: str, **add: Any
) -> Path:
    """Write a vocabulary of sentencepiece as llama.cpp's converter does."""
    tokens: list[str] = []
    types: list[TokenType] = []
    for number in range(library.GetPieceSize()):
        token, kind = library.IdToPiece(number), TokenType.NORMAL
        if library.IsUnknown(number):
            kind = TokenType.UNKNOWN
        elif library.IsControl(number):
            kind = TokenType.CONTROL
        elif library.IsByte(number):
            kind = TokenType.BYTE
        elif token in ("<start_of_turn>", "<end_of_turn>") or token.strip(SPACE) == "":
            kind = TokenType.NORMAL if token == SPACE else TokenType.USER_DEFINED
        if kind == TokenType.USER_DEFINED:
            token = token.replace(SPACE, " ")
        tokens.append(token)
        types.append(kind)
    calls: dict[str, Any] = {
        "add_tokenizer_model": "llama",
        "add_token_list": tokens,
        "add_token_types": types,
        "add_token_scores": [library.GetScore(n) for n in range(library.GetPieceSize())],
        "add_unk_token_id": library.unk_id(),
        "add_bos_token_id": library.bos_id(),
        "add_eos_token_id": library.eos_id(),
        "add_add_bos_token": False,
    }
    kept = {name: value for name, value in {**calls, **add}.items() if value is not None}
    return write_file(path, arch, kept)


#: ``NO_MARKERS``: sentencepiece reads markers as text, and its control characters otherwise.
NO_MARKERS = [text for text in HARD_TEXTS if "<" not in text and "\x00" not in text]


def test_pieces_of_llama_are_those_of_sentencepiece(tmp_path: Path) -> None:
    library = pieces()
    own = encoder_of(write_pieces(tmp_path / "t.gguf", library, "llama"))
    for text in [*NO_MARKERS, *CORPUS]:
        expected = library.Encode(text)
        assert own.encode(text).ids == expected, text
        assert own.decode(expected) == library.Decode(expected)


def test_pieces_of_gemma_are_those_of_sentencepiece(tmp_path: Path) -> None:
    spaces = [SPACE * count for count in range(2, 9)]
    library = pieces(
        add_dummy_prefix=False,
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>", *spaces],
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
    )
    path = write_pieces(tmp_path / "t.gguf", library, "gemma2", add_add_space_prefix=False)
    own = encoder_of(path)
    for text in [*NO_MARKERS, *CORPUS, "<start_of_turn>user\nhi<end_of_turn>\n"]:
        expected = library.Encode(text)
        assert own.encode(text).ids == expected, text
        assert own.decode(expected, skip_special_tokens=False) == library.Decode(expected)


# Folders: transformers reads tokenizers by the type of the model.


@pytest.mark.parametrize(
    ("pre", "model_type"),
    [(pre, each) for pre in REFERENCES for each in ("llama", "qwen3")] + [("qwen2", "qwen2")],
)
def test_a_byte_level_folder_encodes_so(tmp_path: Path, pre: str, model_type: str) -> None:
    reference = trained(pre)
    path = write_bytes(tmp_path / "t.gguf", reference, pre)
    own = loaded(tmp_path / "folder", path, model_type)
    for text in [*HARD_TEXTS, *CORPUS]:
        assert list(own.encode(text)) == reference.encode(text).ids, text


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text"])
def test_a_folder_of_pieces_encodes_so(tmp_path: Path, model_type: str) -> None:
    is_llama = model_type == "llama"
    library = pieces(add_dummy_prefix=is_llama)
    arch = model_type.removesuffix("_text")
    path = write_pieces(tmp_path / "t.gguf", library, arch, add_add_space_prefix=is_llama)
    own = loaded(tmp_path / "folder", path, model_type)
    for text in [*NO_MARKERS, *CORPUS]:
        assert list(own.encode(text)) == library.Encode(text), text


def test_qwen2_has_no_other_tokenizer_than_its_own(tmp_path: Path) -> None:
    add = {"add_tokenizer_pre": "llama-bpe"}
    path = write_bytes(tmp_path / "t.gguf", trained("qwen2"), "qwen2", **add)
    with pytest.raises(ModelLoadError, match="llama-bpe"):
        files_of(path)
    with pytest.raises(ModelLoadError, match="'llama'"):
        files_of(write_pieces(tmp_path / "u.gguf", pieces(), "qwen2"))


# What is said about texts beside the vocabulary.


def loaded(folder: Path, path: Path, model_type: str = "llama") -> Any:
    files = files_of(path)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(files.tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(files.config))
    config = {"model_type": model_type, "eos_token_id": files.end_ids}
    (folder / "config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.mark.parametrize("begins", [True, False, None])
def test_the_begin_token_is_added_as_the_file_says(tmp_path: Path, begins: bool | None) -> None:
    """llama.cpp adds it to this kind of vocabulary unless the file says otherwise."""
    library = pieces()
    path = write_pieces(tmp_path / "t.gguf", library, "llama", add_add_bos_token=begins)
    ids = encoder_of(path).encode("the dog").ids
    assert (ids[0] == library.bos_id()) is (begins is not False)
    assert ids[-1] != library.eos_id()
    pair = encoder_of(path).encode("the", "dog").ids
    assert pair.count(library.bos_id()) == (2 if begins is not False else 0)


def test_a_template_and_special_tokens_come_from_the_file(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    path = write_bytes(tmp_path / "t.gguf", trained("qwen2"), "qwen2", add_chat_template=template)
    tokenizer = loaded(tmp_path / "folder", path)
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi"


def test_several_templates_are_kept_by_name(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    path = write_bytes(tmp_path / "t.gguf", trained("qwen2"), "qwen2", add_chat_template=templates)
    assert files_of(path).config["chat_template"] == templates


def test_tokens_that_end_a_turn_end_answers_too(tmp_path: Path) -> None:
    """Files of Llama 3 name one end, which its chats do not write (ollama#3759)."""
    tokenizer = trained("llama-bpe")
    tokenizer.add_special_tokens(["<|eot_id|>"])
    ids = [tokenizer.get_vocab()[name] for name in ("<|endoftext|>", "<|im_end|>", "<|eot_id|>")]
    path = write_bytes(tmp_path / "t.gguf", tokenizer, "llama-bpe")
    assert files_of(path).end_ids == sorted(ids)
    path = write_bytes(tmp_path / "u.gguf", tokenizer, "llama-bpe", add_eot_token_id=7)
    assert files_of(path).end_ids == sorted([7, *ids])


def test_a_whole_tokenizer_json_counts_most(tmp_path: Path) -> None:
    tokenizer = trained("gpt-2")

    def whole(content: str) -> Path:
        writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
        writer.add_context_length(512)
        writer.add_token_list(["a", "b"])
        writer.add_string("tokenizer.huggingface.json", content)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tmp_path / "t.gguf"

    own = encoder_of(whole(tokenizer.to_str()))
    assert [own.encode(text).ids for text in CORPUS] == [
        tokenizer.encode(text).ids for text in CORPUS
    ]
    for content in ("[]", "{", "[" * 100_000, "{}"):
        with pytest.raises(ModelLoadError, match="huggingface"):
            files_of(whole(content))


def rows(values: Sequence[Any]) -> dict[str, Any]:
    return {"add_tokenizer_model": "llama", "add_token_list": values}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"add_tokenizer_model": "llama"}, "tokenizer.ggml.tokens"),
    "no scores": (rows(["a"]), "tokenizer.ggml.scores"),
    "too few scores": ({**rows(["a", "b"]), "add_token_scores": [0.5]}, "array of 2 numbers"),
    # Readers that take bytes for floats read beyond these (llama.cpp#26690).
    "scores of another type": ({**rows(["a"]), "add_token_scores": [1]}, "scores"),
    "types of another type": (
        {**rows(["a"]), "add_token_scores": [0.5], "add_token_types": [0.5]},
        "token_type",
    ),
    "more tokens than embeddings": (rows(["a"] * 5), "at most 4"),
    "an end beyond the vocabulary": (
        {**rows(["a"]), "add_token_scores": [0.5], "add_eos_token_id": 1},
        "eos_token_id",
    ),
    "a kind of 10 MB": (
        {"add_tokenizer_model": "x" * 10**7, "add_token_list": ["a"]},
        "'xxx",
    ),
    "a kind that is not read": (
        {"add_tokenizer_model": "t5", "add_token_list": ["a"]},
        "'t5'",
    ),
    "a begin beyond the vocabulary": (
        {**rows(["a"]), "add_token_scores": [0.5], "add_bos_token_id": 9},
        "bos_token_id",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_vocabularies_are_refused(tmp_path: Path, case: str) -> None:
    add, words = WRONG[case]
    with pytest.raises(ModelLoadError) as error:
        files_of(write_file(tmp_path / "t.gguf", "llama", add), vocab_size=4)
    assert words in str(error.value)
    assert len(str(error.value)) < 600

    """Merges of one token take time by the square of its length."""
    """The time for merges that make a token grows with the square of its length."""
    add = {**rows(["a", "aa", "a" * 2_000_000]), "add_token_scores": [0.0, -1.0, -2.0]}
    tokenizer = files_of(write_file(tmp_path / "t.gguf", "llama", add)).tokenizer
    assert tokenizer["model"]["merges"] == [["a", "a"]]


def test_byte_tokens_of_other_names_are_only_text(tmp_path: Path) -> None:
    """llama.cpp computed an index from the name of such a token (lmstudio-bug-tracker#2289)."""
    add = {
        "add_tokenizer_model": "llama",
        "add_token_list": ["<unk>", "<0x-1>", "<0xZZ>", "a"],
        "add_token_scores": [0.0, 0.0, 0.0, -1.0],
        "add_token_types": [TokenType.UNKNOWN, TokenType.BYTE, TokenType.BYTE, TokenType.NORMAL],
        "add_unk_token_id": 0,
        "add_add_space_prefix": False,
    }
    own = encoder_of(write_file(tmp_path / "t.gguf", "llama", add))
    assert own.encode("ab").ids == [3, 0]
