"""reshape_and_cache, copy_blocks and swap_blocks: exact bytes, and no other byte touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_checks import DTYPES, assert_margins_untouched, cpu_kernels, gpu_kernels, guarded, on_gpu
from pelton import ops


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def new_caches(
    num_blocks: int, num_kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, num_kv_heads, block_size, head_size)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def pairs(*rows: tuple[int, int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "block_size", "head_size"),
    [(0, 2, 16, 8), (1, 1, 8, 1), (5, 3, 16, 64), (7, 2, 32, 80), (64, 3, 8, 33), (300, 3, 64, 64)],
)
def test_write(
    num_tokens: int, num_kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_blocks = num_tokens // block_size + 3
    caches = new_caches(num_blocks, num_kv_heads, block_size, head_size, dtype)
    want = tuple(cache.clone() for cache in caches)
    key, value = (torch.randn(num_tokens, num_kv_heads, head_size).to(dtype) for _ in range(2))
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[::3] = -1
    ops.reshape_and_cache(key, value, *caches, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[0][slot // block_size, :, slot % block_size] = key[token]
            want[1][slot // block_size, :, slot % block_size] = value[token]
    assert torch.equal(caches[0], want[0])
    assert torch.equal(caches[1], want[1])


@pytest.mark.parametrize("skipped", [-1, -2, -(2**63)])
def test_padded_rows_write_nothing(skipped: int) -> None:
    """Slots [5, -1, 7, -1]: 5 and 7 are written, every other byte stays, the last block's too."""
    torch.manual_seed(0)
    caches = new_caches(3, 2, 4, 8, torch.float32)
    want = tuple(cache.clone() for cache in caches)
    key, value = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    key[1], value[3] = float("nan"), float("nan")
    ops.reshape_and_cache(key, value, *caches, torch.tensor([5, skipped, 7, skipped]))
    for cache, before, new in zip(caches, want, (key, value), strict=True):
        before[1, :, 1], before[1, :, 3] = new[0], new[2]
        assert torch.equal(bits(cache), bits(before))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_a_qkv_buffer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(6, 5, 24).to(dtype)  # one query head, two of keys, two of values
    key, value = qkv[:, 1:3], qkv[:, 3:5]
    caches, want = new_caches(4, 2, 8, 24, dtype), None
    want = tuple(cache.clone() for cache in caches)
    slots = torch.tensor([31, 0, 8, 9, -1, 16])
    ops.reshape_and_cache(key, value, *caches, slots)
    ops.reference.reshape_and_cache(key, value, *want, slots)
    assert torch.equal(caches[0], want[0])
    assert torch.equal(caches[1], want[1])


def test_strided_cache() -> None:
    """Keys and values interleaved block by block in one buffer."""
    torch.manual_seed(0)
    both = torch.randn(4, 2, 3, 8, 16)
    want = both.clone()
    key, value, slots = torch.randn(2, 3, 16), torch.randn(2, 3, 16), torch.tensor([30, 1])
    ops.reshape_and_cache(key, value, both[:, 0], both[:, 1], slots)
    ops.reference.reshape_and_cache(key, value, want[:, 0], want[:, 1], slots)
    assert torch.equal(both, want)


PAST_THE_CACHE = [12, 13, 2**31, 2**63 - 1]


@cpu_kernels
@pytest.mark.parametrize("bad", PAST_THE_CACHE)
def test_a_slot_past_the_cache_writes_nothing(bad: int) -> None:
    caches = new_caches(3, 1, 4, 2, torch.float32)
    before = tuple(cache.clone() for cache in caches)
    key = torch.randn(3, 1, 2)
    with pytest.raises(
        RuntimeError, match=rf"^reshape_and_cache: slot_mapping\[2\] is {bad}, but the cache has 12 slots$"
    ):
        ops.reshape_and_cache(key, key, *caches, torch.tensor([0, 11, bad]))
    assert torch.equal(caches[0], before[0])
    assert torch.equal(caches[1], before[1])


