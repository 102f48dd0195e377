"""The policy which method computes with a quantized layer, and the methods themselves."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from model_driver import DEVICE, ON_GPU
from pelton.quant.canonical import QuantizedWeight, Scheme
from pelton.quant.methods import (
    DEQUANTIZED_FROM,
    FORMAT_FEATURES,
    METHODS,
    Choice,
    MarlinLinear,
    Method,
    Refusal,
    Target,
    choose,
)
from quant_writers import Quantized, quantized

ALL = frozenset({"awq", "gptq", "marlin"})
CPU = Target("cpu", frozenset({"awq", "gptq"}), "float16")
SM90 = Target("cuda", ALL, "bfloat16", (9, 0))
ROCM = Target("rocm", frozenset({"awq", "gptq"}), "float16", (9, 0))
GPTQ = Scheme("gptq", 4, 128, True)
AWQ = Scheme("awq", 4, 128, False)
CT = Scheme("compressed-tensors", 4, 128, True)


def without(target: Target, *features: str) -> Target:
    return dataclasses.replace(target, features=target.features - set(features))


def changed(scheme: Scheme, **values: object) -> Scheme:
    return dataclasses.replace(scheme, **values)  # type: ignore[arg-type]


CHOICES = [
    # target, scheme, K, N, method
    (CPU, GPTQ, 576, 576, "cpu"),
    (CPU, AWQ, 576, 576, "cpu"),
    (CPU, CT, 576, 576, "cpu"),
    (CPU, changed(GPTQ, order="any"), 576, 576, "cpu"),
    (CPU, changed(GPTQ, bits=8), 576, 576, "cpu"),
    (without(CPU, "awq"), CT, 576, 576, "cpu"),
    (dataclasses.replace(CPU, dtype="float32"), CT, 576, 576, "cpu"),
    (dataclasses.replace(CPU, dtype="bfloat16"), CT, 576, 576, "cpu-int8"),
    (dataclasses.replace(CPU, dtype="bfloat16", int8=False), CT, 576, 576, "cpu"),
    (dataclasses.replace(CPU, int8=True), CT, 576, 576, "cpu-int8"),
    (SM90, GPTQ, 4096, 4096, "marlin"),
    (SM90, AWQ, 4096, 4096, "marlin"),
    (SM90, CT, 4096, 4096, "marlin"),
    (SM90, changed(GPTQ, order="equal", bits=8), 4096, 4096, "marlin"),
    (SM90, changed(GPTQ, group_size=-1), 4096, 4096, "marlin"),
    (without(SM90, "gptq"), GPTQ, 4096, 4096, "marlin"),
    (without(SM90, "awq"), AWQ, 4096, 4096, "marlin"),
    (SM90, changed(GPTQ, order="any"), 4096, 4096, "gptq"),
    (SM90, changed(GPTQ, group_size=256), 4096, 4096, "marlin"),
    (SM90, changed(GPTQ, group_size=600), 576, 576, "marlin"),  # that is one group
    (SM90, changed(GPTQ, group_size=16), 4096, 4096, "gptq"),
    (SM90, changed(AWQ, group_size=16), 4096, 4096, "awq"),
    (dataclasses.replace(SM90, capability=(7, 5)), AWQ, 4096, 4096, "awq"),
    (dataclasses.replace(SM90, capability=(7, 5)), GPTQ, 4096, 4096, "gptq"),
    (without(SM90, "marlin"), GPTQ, 4096, 4096, "gptq"),
    (without(SM90, "marlin"), AWQ, 4096, 4096, "awq"),
    (without(SM90, "marlin"), AWQ, 576, 4096, "gptq"),  # a short last group
    (without(SM90, "marlin"), AWQ, 4096, 4100, "gptq"),
    (without(SM90, "marlin"), CT, 4096, 4096, "gptq"),
    (without(SM90, "marlin", "gptq"), CT, 4096, 4096, "awq"),
    (ROCM, GPTQ, 576, 576, "gptq"),
    (ROCM, AWQ, 4096, 4096, "awq"),
]
REFUSALS = [
    # target, scheme, K, N, feature that helps, part of the reason
    (without(CPU, "awq"), AWQ, 576, 576, "awq", "need the feature awq"),
    (without(CPU, "gptq"), GPTQ, 576, 576, "gptq", "need the feature gptq"),
    (without(CPU, "awq", "gptq"), CT, 576, 576, "gptq", "need the feature gptq"),
    (without(SM90, *ALL), GPTQ, 4096, 4096, "gptq", "need the feature gptq"),
    (without(SM90, "awq", "marlin"), AWQ, 4096, 4096, "awq", "need the feature awq"),
    (without(SM90, "gptq", "marlin"), GPTQ, 4096, 4096, "gptq", "need the feature gptq"),
    (without(SM90, "gptq"), changed(GPTQ, order="any"), 4096, 4096, "gptq", "unequal"),
    (without(SM90, "gptq", "awq"), changed(CT, group_size=48), 4096, 4096, "gptq", "not of 48"),
    (without(SM90, "gptq", "marlin"), changed(CT, bits=8), 4096, 4096, "gptq", "4 bit"),
    (dataclasses.replace(SM90, dtype="float32"), GPTQ, 4096, 4096, "", "float16 or bfloat16"),
    (dataclasses.replace(CPU, features=frozenset({"marlin"})), GPTQ, 576, 576, "gptq", "feature gptq"),
]


@pytest.mark.parametrize(("target", "scheme", "k", "n", "method"), CHOICES)
def test_choice(target: Target, scheme: Scheme, k: int, n: int, method: str) -> None:
    choice = choose(target, scheme, k, n)
    assert isinstance(choice, Choice)
    assert choice.method == method
    assert choice.reason


@pytest.mark.parametrize(("target", "scheme", "k", "n", "feature", "reason"), REFUSALS)
def test_refusal(target: Target, scheme: Scheme, k: int, n: int, feature: str, reason: str) -> None:
    refusal = choose(target, scheme, k, n)
    assert isinstance(refusal, Refusal)
    assert refusal.feature == feature
    assert reason in refusal.reason


LAYERS = [
    # N, K, bits, group size, order
    (40, 64, 4, 32, "none"),
    (40, 96, 4, -1, "none"),
    (24, 576, 4, 128, "none"),
    (24, 72, 8, 64, "none"),
    (24, 70, 4, 16, "none"),  # groups of less than a block
    (24, 50, 8, 48, "none"),
    (24, 64, 4, 1024, "none"),
    (24, 128, 4, 32, "equal"),
    (24, 100, 8, 32, "equal"),
    (24, 128, 4, 32, "any"),
    (24, 100, 8, 16, "any"),
    (1, 1, 4, -1, "none"),
]


@pytest.mark.skipif(
    not hasattr(torch.ops.pelton, "quant_linear"), reason="for a library with the CPU's quantized products"
)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [
        ("cpu", torch.float32, 1e-6),
        ("cpu", torch.float16, 1e-3),
        ("cpu", torch.bfloat16, 8e-3),
        ("cpu-int8", torch.float32, 1e-2),
        ("cpu-int8", torch.bfloat16, 1.5e-2),
    ],
)
@pytest.mark.parametrize(("n", "k", "bits", "group_size", "order"), LAYERS)
def test_cpu(
    n: int,
    k: int,
    bits: int,
    group_size: int,
    order: str,
    name: str,
    dtype: torch.dtype,
    bound: float,
    symmetric: bool,
) -> None:
    written = quantized(n, k, bits=bits, group_size=group_size, order=order, symmetric=symmetric)
    zeros = None if symmetric else torch.from_numpy(written.zeros.astype(np.uint8))
    g_idx = None if order == "none" else torch.from_numpy(written.g_idx.astype(np.int32))
    q = torch.from_numpy(written.q.astype(np.uint8))
    size = k if group_size == -1 else group_size
    method = METHODS[name].pack(
        QuantizedWeight(q, written.scales, zeros, g_idx, bits, size), dtype, torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(1)
    x, bias = torch.randn(5, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    weight = written.dequantized()
    for b in (None, bias):
        wide = torch.full((5, 2 * n), 7.0, dtype=dtype)
        method.apply(x, b, wide[:, n:])
        expected = x.double() @ weight.t() + (0 if b is None else b.double())
        size_of_terms = float((x.double().norm(dim=1, keepdim=True) * weight.norm(dim=1)).max())
        assert (wide[:, n:].double() - expected).abs().max() <= bound * (
            size_of_terms + float(expected.abs().max())
        )
        assert (wide[:, :n] == 7).all()


def on_device(written: Quantized, symmetric: bool, order: str) -> QuantizedWeight:
    """A layer in the canonical form, where the kernels are."""

    def integers(values: np.ndarray, dtype: type) -> torch.Tensor:
        return torch.from_numpy(values.astype(dtype)).to(DEVICE)

    return QuantizedWeight(
        integers(written.q, np.uint8),
        written.scales.to(DEVICE),
        None if symmetric else integers(written.zeros, np.uint8),
        None if order == "none" else integers(written.g_idx, np.int32),
        written.bits,
        written.q.shape[1] if written.group_size == -1 else written.group_size,
    )


def assert_products(
    method: Method, written: Quantized, tokens: int, dtype: torch.dtype, rounding: float
) -> None:
    """With and without bias, into part of a row: right up to the result's rounding, and `rounding` of the terms."""
    weight = written.dequantized()
    n, k = weight.shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    terms = x.double().abs() @ weight.abs().t() + 1
    for b in (None, bias):
        wide = torch.full((tokens, 2 * n), 7.0, dtype=dtype, device=DEVICE)
        method.apply(x.to(DEVICE), None if b is None else b.to(DEVICE), wide[:, n:])
        expected = x.double() @ weight.t() + (0 if b is None else b.double())
        bound = torch.finfo(dtype).eps / 2 * 1.01 * expected.abs() + rounding * terms
        assert ((wide[:, n:].cpu().double() - expected).abs() <= bound).all()
        assert (wide[:, :n] == 7).all()


