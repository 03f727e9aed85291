"""Linear layers that multiply rows of one token each faster than MLX's own.

A linear layer of MLX runs four operations on ``[T, 1, K]``: it transposes the weight, flattens the
rows, multiplies, and restores the shape. Three of them only make views, but each costs the host a
third of a small kernel. Layers that read the same input, such as those of queries, keys and values,
are multiplied at once: the first layer called computes the outputs of all. See
``docs/decisions/013-linear-layers-of-rows.md``. In training mode layers are MLX's own: the kernel
has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.types.shape_buckets import padded_rows
from mlx_parallm.worker.device.kernel_trial import KernelTrials, ShapeTrials
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.layers.packed import PackedProducts, keeps_dtype
from mlx_parallm.worker.layers.packing import WORD_BITS, Packing, packing_of
from mlx_parallm.worker.layers.product_variants import Around
from mlx_parallm.worker.layers.row_kernel import MAX_ROWS, RowKernel, why_not, why_unsupported
from mlx_parallm.worker.layers.wrapped_calls import replace_class

#: Names of sibling layers, which models call on one and the same input.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("wi_0", "wi_1"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
#: ``SELECTED_ROWS``: the name of the method by which a head says which rows it computes.
SELECTED_ROWS = "selected_rows"
#: ``CROSS_ATTENTION``: names of modules whose queries have another input than keys and values.
CROSS_ATTENTION = frozenset({"EncDecAttention", "encoder_attn"})


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a matrix that are a layer's output.

    Kernels get the matrix instead of a view, whose strides are unknown until it is computed.

    Attributes:
        matrix: the products of one input and several layers, ``[T, 1, N]``.
        first: the index of the output's first column.
    """

    matrix: mx.array
    first: int


@dataclass(frozen=True, slots=True)
class Part:
    """A layer's output ``[T, 1, width]``, and the columns that it is a view of."""

    output: mx.array
    columns: Columns


