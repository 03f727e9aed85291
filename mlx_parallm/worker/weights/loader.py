"""Loads a model folder through mlx_lm and puts it into the dtype it will compute in."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from mlx_parallm.config import ModelConfig
from mlx_parallm.kernels.language import CudaLanguage
from mlx_parallm.models.checkpoints.known_differences import known_differences
from mlx_parallm.models.checkpoints.overrides import folder_with
from mlx_parallm.models.checkpoints.rope_fields import readable_config
from mlx_parallm.models.checkpoints.weight_files import mlx_lm_folder
from mlx_parallm.models.decoder_classes import decoder_classes
from mlx_parallm.models.indexed_weights import reading_index, tied_as_saved
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.models.value_heads import value_layer, with_value_head
from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.models.vision.registry import family_of, why_no_family
from mlx_parallm.numerics.finite import evaluate_weights, scale_modes
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.device.kernel_trial import KernelTrials
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.device.ranks import Ranks, agreed, all_succeed
from mlx_parallm.worker.layers.attention_heads import use_head_kernels
from mlx_parallm.worker.layers.block_kernels import BlockKernels, use_block_kernels
from mlx_parallm.worker.layers.delta_net import NetKernels, use_net_kernels
from mlx_parallm.worker.layers.expert_kernel import ExpertKernel, use_expert_layers
from mlx_parallm.worker.layers.fused_blocks import use_fused_blocks
from mlx_parallm.worker.layers.packed import begin_packed_kernels, use_packed_kernels
from mlx_parallm.worker.layers.packed_kernel import PackedKernels
from mlx_parallm.worker.layers.row_kernel import RowKernel
from mlx_parallm.worker.layers.row_layers import RowProduct, row_products, use_packed_layers
from mlx_parallm.worker.layers.state_kernels import ConvolutionKernel
from mlx_parallm.worker.layers.state_layers import use_state_layers
from mlx_parallm.worker.sharding.check import check_shardable
from mlx_parallm.worker.sharding.sharding import Sharding, cut_model

logger = logging.getLogger(__name__)

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
#: ``PART_BYTES``: weights evaluated by one stage of a load; a larger tensor is a stage by itself.
PART_BYTES = 4 << 20
# What a quantised layer has beside its packed weights.
PACKED = ("scales", "biases")


@dataclass(frozen=True, slots=True)
class CastRule:
    """Decides if ``dtype="auto"`` becomes float32.

    Attributes:
        is_cast: the decision of another worker or an earlier load; None to decide.
        free_bytes: memory that is free; None if unknown.
        ranks: the processes that decide alike, of which each has its part; None for this one alone.
    """

    is_cast: bool | None = None
    free_bytes: int | None = None
    ranks: Ranks | None = None

    def applies(self, needed: int) -> bool:
        """True if weights are cast that would take ``needed`` bytes."""
        if self.is_cast is not None:
            return self.is_cast
        size = 1 if self.ranks is None else self.ranks.size
        return agreed(self.ranks, self._fits(needed // size))

    def _fits(self, needed: int) -> bool:
        if backend_name() != "cpu":
            return False
        if self.free_bytes is not None and needed > self.free_bytes // 2:
            logger.warning(
                "float32 weights would take %.1f GB, so the weights keep their dtype", needed / 1e9
            )
            return False
        return True


#: ``DECIDE``: the rule of a machine whose memory is not looked at.
DECIDE = CastRule()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run on this thread.

    Attributes:
        model: an mlx_lm model; its parameters are evaluated.
        config: the checkpoint's config.json.
        path: the folder it came from.
        dtype: what it computes in.
        weight_bytes: size of the parameters.
        source: how it was loaded.
        is_cast: True if ``dtype="auto"`` became float32, see ``load_model``.
        sharding: how it was cut, if it is one rank's part of a model; None if it is whole.
    """

    model: Any
    config: dict[str, Any]
    path: Path
    dtype: str
    weight_bytes: int
    source: ModelConfig = field(default_factory=ModelConfig)
    is_cast: bool = False
    sharding: Sharding | None = None


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose parameters are not evaluated yet; ``finish`` returns it once they are.

    Attributes:
        loaded: the model and its facts.
        ranks: the processes that load it together; None if there is this one alone.
        products: of its row layers, which are settled when their weights are evaluated.
        kernels: each gives layers of the model, whose weights are evaluated, a kernel.
    """

    loaded: LoadedModel
    ranks: Ranks | None = None
    products: Sequence[RowProduct] = ()
    kernels: Sequence[Callable[[], int]] = ()

    def parts(self) -> Iterator[Callable[[], None]]:
        """Yield what evaluates the parameters, a part each; raise ModelLoadError as ``load_model``.

        Processes that load a model together evaluate it at once.
        """
        model = self.loaded.model
        arrays, modes = parameters_of(model), scale_modes(model)
        parts = weight_parts(arrays) if self.ranks is None else iter([arrays])
        for part, complete in _with_products(model, self.products, arrays, parts):
            yield partial(self._evaluate, part, modes, complete)
        for use_kernel in self.kernels:
            yield partial(self._use_kernel, use_kernel)

    def _evaluate(
        self, part: dict[str, mx.array], modes: Mapping[str, str], complete: Sequence[RowProduct]
    ) -> None:
        path = self.loaded.path
        with load_failures(path):
            with all_succeed(self.ranks):
                evaluate_weights(part, path, modes)
            part.clear()
            for product in complete:
                product.settle()

    def _use_kernel(self, use_kernel: Callable[[], int]) -> None:
        with load_failures(self.loaded.path):
            use_kernel()

    def finish(self) -> LoadedModel:
        """Return the model, of which all parts were evaluated."""
        if self.loaded.sharding is not None:
            # Last, when layers have the classes that kernels give them.
            self.loaded.sharding.add_up()
        return self.loaded


def load_model(
    config: ModelConfig,
    path: Path,
    *,
    cast: CastRule = DECIDE,
    trials: KernelTrials | None = None,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Load a folder in mlx_lm's or Hugging Face's form; see ``open_model``."""
    opened = open_model(config, path, cast=cast, trials=trials, ranks=ranks)
    for evaluate in opened.parts():
        evaluate()
    return opened.finish()


