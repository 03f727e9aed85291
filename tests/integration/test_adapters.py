"""Rows with different adapters in one step, against models with those adapters alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.shape_buckets import padded_rows
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.group_cache import CacheViews
from mlx_parallm.worker.generation.load.path_choice import choose_path
from mlx_parallm.worker.generation.paged_cache import KVPools
from mlx_parallm.worker.generation.paths.sequential import SequentialPath
from mlx_parallm.worker.generation.step_rows import token_array
from mlx_parallm.worker.layers.row_layers import Columns, use_row_layers
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers
from mlx_parallm.worker.lora.change_kernels import ChangeKernels
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.stack import LinearStack
from mlx_parallm.worker.ops import at_once
from tests.builders.random_models import random_model
from tests.compiled_attention import CompiledAttention
from tests.host_tensors import all_host
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import CudaShim, MetalShim

BLOCK = 8
LENGTH, CHUNK = 21, 9
ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
EXPERTS = [f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down")]
TABLES = ["model.embed_tokens", "lm_head"]
Adapters = dict[int, tuple[list[str], int, float, str]]
#: ``ADAPTERS``: keys, rank, scale and kind, by slot.
ADAPTERS: Adapters = {
    1: ([*ATTENTION, "mlp.gate_proj"], 4, 4.0, "lora"),
    2: (["mlp.down_proj", "self_attn.k_proj"], 16, 2.0, "dora"),
    3: (["mlp.up_proj", *TABLES], 8, 3.0, "lora"),
    4: ([*ATTENTION, *MLP], 64, 0.5, "lora"),
    5: ([*ATTENTION, *MLP], 5, 1.0, "dora"),
    6: (["model.embed_tokens"], 32, 2.0, "lora"),
    7: (["self_attn.q_proj", "self_attn.v_proj"], 12, 6.0, "lora"),
    8: ([*TABLES, "self_attn.o_proj"], 6, 1.5, "dora"),
}
OF_EXPERTS: Adapters = {
    1: (EXPERTS, 4, 4.0, "lora"),
    2: (["mlp.switch_mlp.down_proj", *ATTENTION], 16, 1.0, "lora"),
    3: (["self_attn.q_proj"], 8, 3.0, "dora"),
    4: (["mlp.switch_mlp.up_proj"], 3, 5.0, "lora"),
}
#: ``SLOTS`` of the sequences of a step.
ROWS = (1, 0, 2, 3, 1, 4, 5, 6, 0, 7, 8, 4)
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


def train(
    model: Any, slot: int, adapters: Adapters = ADAPTERS
) -> tuple[dict[str, Any], dict[str, HostTensor]]:
    """Add an adapter of mlx_lm to the model; return its config and its tensors as saved."""
    keys, rank, scale, kind = adapters[slot]
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), parameters, use_dora=kind == "dora")
    mx.random.seed(slot)
    changed = {}
    leaves: Any = tree_flatten(model.parameters())
    for name, value in leaves:
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("lora_a", "lora_b"):
            changed[name] = mx.random.normal(value.shape) * 0.1
        elif leaf == "m":
            changed[name] = value * mx.random.uniform(0.5, 1.5, value.shape)
    model.update(tree_unflatten(list(changed.items())))
    return {"fine_tune_type": kind, "lora_parameters": parameters}, all_host(changed)


def fuse(model: Any) -> Any:
    """Fuse adapted layers like ``mlx_lm fuse --dequantize``."""
    fused = [
        (name, module.fuse(dequantize=True))
        for name, module in model.named_modules()
        if hasattr(module, "fuse")
    ]
    model.update_modules(tree_unflatten(fused))
    return model


class Served:
    """A model with adapters in slots, and for each row the model that it must equal."""

    def __init__(
        self,
        shape: str,
        adapters: Adapters,
        *,
        bits: int | None = None,
        backend: ReferenceAttention | None = None,
        sequential: bool = False,
        has_row_layers: bool = False,
    ) -> None:
        self._new = lambda: random_model(shape, dtype=mx.float32, bits=bits)
        self.rows = [slot for slot in ROWS if slot in adapters or slot == 0]
        self.backend = backend or ReferenceAttention(BLOCK)
        base = self._new()
        self.model, self.vocab_size = base.model, base.vocab_size
        if has_row_layers:
            use_row_layers(self.model, None)
        layouts = probe_layout(self.model)
        width = -(-LENGTH // BLOCK)
        num_blocks = max(64, len(self.rows) * width)
        self.path: Any = at_once(choose_path)(
            self.model,
            layouts,
            self.backend,
            vocab_size=base.vocab_size,
            num_blocks=num_blocks,
            block_size=BLOCK,
            dtype="float32",
        ).path
        if sequential:
            self.path = as_sequential(self.model, layouts, self.backend, num_blocks)
        self.layers = AdaptedLayers(self.model, mx.float32, self.path.adapters)
        self.alone, self.fused = {0: self._new().model}, {0: self._new().model}
        for slot in adapters:
            self.alone[slot], self.fused[slot] = self._new().model, self._new().model
            config, tensors = train(self.alone[slot], slot, adapters)
            train(self.fused[slot], slot, adapters)
            fuse(self.fused[slot])
            self.layers.put(slot, read_adapter(config, tensors, param="adapter"), param="adapter")
        source = mx.random.key(1)
        shape_of_texts = (len(self.rows), LENGTH)
        drawn = mx.random.randint(0, self.vocab_size, shape_of_texts, key=source)
        self.texts = cast("list[list[int]]", drawn.tolist())

    def step(self, start: int, end: int, rows: list[int] | None = None) -> mx.array:
        """Return the logits after tokens ``[start, end)`` of each text with its adapter."""
        slots = self.rows if rows is None else rows
        sequences = [
            sequence(i, self.texts[i][start:end], start, slot) for i, slot in enumerate(slots)
        ]
        last = [(i + 1) * (end - start) - 1 for i in range(len(slots))]
        actual = self.path.logits(sequences, token_array(sequences), last)
        mx.eval(actual, self.path.arrays())
        return actual

    def check(self, actual: mx.array, end: int) -> None:
        """Compare each row with its adapter alone, and with the weights that mlx_lm fused."""
        for i, slot in enumerate(self.rows):
            for target in (self.alone[slot], self.fused[slot]):
                wanted = target(mx.array([self.texts[i][:end]]))[0, -1]
                assert mx.allclose(actual[i], wanted, **TOLERANCE), (slot, end)


@pytest.mark.parametrize(
    ("shape", "bits", "wanted"),
    [
        ("tiny", None, "packed"),
        ("tiny", 8, "packed"),
        ("tiny tied", None, "packed"),
        ("tiny MoE", None, "packed"),
        ("tiny hybrid", None, "split"),
        ("tiny", None, "sequential"),
    ],
)
def test_rows_of_different_adapters_equal_each_alone(
    shape: str, bits: int | None, wanted: str
) -> None:
    adapters = OF_EXPERTS if shape == "tiny MoE" else ADAPTERS
    if shape == "tiny tied":
        adapters = {slot: (untied(adapter[0]), *adapter[1:]) for slot, adapter in ADAPTERS.items()}
    if bits:
        # mlx_lm trains no DoRA of a quantised embedding.
        adapters = {slot: adapter for slot, adapter in ADAPTERS.items() if slot != 8}
    served = Served(shape, adapters, bits=bits, sequential=wanted == "sequential")
    assert served.path.name == wanted
    for start, end in [(0, CHUNK), (CHUNK, LENGTH - 2), (LENGTH - 2, LENGTH - 1)]:
        served.check(served.step(start, end), end)


class CountedKernels(ChangeKernels):
    """Kernels on the CPU that record the number of layers of each call."""

    def __init__(self, language: KernelLanguage) -> None:
        super().__init__(language)
        self.layers: list[int] = []
        self.widths: list[list[int]] = []

    def __call__(
        self,
        x: mx.array,
        ys: Sequence[mx.array],
        stacks: Sequence[LinearStack],
        slots: mx.array,
        columns: Sequence[Columns] | None = None,
    ) -> list[mx.array]:
        self.layers.append(len(ys))
        self.widths.append([each.matrix.shape[-1] for each in columns or ()])
        return super().__call__(x, ys, stacks, slots, columns)


@pytest.mark.parametrize(("language", "bits"), [(CudaShim, None), (MetalShim, 8)])
def test_kernels_change_layers_of_one_input_at_once(
    language: Callable[[], KernelLanguage], bits: int | None
) -> None:
    require_compiler()
    served = Served("tiny", {slot: ADAPTERS[slot] for slot in (1, 2, 3, 5)}, bits=bits)
    served.path.adapters.kernels = kernels = CountedKernels(language())
    for start, end in [(0, 2), (2, 3)]:
        served.check(served.step(start, end), end)
    # The groups are: queries, keys and values; attention's output; gate and up; down; the head.
    num_layers = len(served.model.layers)
    assert kernels.layers[-4 * num_layers - 1 :] == [3, 1, 2, 1] * num_layers + [1]


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize(
    ("shape", "bits"), [("tiny", None), ("tiny", 8), ("tiny tied", None), ("tiny hybrid", None)]
)
def test_rows_of_a_head_have_their_own_adapters_where_steps_are_padded(
    shape: str, bits: int | None, has_kernels: bool
) -> None:
    """Check steps as an NVIDIA GPU has them, with as many tokens as the head has rows."""
    # mlx_lm trains no DoRA of a quantised embedding.
    other = 1 if bits else 8
    adapters = {slot: ADAPTERS[slot] for slot in (1, 3, 5, 6, other)}
    if shape == "tiny tied":
        adapters = {slot: (untied(adapter[0]), *adapter[1:]) for slot, adapter in adapters.items()}
    backend = CompiledAttention(BLOCK)
    served = Served(shape, adapters, bits=bits, backend=backend, has_row_layers=True)
    kernels = CountedKernels(CudaShim())
    if has_kernels:
        require_compiler()
        served.path.adapters.kernels = kernels
    head = 6 if shape == "tiny tied" else 3
    slots = [head, 0, other, 5, head]
    # The tokens of five rows are padded to 8, and their five logits too; or to 16 and to 4.
    for lengths in [(2, 2, 2, 1, 1), (4, 4, 4, 1), (2, 1), (1, 1, 1, 1, 1)]:
        own = slots[: len(lengths)]
        sequences = [
            sequence(i, served.texts[i][:length], 0, slot)
            for i, (slot, length) in enumerate(zip(own, lengths, strict=True))
        ]
        wanted = mx.concatenate(
            [
                served.alone[slot](mx.array([served.texts[i][:length]]))[0]
                for i, (slot, length) in enumerate(zip(own, lengths, strict=True))
            ]
        )
        ends = [sum(lengths[: i + 1]) - 1 for i in range(len(lengths))]
        # Those of all tokens too, as log-probabilities of prompts need them, and of some, as
        # proposals do.
        for rows in (ends, list(range(sum(lengths))), sorted({0, *ends})):
            with served.path._selector.noting() as noted:
                actual = served.path.logits(sequences, token_array(sequences), rows)
            # The split path pads none.
            num_rows = len(rows) if shape == "tiny hybrid" else padded_rows(len(rows))
            assert [len(each) for each in noted] == [num_rows]
            assert mx.allclose(actual, wanted[mx.array(rows)], **TOLERANCE), (lengths, rows)
    if has_kernels and shape != "tiny hybrid":
        # Queries, keys and values of a layer are columns of one product, and so are gate and up.
        assert kernels.widths[:4] == [[256] * 3, [64], [256] * 2, [64]]


def untied(keys: list[str]) -> list[str]:
    return [key for key in keys if key != "lm_head"]


def test_a_dropped_adapter_is_gone_and_others_stay() -> None:
    served = Served("tiny", ADAPTERS)
    served.step(0, LENGTH - 1)
    size = served.layers.num_bytes
    served.layers.drop(1)
    actual = served.step(LENGTH - 1, LENGTH)
    for i, slot in enumerate(served.rows):
        wanted = served.alone[slot](mx.array([served.texts[i]]))[0, -1]
        assert mx.allclose(actual[i], wanted, **TOLERANCE) == (slot != 1)
    assert served.layers.num_bytes == size
    for slot in ADAPTERS:
        served.layers.drop(slot)
    assert served.layers.num_bytes == 0
    served.rows = [0] * len(served.rows)
    served.step(0, LENGTH - 1)
    served.check(served.step(LENGTH - 1, LENGTH), LENGTH)


@pytest.mark.parametrize(
    "shape",
    ["tiny", "tiny tied", "tiny MoE", pytest.param("tiny hybrid", marks=pytest.mark.slow)],
)
def test_compiled_steps_with_adapters(shape: str) -> None:
    adapters = OF_EXPERTS if shape == "tiny MoE" else ADAPTERS
    if shape == "tiny tied":
        adapters = {slot: (untied(adapter[0]), *adapter[1:]) for slot, adapter in ADAPTERS.items()}
    backend = CompiledAttention(BLOCK)
    served = Served(shape, adapters, backend=backend)
    assert served.path.is_compiled
    served.step(0, LENGTH - 4)
    compiled = backend.num_decodes
    for end in range(LENGTH - 3, LENGTH):
        served.check(served.step(end - 1, end), end)
    assert backend.num_decodes == compiled + 3


def traces(model: Any) -> list[int]:
    """Return a list that grows whenever the model's Python code runs."""
    calls: list[int] = []
    norm = model.model.norm
    original = type(norm)

    def call(self: Any, x: mx.array) -> mx.array:
        calls.append(x.shape[0])
        return original.__call__(self, x)

    norm.__class__ = type("Counted", (original,), {"__call__": call})
    return calls


