"""The twin of the `_host` extension in plain Python, for interpreters that the wheel has no extension for.

Same functions, same results; `pelton.host` chooses. Nothing of torch is needed.
"""

from __future__ import annotations

import sysconfig
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

__all__ = ["chain_block_hashes", "cpu_features", "module_info"]

CPUINFO = Path("/proc/cpuinfo")

# The flags that the extension reports, as Linux names them. Linux lists only what it lets programs use.
KNOWN_FLAGS = frozenset(
    "abm aes amx_bf16 amx_int8 amx_tile avx avx2 avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni "
    "avx512_vpopcntdq avx512bw avx512cd avx512dq avx512f avx512ifma avx512vbmi avx512vl avx_vnni bmi1 bmi2 cmov cx16 "
    "cx8 f16c fma fxsr gfni lahf_lm lm mmx movbe pclmulqdq pni popcnt sha_ni sse sse2 sse4_1 sse4_2 ssse3 vaes "
    "vpclmulqdq xsave".split()
)
_DIGEST = 16


def cpu_features() -> dict[str, str | list[str]]:
    """Vendor and usable flags of the first processor, from /proc/cpuinfo; empty where there is none.

    `off` (features whose registers the system does not save) is always empty: Linux does not list them.
    """
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return _parse_cpuinfo(text)


def _parse_cpuinfo(text: str) -> dict[str, str | list[str]]:
    entries: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            entries.setdefault(key.strip(), value.strip())
    flags = sorted(KNOWN_FLAGS.intersection(entries.get("flags", "").split()))
    return {"vendor": entries.get("vendor_id", ""), "flags": flags, "off": []}


def chain_block_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """BLAKE2b-128 of each full block of tokens, each over the hash before it and its own tokens as int64.

    Args:
        parent: what the first block follows: the hash of the block before it, or any salt.
        token_ids: int64 values; a last block that is not full has no hash.
        block_size: tokens of a block, at least 1. Raises ValueError below that.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, found {block_size}")
    hashes: list[bytes] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[start : start + block_size]).tobytes()
        parent = blake2b(parent + tokens, digest_size=_DIGEST).digest()
        hashes.append(parent)
    return hashes


def module_info() -> dict[str, str]:
    """What this implementation is: `implementation`, `python` (SOABI of the interpreter) and `compiler`."""
    return {"implementation": "twin", "python": sysconfig.get_config_var("SOABI") or "", "compiler": ""}
