"""The command line as a whole."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from mlx_parallm import __version__
from mlx_parallm.cli.doctor.advice import device_advice
from mlx_parallm.cli.doctor.command import REJECTED
from mlx_parallm.cli.engines import ProgressPrinter
from mlx_parallm.cli.logs import ConsoleFormatter, JsonFormatter
from mlx_parallm.cli.main import COMMANDS, main
from mlx_parallm.cli.serve import is_exposed
from mlx_parallm.media import check, decode
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.worker.device.properties import DeviceReport
from tests.server_process import user_environment


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_device(**changes: Any) -> DeviceReport:
    values: dict[str, Any] = {
        "backend": "cpu",
        "device": "a processor",
        "memory_total_bytes": 16 * 2**30,
        "memory_free_bytes": 8 * 2**30,
        "blas": "OpenBLAS 0.3.34",
        "blas_path": None,
        "has_slow_blas": False,
        "matmul_gflops": 5.0,
        "info": {},
    }
    return DeviceReport(**(values | changes))


def make_record(**extra: object) -> logging.LogRecord:
    record = logging.makeLogRecord({"name": "a.b", "levelname": "INFO", "msg": "got %d"})
    record.args = (3,)
    record.__dict__.update(extra)
    return record


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"  {name}" in shown for name in COMMANDS)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["sevre"])
    assert "sevre" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"mlx_parallm {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"usage: mlx_parallm {command}" in capsys.readouterr().out


def test_help_of_serve_imports_nothing_that_takes_long() -> None:
    program = (
        "import sys; from mlx_parallm.cli.main import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print('imported:', *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "--max-model-len" in done.stdout
    imported = set(done.stdout.rpartition("imported:")[2].split())
    slow = {
        "mlx",
        "mlx_lm",
        "transformers",
        "tokenizers",
        "fastapi",
        "pydantic",
        "uvicorn",
        "numpy",
    }
    assert "mlx_parallm" in imported
    assert not imported & slow


def test_imports_print_nothing() -> None:
    """Lines that a library prints while it is imported would not be JSON with --log-format json."""
    modules = ("cli.serve", "llm", "tokenizer.tokenizer", "cli.doctor.command")
    imports = "; ".join(f"import mlx_parallm.{module}" for module in modules)
    command = [sys.executable, "-c", imports]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=user_environment()
    )
    assert done.stdout + done.stderr == ""


def test_a_missing_mlx_is_told_in_one_line() -> None:
    """Start as on Linux after an installation without one of the extras."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['mlx'] = None; sys.modules['mlx.core'] = None\n"
            "from mlx_parallm.cli.main import main; sys.exit(main(['serve']))",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "mlx-parallm[cpu]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_of_a_command_has_hints_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", "--num-requsets", "3"])
    assert "--num-requsets (did you mean --num-requests?)" in capsys.readouterr().err


def test_a_wrong_setting_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "many"]) == 2
    assert "mlx_parallm serve: error: --port: must be" in capsys.readouterr().err


def test_flags_are_not_guessed_from_their_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--max-num", "3"])
    assert "--max-num" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "keys", "exposed"),
    [
        ("127.0.0.1", (), False),
        ("127.9.9.9", (), False),
        ("::1", (), False),
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("192.168.1.2", (), True),
        ("0.0.0.0", ("key",), False),
    ],
)
def test_listening_beyond_loopback_without_a_key_is_exposed(
    host: str, keys: tuple[str, ...], exposed: bool
) -> None:
    assert is_exposed(ServerConfig(api_keys=keys), host) is exposed


def test_doctor_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    # A GPU that is virtual may reject kernels; then a server runs without them.
    assert status == (REJECTED if report["rejected"] else 0)
    assert report["device"]["backend"] in ("cpu", "cuda", "metal")
    assert report["device"]["matmul_gflops"] > 0
    assert report["attention"]["passed"] is True
    assert {name: cost["passed"] for name, cost in report["quantised_kv"].items()} == {
        "int8": True,
        "int4": True,
    }
    assert report["versions"]["mlx_parallm"] == __version__
    assert "pillow" in report["versions"]
    assert report["pictures"] == dict.fromkeys(("png", "jpeg", "webp", "gif", "bmp"))
    assert report["audio"] == dict.fromkeys(("wav", "flac", "mp3", "vorbis"))