def test_steps_are_traced_anew_only_where_they_must_be() -> None:
    served = Served("tiny", {slot: ADAPTERS[slot] for slot in (1, 7)}, backend=CompiledAttention(8))
    calls = traces(served.model)
    mixed, base, others = [1, 0, 7, 0], [0, 0, 0, 0], [7, 7, 0, 1]
    served.step(0, 9, base)
    served.step(9, 10, base)
    served.step(9, 10, mixed)
    del calls[:]
    for rows in (mixed, others, mixed, base):
        served.step(9, 10, rows)
    # A slot gets another adapter of the same modules.
    config, tensors = train(random_model("tiny", dtype=mx.float32).model, 7, {7: ADAPTERS[7]})
    served.layers.put(7, read_adapter(config, tensors, param="adapter"), param="adapter")
    for rows in (mixed, base):
        served.step(9, 10, rows)
    assert calls == []
    # An adapter of other modules needs more slots and a higher rank.
    other = random_model("tiny", dtype=mx.float32).model
    config, tensors = train(other, 4)
    served.layers.put(4, read_adapter(config, tensors, param="adapter"), param="adapter")
    served.step(9, 10, base)
    assert calls == []
    served.step(9, 10, [4, 0, 7, 0])
    assert calls == [4]
    # The earlier modules are back; their traces hold except for the shapes of the stacks.
    served.layers.drop(4)
    served.step(9, 10, mixed)
    served.step(9, 10, others)
    assert calls == [4, 4]


