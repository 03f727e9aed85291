"""Requirements, docs and code that must agree with one another."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from mlx_parallm.cli.settings import SETTINGS
from scripts import write_configuration_docs, write_python_docs
from scripts.check_pins import TARGETS, pins, read_requirements

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
PLATFORMS = ("darwin", "linux-cpu", "linux-cuda12", "linux-cuda13")


# CONTROL: what no text holds; tools take a file with a NUL for binary.
CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
TEXTS = {
    *(".py", ".pyi", ".md", ".json", ".ipynb", ".js", ".css", ".html", ".svg", ".txt", ".toml"),
    *(".yaml", ".yml", ".ini", ".sh", ".jinja", ".cu", ".h", ".metal", ".pem", ".plist"),
    ".service",
}
# NOT_OURS: folders that git ignores.
NOT_OURS = {"node_modules", "build", "dist", "wheels"}


def is_ours(folder: Path) -> bool:
    return not folder.name.startswith(".") and folder.name not in NOT_OURS


def test_no_text_file_has_control_characters() -> None:
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and is_ours(folder)]
    files = [
        file
        for folder in (*folders, ROOT)
        for file in (folder.glob("*") if folder == ROOT else folder.rglob("*"))
        if file.suffix in TEXTS and all(map(is_ours, file.relative_to(ROOT).parents))
    ]
    assert len(files) > 1000
    assert [file for file in files if CONTROL.search(file.read_bytes())] == []


def test_tests_are_marked_slow_where_their_collection_looks_for_it() -> None:
    """Look for markers elsewhere: files that these mark are not collected by ``make test-slow``."""
    marking = {
        file
        for file in (ROOT / "tests").rglob("*.py")
        if not file.name.startswith("test_") and "mark.slow" in file.read_text(encoding="utf-8")
    }
    assert {file.name for file in marking} == {"conftest.py"}
    # A file of tests is collected for the one beside it.
    assert not [test for file in marking for test in file.parent.glob("*/**/test_*.py")]


def test_every_test_of_several_engines_is_in_the_target_that_runs_them() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (suites,) = re.findall(r"^ENGINE_SUITES := (.*)$", makefile, re.MULTILINE)
    (recipe,) = re.findall(r"^test-engines:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    named = {f"test_{suite}.py" for suite in suites.split()}
    named |= set(re.findall(r"tests/e2e/(test_\w+\.py)", recipe))
    assert named == {name for name in named if (ROOT / "tests/e2e" / name).exists()}
    marked = {
        file.name
        for file in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.engines" in file.read_text(encoding="utf-8")
    }
    assert marked - {Path(__file__).name} <= named


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(platform: str) -> dict[str, str]:
    """Return the name and version of every pin of a platform, without markers."""
    requirements = read_requirements(REQUIREMENTS / f"{platform}.txt")
    return {
        canonical(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement in requirements
    }


@pytest.mark.parametrize("file", sorted(REQUIREMENTS.glob("*.txt")), ids=lambda file: file.name)
def test_requirements_are_exact_versions_and_nothing_else(file: Path) -> None:
    for requirement in read_requirements(file):
        assert re.fullmatch(r"==[0-9][0-9A-Za-z.]*", str(requirement.specifier)), requirement
        assert requirement.url is None
    assert "://" not in file.read_text()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_dependency_is_pinned_within_its_range(platform: str) -> None:
    pins = pinned(platform)
    for text in project()["dependencies"]:
        dependency = Requirement(text)
        assert dependency.specifier.contains(pins[canonical(dependency.name)]), text


@pytest.mark.parametrize("platform", PLATFORMS)
def test_development_pins_agree_with_the_platforms(platform: str) -> None:
    pins, development = pinned(platform), pinned("dev")
    both = pins.keys() & development.keys()
    assert {name: pins[name] for name in both} == {name: development[name] for name in both}


def test_mlx_and_its_builds_have_one_version() -> None:
    names = ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13")
    versions = {pinned(platform).get(name) for platform in PLATFORMS for name in names} - {None}
    assert len(versions) == 1


def test_extras_add_nothing_on_a_mac() -> None:
    extras = project()["optional-dependencies"]
    for extra in ("cpu", "cuda12", "cuda13"):
        for text in extras[extra]:
            marker = Requirement(text).marker
            assert marker is not None
            assert marker.evaluate({"platform_system": "Linux"})
            assert not marker.evaluate({"platform_system": "Darwin"})


def test_pins_are_judged_for_the_target_not_for_this_machine() -> None:
    mac = next(target for target in TARGETS if target.sys_platform == "darwin")
    assert pins(mac, "3.11") != pins(mac, "3.12")
    for target in TARGETS:
        for python in ("3.11", "3.14"):
            names = [pin.partition("==")[0] for pin in pins(target, python)]
            assert len(names) == len(set(names))


@pytest.mark.parametrize("page", [write_configuration_docs, write_python_docs])
def test_the_generated_page_is_up_to_date(page: Any) -> None:
    assert page.TARGET.read_text(encoding="utf-8") == page.render(), "run: make docs"


def test_nothing_of_mlx_lm_generates_or_serves_here() -> None:
    forbidden = {"mlx_lm.generate", "mlx_lm.server"}
    for file in (ROOT / "mlx_parallm").rglob("*.py"):
        text = file.read_text()
        if "mlx_lm" not in text or not re.search("generate|server", text):
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Import(names=names):
                    imported = {name.name for name in names}
                case ast.ImportFrom(module=str(module), names=names):
                    imported = {module, *(f"{module}.{name.name}" for name in names)}
                case _:
                    continue
            assert not imported & forbidden, file


@pytest.mark.parametrize("target", ["serve", "test", "lint", "bench"])
def test_the_makefile_has_the_promised_targets(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_image_listens_on_every_interface_as_a_plain_user() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "MLX_PARALLM_HOST=0.0.0.0" in text
    assert re.search(r"^USER 1000$", text, re.MULTILINE)
    assert re.search(r"^ARG ACCEL=cpu$", text, re.MULTILINE)


def test_what_the_image_copies_is_not_ignored() -> None:
    kept = {
        line.removeprefix("!").rstrip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set()
    for line in re.findall(r"^COPY (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        copied |= {source.rstrip("/") for source in line.split()[:-1]}
    assert copied <= kept


def compose(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


def test_containers_set_what_there_is() -> None:
    image = (ROOT / "Dockerfile").read_text()
    (service,) = compose("compose.yaml")["services"].values()
    used = {*re.findall(r"(MLX_PARALLM_\w+)=", image), *service["environment"]}
    assert used >= {"MLX_PARALLM_DATA_DIR", "MLX_PARALLM_API_KEY_FILE"}
    assert used <= {setting.variable for setting in SETTINGS}


def test_compose_keeps_the_volumes_of_the_image() -> None:
    (volumes,) = re.findall(r"^VOLUME (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    file = compose("compose.yaml")
    (service,) = file["services"].values()
    mounts = [volume.split(":") for volume in service["volumes"]]
    mounted = {place: name for name, place in mounts}
    assert sorted(mounted) == sorted(volumes.split())
    assert sorted(mounted.values()) == sorted(file["volumes"])
    (secret,) = service["secrets"]
    assert service["environment"]["MLX_PARALLM_API_KEY_FILE"] == f"/run/secrets/{secret}"
    assert secret in file["secrets"]


def test_compose_for_gpus_changes_the_same_service() -> None:
    (name,) = compose("compose.cuda.yaml")["services"]
    assert name in compose("compose.yaml")["services"]
    (build,) = [service["build"] for service in compose("compose.cuda.yaml")["services"].values()]
    assert (REQUIREMENTS / f"linux-{build['args']['ACCEL']}.txt").exists()
