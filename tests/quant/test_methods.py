"""The policy which method computes with a quantized layer, and the method that needs no kernel."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pelton import ops
from pelton.quant.canonical import QuantizedWeight, Scheme
from pelton.quant.methods import METHODS, Choice, Refusal, Target, choose

ALL = frozenset({"awq", "gptq", "marlin"})
CPU = Target("cpu", frozenset({"awq", "gptq"}), "bfloat16")
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
    (CPU, changed(GPTQ, bits=8), 576, 576, "dequantize"),
    (without(CPU, "awq"), CT, 576, 576, "cpu"),
    (SM90, GPTQ, 4096, 4096, "marlin"),
    (SM90, AWQ, 4096, 4096, "marlin"),
    (SM90, CT, 4096, 4096, "marlin"),
    (SM90, changed(GPTQ, order="equal", bits=8), 4096, 4096, "marlin"),
    (SM90, changed(GPTQ, group_size=-1), 4096, 4096, "marlin"),
    (without(SM90, "gptq"), GPTQ, 4096, 4096, "marlin"),
    (without(SM90, "awq"), AWQ, 4096, 4096, "marlin"),
    (SM90, changed(GPTQ, order="any"), 4096, 4096, "gptq"),
    (SM90, changed(GPTQ, group_size=256), 4096, 4096, "gptq"),
    (SM90, changed(AWQ, group_size=256), 4096, 4096, "awq"),
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
    (without(SM90, "gptq", "awq"), changed(CT, group_size=256), 4096, 4096, "gptq", "not of 256"),
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


@pytest.mark.skipif(ops.backend() in ("cuda", "rocm"), reason="the weights are on the CPU")
@pytest.mark.parametrize("bias", [False, True])
def test_dequantized(bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(0, 256, (48, 80), generator=generator, dtype=torch.uint8)
    scales = torch.rand(3, 48, generator=generator)
    weight = QuantizedWeight(q, scales, None, None, 8, 32)
    x, b = torch.randn(5, 80, generator=generator), torch.randn(48, generator=generator)
    wide = torch.zeros(5, 96)
    method = METHODS["dequantize"].pack(weight, torch.float32, q.device)
    method.apply(x, b if bias else None, wide[:, 48:])
    expected = x.double() @ weight.dequantize(torch.float64).t() + (b if bias else 0)
    torch.testing.assert_close(wide[:, 48:].double(), expected, rtol=1e-5, atol=1e-3)
    assert not wide[:, :48].any()