def test_weights_that_are_replaced_are_heeded() -> None:
    served = Served("tiny", {slot: ADAPTERS[slot] for slot in (1, 5)}, backend=CompiledAttention(8))
    served.step(0, LENGTH - 1)
    served.step(LENGTH - 1, LENGTH)
    factors = {"model.layers.0.self_attn.q_proj": 1.5, "model.layers.1.mlp.down_proj": 0.5}
    change(served.model, factors)
    served.path.forget_weights()
    served.layers.refresh()
    for slot in (0, 1, 5):
        fresh = random_model("tiny", dtype=mx.float32).model
        change(fresh, factors)
        if slot:
            before = random_model("tiny", dtype=mx.float32).model
            train(before, slot)
            train(fresh, slot)
            fresh.update(tree_unflatten(adapter_parameters(before)))
        served.alone[slot] = served.fused[slot] = fresh
    served.step(0, LENGTH - 1)
    served.check(served.step(LENGTH - 1, LENGTH), LENGTH)


def change(model: Any, factors: dict[str, float]) -> None:
    modules = dict(model.named_modules())
    for path, factor in factors.items():
        modules[path].weight = modules[path].weight * factor


def adapter_parameters(model: Any) -> list[tuple[str, mx.array]]:
    leaves: Any = tree_flatten(model.parameters())
    return [
        (name, value)
        for name, value in leaves
        if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b", "m")
    ]


