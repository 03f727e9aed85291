"""Packages that carry what others wrote, pinned by version and digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An archive of source code on the package index. It is unpacked, never built.

    Attributes:
        name: of the package.
        version: of the package.
        sha256: digest of the archive, ``NAME-VERSION.tar.gz``.
        members: patterns (``PurePath.match``) of the files to unpack, below the archive's folder.
    """

    name: str
    version: str
    sha256: str
    members: tuple[str, ...]

    @property
    def archive(self) -> str:
        """Return the file name of the archive."""
        return f"{self.name.replace('-', '_')}-{self.version}.tar.gz"

    @property
    def key(self) -> str:
        """Return a name for the unpacked files, which changes with everything that they are."""
        digest = hashlib.sha256("\n".join((self.sha256, *self.members)).encode())
        return f"{self.name}-{self.version}-{digest.hexdigest()[:12]}"


LLAMA_CPP = Source(
    name="llama-cpp-python",
    version="0.3.36",
    sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    members=(
        "vendor/llama.cpp/models/templates/*.jinja",
        "vendor/llama.cpp/models/ggml-vocab-*",
    ),
)
VLLM = Source(
    name="vllm",
    version="0.33.0",
    sha256="f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    members=(
        "examples/*.jinja",
        "tests/parser/engine/*.py",
        "tests/reasoning/*.py",
        "tests/tool_parsers/*.py",
        "tests/tool_use/*.py",
    ),
)