def open_model(
    config: ModelConfig,
    path: Path,
    *,
    cast: CastRule = DECIDE,
    trials: KernelTrials | None = None,
    ranks: Ranks | None = None,
) -> OpenedModel:
    """Begin to load a folder in mlx_lm's or Hugging Face's form: no parameter is read.

    On the CPU, ``dtype="auto"`` casts and dequantises to float32 when the result fits in half of
    the free memory: products of bfloat16 take 18 to 40 times as long there, and those of packed
    weights are unpacked for every product.

    Args:
        config: the model's settings.
        path: the folder.
        cast: decides that.
        trials: of the kernels of its layers; None for new ones.
        ranks: the processes that compute it together, of which each reads its part; all must call
            alike. None to read the whole model.

    Raises:
        ConfigError: an unknown dtype, or a model that these ranks cannot compute together.
        ModelLoadError: the architecture is unknown, or weights are missing; when the parts are
            evaluated, they are NaN or infinite.
    """
    check_dtype(config.dtype)
    with load_failures(path):
        with all_succeed(ranks):
            model, model_config = _read(config, path, ranks)
        _warn_of_tower(model, model_config, path, is_cut=ranks is not None)
        warn_of_differences(model_config, path)
        model, is_cast = _cast_generator(model, config.dtype, cast)
        with all_succeed(ranks):
            sharding = None if ranks is None else cut_model(model, ranks)
        run_uncompiled(model)
        model.eval()
        loaded = loaded_model(model, model_config, path, config, is_cast=is_cast)
        loaded = replace(loaded, sharding=sharding)
        if backend_name() == "cpu":
            use_packed_layers(model)
        if backend_name() != "cuda":
            return OpenedModel(loaded, ranks)
        products = row_products(model, RowKernel(CudaLanguage()), trials)
        return OpenedModel(loaded, ranks, products, _cuda_kernels(loaded, trials))