def as_sequential(model: Any, layouts: Any, backend: Any, num_blocks: int) -> Any:
    pools = KVPools(backend, [layout.shape for layout in layouts], num_blocks)
    return SequentialPath(model, CacheViews(layouts, pools, backend), pools, backend, BLOCK)


def sequence(number: int, token_ids: list[int], start: int, slot: int) -> ScheduledSequence:
    width = -(-LENGTH // BLOCK)
    return ScheduledSequence(
        seq_id=number,
        slot=number,
        start=start,
        token_ids=tuple(token_ids),
        block_table=tuple(range(number * width, (number + 1) * width)),
        adapter_slot=slot,
    )


def test_an_adapter_that_failed_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("tiny", {slot: ADAPTERS[slot] for slot in (1, 7)})
    config, tensors = train(random_model("tiny", dtype=mx.float32).model, 4)
    adapter = read_adapter(config, tensors, param="adapter")
    put, calls = LinearStack.put, []

    def fails(self: Any, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 6:
            raise RuntimeError("out of memory")
        put(self, *args)

    monkeypatch.setattr(LinearStack, "put", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        served.layers.put(7, adapter, param="adapter")
    monkeypatch.undo()
    config, tensors = train(random_model("tiny", dtype=mx.float32).model, 7)
    served.layers.put(7, read_adapter(config, tensors, param="adapter"), param="adapter")
    served.check(served.step(0, LENGTH), LENGTH)


def test_an_adapter_is_put_in_parts_beside_steps_of_others() -> None:
    served = Served("tiny", {slot: ADAPTERS[slot] for slot in (1, 7)})
    config, tensors = train(random_model("tiny", dtype=mx.float32).model, 7)
    adapter = read_adapter(config, tensors, param="adapter")
    rows = [0 if slot == 7 else slot for slot in served.rows]
    before = served.step(0, LENGTH, rows)
    served.layers.drop(7)
    served.layers.begin(7, adapter, param="adapter")
    parts = 1
    while served.layers.put_modules(7, 1):
        parts += 1
        assert mx.allclose(served.step(0, LENGTH, rows), before, **TOLERANCE)
    assert parts == len(adapter.modules)
    served.check(served.step(0, LENGTH), LENGTH)


def test_an_adapter_that_does_not_fit_changes_nothing() -> None:
    model = random_model("tiny", dtype=mx.float32).model
    layers = AdaptedLayers(model, mx.float32, AdapterContext())
    config, tensors = train(random_model("tiny", dtype=mx.float32).model, 1)
    renamed = {name.replace("q_proj", "z_proj"): tensor for name, tensor in tensors.items()}
    with pytest.raises(InvalidRequestError, match="z_proj"):
        layers.put(1, read_adapter(config, renamed, param="adapter"), param="adapter")
    cut = {
        name: HostTensor(tensor.array[:-1]) if name.endswith("q_proj.lora_a") else tensor
        for name, tensor in tensors.items()
    }
    with pytest.raises(InvalidRequestError, match="does not fit"):
        layers.put(1, read_adapter(config, cut, param="adapter"), param="adapter")
    assert layers.num_bytes == 0
