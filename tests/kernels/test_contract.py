"""What every operator owes torch: schema, fake kernel, compilation, and a reference beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pelton import _fakes, ops

X, WEIGHT = torch.randn(3, 32), torch.randn(32)
IDS = torch.tensor([0, 2, 1])
HEADS = torch.randn(3, 2, 16)
CACHE = torch.randn(4, 2, 8, 16)
MAPPING = torch.tensor([[0, 1], [1, 2]])

CALLS: dict[str, tuple[object, ...]] = {
    "rms_norm": (torch.zeros(3, 32), X, WEIGHT, 1e-5),
    "fused_add_rms_norm": (X.clone(), X.clone(), WEIGHT, 1e-5),
    "rotary_embedding": (HEADS.clone(), HEADS[:, :1].clone(), IDS, torch.randn(5, 16), False),
    "silu_and_mul": (torch.zeros(3, 16), X),
    "gelu_and_mul": (torch.zeros(3, 16), X, "tanh"),
    "embedding": (torch.zeros(3, 32), IDS, X),
    "reshape_and_cache": (HEADS, HEADS, CACHE.clone(), CACHE.clone(), IDS),
    "copy_blocks": (CACHE.clone(), CACHE.clone(), MAPPING),
    "swap_blocks": (CACHE, CACHE.clone(), MAPPING),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    """Schema, autograd registration, fake kernel and AOT dispatch with dynamic shapes."""
    result = torch.library.opcheck(getattr(torch.ops.pelton, name).default, CALLS[name])
    assert set(result.values()) == {"SUCCESS"}
    assert len(result) == 4


@pytest.mark.parametrize("name", sorted(_fakes._FAKES))
def test_function_and_reference_agree(name: str) -> None:
    function, reference = getattr(ops, name), getattr(ops.reference, name)
    assert inspect.signature(function) == inspect.signature(reference)
    assert function.__doc__
    assert name in ops.__all__
    assert name in ops.reference.__all__


def test_every_operator_of_the_library_has_a_fake_kernel() -> None:
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("pelton::")]
    takes_tensors = {
        s.name.removeprefix("pelton::") for s in schemas if any("Tensor" in str(a.type) for a in s.arguments)
    }
    assert takes_tensors == {name for name in _fakes._FAKES if hasattr(torch.ops.pelton, name)}


FUNCTIONS = {
    "rms_norm": lambda x: ops.rms_norm(x, x[0], 1e-5),
    "silu_and_mul": ops.silu_and_mul,
    "gelu_and_mul": ops.gelu_and_mul,
    "embedding": lambda x: ops.embedding(torch.zeros(7, dtype=torch.int64), x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fake_tensors(name: str, dtype: torch.dtype) -> None:
    real = FUNCTIONS[name](torch.zeros(5, 12, dtype=dtype))
    with FakeTensorMode():
        fake = FUNCTIONS[name](torch.zeros(5, 12, dtype=dtype))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5), "rms_norm: weight must have"),
        (lambda: ops.silu_and_mul(torch.zeros(2, 7)), "silu_and_mul: out must have half"),
        (
            lambda: ops.rotary_embedding(torch.zeros(2, 8), torch.zeros(2, 8), IDS, torch.zeros(2, 8)),
            "rotary_embedding: query and key",
        ),
    ],
)
def test_fake_kernels_check_shapes(call: object, message: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=message):
        call()  # type: ignore[operator]


def block(qkv: Tensor, residual: Tensor, positions: Tensor, cos_sin: Tensor, weight: Tensor) -> Tensor:
    query, key = qkv.view(-1, 4, 16)[:, :2], qkv.view(-1, 4, 16)[:, 2:]
    ops.rotary_embedding(query, key, positions, cos_sin)  # two views of one tensor
    return finish(qkv * 2, residual, weight)


def block_of_own_tensors(
    qkv: Tensor, residual: Tensor, positions: Tensor, cos_sin: Tensor, weight: Tensor
) -> Tensor:
    query, key = qkv.view(-1, 4, 16)[:, :2].clone(), qkv.view(-1, 4, 16)[:, 2:].clone()
    ops.rotary_embedding(query, key, positions, cos_sin)
    return finish(torch.cat([query, key], dim=1).flatten(1), residual, weight)


def finish(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    return ops.silu_and_mul(x) + 1


def check_compiled(function: Callable[..., Tensor], backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    cos_sin, weight = torch.rand(50, 16), torch.randn(64)
    for num_tokens in (3, 5):
        plain = torch.randn(num_tokens, 64), torch.randn(num_tokens, 64), torch.arange(num_tokens)
        traced = tuple(x.clone() for x in plain)
        want = function(*plain, cos_sin, weight)
        got = compiled(*traced, cos_sin, weight)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(traced, plain)  # what they changed in place


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(dynamic: bool) -> None:
    check_compiled(block, "aot_eager", dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_with_inductor(dynamic: bool) -> None:
    """Needs a C++ compiler.

    Not with views: for a sliced view that an operator mutates, torch 2.13's Inductor makes wrong code when
    shapes are dynamic (the graph it is given, as aot_eager runs it, is right).
    """
    check_compiled(block_of_own_tensors, "inductor", dynamic)