@gpu_kernels
@pytest.mark.parametrize("bad", PAST_THE_CACHE)
def test_a_slot_past_the_cache_is_left_out(bad: int) -> None:
    torch.manual_seed(0)
    key_cache, key_buffer = guarded(torch.randn(3, 2, 4, 8))
    value_cache, value_buffer = guarded(torch.randn(3, 2, 4, 8))
    want = key_cache.clone(), value_cache.clone()
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    ops.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([0, bad, 11]))
    ops.reference.reshape_and_cache(key[[0, 2]], value[[0, 2]], *want, torch.tensor([0, 11]))
    assert torch.equal(key_cache, want[0])
    assert torch.equal(value_cache, want[1])
    assert_margins_untouched(key_buffer)
    assert_margins_untouched(value_buffer)


T, KV, S = torch.zeros(2, 3, 8), torch.zeros(4, 3, 16, 8), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("key", "value", "key_cache", "value_cache", "slots", "message"),
    [
        (T[0], T, KV, KV, S, r"key must be \[num_tokens, num_heads, head_size\], found \[3, 8\]"),
        (T, T[:1], KV, KV, S, "value must have the shape of key"),
        (T, T, KV[0], KV, S, r"key_cache must be \[num_blocks, num_kv_heads, block_size, head_size\], found"),
        (T, T, KV, KV[:2], S, "value_cache must have the shape of key_cache"),
        (T, T, KV[:, :2], KV[:, :2], S, "must have the same num_kv_heads and head_size"),
        (
            T,
            T,
            torch.zeros(4, 3, 16, 4),
            torch.zeros(4, 3, 16, 4),
            S,
            "must have the same num_kv_heads and head_size",
        ),
        (T, T, KV.half(), KV.half(), S, "dtypes must be equal, found Float and Half"),
        (T, T.half(), KV, KV, S, "dtypes must be equal, found Float and Half"),
        (T.double(), T.double(), KV.double(), KV.double(), S, "dtype must be float32, float16 or bfloat16"),
        (T, T, KV, KV, S.int(), "slot_mapping must be Long, found Int"),
        (T, T, KV, KV, S[:1], r"slot_mapping must have shape \[2\], found \[1\]"),
        (T, T, KV, KV, torch.zeros(4, dtype=torch.int64)[::2], "slot_mapping must be contiguous"),
        (
            T,
            T,
            torch.zeros(4, 3, 8, 16).transpose(2, 3),
            KV,
            S,
            "key_cache's last dimension must be contiguous",
        ),
        (torch.zeros(2, 8, 3).transpose(1, 2), T, KV, KV, S, "key's last dimension must be contiguous"),
    ],
)
def test_write_errors(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, message: str
) -> None:
    with pytest.raises(RuntimeError, match=r"^reshape_and_cache: .*" + message):
        ops.reshape_and_cache(key, value, key_cache, value_cache, slots)


def copied(x: Tensor, mapping: Tensor) -> Tensor:
    result = x.clone()
    for source, destination in mapping.tolist():
        result[destination] = result[source].clone()
    return result


MAPPINGS = {
    "empty": pairs(),
    "one": pairs((0, 4)),
    "fan out": pairs((1, 2), (1, 3), (1, 4)),
    "chain": pairs((0, 1), (1, 2), (2, 3)),
    "backward chain": pairs((2, 3), (1, 2), (0, 1)),
    "exchange": pairs((0, 4), (1, 0), (4, 1)),
    "onto itself": pairs((3, 3)),
    "twice the same destination": pairs((0, 2), (1, 2)),
}


@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [(1, 8, 1), (3, 16, 64), (2, 64, 300)])
def test_copy_blocks(mapping: Tensor, dtype: torch.dtype, block: tuple[int, int, int]) -> None:
    key_cache, value_cache = new_caches(5, *block, dtype)
    want = copied(key_cache, mapping), copied(value_cache, mapping)
    ops.copy_blocks(key_cache, value_cache, mapping)
    assert torch.equal(key_cache, want[0])
    assert torch.equal(value_cache, want[1])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_any_list_takes_effect_in_order(rows: list[tuple[int, int]]) -> None:
    mapping = pairs(*rows)
    key_cache, value_cache = torch.arange(6.0).view(6, 1, 1, 1).repeat(1, 2, 8, 40), torch.randn(6, 2, 8, 40)
    want = copied(key_cache, mapping), copied(value_cache, mapping)
    ops.copy_blocks(key_cache, value_cache, mapping)
    assert torch.equal(key_cache, want[0])
    assert torch.equal(value_cache, want[1])