MARLIN_LAYERS = [
    # N, K, bits, group size, order
    (72, 192, 4, 64, "none"),
    (24, 576, 4, 128, "none"),  # a short last group
    (40, 100, 4, 32, "none"),  # no whole pieces of 8 inputs
    (24, 136, 8, -1, "none"),
    (24, 64, 4, 1024, "none"),
    (24, 160, 4, 64, "equal"),
    (24, 100, 8, 32, "equal"),
]


@pytest.mark.skipif(
    not hasattr(torch.ops.pelton, "marlin_gemm"), reason="for a library with the feature marlin"
)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k", "bits", "group_size", "order"), MARLIN_LAYERS)
def test_marlin(
    n: int, k: int, bits: int, group_size: int, order: str, dtype: torch.dtype, symmetric: bool
) -> None:
    written = quantized(n, k, bits=bits, group_size=group_size, order=order, symmetric=symmetric, dtype=dtype)
    weight = on_device(written, symmetric, order)
    method = MarlinLinear.pack(weight, dtype, DEVICE)
    kept = [method.weight, method.scales, *([] if method.zeros is None else [method.zeros])]
    itemsize = dtype.itemsize
    most = MarlinLinear.num_bytes(n, k, weight.scales.shape[0], bits, itemsize)
    assert sum(t.numel() * t.element_size() for t in kept) <= most
    for tokens in (5, 3 if ON_GPU else 1, MarlinLinear.copied_tokens + 1):
        if tokens > 5 and not (ON_GPU or (order == "equal" and bits == 4)):
            continue
        # Many tokens with 4 bits on sm_90: scaled weights are rounded to the dtype.
        wgmma = ON_GPU and bits == 4 and tokens > 32 and torch.cuda.get_device_capability() == (9, 0)
        rounding = torch.finfo(dtype).eps / 2 * 1.01 if wgmma else 0.0
        assert_products(method, written, tokens, dtype, 2.0**-20 + rounding)


