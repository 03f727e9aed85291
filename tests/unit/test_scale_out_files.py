"""The files of examples/scale-out, as far as no server is needed."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from mlx_parallm.api.app import SLICES, STORING_SLICES, routes_of
from mlx_parallm.cli.configure import add_arguments, read_settings
from mlx_parallm.peers import child_process
from tests.server_process import ROOT

FOLDER = ROOT / "examples" / "scale-out"
#: PROCESS_END_S: what processes get to end after the requests; see docs/operations.md.
PROCESS_END_S = 30


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    text = (FOLDER / "kubernetes.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_the_service_lists_the_addresses_of_the_pods(objects: dict[str, Any]) -> None:
    service, deployment = objects["Service"]["spec"], objects["Deployment"]["spec"]
    assert service["clusterIP"] == "None"
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == labels == deployment["selector"]["matchLabels"]
    (container,) = deployment["template"]["spec"]["containers"]
    names = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= names


def test_probes_are_routes_and_ports_of_the_container(objects: dict[str, Any]) -> None:
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    paths = {route.path for route in routes_of(SLICES + STORING_SLICES)}
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness")}
    probes["readiness"] = container["readinessProbe"]["httpGet"]
    assert {probe["path"] for probe in probes.values()} <= paths
    assert {probe["port"] for probe in probes.values()} == {container["ports"][0]["name"]}
    assert (probes["liveness"]["path"], probes["readiness"]["path"]) == ("/health", "/ready")


def test_a_pod_has_time_to_drain(objects: dict[str, Any]) -> None:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    _, *flags = container["args"]
    _, server = read_settings(parser.parse_args(flags), {})
    end_s = server.shutdown_timeout_s + PROCESS_END_S
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + end_s
    # /health answers 503 while requests finish.
    liveness = container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > end_s


@pytest.mark.parametrize(
    "command",
    [["nginx", "-t", "-c", "nginx.conf"], ["haproxy", "-c", "-f", "haproxy.cfg"]],
    ids=lambda command: command[0],
)
def test_the_program_accepts_its_file(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    program, *options, file = command
    target = ["--", program, *options, str(FOLDER / file)]
    result = child_process.run(target, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout


def test_all_files_have_the_same_servers() -> None:
    for name in ("nginx.conf", "haproxy.cfg", "sglang-router.sh"):
        text = (FOLDER / name).read_text()
        assert set(re.findall(r"10\.0\.0\.\d+:\d+", text)) == {"10.0.0.11:8000", "10.0.0.12:8000"}
