"""Linear projection, one or several side by side in one weight."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..errors import CheckpointError
from ..pages import own_pages
from ..quant.canonical import QuantizedWeight, Scheme
from ..quant.layout import TensorSpec
from .weight import Place, Weight

if TYPE_CHECKING:
    from ..loader import CheckpointTensor
    from ..quant.checkpoint import Quantization
    from ..quant.methods import Method

__all__ = ["Linear", "PlainLinear"]

#: On the CPU the product is ours and reads packed weights. On GPUs it is torch's, on weights as they come.
_PACKED = ops.backend() == "cpu"


class PlainLinear:
    """``x W^T + b`` with W [out_features, in_features] in a float dtype; no copy unless weights are packed."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features = weight.shape[0]
        self.weight = ops.pack_linear_weight(weight) if _PACKED else weight.t()

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if _PACKED:
            return ops.linear(x, self.weight, bias, out_features=self.out_features, out=out)
        if bias is None:
            return torch.mm(x, self.weight, out=out)
        return torch.addmm(bias, x, self.weight, out=out)


class Linear:
    """``x W^T + b``, where W stacks the projections `parts` (Hugging Face name -> output features).

    Several projections of the same input (query, key, value; gate, up) make one product: the input is read once.
    Where that cannot be, because only some of them are quantized or their groups differ, each run of projections that
    are alike makes a product, into its columns of the output.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], place: Place, *, bias: bool = False
    ) -> None:
        self.in_features = in_features
        self.out_features = sum(parts.values())
        self.parts = dict(parts)
        self.place = place
        self.bias: Tensor | None = None
        self._has_bias = bias
        ends = list(itertools.accumulate(self.parts.values()))
        self._columns = {
            name: slice(end - features, end)
            for (name, features), end in zip(self.parts.items(), ends, strict=True)
        }
        self._products: list[tuple[slice, PlainLinear | Method]] = []  # made when the weights are loaded
        self._runs: list[_PlainRun | _QuantizedRun] = []
        for scheme, names in itertools.groupby(self.parts, self._scheme):
            columns = {name: self._columns[name] for name in names}
            if scheme is None:
                self._runs.append(_PlainRun(columns, in_features, place, self._products.append))
            else:
                assert place.quantization is not None
                self._runs.append(
                    _QuantizedRun(
                        columns, in_features, place, self._products.append, scheme, place.quantization
                    )
                )

    def _scheme(self, name: str) -> Scheme | None:
        return self.place.quantization.scheme(name) if self.place.quantization else None

    def weights(self) -> dict[str, Weight]:
        places = {name: weight for run in self._runs for name, weight in run.weights(self).items()}
        for name, columns in self._columns.items():
            shape = (self.parts[name],)
            if self._has_bias:
                places[f"{name}.bias"] = Weight(shape, partial(self._load_bias, columns), owner=self)
            elif self.place.quantization is not None and self.place.quantization.has_more(f"{name}.bias"):
                places[f"{name}.bias"] = Weight(shape, _check_no_bias, early=True, num_bytes=0)
        return places

    def _load_bias(self, columns: slice, source: CheckpointTensor) -> None:
        if self.bias is None:
            self.bias = self.place.empty(self.out_features)
        source.load(out=self.bias[columns])

    def take(self, weight: Tensor) -> None:
        """Compute with `weight` [out_features, in_features], without a copy unless weights are packed."""
        self._products[:] = [(slice(0, self.out_features), PlainLinear(weight))]

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """``x`` [T, in_features] -> `out` [T, out_features]."""
        if len(self._products) == 1:
            return self._products[0][1].apply(x, self.bias, out)
        for columns, product in self._products:
            bias = None if self.bias is None else self.bias[columns]
            product.apply(x, bias, out[:, columns])
        return out


Products = Callable[[tuple[slice, "PlainLinear | Method"]], None]


class _PlainRun:
    """Adjacent projections that are not quantized: their rows are collected in plain layout until all are there."""

    def __init__(self, columns: Mapping[str, slice], in_features: int, place: Place, done: Products) -> None:
        self.columns = columns
        self.in_features = in_features
        self.place = place
        self.done = done
        self.all_columns = _joined(list(columns.values()))
        self._plain: Tensor | None = None
        self._missing = len(columns)

    def weights(self, owner: object) -> dict[str, Weight]:
        return {
            f"{name}.weight": Weight(
                (columns.stop - columns.start, self.in_features), partial(self._load, columns), owner=owner
            )
            for name, columns in self.columns.items()
        }

    def _load(self, columns: slice, source: CheckpointTensor) -> None:
        first = self.all_columns.start
        if self._plain is None:
            shape = (self.all_columns.stop - first, self.in_features)
            self._plain = own_pages(shape, self.place.dtype) if _PACKED else self.place.empty(*shape)
        source.load(out=self._plain[columns.start - first : columns.stop - first])
        self._missing -= 1
        if self._missing == 0:
            self.done((self.all_columns, PlainLinear(self._plain)))
            self._plain = None


class _QuantizedRun:
    """Adjacent projections that are quantized alike.

    What a checkpoint has of each becomes rows of one canonical weight as soon as it is there. The whole is packed
    when the last is there; if their inputs are mapped to groups in several ways, each of these is packed for itself.
    """

    def __init__(
        self,
        columns: Mapping[str, slice],
        in_features: int,
        place: Place,
        done: Products,
        scheme: Scheme,
        quantization: Quantization,
    ) -> None:
        self.columns = columns
        self.in_features = in_features
        self.place = place
        self.done = done
        self.scheme = scheme
        self.quantization = quantization
        self.all_columns = _joined(list(columns.values()))
        self._numbers: Tensor | None = None
        self._tensors: dict[str, dict[str, Tensor]] = {name: {} for name in columns}
        self._parsed: dict[str, QuantizedWeight] = {}
        self._specs = {name: self._specs_of(name) for name in columns}
        name, features = next(iter(columns)), self.all_columns.stop - self.all_columns.start
        self.method = quantization.method(name, scheme, in_features, features)

    def _specs_of(self, name: str) -> dict[str, TensorSpec]:
        parser, has = self.quantization.parser, self.quantization.has
        out_features = self.columns[name].stop - self.columns[name].start
        where = f"{self.quantization.config.source}: {name}"
        specs = parser.specs(self.scheme, out_features, self.in_features, where)
        for suffix in parser.optional(self.scheme):
            if not has(f"{name}.{suffix}"):
                del specs[suffix]
        return specs

    def weights(self, owner: object) -> dict[str, Weight]:
        asked_by = f"{self.scheme.describe()} with {self.in_features} inputs"
        groups = self.scheme.groups(self.in_features)
        places = {}
        for name, specs in self._specs.items():
            columns = self.columns[name]
            size = self.method.num_bytes(
                columns.stop - columns.start,
                self.in_features,
                groups,
                self.scheme.bits,
                self.place.dtype.itemsize,
            )
            for suffix, spec in specs.items():
                places[f"{name}.{suffix}"] = Weight(
                    spec.shape,
                    partial(self._load, name, suffix),
                    spec.dtypes,
                    f"{asked_by} and {columns.stop - columns.start} outputs",
                    spec.early,
                    owner,
                    0 if spec.early else size,
                    partial(self._fill, name, spec),
                )
        return places

    def _fill(self, name: str, spec: TensorSpec, out: Tensor, generator: torch.Generator) -> None:
        """What stands for a tensor that no file has."""
        scheme = self.scheme
        if spec.fill == "words" or (spec.fill == "zeros" and not scheme.symmetric):
            out.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
        elif spec.fill == "zeros":
            out.view(torch.uint8).fill_(0x88 if scheme.bits == 4 else 0x80)
            if scheme.zeros_less_one:
                out -= 0x11111111 if scheme.bits == 4 else 0x01010101
        elif spec.fill == "scales":
            out.fill_(0.02 / (1 << (scheme.bits - 2)))
        elif spec.fill == "shape":
            out.copy_(torch.tensor(self._shape(name)))
        else:
            out.copy_(torch.arange(out.shape[0]) // self._group_size())

    def _group_size(self) -> int:
        return self.in_features if self.scheme.group_size == -1 else self.scheme.group_size

    def _shape(self, name: str) -> list[int]:
        return [self.columns[name].stop - self.columns[name].start, self.in_features]

    def _load(self, name: str, suffix: str, source: CheckpointTensor) -> None:
        spec = self._specs[name][suffix]
        dtype = getattr(source, "dtype", spec.dtypes[0])
        if spec.early:
            tensor = own_pages(spec.shape, dtype)
            source.load(out=tensor)
            self._check(name, suffix, tensor, where=f"{getattr(source, 'path', '')}: {source.name!r}")
        else:
            on_cpu = self.place.device.type == "cpu"
            tensor = own_pages(spec.shape, dtype) if on_cpu else self.place.empty(*spec.shape, dtype=dtype)
            source.load(out=tensor)
        tensors = self._tensors[name]
        tensors[suffix] = tensor
        if len(tensors) == len(self._specs[name]):
            self._parse(name)
        if len(self._parsed) == len(self.columns):
            self._pack()

    def _check(self, name: str, suffix: str, tensor: Tensor, where: str) -> None:
        spec = self._specs[name][suffix]
        if spec.fill == "shape" and tensor.tolist() != self._shape(name):
            raise CheckpointError(
                f"{where}: says {tensor.tolist()}, the config asks for {self._shape(name)} (outputs, inputs)"
            )
        self.quantization.parser.check(self.scheme, suffix, tensor, spec, where)

    def _parse(self, name: str) -> None:
        first, columns, device = self.all_columns.start, self.columns[name], self.place.device
        if self._numbers is None:
            shape = (self.all_columns.stop - first, self.in_features)
            on_cpu = device.type == "cpu"
            self._numbers = (
                own_pages(shape, torch.uint8) if on_cpu else self.place.empty(*shape, dtype=torch.uint8)
            )
        tensors = {suffix: tensor.to(device) for suffix, tensor in self._tensors.pop(name).items()}
        rows = self._numbers[columns.start - first : columns.stop - first]
        self._parsed[name] = self.quantization.parser.parse(self.scheme, tensors, rows)

    def _pack(self) -> None:
        assert self._numbers is not None
        first = self.all_columns.start
        for names in _alike(self.columns, self._parsed):
            columns = _joined([self.columns[name] for name in names])
            rows = self._numbers[columns.start - first : columns.stop - first]
            weight = _join([self._parsed[name] for name in names], rows)
            scheme = dataclasses.replace(self.scheme, order=weight.order)
            method = self.quantization.method(names[0], scheme, self.in_features, weight.out_features)
            self.done((columns, method.pack(weight, self.place.dtype, self.place.device)))
        self._numbers = None
        self._parsed.clear()


def _alike(
    names: Sequence[str] | Mapping[str, slice], parsed: Mapping[str, QuantizedWeight]
) -> list[list[str]]:
    """Runs of adjacent projections that one product can compute: of one mapping to groups and one dtype of scales."""
    runs: list[list[str]] = []
    for name in names:
        if runs:
            a, b = parsed[runs[-1][0]], parsed[name]
            same_map = (
                a.g_idx is b.g_idx
                if a.g_idx is None or b.g_idx is None
                else bool(torch.equal(a.g_idx, b.g_idx))
            )
            if same_map and a.scales.dtype == b.scales.dtype:
                runs[-1].append(name)
                continue
        runs.append([name])
    return runs


def _join(parts: Sequence[QuantizedWeight], q: Tensor) -> QuantizedWeight:
    """One weight of several, whose numbers lie in `q` already."""
    first = parts[0]
    if len(parts) == 1:
        return first
    zeros = None
    if any(part.zeros is not None for part in parts):
        usual = first.scales.new_full((1, 1), 1 << (first.bits - 1), dtype=torch.uint8)
        zeros = _side_by_side(
            [usual.expand(part.scales.shape) if part.zeros is None else part.zeros for part in parts]
        )
    scales = _side_by_side([part.scales for part in parts])
    return QuantizedWeight(q, scales, zeros, first.g_idx, first.bits, first.group_size)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    if first.device.type != "cpu":
        return torch.cat(list(parts), dim=1)
    joined = own_pages((first.shape[0], sum(part.shape[1] for part in parts)), first.dtype)
    return torch.cat(list(parts), dim=1, out=joined)


def _joined(columns: Sequence[slice]) -> slice:
    return slice(columns[0].start, columns[-1].stop)


def _check_no_bias(source: CheckpointTensor) -> None:
    """Some tools write a bias of zeros for layers that have none."""
    bias = torch.empty(source.shape)
    source.load(out=bias)
    if bool(bias.any()):
        path = getattr(source, "path", Path())
        raise CheckpointError(
            f"{path}: {source.name!r} is a bias that the config does not ask for, and it is not zero; the config and "
            "the weights do not belong together"
        )
