"""Replaces a loaded module's machine code by eight bytes with the same hash.

``mx.fast.precompiled_cuda_kernel`` takes the machine code at every call. MLX finds the loaded
module by the kernel's name and ``std::hash`` of the code, so each of a step's hundreds of calls
would hash and copy all of it. Once a module is loaded, only the hash matters.
"""

from __future__ import annotations

import struct

# std::hash of strings in libstdc++ is MurmurHash64A with this seed.
_SEED = 0xC70F6907
_FACTOR = 0xC6A4A7935BD1E995
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_MASK = (1 << 64) - 1
_WORD = 8


def string_hash(data: bytes) -> int:
    """Return ``std::hash<std::string>`` of libstdc++ on 64-bit machines."""
    whole = len(data) // _WORD * _WORD
    state = _begin(len(data))
    for (word,) in struct.iter_unpack("<Q", data[:whole]):
        state = (state ^ _mix(word * _FACTOR & _MASK) * _FACTOR) * _FACTOR & _MASK
    if whole < len(data):
        state = (state ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    return _mix(_mix(state) * _FACTOR & _MASK)


def module_key(code: bytes) -> bytes:
    """Return eight bytes with the hash of ``code``, which works because each step is invertible."""
    state = _mix(_mix(string_hash(code)) * _INVERSE & _MASK)
    word = state * _INVERSE & _MASK ^ _begin(_WORD)
    return struct.pack("<Q", _mix(word * _INVERSE & _MASK) * _INVERSE & _MASK)


def _begin(length: int) -> int:
    return _SEED ^ length * _FACTOR & _MASK


def _mix(state: int) -> int:
    """Mix the bits of a state; the function is its own inverse."""
    return state ^ state >> 47
