"""The block pool by itself."""

from __future__ import annotations

import pytest

from pelton.errors import CapacityError
from pelton.kv_cache import BlockPool, extend_block_hashes


def test_hashes_are_chained_and_of_full_blocks():
    hashes: list[bytes] = []
    extend_block_hashes(hashes, [1, 2, 3, 4, 5], 2)
    assert len(hashes) == 2
    again = list(hashes)
    extend_block_hashes(again, [1, 2, 3, 4, 5, 6], 2)
    assert again[:2] == hashes and len(again) == 3
    whole: list[bytes] = []
    extend_block_hashes(whole, [1, 2, 3, 4, 5, 6], 2)
    assert whole == again and len(set(whole)) == 3
    other: list[bytes] = []
    extend_block_hashes(other, [9, 9, 3, 4], 2)
    assert other[1] != hashes[1]  # the same block after another beginning


def test_allocation_order():
    pool = BlockPool(6)
    assert [pool.allocate() for _ in range(5)] == [1, 2, 3, 4, 5]
    for block in (1, 2, 3):
        pool.commit(block, bytes([block]))
    pool.release([1, 2, 3, 4])
    pool.release([5])
    # what holds nothing goes first, then the cached tail
    assert [pool.allocate() for _ in range(5)] == [5, 4, 3, 2, 1]
    assert pool.num_cached == 0 and pool.num_free == 0


def test_a_hit_leaves_the_free_list_and_keeps_its_contents():
    pool = BlockPool(4)
    block = pool.allocate()
    pool.commit(block, b"a")
    pool.release([block])
    assert pool.match([b"a", b"b"], 2) == [block] and pool.num_free_in([block]) == 1
    pool.share([block])
    assert pool.num_free == 2 and pool.num_free_in([block]) == 0
    pool.share([block])
    pool.release([block])
    assert pool.ref_count(block) == 1
    assert block not in [pool.allocate() for _ in range(2)]
    assert pool.match([b"a"], 1) == [block]


def test_of_two_blocks_with_one_content_the_first_is_known():
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.commit(first, b"a")
    pool.commit(second, b"a")
    pool.release([second])
    assert pool.allocate() == second and pool.match([b"a"], 1) == [first]


def test_without_caching_nothing_is_found():
    pool = BlockPool(4, enable_prefix_caching=False)
    pool.commit(pool.allocate(), b"a")
    assert pool.match([b"a"], 1) == []


def test_reset_forgets():
    pool = BlockPool(4)
    pool.commit(pool.allocate(), b"a")
    pool.reset()
    assert pool.num_free == 3 and pool.match([b"a"], 1) == []


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_needs_a_block_beside_the_null_block(num_blocks):
    with pytest.raises(CapacityError, match="kv_cache_memory"):
        BlockPool(num_blocks)