def _cuda_kernels(loaded: LoadedModel, trials: KernelTrials | None) -> list[Callable[[], int]]:
    """Return what gives a model's layers, whose weights are evaluated, the kernels of CUDA."""
    model, dtype = loaded.model, DTYPES[loaded.dtype]
    language = CudaLanguage()
    packed = PackedKernels(language)
    begin_packed_kernels(model, packed, dtype)
    return [
        partial(use_packed_kernels, model, packed, dtype, trials),
        partial(use_expert_layers, model, ExpertKernel(language), trials),
        partial(use_state_layers, model, ConvolutionKernel(language), trials),
        partial(use_net_kernels, model, NetKernels(language), trials),
        partial(use_head_kernels, model, language, trials),
        partial(use_block_kernels, model, BlockKernels(language), trials),
        partial(use_fused_blocks, model, trials),
    ]


def _with_products(
    model: nn.Module,
    products: Sequence[RowProduct],
    arrays: Mapping[str, mx.array],
    parts: Iterable[dict[str, mx.array]],
) -> Iterator[tuple[dict[str, mx.array], list[RowProduct]]]:
    """Yield parts of a model's arrays, each with the products of whose weights it has the last."""
    layers = {id(layer): product for product in products for layer in product.layers}
    modules = model.named_modules() if layers else []
    owners = {path: layers[id(module)] for path, module in modules if id(module) in layers}
    unread = Counter(owners.get(name.rpartition(".")[0]) for name in arrays)
    for part in parts:
        complete: list[RowProduct] = []
        for name in part:
            product = owners.get(name.rpartition(".")[0])
            unread[product] -= 1
            if product is not None and not unread[product]:
                complete.append(product)
        yield part, complete


def check_dtype(dtype: str) -> None:
    """Raise ConfigError if nothing can compute in it."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}.")


def loaded_model(
    model: Any,
    model_config: dict[str, Any],
    path: Path,
    config: ModelConfig,
    *,
    is_cast: bool,
) -> LoadedModel:
    """Return a model with its facts."""
    return LoadedModel(
        model, model_config, path, _dtype_of(model), _bytes_of(model), config, is_cast
    )


def load_parameters(
    config: ModelConfig, path: Path, *, is_cast: bool, ranks: Ranks | None = None
) -> dict[str, mx.array]:
    """Return the whole parameters of a folder as ``load_model`` had them, by name, not evaluated.

    Raises:
        ModelLoadError: the architecture is unknown, or weights are missing.
    """
    with load_failures(path), folder_with(path, config.hf_overrides) as folder:
        model, _ = _read(config, folder, ranks)
        model, _ = _cast_generator(model, config.dtype, CastRule(is_cast=is_cast))
    return parameters_of(model)


def weight_parts(arrays: Mapping[str, mx.array]) -> Iterator[dict[str, mx.array]]:
    """Yield arrays by name, in parts of at most ``PART_BYTES`` or a single larger array."""
    part: dict[str, mx.array] = {}
    size = 0
    for name, array in arrays.items():
        if part and size + array.nbytes > PART_BYTES:
            yield part
            part, size = {}, 0
        part[name] = array
        size += array.nbytes
    if part:
        yield part


def parameters_of(model: Any) -> dict[str, mx.array]:
    """Return the parameters of a model by name."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))


def _read(config: ModelConfig, path: Path, ranks: Ranks | None) -> tuple[Any, dict[str, Any]]:
    """Return a whole model and its config.json; its arrays are lazy."""
    with mlx_lm_folder(path) as folder:
        model, model_config = mlx_lm_utils.load_model(
            folder,
            lazy=True,
            get_model_classes=partial(
                _readable_classes if ranks is None else _text_classes,
                folder=path,
                max_model_len=config.max_model_len,
            ),
            trust_remote_code=config.trust_remote_code,
        )
    if ranks is not None:
        check_shardable(model, model_config, path, ranks.size)
    # Before they are multiplied into weights, where the CPU has these: so the name is the file's.
    scales = {f"{name.rpartition('.')[0]}.{leaf}" for name in scale_modes(model) for leaf in PACKED}
    own = parameters_of(model)
    evaluate_weights({name: own[name] for name in scales & own.keys()}, path, scale_modes(model))
    return model, model_config


