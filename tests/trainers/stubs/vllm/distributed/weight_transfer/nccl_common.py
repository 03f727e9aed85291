"""NCCL is not here."""


def trainer_init(init_info: dict) -> None:
    """Raise: weights cannot travel by NCCL without CUDA."""
    raise RuntimeError("NCCL needs CUDA.")