def test_doctor_says_why_a_format_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take WebP's decoder from Pillow, as in a build without its library."""
    decoders = {**check.DECODERS}
    del decoders["webp"]
    monkeypatch.setattr(decode, "DECODERS", decoders)
    problems = check.format_problems()
    assert problems.pop("webp") == "KeyError: 'webp'"
    assert set(problems.values()) == {None}


def test_doctor_says_what_fits_into_kv(capsys: pytest.CaptureFixture[str]) -> None:
    size = "1MiB"
    flags = ["--kv-cache-memory-bytes", size, "--block-size", "8"]
    assert main(["doctor", "--json", *flags]) in (0, REJECTED)
    (fit,) = json.loads(capsys.readouterr().out)["kv"].values()
    # A token has 6 layers, 2 heads, and 64 numbers of a key and of a value in float32.
    assert (fit["num_blocks"], fit["num_tokens"]) == (21, 168)
    assert fit["text"].endswith("1.0 contexts of 168 tokens (cut from 8,192)")


def test_doctor_says_that_so_much_kv_is_not_free(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--kv-cache-memory-bytes", "900TiB"]) == 1
    assert "KV  " in capsys.readouterr().out


def test_doctor_advises_openblas_on_linux() -> None:
    (advice,) = device_advice(make_device(has_slow_blas=True), "linux")
    assert "mlx-parallm[cpu]" in advice
    assert device_advice(make_device(), "linux") == []


def test_doctor_warns_of_little_memory() -> None:
    device = make_device(memory_free_bytes=2**30)
    assert device_advice(device, "linux") == [
        "Only 1.0 GiB of memory is free; large models will not load."
    ]


def test_progress_is_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    show = ProgressPrinter(stream)
    for fraction in (0.0, 0.5, 1.0):
        show("Loading", fraction)
    assert stream.getvalue().count("\r") == 3
    assert stream.getvalue().endswith("100%\n")


def test_progress_elsewhere_is_a_few_lines() -> None:
    stream = io.StringIO()
    show = ProgressPrinter(stream)
    for percent in range(101):
        show("Loading", percent / 100)
    assert stream.getvalue().splitlines() == [
        f"Loading {percent:3}%" for percent in (0, 25, 50, 75, 100)
    ]


def test_json_lines_carry_extra_fields_and_exceptions() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        line = JsonFormatter().format(make_record(request_id="r1", exc_info=sys.exc_info()))
    entry = json.loads(line)
    assert (entry["logger"], entry["level"], entry["message"]) == ("a.b", "info", "got 3")
    assert entry["request_id"] == "r1"
    assert "ValueError: no" in entry["exception"]


def test_console_lines_carry_extra_fields() -> None:
    line = ConsoleFormatter().format(make_record(request_id="r1", color_message="x"))
    assert line.endswith("a.b: got 3 request_id=r1")


def test_json_lines_hold_warnings_library_records_and_uncaught_errors() -> None:
    program = """
import logging, sys, threading, warnings
library = logging.getLogger("library")
library.addHandler(logging.StreamHandler())
library.propagate = False
from mlx_parallm.cli.logs import configure_logging, report
from mlx_parallm.cli.engines import progress_shown
configure_logging("info", "json")
library.warning("two\\nlines")
warnings.warn("careful")
for share in (0.0, 0.1, 1.0):
    progress_shown()("Loading", share)
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
report("failed")
raise ValueError("the end")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines[0]["message"] == "two\nlines"
    assert (lines[1]["logger"], "careful" in lines[1]["message"]) == ("py.warnings", True)
    assert [line["progress"] for line in lines if "progress" in line] == [0.0, 0.1, 1.0]
    assert "ZeroDivisionError" in lines[-3]["exception"]
    assert lines[-2]["message"] == "failed"
    assert "ValueError: the end" in lines[-1]["exception"]
