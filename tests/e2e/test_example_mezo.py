"""``examples/mezo`` against a real server, and its reading of files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from examples.mezo.task import label_words, read_rows, reviews, split
from examples.mezo.train import main, parse_arguments, session_options
from mlx_parallm.client import ClientError, RLClient, TrainingSession
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", "demo:mlm")
    process.wait_until_ready()
    yield process
    process.stop()


async def test_reviews_are_learnt(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--steps", "200", "--report-every", "50"]
    await main(parse_arguments(["--url", server.url, *flags, "--publish", "reviews"]))
    printed = capsys.readouterr().out
    before, after = (float(share) for share in re.findall(r"accuracy ([\d.]+)%", printed))
    assert after >= before + 4
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    # 1,024 texts are computed once in 200 steps of 16.
    assert "prefix cache 68.0% hits" in printed
    assert "served as reviews, version 1" in printed
    # The name is taken now, which is reported before anything is trained.
    options = parse_arguments(["--url", server.url, *flags, "--publish", "reviews"])
    with pytest.raises(ValueError, match="already"):
        await main(options)
    assert not await sessions_of(server)


async def test_what_was_trained_stays_if_it_cannot_be_published(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", server.url, "--steps", "2", "--report-every", "1"]
    with pytest.raises(ClientError):
        await main(parse_arguments([*flags, "--publish", "demo:mlm"]))
    (session,) = await sessions_of(server)
    assert session.step == 2
    assert f"{session.id} can be run and published" in capsys.readouterr().out
    async with RLClient(server.url) as client:
        await client.mezo.delete(session.id)


async def sessions_of(server: ServerProcess) -> list[TrainingSession]:
    async with RLClient(server.url) as client:
        return await client.mezo.sessions()


async def test_a_file_is_learnt_with_the_settings_of_the_paper(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.tsv"
    rows = reviews(Random(1), 40)
    path.write_text("".join(f"{row['label']}\t{row['text']}\n" for row in rows))
    words = ["--words", "negative=bad", "positive=good"]
    sizes = ["--held-out", "8", "--batch-size", "8", "--steps", "3", "--report-every", "1"]
    await main(parse_arguments(["--url", server.url, "--data", str(path), *words, *sizes]))
    printed = capsys.readouterr().out
    assert len(re.findall(r"step \d+: loss", printed)) == 3
    assert "prefix cache unavailable" in printed
    assert "of 8 held-out texts" in printed


def test_settings_are_those_of_the_paper_for_a_file_only() -> None:
    ours = session_options(parse_arguments([]))
    theirs = session_options(parse_arguments(["--model", "a", "--data", "b"]))
    assert theirs["estimator"] == {"preset": "paper"}
    assert theirs["trainable"]["targets"] == ["query", "value"]
    assert "preset" not in ours["estimator"]
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "a"])


def test_rows_have_a_label_a_tab_and_a_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("good\ta joyful film\n\nbad\tdull\tand long\n")
    assert read_rows(path) == [
        {"text": "a joyful film", "label": "good"},
        {"text": "dull\tand long", "label": "bad"},
    ]
    path.write_text("good\ta joyful film\nbad dull\n")
    with pytest.raises(ValueError, match="line 2"):
        read_rows(path)


def test_held_out_rows_are_not_trained_on() -> None:
    rows = reviews(Random(0), 50)
    kept, held_out = split(rows, 10, Random(0))
    texts = [{row["text"] for row in part} for part in (kept, held_out)]
    assert [len(part) for part in texts] == [40, 10]
    assert not texts[0] & texts[1]
    for count in (0, 50):
        with pytest.raises(ValueError, match="held out"):
            split(rows, count, Random(0))


def test_words_belong_to_labels() -> None:
    assert label_words(["bad=dog", "good=cat"]) == {"bad": "dog", "good": "cat"}
    with pytest.raises(ValueError, match="LABEL=WORD"):
        label_words(["dog"])