def test_copy_between_blocks_with_a_gap() -> None:
    both = torch.randn(4, 2, 3, 8, 16)
    want = both.clone()
    want[2] = want[1]
    ops.copy_blocks(both[:, 0], both[:, 1], pairs((1, 2)))
    assert torch.equal(both, want)


@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool], ids=str
)
@pytest.mark.parametrize("shape", [(3,), (2, 16, 40), (1,), (7, 0)])
def test_swap_blocks(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    src, dst = (torch.randint(0, 2, (n, *shape)).to(dtype) for n in (4, 6))
    mapping = pairs((0, 5), (3, 0), (3, 1), (2, 5))
    before, want = src.clone(), dst.clone()
    for source, destination in mapping.tolist():
        want[destination] = src[source]
    ops.swap_blocks(src, dst, mapping)
    assert torch.equal(dst, want)
    assert torch.equal(src, before)


def test_swap_blocks_with_strides_and_itself() -> None:
    src, dst = torch.randn(4, 3, 5)[:, 1], torch.randn(4, 2, 5)[:, 0]
    ops.swap_blocks(src, dst, pairs((1, 2)))
    assert torch.equal(dst[2], src[1])
    ops.swap_blocks(dst, dst, pairs((2, 0), (0, 1)))
    assert torch.equal(dst[0], src[1])
    assert torch.equal(dst[1], src[1])


@pytest.mark.parametrize("num_pairs", [31, 32, 33, 100, 300])
def test_long_lists_take_effect_in_order(num_pairs: int) -> None:
    torch.manual_seed(num_pairs)
    for num_blocks in (3, 20, 2 * num_pairs):
        mapping = torch.randint(0, num_blocks, (num_pairs, 2))
        key_cache, value_cache = new_caches(num_blocks, 2, 8, 24, torch.float16)
        want = copied(key_cache, mapping), copied(value_cache, mapping)
        ops.copy_blocks(key_cache, value_cache, mapping)
        assert torch.equal(key_cache, want[0])
        assert torch.equal(value_cache, want[1])


@cpu_kernels
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((4, 0), r"source block 4 of pair 1 is outside of \[0, 4\)"),
        ((-1, 0), r"source block -1 of pair 1 is outside of \[0, 4\)"),
        ((0, 6), r"destination block 6 of pair 1 is outside of \[0, 6\)"),
        ((0, -(2**40)), r"destination block -1099511627776 of pair 1 is outside of \[0, 6\)"),
    ],
)
def test_a_block_out_of_range_copies_nothing(row: tuple[int, int], message: str) -> None:
    src, dst = torch.ones(4, 3), torch.zeros(6, 3)
    with pytest.raises(RuntimeError, match=rf"^swap_blocks: {message}$"):
        ops.swap_blocks(src, dst, pairs((0, 0), row))
    assert (dst == 0).all()
    with pytest.raises(RuntimeError, match=r"^copy_blocks: (source|destination) block"):
        ops.copy_blocks(src, src, pairs((0, 1), row))


@gpu_kernels
@pytest.mark.parametrize(
    "bad", [(4, 0), (-1, 0), (2**40, 0), (-(2**63), 0), (0, 6), (0, -1), (0, -(2**40)), (0, 2**32)]
)
def test_a_pair_out_of_range_is_left_out(bad: tuple[int, int]) -> None:
    src, dst = torch.randn(4, 40), torch.randn(6, 40)
    src, src_buffer = guarded(src)
    dst, dst_buffer = guarded(dst)
    want_src, want_dst = src.clone(), dst.clone()
    want_dst[3], want_dst[5] = src[0], src[1]
    ops.swap_blocks(src, dst, pairs((0, 3), bad, (1, 5)))
    assert torch.equal(dst, want_dst)
    assert torch.equal(src, want_src)
    assert_margins_untouched(dst_buffer)

    want_src[2], want_src[3] = src[0], src[0]
    other = src.clone()
    if bad != (0, 6):  # blocks 4 and up are not there
        bad = (bad[0], bad[1]) if bad[1] != 0 else (bad[0], 1)
    ops.copy_blocks(src, other, pairs((0, 2), bad, (2, 3)))
    assert torch.equal(src, want_src)
    assert torch.equal(other, want_src)
    assert_margins_untouched(src_buffer)


def on_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x)


