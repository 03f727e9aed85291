"""The test of the documentation fails for wrong blocks, and for no others."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.documentation import (
    BlockError,
    PageRunner,
    imported_modules,
    indented_code,
    read_blocks,
    script_faults,
)
from tests.server_process import ROOT


def run(tmp_path: Path, page: str) -> PageRunner:
    runner = PageRunner(port=1, folder=tmp_path, served=frozenset({"demo:mlm"}))
    runner.run_page(read_blocks("page.md", page))
    return runner


def fenced(language: str, code: str, note: str = "") -> str:
    return f"{note}\n```{language}\n{code}\n```\n"


def test_blocks_have_a_place_a_language_and_the_comment_before_them():
    page = (
        "Text.\n\n<!-- not run: needs a hub -->\n```sh\na\n```\n\n"
        "- item\n\n  ```json\n  {}\n  ```\n"
    )
    first, second = read_blocks("page.md", page)
    assert (first.place, first.language, first.text) == ("page.md:4", "sh", "a\n")
    assert first.reason == "needs a hub"
    assert (second.place, second.text, second.reason) == ("page.md:10", "{}\n", None)


def test_a_comment_further_up_belongs_to_no_block():
    (block,) = read_blocks("page.md", "<!-- not run: a reason -->\n\ntext\n```sh\na\n```\n")
    assert block.note == ""


@pytest.mark.parametrize("language", ["", "bash", "console", "ruby"])
def test_a_block_that_is_neither_run_nor_marked_fails(tmp_path: Path, language: str):
    with pytest.raises(BlockError, match="neither run nor marked"):
        run(tmp_path, fenced(language, "a"))


def test_a_marked_block_passes_if_the_mark_has_a_reason(tmp_path: Path):
    run(tmp_path, fenced("sh", "false", "<!-- not run: needs a model from the hub -->"))
    with pytest.raises(BlockError, match="reason"):
        run(tmp_path, fenced("sh", "false", "<!-- not run: -->"))
    with pytest.raises(BlockError, match="mean"):
        run(tmp_path, fenced("sh", "false", "<!-- skip -->"))


@pytest.mark.parametrize(
    ("language", "code"),
    [("python", "1 / 0"), ("sh", "false"), ("sh", "false | cat"), ("json", "{"), ("yaml", "{")],
)
def test_a_block_that_fails_is_named(tmp_path: Path, language: str, code: str):
    with pytest.raises(BlockError, match=r"page\.md:2"):
        run(tmp_path, fenced(language, code))


def test_a_curl_that_is_refused_fails(tmp_path: Path):
    # Port 1 stands for the server, and nothing listens there.
    with pytest.raises(BlockError, match="status 7"):
        run(tmp_path, fenced("sh", "curl http://127.0.0.1:8000/health"))


def test_python_blocks_share_their_names(tmp_path: Path):
    code = "import asyncio\nasyncio.run(asyncio.sleep(0))\nb = a + 1\nprint(b)  # 3"
    run(tmp_path, fenced("python", "a = 2") + fenced("python", code))


@pytest.mark.parametrize(
    "code", ["await f()", "async with f() as a:\n    pass", "[x async for x in f()]"]
)
def test_a_block_that_awaits_outside_a_function_is_no_script(tmp_path: Path, code: str):
    with pytest.raises(BlockError, match=r"page\.md:2"):
        run(tmp_path, fenced("python", code))
    (block,) = read_blocks("page.md", fenced("python", code, "<!-- not run: needs a hub -->"))
    assert script_faults(block)


def all_pages() -> list[Path]:
    folders = [ROOT, *(ROOT / name for name in ("docs", "examples", "benchmarks", "loadtests"))]
    return [page for folder in folders for page in folder.glob("*.md")] + [
        page for name in ("docs", "examples", "benchmarks") for page in (ROOT / name).glob("*/*.md")
    ]


def test_every_block_of_every_page_is_a_script():
    blocks = [
        block
        for page in all_pages()
        for block in read_blocks(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
    ]
    assert len(blocks) > 100
    assert [fault for block in blocks for fault in script_faults(block)] == []


def test_every_page_says_how_to_install_what_its_blocks_import():
    # SERVER: what an installed server brings, by the names of its modules.
    server = {*sys.stdlib_module_names, "mlx_parallm", "mlx", "numpy", "httpx2", "PIL"}
    server |= {"pydantic", "huggingface_hub", "safetensors", "transformers"}
    packages = {"art": "openpipe-art"}
    missing = []
    for page in all_pages():
        text = page.read_text(encoding="utf-8")
        for block in read_blocks(page.name, text):
            for module in imported_modules(block) - server:
                package = packages.get(module, module)
                if not re.search(rf"pip install [^`\n]*\b{package}\b", text):
                    missing.append((page.name, module))
    assert missing == []


def test_a_comment_behind_print_is_what_it_prints(tmp_path: Path):
    loop = 'for word in ("a", "b"):\n    print(word, end="")  # ab'
    run(tmp_path, fenced("python", loop))
    run(tmp_path, fenced("python", "print(\n    [0.25, 0.5, 'x']\n)  # [0.25, …]"))
    with pytest.raises(BlockError, match="gives '4"):
        run(tmp_path, fenced("python", "print(2 + 2)  # 5"))


def test_an_output_block_is_what_the_block_before_prints(tmp_path: Path):
    echo = fenced("sh", "echo 'id 17: done'")
    run(tmp_path, echo + fenced("text", "id …: done", "<!-- output -->"))
    with pytest.raises(BlockError, match="id 17"):
        run(tmp_path, echo + fenced("text", "id …: failed", "<!-- output -->"))
    with pytest.raises(BlockError):
        run(tmp_path, echo + fenced("text", "id …: failed", "<!-- output -->\n"))
    with pytest.raises(BlockError, match="no block before"):
        run(tmp_path, fenced("text", "a", "<!-- output -->"))


def test_json_output_may_have_more_fields_than_the_page_shows(tmp_path: Path):
    answer = fenced("sh", """echo '{"id": "a-1", "scores": [0.7312, 2], "more": 1}'""")
    run(tmp_path, answer + fenced("json", '{"id": "a-…", "scores": [0.73, 2]}', "<!-- output -->"))
    for wrong in ('{"scores": [0.8, 2]}', '{"scores": [0.73]}', '{"other": 1}', '{"id": "b-…"}'):
        with pytest.raises(BlockError):
            run(tmp_path, answer + fenced("json", wrong, "<!-- output -->"))


def test_a_command_that_serves_must_name_models_of_the_test(tmp_path: Path):
    run(tmp_path, fenced("sh", "mlx_parallm serve --model demo:mlm"))
    with pytest.raises(BlockError, match="org/model"):
        run(tmp_path, fenced("sh", "mlx_parallm serve --model org/model"))


def test_code_by_indentation_is_found():
    assert indented_code("a\n\n    code\n    more\n\n```sh\nx\n\n    y\n```\n- b\n    c\n") == [3]