class RowProduct:
    """One product for all layers that read the same input.

    Attributes:
        layers: these layers.
        arrays: the layers' weights one after the other, ``[N, K]``; for packed weights their scales
            and biases too; none before ``settle`` or the first call.
        widths: the output widths of the layers, N in all.
        kernel: the kernel for up to ``MAX_ROWS`` rows; None to use MLX's operations alone.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        kernel: RowKernel | None = None,
        trial: ShapeTrials | None = None,
    ) -> None:
        """Prepare; no weight is read.

        Args:
            layers: that read the same input; packed ones as ``use_packed_layers`` makes them.
            kernel: ``settle`` decides if it is used; None to use MLX's operations alone.
            trial: the trials of the kernel.
        """
        self.kernel: RowKernel | None = None
        self.layers = layers
        self.arrays: list[mx.array] = []
        self.widths = [layer["weight"].shape[0] for layer in layers]
        self._candidate = kernel
        self._trial = trial
        self._packed: PackedProducts | None = layers[0].get("_packed")
        self._views: dict[int, mx.array] = {}
        self._input: mx.array | None = None
        self._outputs: list[Part | None] = []
        self._parts: list[list[mx.array]] | None = None

    def settle(self) -> None:
        """Merge the weights, and use the kernel if it is right for them; do it once."""
        self._merge()
        kernel, self._candidate = self._candidate, None
        trial, self._trial = self._trial, None
        if kernel is None or trial is None or self._packed is not None:
            return
        weight = self.arrays[0]
        shape = (*self.widths, weight.shape[1], weight.dtype)
        if trial.agree(shape, partial(why_not, kernel, weight, self.widths)):
            self.kernel = kernel

    def serves(self, x: mx.array) -> bool:
        """True if x is rows of one token each, in a bucketed number and the weights' dtype."""
        is_rows = x.ndim == 3 and x.shape[1] == 1 and padded_rows(x.shape[0]) == x.shape[0]
        layer = self.layers[0]
        if self._packed is not None:
            return is_rows and keeps_dtype(layer["scales"].dtype, x.dtype)
        return is_rows and x.dtype == layer["weight"].dtype

    def take(self, index: int, x: mx.array) -> mx.array:
        """Return one layer's output; those of the others are kept until these are called."""
        return self.take_part(index, x).output

    def take_part(self, index: int, x: mx.array) -> Part:
        """Return one layer's output as ``take`` does, with the columns that it is."""
        if x is not self._input or self._outputs[index] is None:
            self._input, self._outputs = x, list(self._compute(x))
        output = self._outputs[index]
        assert output is not None
        self._outputs[index] = None
        if not any(part is not None for part in self._outputs):
            self._input = None
        return output

    def around(self, x: mx.array, around: Around, others: Sequence[mx.array]) -> list[mx.array]:
        """Return the product of rows and packed weights, with what is computed around it.

        All layers' columns are in it. See ``PackedProducts.around``.
        """
        assert self._packed is not None, "weights are packed"
        return self._packed.around(x, self.merged(), around, others)

    def parts(self, x: mx.array) -> mx.array:
        """Return the product of rows and packed weights, or parts of it that are to be added.

        See ``PackedProducts.parts``.
        """
        assert self._packed is not None, "weights are packed"
        return self._packed.parts(x, self.merged())

    def merged(self) -> Sequence[mx.array]:
        """Return the layers' weights as they are now, see ``arrays``."""
        if not self._is_current():
            self._merge()
        return self.arrays

    @property
    def packed(self) -> PackedProducts | None:
        """Return how packed weights are multiplied; None for plain ones."""
        return self._packed

    def release(self) -> None:
        """Hold no weights until the next call."""
        self._parts, self._views, self.arrays = None, {}, []
        self._input, self._outputs = None, []

    def _compute(self, x: mx.array) -> list[Part]:
        if not self._is_current():
            self._merge()
        rows = x.shape[0]
        # For one row, MLX's own matrix-vector kernel is faster.
        if self.kernel is not None and 1 < rows <= MAX_ROWS:
            return list(map(own_part, self.kernel(x, self.arrays[0], self.widths)))
        whole = x @ self._view(rows) if self._packed is None else self._packed(x, self.arrays)
        if len(self.widths) == 1:
            return [own_part(whole)]
        ends = [sum(self.widths[: i + 1]) for i in range(len(self.widths) - 1)]
        outputs = mx.split(whole, ends, axis=-1)
        return [
            Part(output, Columns(whole, first))
            for output, first in zip(outputs, [0, *ends], strict=True)
        ]

    def _is_current(self) -> bool:
        """True if the layers still have the weights that ``_merge`` read."""
        return self._parts is not None and all(
            array is merged
            for layer, part in zip(self.layers, self._parts, strict=True)
            for array, merged in zip(_arrays(layer), part, strict=True)
        )

    def _view(self, rows: int) -> mx.array:
        """Return the transposed weight broadcast to ``[rows, K, N]``: then one operation does."""
        if rows not in self._views:
            (weight,) = self.arrays
            view = mx.broadcast_to(weight.T, (rows, *reversed(weight.shape)))
            # To evaluate it at once would be to wait for all steps in flight.
            mx.async_eval(view)
            self._views[rows] = view
        return self._views[rows]

    def _merge(self) -> None:
        """Concatenate the weights, and make the layers' own weights views of the result."""
        parts = [_arrays(layer) for layer in self.layers]
        self.widths = [part[0].shape[0] for part in parts]
        self.arrays = parts[0]
        if len(parts) > 1:
            self.arrays = [mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True)]
            for index, layer in enumerate(self.layers):
                first = sum(self.widths[:index])
                for name, array in zip(_names(layer), self.arrays, strict=True):
                    layer[name] = array[first : first + self.widths[index]]
            parts = [_arrays(layer) for layer in self.layers]
            mx.eval(self.arrays, parts)
        self._parts, self._views = parts, {}


class RowLinear(nn.Linear):
    """A layer without a bias; a ``RowProduct`` computes its rows."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return what ``nn.Linear`` returns."""
        product: RowProduct = self["_product"]
        if self.training or not product.serves(x):
            return super().__call__(x)
        return product.take(self["_index"], x)