@on_gpu
@pytest.mark.parametrize("list_on", ["cpu", "cuda"])
@pytest.mark.parametrize("direction", ["to host", "from host", "on the host's side", "on the GPU"])
@pytest.mark.parametrize("block", [(2, 16, 40), (3,), (7, 0)])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 5), (3, 0), (3, 1), (2, 5)],
        [(0, 1), (1, 2), (2, 3), (3, 5), (0, 4)],  # blocks that go on where the one before ended
        [],
    ],
)
def test_swap_with_the_host(
    rows: list[tuple[int, int]], block: tuple[int, ...], direction: str, list_on: str
) -> None:
    torch.manual_seed(0)
    src, dst = torch.randn(4, *block), torch.randn(6, *block)
    want = dst.clone()
    for source, destination in rows:
        want[destination] = src[source]
    mapping = pairs(*rows).to(list_on)
    if direction == "on the host's side":
        with pytest.raises(
            RuntimeError, match=r"^swap_blocks: dst is on cpu, but this build of pelton has kern"
        ):
            ops.swap_blocks(on_host(src), on_host(dst), mapping)
        return
    src = on_host(src) if direction == "from host" else src
    dst = on_host(dst) if direction == "to host" else dst
    ops.swap_blocks(src, dst, mapping)
    torch.cuda.synchronize()
    assert torch.equal(dst.to(want.device), want)


@on_gpu
def test_a_list_on_the_host_takes_effect_in_order() -> None:
    cache = torch.randn(5, 2, 8)
    for mapping in MAPPINGS.values():
        want = copied(cache, mapping)
        ops.swap_blocks(cache, cache, mapping.cpu())
        assert torch.equal(cache, want)


@on_gpu
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.swap_blocks(KV, KV.cpu(), pairs().cpu()),
            r"dst is in host memory that is not pinned; allocate it with pin_memory=True$",
        ),
        (lambda: ops.swap_blocks(KV.cpu(), KV, pairs()), "src is in host memory that is not pinned"),
        (
            lambda: ops.swap_blocks(KV, KV, pairs((0, 1), (4, 0)).cpu()),
            r"source block 4 of pair 1 is outside of \[0, 4\)$",
        ),
        (
            lambda: ops.swap_blocks(KV, on_host(KV), pairs((0, -1)).cpu()),
            r"destination block -1 of pair 0 is outside of \[0, 4\)$",
        ),
    ],
)
def test_swap_errors_with_the_host(call: Callable[[], None], message: str) -> None:
    with pytest.raises(RuntimeError, match=r"^swap_blocks: " + message):
        call()


@pytest.mark.parametrize(
    ("src", "dst", "mapping", "message"),
    [
        (KV, KV.half(), pairs(), "dtypes must be equal"),
        (KV, KV[:, :2].contiguous(), pairs(), "src and dst must have blocks of one shape"),
        (KV, KV[:, :2], pairs((0, 1)), "src and dst must have blocks of one shape"),
        (KV[:, :, :8], KV, pairs(), "each block of src must be contiguous"),
        (KV, KV.transpose(1, 2), pairs(), "each block of dst must be contiguous"),
        (KV[0, 0, 0], KV[0, 0, 0], pairs(), r"src must be \[num_blocks, ...\], found \[8\]"),
        (KV, KV, pairs().int(), "block_mapping must be Long"),
        (KV, KV, torch.zeros(3, dtype=torch.int64), r"block_mapping must have shape \[any, 2\], found \[3\]"),
        (
            KV,
            KV,
            torch.zeros(2, 3, dtype=torch.int64),
            r"block_mapping must have shape \[any, 2\], found \[2, 3\]",
        ),
        (KV, KV, torch.zeros(2, 3, dtype=torch.int64).t()[:, :2], "block_mapping must be contiguous"),
        (KV[:1].expand(4, -1, -1, -1), KV, pairs(), "the blocks of src overlap in memory"),
    ],
)
def test_swap_errors(src: Tensor, dst: Tensor, mapping: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^swap_blocks: {message}"):
        ops.swap_blocks(src, dst, mapping)


def test_copy_errors() -> None:
    with pytest.raises(RuntimeError, match=r"^copy_blocks: key_cache has 4 blocks and value_cache 2$"):
        ops.copy_blocks(KV, KV[:2], pairs())
    with pytest.raises(RuntimeError, match=r"^copy_blocks: each block of value_cache must be contiguous"):
        ops.copy_blocks(KV, KV[:, :, :8], pairs())
