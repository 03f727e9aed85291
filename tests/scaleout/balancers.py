"""nginx, HAProxy and SGLang's router before servers, with the files of examples/scale-out."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from mlx_parallm.peers.child_process import COMMAND, ChildProcess
from tests.server_process import ROOT

EXAMPLES = ROOT / "examples" / "scale-out"
#: The interpreter that has the router; see the Makefile.
ROUTER_PYTHON = ROOT / ".venv-scale-out" / "bin" / "python"
#: The addresses in the examples' files.
ADDRESSES = ("10.0.0.11:8000", "10.0.0.12:8000")
PORT, METRICS_PORT = "8080", "29000"
KEY = "scale-out-key"
HEADERS = {"authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Balancer:
    """A program that divides requests among servers.

    Attributes:
        name: of the program.
        file: its example.
        program: what is looked for.
        session_header: the header whose value chooses a server.
    """

    name: str
    file: str
    program: str
    session_header: str = "x-session-id"

    @property
    def is_installed(self) -> bool:
        """True if the program can be run."""
        return shutil.which(self.program) is not None

    def command(self, config: Path) -> list[str]:
        """Return what runs it in the foreground with a file."""
        match self.name:
            case "nginx":
                options = f"daemon off; pid {config.parent}/nginx.pid; error_log stderr;"
                return [self.program, "-c", str(config), "-g", options]
            case "haproxy":
                return [self.program, "-db", "-f", str(config)]
            case _:
                return ["sh", str(config)]

    def config(self, port: int, servers: Sequence[str], folder: Path) -> str:
        """Return the text of the example for these addresses, ``host:port``."""
        text = (EXAMPLES / self.file).read_text()
        for address, server in zip(ADDRESSES, servers, strict=True):
            assert address in text, f"{self.file} has no {address}"
            text = text.replace(address, server)
        text = text.replace("python3", self.program)
        # Users other than root cannot write to the folders of the package.
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        text = text.replace("http {", f"http {{ access_log off; {paths}")
        ports = {PORT: port, METRICS_PORT: free_port()}
        return re.sub(rf"\b({PORT}|{METRICS_PORT})\b", lambda match: str(ports[match[0]]), text)


NGINX = Balancer("nginx", "nginx.conf", "nginx")
HAPROXY = Balancer("haproxy", "haproxy.cfg", "haproxy")
ROUTER = Balancer("router", "sglang-router.sh", str(ROUTER_PYTHON), "x-smg-routing-key")
BALANCERS = (NGINX, HAPROXY, ROUTER)


@contextmanager
def balancing(balancer: Balancer, servers: Sequence[str]) -> Iterator[str]:
    """Yield the URL of a balancer before servers at ``host:port`` with ``KEY``, once it answers."""
    with tempfile.TemporaryDirectory() as name, open(f"{name}/log", "w+") as log:
        folder, port = Path(name), free_port()
        # The workers of nginx, which are another user's, enter it.
        folder.chmod(0o755)
        config = folder / balancer.file
        config.write_text(balancer.config(port, servers, folder))
        command = [COMMAND, *balancer.command(config)]
        environment = os.environ | {"API_KEY": KEY}
        process = ChildProcess(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process, Path(log.name))
            yield url
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    """Return a port of the loopback interface that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_until_ready(url: str, process: ChildProcess, log: Path) -> None:
    """Return once a server is reached through a balancer; fail with its log if it ends first."""
    while True:
        try:
            if httpx2.get(f"{url}/v1/models", headers=HEADERS).status_code == 200:
                return
        except httpx2.TransportError:
            pass
        assert process.poll() is None, log.read_text()
