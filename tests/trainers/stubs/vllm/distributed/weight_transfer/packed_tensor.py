"""NCCL is not here."""


def packed_nccl_broadcast_producer(**_: object) -> None:
    """Raise: weights cannot travel by NCCL without CUDA."""
    raise RuntimeError("NCCL needs CUDA.")
