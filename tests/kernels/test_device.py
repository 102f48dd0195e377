"""Operators on a GPU: wrong devices, streams, CUDA graphs, and sizes beyond 32 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernel_checks import DTYPES, assert_rounded, on_gpu
from layer import Layer
from pelton import ops

pytestmark = on_gpu

X, W, IDS = torch.zeros(4, 16), torch.zeros(16), torch.zeros(4, dtype=torch.int64)
HEADS, CACHE = torch.zeros(4, 2, 16), torch.zeros(3, 2, 8, 16)
PAIRS = torch.zeros(1, 2, dtype=torch.int64)
HOST = {"device": "cpu"}

# One operator, its arguments by name, and which of them are checked.
CALLS: dict[str, tuple[Callable[..., object], dict[str, Tensor], dict[str, object]]] = {
    "rms_norm": (ops.rms_norm, {"x": X, "weight": W, "out": X.clone()}, {"eps": 1e-5}),
    "fused_add_rms_norm": (
        ops.fused_add_rms_norm,
        {"x": X.clone(), "residual": X.clone(), "weight": W},
        {"eps": 1e-5},
    ),
    "silu_and_mul": (ops.silu_and_mul, {"x": X, "out": torch.zeros(4, 8)}, {}),
    "gelu_and_mul": (ops.gelu_and_mul, {"x": X, "out": torch.zeros(4, 8)}, {}),
    "rotary_embedding": (
        ops.rotary_embedding,
        {"query": HEADS.clone(), "key": HEADS.clone(), "positions": IDS, "cos_sin_cache": X},
        {},
    ),
    "embedding": (ops.embedding, {"weight": X, "ids": IDS, "out": X.clone()}, {}),
    "reshape_and_cache": (
        ops.reshape_and_cache,
        {
            "key": HEADS,
            "value": HEADS,
            "key_cache": CACHE.clone(),
            "value_cache": CACHE.clone(),
            "slot_mapping": IDS,
        },
        {},
    ),
    "copy_blocks": (
        ops.copy_blocks,
        {"key_cache": CACHE.clone(), "value_cache": CACHE.clone(), "block_mapping": PAIRS},
        {},
    ),
}


@pytest.mark.parametrize(("name", "argument"), [(name, a) for name, call in CALLS.items() for a in call[1]])
def test_a_tensor_on_the_host_is_an_error(name: str, argument: str) -> None:
    function, tensors, others = CALLS[name]
    function(**tensors, **others)  # is right otherwise
    first = next(iter(tensors))
    if argument == first:
        message = f"^{name}: {argument} is on cpu, but this build of pelton has kernels for GPU tensors only$"
    else:
        message = f"^{name}: {argument} must be on the device of {first}, cuda:0, found cpu$"
    with pytest.raises(RuntimeError, match=message):
        function(**{**tensors, argument: tensors[argument].cpu()}, **others)


def test_all_on_the_host_is_an_error() -> None:
    x = torch.zeros(2, 4, **HOST)
    with pytest.raises(
        RuntimeError, match=r"^rms_norm: x is on cpu, but this build of pelton has kernels for GPU"
    ):
        ops.rms_norm(x, torch.zeros(4, **HOST), 1e-5)


def test_work_goes_to_the_current_stream() -> None:
    """Each operator waits behind what its stream has to do, and for nothing else."""
    stream = torch.cuda.Stream()
    layer, want = Layer(), Layer()
    want.change_inputs()
    want.run()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        layer.change_inputs()
        layer.run()
    stream.synchronize()
    for got, expected in zip(layer.state(), want.state(), strict=True):
        assert torch.equal(got, expected)


def test_a_cuda_graph_reads_the_tensors_anew() -> None:
    recorded, plain = Layer(), Layer()
    recorded.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded.run()
    plain.run()
    for _ in range(2):
        recorded.change_inputs()
        plain.change_inputs()
        graph.replay()
        plain.run()
        for got, want in zip(recorded.state(), plain.state(), strict=True):
            assert torch.equal(got, want)


def test_a_cuda_graph_swaps_with_the_host() -> None:
    cache, mapping = torch.randn(4, 2, 8), torch.tensor([[0, 1], [1, 2]])
    host = torch.zeros(4, 2, 8, pin_memory=True, **HOST)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.swap_blocks(cache, host, mapping)
    mapping.copy_(torch.tensor([[3, 0], [2, 3]]))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(host[[0, 3]], cache[[3, 2]].cpu())
    assert (host[1:3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8192, 16384, 32768, 65536, 65544, 131071, 300_000])
def test_wide_rows(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(3, width).to(dtype), torch.randn(3, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    got = ops.rms_norm(x, weight, 1e-6)
    assert_rounded(got, ops.reference.rms_norm(x.double(), weight.double(), 1e-6), rtol=2e-6)
    total = x.double() + residual.double()
    ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert_rounded(residual, total)
    assert_rounded(x, ops.reference.rms_norm(residual.double(), weight.double(), 1e-6), rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(70_000, 40_000), (2_200_000_000, 1), (1, 2_200_000_000)])
def test_more_elements_than_32_bits_count(shape: tuple[int, int]) -> None:
    """17 GB."""
    x = torch.ones(shape, dtype=torch.bfloat16)
    x[-1, -1] = 3
    out = torch.full_like(x, 5)
    ops.rms_norm(x, torch.full((shape[1],), 2.0, dtype=torch.bfloat16), 0.0, out=out)
    torch.testing.assert_close(out[:-1], torch.full_like(out[:-1], 2))
    want = 2 * x[-1, -1000:].double() / x[-1].double().square().mean().sqrt()
    assert_rounded(out[-1, -1000:], want, rtol=1e-4)
    del out
    rows = x.view(2, -1)
    gated = ops.silu_and_mul(rows)
    assert_rounded(gated[1, -1:], 3 * rows[1, rows.shape[1] // 2 - 1 :][:1].double().sigmoid(), rtol=1e-6)


@pytest.mark.slow
def test_a_cache_larger_than_32_bits_count() -> None:
    """9 GB of keys and values."""
    cache = torch.zeros(140_000, 8, 16, 128, dtype=torch.bfloat16)
    cache_of_values = torch.zeros_like(cache)
    key, value = torch.randn(2, 8, 128).bfloat16(), torch.randn(2, 8, 128).bfloat16()
    slots = torch.tensor([139_999 * 16 + 15, 7])
    ops.reshape_and_cache(key, value, cache, cache_of_values, slots)
    assert torch.equal(cache[139_999, :, 15], key[0])
    assert torch.equal(cache_of_values[0, :, 7], value[1])
    ops.copy_blocks(cache, cache_of_values, torch.tensor([[139_999, 139_998]]))
    assert torch.equal(cache[139_998], cache[139_999])
    table = cache.view(-1, 1024)
    assert torch.equal(ops.embedding(torch.tensor([table.shape[0] - 1]), table)[0], table[-1])
