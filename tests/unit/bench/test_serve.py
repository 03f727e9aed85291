"""`mlx_parallm bench serve` from flags to exit status, against a scripted server in a thread."""

import argparse
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mlx_parallm.bench.serve import add_arguments, make_workload, run
from mlx_parallm.types.errors import ConfigError


def parse(*flags):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(list(flags))


def sample(engine, tokens):
    labels = f'engine="{engine}",model_name="tiny"'
    return f"vllm:generation_tokens_total{{{labels}}} {tokens}.0\n"


@contextlib.contextmanager
def serving(status=200, models=({"id": "tiny"},), num_engines=0):
    """Stream two words for every request; yield the server's address and the bodies.

    With several engines, the header of a request says which one counts its tokens.
    """
    bodies = []
    generated = [0] * num_engines

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/metrics":
                self.send_response(200)
                self.end_headers()
                self.wfile.write("".join(map(sample, range(num_engines), generated)).encode())
                return
            self.send_response(200 if models is not None else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"data": models}).encode())

        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if num_engines:
                generated[int(self.headers["X-data-parallel-rank"])] += 2
            self.send_response(status)
            self.end_headers()
            for text in ("a ", "b"):
                self._event({"choices": [{"index": 0, "text": text}]})
            details = {"image_tokens": 2} if "image_url" in str(bodies[-1]) else {}
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": details}
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, content):
            self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_run_prints_its_figures_and_writes_them_as_json(tmp_path, capsys):
    output = tmp_path / "run.json"
    with serving() as (url, bodies):
        flags = ["--base-url", url, "--num-requests", "6", "--num-warmups", "2"]
        assert run(parse(*flags, "--ramp-s", "0", "--output", str(output))) == 0
    assert "6 (0 failed)" in capsys.readouterr().out
    content = json.loads(output.read_text())
    assert content["summary"]["output_tokens"] == 12
    assert content["settings"]["prompt_lengths"] == "uniform:50,150"
    assert len(content["requests"]) == 6
    assert len(bodies) == 8
    assert {body["model"] for body in bodies} == {"tiny"}


def test_the_engine_of_a_header_has_all_tokens(tmp_path, capsys):
    output = tmp_path / "run.json"
    with serving(num_engines=2) as (url, _):
        flags = ["--base-url", url, "--num-requests", "6", "--ramp-s", "0", "--output", str(output)]
        assert run(parse(*flags, "--header", "X-data-parallel-rank=1")) == 0
    printed = capsys.readouterr().out
    assert "engine 0      0 output tokens (0%), 0 prompt tokens" in printed
    assert "engine 1      12 output tokens (100%)" in printed
    engines = json.loads(output.read_text())["engines"]
    assert [engine["output_tokens"] for engine in engines] == [0, 12]


def test_requests_have_the_images_of_the_flags(tmp_path, capsys):
    output = tmp_path / "run.json"
    flags = ["--num-requests", "4", "--num-warmups", "1", "--ramp-s", "0", "--endpoint", "chat"]
    flags += ["--images", "2", "--image-size", "40x30", "--distinct-images", "3"]
    with serving() as (url, bodies):
        assert run(parse("--base-url", url, *flags, "--output", str(output))) == 0
    contents = [body["messages"][0]["content"] for body in bodies]
    assert [[part["type"] for part in content] for content in contents] == [
        ["image_url", "image_url", "text"]
    ] * 5
    assert "12 (0 cached, 8 of images)" in capsys.readouterr().out
    content = json.loads(output.read_text())
    assert content["summary"]["image_tokens"] == 8
    assert content["settings"]["image_size"] == "40x30"


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (["--output-lengths", "2"], None),
        (["--output-lengths", "3"], "12 of 18 tokens, 6 of 6 answers ended early; the model ended"),
        (["--output-lengths", "3", "--ignore-eos"], "does not know the field ignore_eos"),
    ],
)
def test_outputs_far_shorter_than_asked_are_told(flags, note, capsys):
    with serving() as (url, _):
        run(parse("--base-url", url, "--num-requests", "6", "--ramp-s", "0", *flags))
    printed = capsys.readouterr().err
    assert (note in printed) if note else printed == ""


