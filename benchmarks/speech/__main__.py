"""Measure speech: batches of clips against one after the other, and against others' programs.

Clips are windows of 30 s, transcribed by random weights in Whisper's shapes, in the language that
is given, with 60 new tokens each: the end token is suppressed on all sides, and so is the doubt
that random weights would deserve. Both sides get the same features, whose time is left out.

On a CPU, ``python -m benchmarks.speech --reference-python PYTHON``: whisper-tiny's shape in float32
and 16 clips, beside mlx-whisper, which PYTHON must have. Processes of both sides take turns; ratios
are of processor seconds, because other work of a machine changes those less.

On a GPU, ``python -m benchmarks.speech --gpu --reference-python PYTHON``: whisper-large-v3's shape
in float16 and 64 clips, beside transformers' ``generate`` in one batch, which PYTHON must have with
torch; then 16 streams of a text model in the same engine process while the clips are transcribed.
``--shrink`` tries this with small models on a CPU, without targets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.adapter_swap import model_config
from benchmarks.checks import RESULTS, Check, conclude
from benchmarks.make_model import make_model
from benchmarks.make_speech import make_speech

# HOST_THREADS: threads beside a GPU; NumPy's would otherwise wait on all cores.
HOST_THREADS = 4
SECONDS, NEW_TOKENS, ALONE = 30.0, 60, 4
CPU_CLIPS, GPU_CLIPS, STREAMS = 16, 64, 16
# LEAST_BATCH: audio/s of a batch over those of one clip after the other.
LEAST_BATCH, LEAST_OF_MLX, LEAST_OF_TRANSFORMERS, MOST_GAP = 6.0, 1.0, 2.0, 2.0
MODULES = {"mlx-whisper": "mlx_whisper_reference", "transformers": "transformers_reference"}
PEER, SMALL = "peer", "small"
GPU_PARTS = ("rates", "beside", PEER)

Figures = dict[str, Any]


class TimeIsUpError(Exception):
    """A part did not end in time."""


def main() -> int:
    args = make_parser().parse_args()
    args.end_s = time.monotonic() + args.limit
    return on_gpu(args) if args.gpu or args.shrink else on_cpu(args)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speech",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of both sides, on a CPU")
    parser.add_argument("--reference-python", metavar="PYTHON", help="has the other side's program")
    parser.add_argument("--gpu", action="store_true", help="the measurements for a GPU")
    parser.add_argument("--shrink", action="store_true", help="the same, small enough for a CPU")
    parser.add_argument("--parts", nargs="+", choices=GPU_PARTS, default=list(GPU_PARTS))
    parser.add_argument("--text-shape", default="0.6B", help="of the streams' model")
    parser.add_argument("--max-decode-stall-ms", type=float, help="of the engine, on a GPU")
    parser.add_argument("--max-num-batched-tokens", type=int, help="likewise")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="models; made if missing")
    parser.add_argument("--output", type=Path, default=RESULTS, help="gets the JSON file")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all of it")
    return parser


def on_cpu(args: argparse.Namespace) -> int:
    """Compare a batch with one clip after the other, and both with mlx-whisper."""
    model = make_speech(args.folder / "speech_tiny", "tiny")
    job: Figures = {"clips": CPU_CLIPS, "seconds": SECONDS, "max_tokens": NEW_TOKENS}
    job |= {"alone": ALONE, "parts": ["rates"]}
    own: list[Figures] = []
    peer: list[Figures] = []
    with tempfile.TemporaryDirectory() as folder:
        job["features"] = f"{folder}/features.npy"
        for _ in range(args.repetitions):
            own.append(measure(model, args, **job)["rates"])
            report("mlx_parallm", own[-1], "cpu_s")
            if args.reference_python:
                peer.append(measure_peer("mlx-whisper", model, args, job))
                report("mlx-whisper", peer[-1], "cpu_s")
    checks = rate_checks(own, "cpu_s", CPU_CLIPS)
    if peer:
        checks += peer_checks("mlx-whisper", own, peer, "cpu_s")
    details = {"own": own, "mlx-whisper": peer, "threads": args.threads}
    return conclude("speech", checks, details, args.output)


def on_gpu(args: argparse.Namespace) -> int:
    """Compare a batch with transformers' one, and measure streams beside it."""
    shape = "shrunk" if args.shrink else "large-v3"
    model = make_speech(args.folder / f"speech_{shape}", shape)
    count = 4 if args.shrink else GPU_CLIPS
    job: Figures = {"clips": count, "seconds": SECONDS, "max_tokens": NEW_TOKENS, "alone": ALONE}
    job["rounds"] = args.repetitions
    job["step_tokens"] = args.max_num_batched_tokens
    job["stall_ms"] = args.max_decode_stall_ms
    job["parts"] = [part for part in args.parts if part != PEER]
    if "beside" in args.parts:
        job |= {"text_model": str(text_model(args).resolve()), "streams": STREAMS}
    checks: list[Check] = []
    details: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        job["features"] = f"{folder}/features.npy" if PEER in args.parts else ""
        try:
            own = details["own"] = measure(model, args, **job)
            if "rates" in own:
                report("mlx_parallm", own["rates"], "wall_s")
                checks += rate_checks([own["rates"]], "wall_s", count)
            if "beside" in own:
                checks += beside_checks(own["beside"], count, args)
            if PEER in args.parts and "rates" in own:
                peer = details["transformers"] = measure_peer("transformers", model, args, job)
                report("transformers", peer, "wall_s")
                checks += peer_checks("transformers", [own["rates"]], [peer], "wall_s")
        except (TimeIsUpError, subprocess.SubprocessError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    if not checks:
        print("Nothing was measured.")
        return 1
    if args.shrink:
        checks = [replace(check, limit=None) for check in checks]
    return conclude("speech_tiny" if args.shrink else "speech_gpu", checks, details, args.output)


def report(name: str, figures: Figures, clock: str) -> None:
    """Print the seconds of audio a second of one process."""
    batch = statistics.median(audio_rate(each["batch"], clock) for each in figures["rounds"])
    alone = statistics.median(audio_rate(each["alone"], clock) for each in figures["rounds"])
    print(f"{name}: {batch:.1f} s/s in a batch, {alone:.1f} alone", flush=True)


def audio_rate(figures: Figures, clock: str) -> float:
    """Return the seconds of audio that are transcribed in a second of a clock."""
    return SECONDS * figures["clips"] / figures[clock]


def token_rate(figures: Figures, clock: str) -> float:
    """Return tokens a second of a clock."""
    return figures["tokens"] / figures[clock]


def rounds_of(sides: Sequence[Figures]) -> list[Figures]:
    """Return the rounds of all processes."""
    return [each for side in sides for each in side["rounds"]]


def rate_checks(own: Sequence[Figures], clock: str, clips: int) -> list[Check]:
    """Return medians, and the median of the ratios within a round."""
    rounds = rounds_of(own)
    name = "a processor second" if clock == "cpu_s" else "a second"

    def median(mode: str, rate: Any) -> float:
        return statistics.median(rate(each[mode], clock) for each in rounds)

    gain = statistics.median(
        audio_rate(each["batch"], clock) / audio_rate(each["alone"], clock) for each in rounds
    )
    same = all(all(each["equal"]) for each in rounds)
    return [
        Check(f"batch of {clips}: seconds of audio in {name}", median("batch", audio_rate)),
        Check(f"batch of {clips}: tokens in {name}", median("batch", token_rate)),
        Check(f"alone: seconds of audio in {name}", median("alone", audio_rate)),
        Check(f"alone: tokens in {name}", median("alone", token_rate)),
        Check("batch over alone", gain, ">=", LEAST_BATCH),
        Check("batch and alone have the same tokens", float(same), "==", 1.0),
    ]


def peer_checks(
    name: str, own: Sequence[Figures], peer: Sequence[Figures], clock: str
) -> list[Check]:
    """Compare with another program, round by round."""
    pairs = list(zip(rounds_of(own), rounds_of(peer), strict=True))

    def ratio(mode: str, other: str) -> float:
        return statistics.median(
            audio_rate(ours[mode], clock) / audio_rate(theirs[other], clock)
            for ours, theirs in pairs
        )

    def median(mode: str) -> float:
        return statistics.median(audio_rate(theirs[mode], clock) for _, theirs in pairs)

    least = LEAST_OF_MLX if name == "mlx-whisper" else LEAST_OF_TRANSFORMERS
    unit = "seconds of audio in a" + (" processor" if clock == "cpu_s" else "") + " second"
    alone = least if name == "mlx-whisper" else None
    its = f"{name}'" if name.endswith("s") else f"{name}'s"
    return [
        Check(f"{name}, one batch: {unit}", median("batch")),
        Check(f"{name}, alone: {unit}", median("alone")),
        Check(f"batch over {its} batch", ratio("batch", "batch"), ">=", least),
        Check(f"alone over {its} alone", ratio("alone", "alone"), ">=", alone),
        Check(f"batch over {its} alone", ratio("batch", "alone")),
        Check(f"clips with {its} tokens", shared(own[0]["tokens"], peer[0]["tokens"])),
    ]


def shared(own: Sequence[Sequence[int]], peer: Sequence[Sequence[int]]) -> float:
    """Return the share of clips for which both sides write the same tokens."""
    pairs = list(zip(own, peer, strict=True))
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


def text_model(args: argparse.Namespace) -> Path:
    """Return the folder of the streams' model."""
    shape, dtype = (SMALL, "float32") if args.shrink else (args.text_shape, "bfloat16")
    return make_model(args.folder / f"speech_text_{shape}", config=model_config(shape, dtype))


def beside_checks(figures: Figures, clips: int, args: argparse.Namespace) -> list[Check]:
    """Compare the gaps of streams beside clips with those of streams alone."""

    def median(mode: str, name: str) -> float:
        return statistics.median(each[mode][name] for each in figures["rounds"])

    ratio = statistics.median(
        each["beside"]["p99_ms"] / each["alone"]["p99_ms"] for each in figures["rounds"]
    )
    what = f"{STREAMS} streams of {SMALL if args.shrink else args.text_shape}"
    rate = statistics.median(audio_rate(each["clips"], "wall_s") for each in figures["rounds"])
    return [
        Check(f"{what} alone: gap p50, ms", median("alone", "p50_ms")),
        Check(f"{what} alone: gap p99, ms", median("alone", "p99_ms")),
        Check(f"{what} beside {clips} clips: gap p50, ms", median("beside", "p50_ms")),
        Check(f"{what} beside {clips} clips: gap p99, ms", median("beside", "p99_ms")),
        Check(f"{what} beside clips: longest gap, ms", median("beside", "most_ms")),
        Check(f"{what} beside clips: gap p99 over alone", ratio, "<=", MOST_GAP),
        Check("clips beside streams: seconds of audio a second", rate),
    ]


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a child: the number of threads of a CPU's matrix products."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(HOST_THREADS if args.gpu else args.threads))}


def measure(model: Path, args: argparse.Namespace, **job: Any) -> Figures:
    """Return the figures of ``benchmarks.speech.engine`` in a process of its own."""
    content = json.dumps({"model": str(model.resolve()), **job})
    command = ["-m", "mlx_parallm.process_setup.openblas", "benchmarks.speech.engine"]
    return _output([sys.executable, *command], args, content)


def measure_peer(name: str, model: Path, args: argparse.Namespace, job: Figures) -> Figures:
    """Return the figures of another program for the same features."""
    module = f"benchmarks.speech.{MODULES[name]}"
    command = [args.reference_python or sys.executable, "-m"]
    if name == "mlx-whisper":
        # MLX alone would multiply matrices with LAPACK's reference BLAS.
        command.append("mlx_parallm.process_setup.openblas")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps({"rounds": 1} | job))
        return _output([*command, module, str(model.resolve()), str(file)], args)


def _output(command: Sequence[str], args: argparse.Namespace, content: str = "") -> Figures:
    """Return the JSON of the last line that a process prints."""
    left = args.end_s - time.monotonic()
    if left <= 0:
        raise TimeIsUpError("there is no time left")
    try:
        done = subprocess.run(
            command,
            input=content,
            stdout=subprocess.PIPE,
            env=environment(args),
            text=True,
            check=True,
            timeout=left,
        )
    except subprocess.TimeoutExpired as error:
        # The parts that ended were printed.
        printed = error.stdout or b""
        lines = (printed.encode() if isinstance(printed, str) else printed).splitlines()
        if not lines:
            raise
        return json.loads(lines[-1])
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
