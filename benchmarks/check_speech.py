"""Measure the word error rate of a speech model over recordings with transcripts.

    make check-speech MODEL=folder DATA=folder

DATA is a folder with audio files, each beside a ``.txt`` file of the same stem; or a manifest: a
``.tsv`` file whose lines are a path, a tab and the transcript, or a ``.jsonl`` file of objects with
``audio`` and ``text``. Paths are relative to the manifest. A server is started for MODEL, and some
recordings at once go to ``/v1/audio/transcriptions``; ``--base-url`` names a running server.

Both texts are normalised: letters become small, apostrophes are left out, and every other character
that is no letter, mark or digit becomes a space. Whisper's own rules for English do more: they also
write numbers as digits, one spelling for American and British words, and contractions in full. So
rates are a little higher here. The rate of all files is the number of words that were replaced,
left out or added over the number of words in the transcripts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

from benchmarks.checks import Check, conclude
from benchmarks.servers import mlx_parallm_server

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg")
APOSTROPHES = "'\u2019\u02bc"
AT_ONCE = 8


class DataError(Exception):
    """The recordings or transcripts are not as they must be."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A recording and what is said in it."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """The transcript of a clip by the model.

    Attributes:
        clip: the recording.
        text: the model's transcript; empty if it failed.
        seconds: how long the recording is.
        error: why there is no transcript; empty if there is one.
    """

    clip: Clip
    text: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def num_words(self) -> int:
        """Return the words of the clip's transcript."""
        return len(words_of(self.clip.text))

    @property
    def num_errors(self) -> int:
        """Return the words that the model replaced, left out or added."""
        return word_errors(words_of(self.clip.text), words_of(self.text))


def words_of(text: str) -> list[str]:
    """Return the normalised words of a text; see the module."""
    kept: list[str] = []
    for char in unicodedata.normalize("NFKC", text).lower():
        if char not in APOSTROPHES:
            kept.append(char if unicodedata.category(char)[0] in "LMN" else " ")
    return "".join(kept).split()


def word_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> int:
    """Return the least number of words to replace, leave out or add (Levenshtein, 1966)."""
    before = list(range(len(hypothesis) + 1))
    for row, word in enumerate(reference, 1):
        current = [row]
        for column, other in enumerate(hypothesis, 1):
            replaced = before[column - 1] + (word != other)
            current.append(min(replaced, before[column] + 1, current[-1] + 1))
        before = current
    return before[-1]


def read_clips(data: Path) -> list[Clip]:
    """Return the clips of a folder or a manifest.

    Raises:
        DataError: there are none, a file is missing, or a line is not as it must be.
    """
    if data.is_dir():
        paths = sorted(path for path in data.rglob("*") if path.suffix.lower() in SUFFIXES)
        texts = [path.with_suffix(".txt") for path in paths]
        clips = [
            Clip(path, text.read_text(encoding="utf-8"))
            for path, text in zip(paths, texts, strict=True)
            if text.exists()
        ]
        if not clips:
            raise DataError(f"{data} has no audio file with a .txt file of the same stem.")
        return clips
    readers: dict[str, Callable[[str], tuple[str, str]]] = {".tsv": _tsv, ".jsonl": _jsonl}
    read = readers.get(data.suffix.lower())
    if read is None or not data.is_file():
        raise DataError(f"{data} is no folder, and no .tsv or .jsonl file.")
    return list(_manifest(data, read))


def _manifest(file: Path, read: Callable[[str], tuple[str, str]]) -> Iterator[Clip]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            name, text = read(line)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"Line {number} of {file} has no path and text: {error}") from None
        path = file.parent / name
        if not path.is_file():
            raise DataError(f"Line {number} of {file} names {path}, which does not exist.")
        yield Clip(path, text)


def _tsv(line: str) -> tuple[str, str]:
    name, text = line.split("\t")
    return name, text


def _jsonl(line: str) -> tuple[str, str]:
    entry: dict[str, Any] = json.loads(line)
    return str(entry["audio"]), str(entry["text"])


def transcribe(
    clips: Sequence[Clip], base_url: str, model: str, language: str | None, at_once: int
) -> Iterator[Result]:
    """Yield the results of clips in their order; so many are transcribed at once."""
    client = OpenAI(base_url=f"{base_url}/v1", api_key="-", timeout=3600.0)
    options: dict[str, Any] = {} if language is None else {"language": language}

    def send(clip: Clip) -> Result:
        try:
            answer = client.audio.transcriptions.create(
                file=clip.path, model=model, response_format="verbose_json", **options
            )
        except OpenAIError as error:
            return Result(clip, error=str(error))
        return Result(clip, answer.text, answer.duration)

    with client, ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(send, clips)


def checks_of(results: Sequence[Result], wall_s: float, most: float | None) -> list[Check]:
    """Return the rate over all files that were heard, and how fast they were."""
    heard = [each for each in results if not each.error]
    num_words = sum(each.num_words for each in heard)
    rate = sum(each.num_errors for each in heard) / num_words if num_words else float("nan")
    seconds = sum(each.seconds for each in heard)
    return [
        Check("files", len(heard)),
        Check("files that failed", len(results) - len(heard), "<=", 0.0),
        Check("words", num_words),
        Check("word error rate", rate, "<=", most),
        Check("seconds of audio", seconds),
        Check("seconds of audio a second", seconds / wall_s),
    ]


def report(result: Result, root: Path) -> None:
    """Print one line for a clip."""
    path = result.clip.path
    name = path.relative_to(root) if path.is_relative_to(root) else path
    if result.error:
        print(f"failed  {name}: {result.error}", flush=True)
        return
    rate = result.num_errors / result.num_words if result.num_words else float("nan")
    print(f"{rate:6.3f}  {name}: {result.num_errors} of {result.num_words} words", flush=True)


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Provide the base URL and the model's name of a server."""
    if args.base_url:
        yield args.base_url.removesuffix("/").removesuffix("/v1"), args.model
        return
    with mlx_parallm_server(Path(args.model), shlex.split(args.server_options)) as server:
        yield server.base_url, str(server.model)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check_speech",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a folder; with --base-url a served name")
    parser.add_argument("--data", type=Path, required=True, help="recordings with transcripts")
    parser.add_argument("--language", help="of all recordings; detected if absent")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="recordings at the same time")
    parser.add_argument("--most", type=float, help="fail above this word error rate")
    parser.add_argument("--base-url", default="", help="a running server, in place of a new one")
    parser.add_argument("--server-options", default="", help="flags of the server, in one argument")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    try:
        clips = read_clips(args.data)
    except (DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    results: list[Result] = []
    with serving(args) as (base_url, model):
        started = time.perf_counter()
        for result in transcribe(clips, base_url, model, args.language, args.at_once):
            report(result, args.data)
            results.append(result)
        wall_s = time.perf_counter() - started
    files = [
        {
            "file": str(each.clip.path),
            "errors": each.num_errors,
            "words": each.num_words,
            "text": each.text,
            "error": each.error,
        }
        for each in results
    ]
    return conclude("check_speech", checks_of(results, wall_s, args.most), {"files": files})


if __name__ == "__main__":
    sys.exit(main())
