"""rotary_embedding against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_checks import (
    DTYPES,
    assert_margins_untouched,
    assert_rounded,
    cpu_kernels,
    field_cases,
    gpu_kernels,
    guarded,
)
from pelton import ops

NAN = float("nan")


def table(max_position: int, rotary_dim: int, base: float = 10000.0) -> Tensor:
    inverse = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(max_position, dtype=torch.float64).unsqueeze(1) * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def check(query: Tensor, key: Tensor, positions: Tensor, cache: Tensor, interleaved: bool) -> None:
    want_query, want_key = query.double(), key.double()
    ops.reference.rotary_embedding(want_query, want_key, positions, cache.double(), interleaved)
    ops.rotary_embedding(query, key, positions, cache, interleaved)
    assert_rounded(query, want_query, atol=2e-6)
    assert_rounded(key, want_key, atol=2e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_size", "rotary_dim"),
    [
        (2, 2),
        (32, 32),
        (48, 48),
        (64, 64),
        (80, 80),
        (80, 32),
        (96, 10),
        (128, 128),
        (192, 64),
        (256, 256),
        (300, 290),
        (64, 0),
        (37, 36),
    ],
)
def test_head_sizes(head_size: int, rotary_dim: int, dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(head_size)
    query, key = torch.randn(5, 4, head_size).to(dtype), torch.randn(5, 2, head_size).to(dtype)
    check(query, key, torch.tensor([0, 3, 3, 99, 1]), table(100, rotary_dim), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads"), [(0, 2, 1), (1, 9, 3), (1, 1, 1), (3, 7, 0), (300, 9, 3)]
)
def test_shapes(num_tokens: int, num_heads: int, num_kv_heads: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(num_tokens, num_heads, 64), torch.randn(num_tokens, num_kv_heads, 64)
    check(query, key, torch.randint(0, 512, (num_tokens,)), table(512, 64), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_size", [32, 48])  # vectors of a head that are a power of two, and others
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 2), (1, 1)])
def test_many_tokens(num_heads: int, num_kv_heads: int, head_size: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(1025, heads, head_size).bfloat16() for heads in (num_heads, num_kv_heads))
    check(query, key, torch.randint(0, 64, (1025,)), table(64, head_size), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_a_qkv_buffer(dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_size = 6, 2, 40
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * head_size).to(dtype)
    before = qkv.clone()
    query, key, value = (
        part.unflatten(-1, (-1, head_size))
        for part in qkv.split(
            [num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size], dim=-1
        )
    )
    check(query, key, torch.tensor([7, 7, 0, 49, 2]), table(50, 24), interleaved)
    assert torch.equal(value.flatten(1), before[:, -num_kv_heads * head_size :])
    assert not torch.equal(query.flatten(1), before[:, : num_heads * head_size])


def test_any_token_and_head_stride() -> None:
    torch.manual_seed(0)
    query = torch.randn(4, 6, 3, 64).transpose(0, 1)[:, :, 1]  # [6, 4, 64], heads outside tokens
    key = torch.randn(2, 6, 64).transpose(0, 1)
    check(query, key, torch.arange(6), table(10, 64), False)


@pytest.mark.parametrize("interleaved", [False, True])
def test_elements_beyond_rotary_dim_stay(interleaved: bool) -> None:
    query, key = torch.full((3, 2, 50), NAN), torch.full((3, 1, 50), NAN)
    query[..., :20], key[..., :20] = 1.0, 1.0
    ops.rotary_embedding(query, key, torch.tensor([1, 2, 3]), table(4, 20), interleaved)
    assert query[..., :20].isfinite().all()
    assert query[..., 20:].isnan().all()
    assert key[..., :20].isfinite().all()
    assert key[..., 20:].isnan().all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_bad_head_touches_no_other(interleaved: bool) -> None:
    torch.manual_seed(0)
    query, key, positions, cache = torch.randn(3, 4, 36), torch.randn(3, 2, 36), torch.arange(3), table(4, 36)
    clean_query, clean_key = query.clone(), key.clone()
    ops.rotary_embedding(clean_query, clean_key, positions, cache, interleaved)
    query[1, 2, 35] = NAN
    ops.rotary_embedding(query, key, positions, cache, interleaved)
    assert query[1, 2].isnan().sum() == 2  # the pair
    query[1, 2], clean_query[1, 2] = 0, 0
    assert torch.equal(query, clean_query)
    assert torch.equal(key, clean_key)


@pytest.mark.parametrize(
    ("name", "interleaved"), [("rotary_neox_partial", False), ("rotary_interleaved_partial", True)]
)
def test_cases_from_the_field(name: str, interleaved: bool) -> None:
    cases = field_cases()
    query, want = cases[f"{name}.x"].clone(), cases[f"{name}.out"].double()
    key = query[:, :1].clone()
    ops.rotary_embedding(query, key, cases[f"{name}.positions"], table(1001, 32), interleaved)
    assert_rounded(query, want, atol=1e-6)
    assert_rounded(key, want[:, :1], atol=1e-6)


OUT_OF_RANGE = [-1, 10, 2**31, 2**40, -(2**63)]


@cpu_kernels
@pytest.mark.parametrize("position", OUT_OF_RANGE)
def test_a_position_out_of_range_changes_nothing(position: int) -> None:
    query, key = torch.randn(3, 2, 16), torch.randn(3, 1, 16)
    before = query.clone(), key.clone()
    message = rf"^rotary_embedding: positions\[1\] is {position}, outside of \[0, 10\)$"
    with pytest.raises(RuntimeError, match=message):
        ops.rotary_embedding(query, key, torch.tensor([0, position, 1]), table(10, 16))
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


@gpu_kernels
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("position", OUT_OF_RANGE)
def test_a_position_out_of_range_leaves_its_token(position: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    query, query_buffer = guarded(torch.randn(3, 2, 16))
    key, key_buffer = guarded(torch.randn(3, 1, 16))
    want_query, want_key = query.clone(), key.clone()
    ops.rotary_embedding(query, key, torch.tensor([3, position, 9]), table(10, 16), interleaved)
    rest = [0, 2]
    turned_query, turned_key = want_query[rest].double(), want_key[rest].double()
    ops.reference.rotary_embedding(
        turned_query, turned_key, torch.tensor([3, 9]), table(10, 16).double(), interleaved
    )
    assert_rounded(query[rest], turned_query, atol=2e-6)
    assert_rounded(key[rest], turned_key, atol=2e-6)
    assert torch.equal(query[1], want_query[1])
    assert torch.equal(key[1], want_key[1])
    assert_margins_untouched(query_buffer)
    assert_margins_untouched(key_buffer)


Q, K, P, C = torch.zeros(3, 2, 16), torch.zeros(3, 1, 16), torch.zeros(3, dtype=torch.int64), table(10, 16)


@pytest.mark.parametrize(
    ("query", "key", "positions", "cache", "message"),
    [
        (Q.flatten(1), K, P, C, r"query must be \[num_tokens, num_heads, head_size\], found \[3, 32\]"),
        (Q, K.flatten(1), P, C, r"key must be \[num_tokens, num_heads, head_size\]"),
        (Q, K.half(), P, C, "dtypes must be equal, found Float and Half"),
        (Q.double(), K.double(), P, C, "dtype must be float32, float16 or bfloat16"),
        (Q, K[:2], P, C, "query and key must have the same num_tokens and head_size"),
        (Q, torch.zeros(3, 1, 8), P, C, "query and key must have the same num_tokens and head_size"),
        (Q, K, P.int(), C, "positions must be Long, found Int"),
        (Q, K, P[:2], C, r"positions must have shape \[3\], found \[2\]"),
        (Q, K, torch.zeros(6, dtype=torch.int64)[::2], C, "positions must be contiguous"),
        (Q, K, P, C.half(), "cos_sin_cache must be Float, found Half"),
        (Q, K, P, C.flatten(), r"cos_sin_cache must have shape \[any, any\], found \[160\]"),
        (Q, K, P, C[:, :8], "cos_sin_cache must be contiguous"),
        (Q, K, P, torch.zeros(10, 18), "rotary_dim 18, which must be even and at most the head_size 16"),
        (Q, K, P, torch.zeros(10, 7), "rotary_dim 7, which must be even"),
        (
            torch.zeros(3, 16, 2).transpose(1, 2),
            K,
            P,
            C,
            "query's last dimension must be contiguous, its stride is 2",
        ),
    ],
)
def test_errors(query: Tensor, key: Tensor, positions: Tensor, cache: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=r"^rotary_embedding: .*" + message):
        ops.rotary_embedding(query, key, positions, cache)
