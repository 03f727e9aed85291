import json
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.tokenizer.template_form import UNPROBED
from mlx_parallm.types.errors import ConfigError, InvalidRequestError, ModelLoadError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'critic' %}"
    "{{ raise_exception('no critic here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}T{{ tools | length }}{% endif %}{{ mood }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def save(folder: Path, template: str | None = TEMPLATE, *, config=None, generation=None):
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(["<think>", "</think>"])
    backend.enable_truncation(5)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", chat_template=template
    )
    hf.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(save(tmp_path))


def test_end_tokens_of_all_files_are_united(tmp_path):
    folder = save(
        tmp_path,
        config={"model_type": "llama", "eos_token_id": 7, "text_config": {"eos_token_id": [8]}},
        generation={"eos_token_id": [9, 10]},
    )
    assert load_tokenizer(folder).eos_ids == {7, 8, 9, 10, 256}


def test_the_vocabulary_counts_added_tokens(tokenizer):
    assert tokenizer.vocab_size == 259
    assert tokenizer.token_id("</think>") == 258
    assert tokenizer.token_id("no token") is None
    assert tokenizer.special_tokens == {"<|end|>"}


def test_a_long_prompt_is_not_cut(tokenizer):
    assert len(tokenizer.encode("a" * 100)) == 100


def test_special_tokens_are_left_out_when_asked(tokenizer):
    ids = tokenizer.encode("a<|end|>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b"


def test_the_template_sees_tools_and_further_variables(tokenizer):
    text = tokenizer.render_chat(
        [USER], tools=[{"type": "function"}], template_kwargs={"mood": "!"}
    )
    assert text == "<user>hi<|end|>T1!<assistant>"


def test_further_variables_do_not_replace_arguments(tokenizer):
    text = tokenizer.render_chat([USER], template_kwargs={"add_generation_prompt": False})
    assert text.endswith("<assistant>")


def test_encoding_a_chat_is_encoding_what_was_rendered(tokenizer):
    ids = tokenizer.encode_chat([USER])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<user>hi<|end|><assistant>"
    assert ids.count(256) == 1


def test_the_final_message_can_be_continued(tokenizer):
    messages = [USER, {"role": "assistant", "content": "Well"}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>hi<|end|><assistant>Well"


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([{"role": "critic", "content": "x"}], {}),
        ([USER], {"chat_template": "{{ messages[0].content + 1 }}"}),
        ([USER], {"chat_template": "{% broken"}),
        ([USER], {"chat_template": "{{ messages[0].nothing.deeper }}"}),
        ([USER], {"chat_template": "{{ 1 // 0 }}"}),
        ([USER], {"continue_final_message": True, "add_generation_prompt": True}),
    ],
)
def test_what_the_template_refuses_is_the_callers_fault(tokenizer, messages, options):
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.render_chat(messages, **options)
    assert caught.value.param == "messages"


def test_the_templates_own_words_reach_the_caller(tokenizer):
    with pytest.raises(InvalidRequestError, match="no critic here"):
        tokenizer.render_chat([{"role": "critic", "content": "x"}])


def test_without_a_template_chat_is_refused_unless_one_is_given(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path, None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.render_chat([USER])
    assert tokenizer.render_chat([USER], chat_template="{{ messages[0].content }}") == "hi"


def test_a_template_given_at_load_replaces_the_models(tmp_path):
    folder = save(tmp_path, None)
    file = tmp_path / "mine.jinja"
    file.write_text("file {{ messages[0].content }}")
    for template, expected in (
        ("text {{ messages[0].content }}", "text hi"),
        (str(file), "file hi"),
    ):
        tokenizer = load_tokenizer(folder, chat_template=template)
        assert tokenizer.has_chat_template
        assert tokenizer.render_chat([USER]) == expected


def test_a_template_file_that_is_missing_is_a_wrong_setting(tmp_path):
    with pytest.raises(ConfigError):
        load_tokenizer(save(tmp_path), chat_template=str(tmp_path / "absent.jinja"))


def test_a_folder_without_a_tokenizer_cannot_be_loaded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelLoadError):
        load_tokenizer(tmp_path)


def test_threads_can_share_it(tokenizer):
    texts = [f"text {i} 🙂" * 50 for i in range(8)]
    results = {}

    def work(text):
        ids = tokenizer.encode(text)
        detokenizer = tokenizer.detokenizer()
        results[text] = "".join(map(detokenizer.add, ids)) + tokenizer.render_chat([USER])

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {text: f"{text}<user>hi<|end|><assistant>" for text in texts}


WHOLE = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
TALKS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
CHOOSES = "{% if tools %}{{ tools }}WITH{% else %}WITHOUT{% endif %}"
NOTHING = "{{ raise_exception('wants tools') if not tools }}"


@pytest.mark.parametrize(
    ("template", "losses"),
    [
        (WHOLE, []),
        (TALKS, ["tool calls"]),
        (TALKS + "{{ tools }}", ["tool calls"]),
        (CHOOSES.replace("WITHOUT", WHOLE).replace("WITH", TALKS), ["with tools, tool calls"]),
        (CHOOSES.replace("WITHOUT", TALKS).replace("WITH", WHOLE), ["without tools, tool calls"]),
        (WHOLE + NOTHING + "{{ tools }}", [f"without tools, {UNPROBED}"]),
        ("{{ raise_exception('no') }}", [UNPROBED]),
    ],
)
def test_losses_with_tools_and_without_are_known_at_load(tmp_path, template, losses):
    tokenizer = load_tokenizer(save(tmp_path, template))
    known = tokenizer.probe_template()
    assert [loss for loss in known if "tool calls" in loss or UNPROBED in loss] == losses
    assert {"_forms", "_thinking"} <= vars(tokenizer).keys(), "no request has to probe"


def test_a_template_is_probed_as_requests_are_rendered(tmp_path):
    # This one writes the system message only where it opens the assistant's turn.
    opens = (
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{% for m in messages if m.role == 'system' %}"
        "{{ m.content }}{% endfor %}{% endif %}"
    )
    tokenizer = load_tokenizer(save(tmp_path, opens))
    messages = [USER, {"role": "system", "content": "rule"}]
    assert tokenizer.render_chat(messages) == "hirule"


def test_a_template_of_parts_gets_a_later_system_message_in_a_users_turn(tmp_path):
    parts = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('first only') }}{% endif %}<{{ m.role }}>"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    tokenizer = load_tokenizer(save(tmp_path, parts))
    messages = [
        {"role": "system", "content": "s"},
        USER,
        {"role": "assistant", "content": "a"},
        {"role": "system", "content": "t"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "u"}]},
    ]
    assert tokenizer.render_chat(messages) == "<system>s<user>hi<assistant>a<user>tu"
