# Pyright needs 20 s for transformers' own module, which imports thousands of others by need, and
# finds Any for most names. Submodules have their own types.
from typing import Any

def __getattr__(name: str) -> Any: ...
