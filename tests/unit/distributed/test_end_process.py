"""A rank that must end does so, whatever becomes of its log."""

from __future__ import annotations

import subprocess
import sys

from mlx_parallm.distributed.leading import LOST

# CODE ends a process whose log blocks, as a full pipe does.
CODE = """
import logging, threading
from mlx_parallm.distributed.leading import end_process

class Blocking(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)
        threading.Event().wait()

logging.getLogger().addHandler(Blocking())
end_process("rank 1 is gone")
"""


def test_a_log_that_nobody_reads_keeps_no_rank_alive() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    assert ended.returncode == LOST
    assert ended.stdout == "this rank ends: rank 1 is gone\n"