class RowQuantizedLinear(nn.QuantizedLinear):
    """A layer with packed weights; a ``RowProduct`` computes its rows if there is one.

    Other inputs are multiplied by the way that is fastest for their number of rows.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """Return what ``nn.QuantizedLinear`` returns."""
        if self.training or not keeps_dtype(self["scales"].dtype, x.dtype):
            return super().__call__(x)
        product: RowProduct | None = self.get("_product")
        if product is not None and product.serves(x):
            return product.take(self["_index"], x)
        output = self["_packed"](x, _arrays(self))
        return output + self["bias"] if "bias" in self else output


class RowEmbedding(nn.Embedding):
    """An embedding that is the head too; a ``RowProduct`` computes the head's rows."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Return what ``nn.Embedding.as_linear`` returns."""
        product: RowProduct = self["_product"]
        if self.training or not product.serves(x):
            return super().as_linear(x)
        return product.take(0, x)


class RowQuantizedEmbedding(nn.QuantizedEmbedding):
    """An embedding with packed weights that is the head too; see ``RowQuantizedLinear``."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Return what ``nn.QuantizedEmbedding.as_linear`` returns."""
        if self.training or not keeps_dtype(self["scales"].dtype, x.dtype):
            return super().as_linear(x)
        product: RowProduct | None = self.get("_product")
        if product is not None and product.serves(x):
            return product.take(0, x)
        return self["_packed"](x, _arrays(self))


ROW_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RowLinear,
    nn.QuantizedLinear: RowQuantizedLinear,
    nn.Embedding: RowEmbedding,
    nn.QuantizedEmbedding: RowQuantizedEmbedding,
}


def head_rows(layer: nn.Module) -> mx.array | None:
    """Return the indices of the rows that a layer computes if it is a head that selects some.

    None: it computes all of them.
    """
    selected = getattr(type(layer), SELECTED_ROWS, None)
    return None if selected is None else selected(layer)


def picked_rows(x: mx.array, rows: mx.array) -> mx.array:
    """Return rows of ``[..., K]``, counted over all leading axes, as ``[len(rows), 1, K]``.

    They are in row-major order. An axis that is inserted behind the rows has another stride, with
    which MLX's product on CUDA reads the weight once for each row.
    """
    return x.reshape(-1, 1, x.shape[-1])[rows]


def has_own_calls(layer: nn.Module) -> bool:
    """True if nothing wraps the calls of a row layer, whose product is its output then."""
    return type(layer) in ROW_LAYERS.values()


def part_of(layer: nn.Module, call: Callable[[mx.array], mx.array], x: mx.array) -> Part:
    """Return a layer's output, and the columns that it is.

    ``call`` computes the output of a layer without a ``RowProduct``.
    """
    product: RowProduct | None = layer.get("_product")
    if product is not None and not layer.training and product.serves(x):
        return product.take_part(layer["_index"], x)
    return own_part(call(x))


def product_of(layers: Sequence[nn.Module]) -> RowProduct | None:
    """Return the product of these layers and no others; None if there is none.

    There is none either if calls of a layer are wrapped, for adapters, or in training mode.
    """
    product: RowProduct | None = layers[0].get("_product")
    if product is None or not all(map(has_own_calls, layers)):
        return None
    is_alike = [id(layer) for layer in layers] == [id(layer) for layer in product.layers]
    return product if is_alike and not any(layer.training for layer in layers) else None


def called_part(layer: nn.Module, x: mx.array) -> Part:
    """Return what calling a layer returns, and the columns that it is.

    A layer whose calls are wrapped, for adapters, is called: its product is not its output.
    """
    return part_of(layer, layer, x) if has_own_calls(layer) else own_part(layer(x))


def own_part(output: mx.array) -> Part:
    """Return a layer's output that no other layer shares."""
    return Part(output, Columns(output, 0))


def use_row_layers(
    model: nn.Module, kernel: RowKernel | None, trials: KernelTrials | None = None
) -> int:
    """Give a model row layers as ``row_products`` does, ready to run; return how many are new."""
    was = _num_row_layers(model)
    for product in row_products(model, kernel, trials):
        product.settle()
    return _num_row_layers(model) - was