def test_an_open_loop_runs_from_its_flags():
    with serving() as (url, bodies):
        flags = ["--base-url", url, "--num-requests", "5", "--num-warmups", "0"]
        assert run(parse(*flags, "--rate", "500", "--seed-requests")) == 0
    assert sorted(body["seed"] for body in bodies) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("load", [("--ramp-s", "0", "--concurrency", "4"), ("--rate", "500")])
def test_processes_share_a_load_and_report_it_together(load, tmp_path, capsys):
    output = tmp_path / "run.json"
    flags = ["--num-requests", "9", "--num-warmups", "0", "--seed-requests", *load]
    with serving() as (url, bodies):
        assert (
            run(parse("--base-url", url, *flags, "--processes", "3", "--output", str(output))) == 0
        )
    assert "9 (0 failed)" in capsys.readouterr().out
    assert sorted(body["seed"] for body in bodies) == list(range(9))
    content = json.loads(output.read_text())
    assert content["summary"]["output_tokens"] == 18
    assert content["settings"]["processes"] == 3
    requests = content["requests"]
    assert [each["index"] for each in requests] == list(range(9))
    # The times of all processes are on one clock.
    assert all(0 <= each["start_s"] <= each["end_s"] for each in requests)
    assert max(each["end_s"] for each in requests) <= content["summary"]["duration_s"] + 1e-6


def test_failed_requests_make_the_exit_status_1_and_are_told(capsys):
    with serving(status=500) as (url, _):
        flags = ["--base-url", url, "--num-requests", "3", "--ramp-s", "0"]
        assert run(parse(*flags)) == 1
    assert "3 x status 500" in capsys.readouterr().err


def test_a_server_that_names_no_model_is_asked_without_one():
    with serving(models=None) as (url, bodies):
        assert run(parse("--base-url", url, "--num-requests", "2", "--ramp-s", "0")) == 0
    assert all("model" not in body for body in bodies)


def test_a_server_that_is_not_there_is_a_configuration_error():
    with serving() as (url, _):
        pass
    with pytest.raises(ConfigError, match="cannot measure"):
        run(parse("--base-url", url))


@pytest.mark.parametrize(
    "flags",
    [
        ("--base-url", "localhost"),
        ("--model", "m", "--endpoint", "chat", "--token-ids", "9"),
        ("--model", "m", "--images", "1"),
        ("--model", "m", "--processes", "5", "--concurrency", "4"),
    ],
)
def test_flags_that_make_no_sense_are_configuration_errors(flags):
    with pytest.raises(ConfigError):
        run(parse(*flags))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--concurrency", "0"), "--concurrency: must be at least 1, not '0'"),
        (("--num-requests", "x"), "--num-requests: must be a whole number, not 'x'"),
        (("--processes", "0"), "--processes: must be at least 1, not '0'"),
        (("--num-warmups", "-1"), "--num-warmups: must be at least 0, not '-1'"),
        (("--image-size", "640"), "--image-size: must be WIDTHxHEIGHT, each from 1 to 16384"),
        (("--rate", "0"), "--rate: must be above 0, not '0'"),
        (("--timeout-s", "nan"), "--timeout-s: must be a number, not 'nan'"),
        (("--header", "X-data-parallel-rank"), "must be NAME=VALUE, not 'X-data-parallel-rank'"),
        (("--header", "A=1\r\nB: 2"), "must be NAME=VALUE"),
        (("--temperature", "-1"), "--temperature: must be at least 0, not '-1'"),
        (("--prompt-lengths", "uniform:9,2"), "--prompt-lengths: must be N, uniform:LOW,HIGH"),
        (("--output", "/does/not/exist.json"), "--output: /does/not/exist.json: No such file"),
    ],
)
def test_a_wrong_value_is_named_before_anything_is_sent(flags, complaint, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*flags)
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_plot_is_written(tmp_path):
    image = tmp_path / "run.png"
    with serving() as (url, _):
        flags = ["--base-url", url, "--num-requests", "3", "--ramp-s", "0"]
        assert run(parse(*flags, "--plot", str(image))) == 0
    assert image.read_bytes().startswith(b"\x89PNG")


def test_warm_up_prompts_are_not_those_measured():
    args = parse("--seed", "5")
    assert make_workload(args, None, is_warmup=True).seed != make_workload(args, None).seed