@pytest.mark.skipif(
    not hasattr(torch.ops.pelton, "marlin_gemm"), reason="for a library with the feature marlin"
)
def test_marlin_keeps_workspaces_that_graphs_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MarlinLinear, "workspaces", {})
    for k in (100, 300, 100):
        q = torch.zeros(64, k, dtype=torch.uint8, device=DEVICE)
        weight = QuantizedWeight(q, torch.ones(1, 64, device=DEVICE), None, None, 4, k)
        MarlinLinear.pack(weight, torch.float16, DEVICE)
    (own,) = MarlinLinear.workspaces.values()
    assert len(own) == 2
    assert own[0].numel() < own[1].numel()


PLAIN_LAYERS = [
    # method, N, K, bits, group size, order
    ("gptq", 40, 96, 4, 32, "none"),
    ("gptq", 24, 100, 4, -1, "none"),  # no whole words of inputs
    ("gptq", 20, 72, 8, 64, "none"),  # no whole vectors of outputs, a short last group
    ("gptq", 24, 70, 4, 16, "none"),  # groups of less than a step
    ("gptq", 24, 64, 4, 1024, "none"),
    ("gptq", 24, 128, 4, 32, "equal"),
    ("gptq", 24, 100, 8, 16, "any"),
    ("gptq", 1, 1, 4, -1, "none"),
    ("awq", 40, 96, 4, 32, "none"),
    ("awq", 24, 48, 4, 16, "none"),
    ("awq", 24, 100, 4, -1, "none"),
]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "n", "k", "bits", "group_size", "order"), PLAIN_LAYERS)
def test_plain_gpu_layouts(
    name: str, n: int, k: int, bits: int, group_size: int, order: str, dtype: torch.dtype, symmetric: bool
) -> None:
    """By the kernels, and from DEQUANTIZED_FROM tokens on by torch, with weights rounded to the dtype."""
    if not hasattr(torch.ops.pelton, f"{name}_gemm"):
        pytest.skip(f"for a library of GPU kernels with the feature {name}")
    written = quantized(n, k, bits=bits, group_size=group_size, order=order, symmetric=symmetric, dtype=dtype)
    weight = on_device(written, symmetric, order)
    method = METHODS[name].pack(weight, dtype, DEVICE)
    kept = [value for value in vars(method).values() if isinstance(value, torch.Tensor)]
    most = METHODS[name].num_bytes(n, k, weight.scales.shape[0], bits, dtype.itemsize)
    assert sum(t.numel() * t.element_size() for t in kept) <= most
    for tokens in (1, 5, DEQUANTIZED_FROM):
        by_torch = tokens >= DEQUANTIZED_FROM
        assert_products(method, written, tokens, dtype, torch.finfo(dtype).eps if by_torch else 2.0**-20)


PROFILES = sorted((Path(__file__).parents[2] / "build_profiles").glob("*.toml"))


@pytest.mark.parametrize("scheme", [GPTQ, AWQ, CT, changed(GPTQ, order="any", bits=8)])
@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_the_wheels_have_what_the_policy_names(profile: Path, scheme: Scheme) -> None:
    """Of each profile, with the features that it has: a class of ours computes, or the feature is named."""
    values = tomllib.loads(profile.read_text())
    features = frozenset(name for name, on in values["features"].items() if on)
    target = Target(values["target"]["backend"], features, "float16", (9, 0))
    choice = choose(target, scheme, 4096, 4096)
    if isinstance(choice, Choice):
        assert choice.method in METHODS
    else:
        assert choice.feature in FORMAT_FEATURES[scheme.format]
        assert choice.feature not in features