def row_products(
    model: nn.Module, kernel: RowKernel | None, trials: KernelTrials | None = None
) -> list[RowProduct]:
    """Give a model's linear layers the classes of ``ROW_LAYERS``; return their products.

    Names and parameters stay, and no weight is read: each product has to be settled once the
    weights of its layers are.

    Args:
        model: mlx_lm's model.
        kernel: the kernel for few rows; None to use MLX's operations alone.
        trials: the trials of the model's kernels; None for new ones.
    """
    use_packed_layers(model)
    groups = list(_groups(model))
    trial = (trials or KernelTrials()).of("the linear kernel is")
    if kernel is not None:
        _begin(kernel, groups)
    products = [RowProduct(group, kernel, trial) for group in groups]
    for product in products:
        for index, layer in enumerate(product.layers):
            kind = ROW_LAYERS.get(type(layer), type(layer))
            replace_class(layer, kind, _product=product, _index=index)
    return products


def use_packed_layers(model: nn.Module) -> int:
    """Make a model's packed layers multiply by the way for their rows; return how many are new."""
    known: dict[tuple[Packing, int], PackedProducts] = {}
    layers = {id(layer): layer for layer in model.modules() if type(layer) in ROW_LAYERS}
    num_new = 0
    for layer in layers.values():
        packing = packing_of(layer)
        if packing is not None:
            depth = layer["weight"].shape[1] * WORD_BITS // packing.bits
            key = packing, depth
            known.setdefault(key, PackedProducts(packing, depth, backend_name()))
            replace_class(layer, ROW_LAYERS[type(layer)], _packed=known[key], _product=None)
            num_new += 1
    return num_new


def _num_row_layers(model: nn.Module) -> int:
    kinds = set(ROW_LAYERS.values())
    return len({id(module) for module in model.modules() if type(module) in kinds})


def _begin(kernel: RowKernel, groups: Sequence[Sequence[nn.Module]]) -> None:
    """Begin to compile the kernel for all groups that it takes, all at the same time."""
    for group in groups:
        weights = [layer["weight"] for layer in group]
        if packing_of(group[0]) is None and why_unsupported(weights, len(group)) is None:
            kernel.begin(weights[0].dtype, len(group))


def release_products(model: nn.Module) -> None:
    """Release the weights that products hold outside of a model's layers, until the next call."""
    for module in model.modules():
        product: RowProduct | None = module.get("_product")
        if product is not None:
            product.release()


def siblings_of(path: str) -> tuple[str, ...]:
    """Return the names of the layers that read the input of the layer with this module path."""
    parent, _, own = path.rpartition(".")
    return next((names for names in _siblings_in(parent) if own in names), (own,))


def _siblings_in(path: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of siblings that the module with this path may have."""
    return () if path.rpartition(".")[2] in CROSS_ATTENTION else SIBLINGS


def _groups(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the layers that a product takes: siblings together, and shared layers only once."""
    grouped: set[int] = set()
    for path, parent in model.named_modules():
        for names in _siblings_in(path):
            group = [parent[name] for name in names if name in parent]
            is_new = grouped.isdisjoint(map(id, group))
            if len(group) == len(names) and is_new and all(map(_fits, group)) and _alike(group):
                grouped.update(map(id, group))
                yield group
    for module in model.modules():
        if _fits(module) and id(module) not in grouped:
            grouped.add(id(module))
            yield [module]


def _fits(layer: Any) -> bool:
    is_new = type(layer) in ROW_LAYERS or ("_packed" in layer and layer["_product"] is None)
    return is_new and "bias" not in layer


def _alike(layers: Sequence[nn.Module]) -> bool:
    """True if the layers' weights can be concatenated."""
    kinds = {
        (
            *(type(layer), layer["weight"].shape[1:], packing_of(layer)),
            *(array.dtype for array in _arrays(layer)),
        )
        for layer in layers
    }
    return len(kinds) == 1


def _names(layer: nn.Module) -> tuple[str, ...]:
    packing = packing_of(layer)
    return ("weight",) if packing is None else packing.names


def _arrays(layer: nn.Module) -> list[mx.array]:
    return [layer[name] for name in _names(layer)]
