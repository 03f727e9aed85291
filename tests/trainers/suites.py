"""Which trainers there are, and how each one's tests are run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TRAINERS = ROOT / ".venv-trainers" / "bin" / "python"
ART = ROOT / ".venv-art" / "bin" / "python"
PINS = "requirements/trainers.txt"
ART_PINS = "requirements/trainers-art.txt"
#: The folder of a distribution named vllm, for TRL; see its README.
STUBS = HERE / "stubs"


@dataclass(frozen=True)
class Suite:
    """The tests of one file.

    Attributes:
        file: in this folder.
        client: its name in the document.
        packages: the client's, whose versions are reported.
        limits: what cannot be without CUDA, with the error it gives; Markdown.
        pins: the file under the repository that pins the packages.
        python: what runs it.
        path: folders for PYTHONPATH.
    """

    file: str
    client: str
    packages: tuple[str, ...]
    limits: str
    pins: str = PINS
    python: Path = TRAINERS
    path: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the file of its results."""
        return self.file.removesuffix(".py")

    def command(self, results: Path) -> list[str]:
        """Return the command that runs it and writes its results as JUnit's XML."""
        settings = ["-q", "-c", str(HERE / "pytest.ini"), "--rootdir", str(ROOT)]
        return [
            *(str(self.python), "-m", "pytest", *settings),
            *(f"--junit-xml={results}", str(HERE / self.file)),
        ]


SUITES = (
    Suite(
        "test_trl_vllm_client.py",
        "TRL",
        ("trl",),
        '`init_communicator` sends weights by NCCL, whose engine "needs a CUDA device". The server '
        'answers "has no weight-transfer engine".',
        path=(STUBS,),
    ),
    Suite(
        "test_trl_async_grpo.py",
        "TRL",
        ("trl", "peft"),
        "the trainer's own forward (`get_peak_flops_per_device`) and flash-attn 3 from the hub. "
        "Both have stand-ins; client, worker and synchronisation are as published.",
        path=(STUBS,),
    ),
    Suite(
        "test_verifiers.py",
        "verifiers",
        ("verifiers", "renderers"),
        "nothing: this client needs no CUDA",
    ),
    Suite(
        "test_art.py",
        "ART",
        ("openpipe-art",),
        "`art.unsloth.service` and `art.local`, whose training needs Unsloth on CUDA. The "
        "service's own code makes its calls, with stand-ins for these imports.",
        ART_PINS,
        ART,
        (ROOT,),
    ),
    Suite(
        "test_atropos.py",
        "atropos",
        ("atroposlib",),
        "nothing: these clients need no CUDA",
    ),
    Suite(
        "test_replays.py",
        "prime-rl, slime, SkyRL",
        (),
        "prime-rl is not on PyPI, and slime there is another project. The sampling client of SkyRL "
        "0.4.0 imports its training backends, which need the CUDA build of torch.",
    ),
)