def _readable_classes(
    config: dict[str, Any], folder: Path, max_model_len: int | None
) -> tuple[Any, type]:
    """Return the classes of a config, which gets the fields that these would miss."""
    read = readable_config(config, max_model_len=max_model_len)
    config |= tied_as_saved(read, config, folder)
    model, args = decoder_classes(config)
    return reading_index(with_value_head(model, folder), folder), args


def _text_classes(
    config: dict[str, Any], folder: Path, max_model_len: int | None
) -> tuple[Any, type]:
    """Return the classes of a config without its tower, which ranks cannot compute together."""
    kept = {name: value for name, value in config.items() if name != "vision_config"}
    model, args = _readable_classes(kept, folder, max_model_len)
    config |= kept
    return model, args


def warn_of_differences(config: Mapping[str, Any], path: Path) -> None:
    """Log what a model computes otherwise than transformers; ``config`` is a readable one."""
    for difference in known_differences(config):
        logger.warning(
            "%s: mlx_lm differs from transformers in %s (docs/models.md)", path, difference
        )


def _warn_of_tower(model: Any, config: dict[str, Any], path: Path, *, is_cut: bool) -> None:
    """Log why a model takes no images although its checkpoint has a tower."""
    why = why_no_family(config)
    if why is None and family_of(config) is not None:
        if is_cut:
            why = f"the image tower of {config['model_type']} is not served over ranks"
        elif getattr(model, TOWER, None) is None:
            why = "its files have no weights of a tower"
    if why is not None:
        logger.warning("%s is read as a text model: %s", path, why)


def _cast_generator(model: Any, dtype: str, rule: CastRule) -> tuple[Any, bool]:
    """Return what ``cast_model`` returns, with a value head in float32."""
    head = value_layer(model)
    exact = {} if head is None else {key: head[key].astype(mx.float32) for key in head}
    model, is_cast = cast_model(model, dtype, rule)
    if head is not None:
        value_layer(model).update(exact)
    return model, is_cast


def cast_model(model: Any, dtype: str, rule: CastRule) -> tuple[Any, bool]:
    """Return the model in the dtype it computes in, and whether ``rule`` made that float32.

    Raises:
        ConfigError: the model overflows in this dtype.
    """
    is_narrow = getattr(model, "overflows_in_float16", False)
    if dtype != "auto":
        if is_narrow and dtype == "float16":
            raise ConfigError(
                f"dtype float16 is too narrow for {model.model_type}, whose hidden states exceed "
                "65504; bfloat16 and float32 are not."
            )
        model.set_dtype(DTYPES[dtype])
        return model, False
    if not rule.applies(4 * mlx_lm_utils.get_total_parameters(model)):
        if is_narrow:
            model.set_dtype(mx.bfloat16, lambda own: own == mx.float16)
        return model, False
    if any(isinstance(module, nn.QuantizedLinear) for module in model.modules()):
        model = mlx_lm_utils.dequantize_model(model)
    model.set_dtype(mx.float32)
    return model, True


def _dtype_of(model: Any) -> str:
    """Return the dtype of most parameters that are not packed integers."""
    sizes: dict[str, int] = {}
    for array in _arrays(model):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + array.size
    return max(sizes, key=lambda name: sizes[name], default="float32")


def _bytes_of(model: Any) -> int:
    return sum(array.nbytes for array in _arrays(model))


def _arrays(model: Any) -> list[mx.array]:
    return list(parameters_of(model).values())


# Turns off compilation inside mlx_lm's layers, which would fix the weights of the first step.
#
# On Metal the linear attention of ``kimi_k3`` compiles its decode step when it first runs. Weights
# and the adapters of the rows are constants of that trace, so later ones would have no effect.


def run_uncompiled(model: nn.Module) -> int:
    """Make such layers call the function that they would compile; return how many there are."""
    layers = [
        module for module in model.modules() if callable(getattr(module, "_decode_core", None))
    ]
    for layer in layers:
        layer._step = layer._decode_core
    return len(layers)
