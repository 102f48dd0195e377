"""The blocks of the KV cache: who owns which, and which hold something that can be used again.

Only numbers live here; the tensors are the runner's. A block is free (in the free list), or held by one or more
requests (its reference count). A full block is known under a chained hash of its tokens, all tokens before it
included, and keeps its contents when it becomes free: until it is handed out again, a request that starts with
the same tokens takes it back. The free list is in LRU order, with two refinements: a sequence's last blocks are
given up before its first ones (a prefix without its start is worth nothing), and blocks that hold nothing of
use are handed out before any that do.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pelton.errors import CapacityError
from pelton.host import chain_block_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["NULL_BLOCK", "BlockPool", "extend_block_hashes"]

#: Never handed to a request: padding in block tables points here.
NULL_BLOCK = 0

_ROOT = b"pelton"


def extend_block_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that are not in it yet.

    They are cryptographic, because a collision would silently give one request the context of another.
    """
    start = len(hashes) * block_size
    if len(token_ids) - start >= block_size:
        hashes.extend(chain_block_hashes(hashes[-1] if hashes else _ROOT, token_ids[start:], block_size))


class BlockPool:
    """Reference counts, the free list and the table of cached blocks.

    Args:
        num_blocks: blocks in the KV cache, the null block included.
        enable_prefix_caching: when false, nothing is ever found in the cache.
    """

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise CapacityError(
                f"the KV cache has {num_blocks} block(s), and one is the null block: raise kv_cache_memory"
            )
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """Forget everything: all blocks free, nothing cached."""
        self._ref_counts = [0] * self.num_blocks
        self._ref_counts[NULL_BLOCK] = 1
        self._hashes: list[bytes | None] = [None] * self.num_blocks
        self._cached: dict[bytes, int] = {}
        # OrderedDict, because a block found in the cache leaves from the middle of the list in O(1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def match(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Return the longest run of cached blocks for the first `limit` of `hashes` (takes no reference)."""
        found: list[int] = []
        if self.enable_prefix_caching:
            for key in hashes[:limit]:
                block_id = self._cached.get(key)
                if block_id is None:
                    break
                found.append(block_id)
        return found

    def num_free_in(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks lie in the free list (taking them leaves that many fewer to allocate)."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each block (cached free ones leave the free list)."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def allocate(self) -> int:
        """Hand out the block that was useless the longest; what it held is forgotten.

        The caller checks `num_free` first.
        """
        block_id, _ = self._free.popitem(last=False)
        key = self._hashes[block_id]
        if key is not None:
            del self._cached[key]
            self._hashes[block_id] = None
        self._ref_counts[block_id] = 1
        return block_id

    def commit(self, block_id: int, key: bytes) -> None:
        """Make a full block known under its hash. Of two blocks with one content the first stays known."""
        if self.enable_prefix_caching and key not in self._cached:
            self._cached[key] = block_id
            self._hashes[block_id] = key

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block of a sequence, its last block first."""
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            self._ref_counts[block_id] = count
            if count == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
