"""The chat template of a model's processor serves where its tokenizer has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.tokenizer.encoder_tokenizer import load_encoder_tokenizer
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.errors import ModelLoadError
from tests.decoder_folders import write_words

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OTHER = "w9 {{ messages[0].content }}"
MESSAGES = [{"role": "user", "content": "w5 w6"}]
WRITTEN = "user: w5 w6\n"
FILES = ("chat_template.json", "processor_config.json")


def write(folder: Path, file: str, template: Any, own: str | None = None) -> Path:
    """Write a tokenizer, maybe with a template of its own, and a processor's."""
    write_words(folder, 20, template=own)
    (folder / "config.json").write_text('{"model_type": "llava"}')
    (folder / file).write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("form", ["text", "names", "list"])
def test_it_is_rendered(file: str, form: str, tmp_path: Path) -> None:
    template: Any = TEMPLATE
    if form == "names":
        template = {"default": TEMPLATE, "tool_use": OTHER}
    elif form == "list":
        template = [{"name": "default", "template": TEMPLATE}]
    folder = write(tmp_path, file, template)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(MESSAGES) == WRITTEN
    encoder = load_encoder_tokenizer(folder)
    assert encoder.has_chat_template
    assert "tool calls" in encoder.probe_template()


@pytest.mark.parametrize("file", FILES)
def test_the_tokenizers_own_template_counts_more(file: str, tmp_path: Path) -> None:
    folder = write(tmp_path, file, TEMPLATE, OTHER)
    assert load_tokenizer(folder).chat_template == OTHER


def test_one_that_is_passed_counts_most(tmp_path: Path) -> None:
    folder = write(tmp_path, FILES[0], TEMPLATE)
    assert load_tokenizer(folder, chat_template=OTHER).chat_template == OTHER


def test_a_file_of_its_own_counts_more_than_a_processors_settings(tmp_path: Path) -> None:
    folder = write(tmp_path, FILES[0], TEMPLATE)
    (folder / FILES[1]).write_text(json.dumps({"chat_template": OTHER}))
    assert load_tokenizer(folder).chat_template == TEMPLATE


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("content", ["[", '{"chat_template": 7}', '{"chat_template": {"a": 1}}'])
def test_a_wrong_file_is_refused(file: str, content: str, tmp_path: Path) -> None:
    folder = write(tmp_path, file, TEMPLATE)
    (folder / file).write_text(content)
    with pytest.raises(ModelLoadError):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["{}", "[]", '{"chat_template": null}'])
def test_files_without_a_template_are_no_template(content: str, tmp_path: Path) -> None:
    folder = write(tmp_path, FILES[0], TEMPLATE)
    (folder / FILES[0]).write_text(content)
    assert not load_tokenizer(folder).has_chat_template
    encoder = load_encoder_tokenizer(folder)
    assert not encoder.has_chat_template
    assert not encoder.probe_template()
