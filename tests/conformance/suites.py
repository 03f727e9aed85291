"""Which clients there are, and how each one's tests are run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"
INSTRUCTOR = ROOT / ".venv-instructor" / "bin" / "python"
LANGCHAIN = ROOT / ".venv-langchain" / "bin" / "python"
INFERENCE = ROOT / ".venv-inference" / "bin" / "python"


@dataclass(frozen=True)
class Suite:
    """The tests of one file.

    Attributes:
        file: under this folder.
        client: its name in the document.
        packages: the client's packages, whose versions are reported.
        pins: the file under the repository that pins them.
        python: what runs it; None for Node.
    """

    file: str
    client: str
    packages: tuple[str, ...]
    pins: str = "requirements/conformance.txt"
    python: Path | None = CLIENTS

    @property
    def name(self) -> str:
        """Return the name of the file of its results."""
        return self.file.replace("/", "-").removesuffix(".py").removesuffix(".test.js")

    @property
    def folder(self) -> Path:
        """Where it is run."""
        return ROOT if self.python else HERE / "node"

    def command(self, results: Path) -> list[str]:
        """Return the command that runs it and writes its results as JUnit's XML."""
        if self.python is None:
            to = ["spec", "stdout", "junit", str(results)]
            reporters = [
                f"--test-reporter={to[0]}",
                f"--test-reporter-destination={to[1]}",
                f"--test-reporter={to[2]}",
                f"--test-reporter-destination={to[3]}",
            ]
            return ["node", "--test", *reporters, Path(self.file).name]
        settings = ["-q", "-c", str(HERE / "pytest.ini"), "--rootdir", str(ROOT)]
        return [
            *(str(self.python), "-m", "pytest", *settings),
            *(f"--junit-xml={results}", str(HERE / self.file)),
        ]


NODE = "tests/conformance/node/package.json"
SUITES = (
    Suite("test_openai_sdk.py", "OpenAI's client for Python", ("openai",)),
    Suite("test_openai_responses.py", "OpenAI's client for Python", ("openai",)),
    Suite("test_anthropic_sdk.py", "Anthropic's client for Python", ("anthropic",)),
    Suite("test_langchain.py", "langchain", ("langchain-openai", "langchain-tests")),
    Suite("test_openai_agents.py", "OpenAI's agents", ("openai-agents",)),
    Suite("test_pydantic_ai.py", "pydantic-ai", ("pydantic-ai-slim",)),
    Suite("test_litellm.py", "litellm", ("litellm",)),
    Suite("test_litellm_rerank.py", "litellm", ("litellm",)),
    Suite("test_embeddings.py", "langchain and litellm", ("langchain-openai", "litellm")),
    Suite(
        "test_images.py",
        "OpenAI's and Anthropic's clients for Python, langchain and litellm",
        ("openai", "anthropic", "langchain-openai", "litellm"),
    ),
    Suite(
        "test_instructor.py",
        "instructor",
        ("instructor", "openai"),
        "requirements/conformance-instructor.txt",
        INSTRUCTOR,
    ),
    Suite(
        "test_sources.py",
        "Hugging Face's and OpenAI's clients for Python, langchain and litellm",
        ("huggingface-hub", "openai", "langchain-openai", "litellm"),
    ),
    Suite(
        "test_langchain_sources.py",
        "langchain's package for Hugging Face",
        ("langchain-huggingface", "huggingface-hub"),
        "requirements/conformance-langchain.txt",
        LANGCHAIN,
    ),
    Suite(
        "test_open_inference.py",
        "Triton's and KServe's clients",
        ("tritonclient", "kserve"),
        "requirements/conformance-inference.txt",
        INFERENCE,
    ),
    Suite(
        "test_policies.py",
        "requests with gymnasium and json-numpy",
        ("requests", "gymnasium", "json-numpy"),
        "requirements/conformance-inference.txt",
        INFERENCE,
    ),
    Suite("node/openai.test.js", "OpenAI's client for Node", ("openai",), NODE, None),
    Suite(
        "node/ai_sdk.test.js",
        "Vercel's AI SDK",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"),
        NODE,
        None,
    ),
    Suite(
        "test_schema.py",
        "schemathesis",
        ("schemathesis",),
        "requirements/dev.txt",
        Path(sys.executable),
    ),
)
