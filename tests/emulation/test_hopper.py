"""What sm_90 adds, in the emulation: barriers that count bytes, bulk copies, products of a warpgroup."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulated import Cases, emulated_folder

FOLDER = emulated_folder()
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="PELTON_LIBRARY names no emulated build (nox -s emulate)"
)

ORDERS = ["forward", "reverse", "shuffled:1", "shuffled:2"]
STATIC = "of static shared memory"

MISTAKES = {
    # What is said; a copy lands at once in the order `forward`, else as late as it can.
    "bulk_without_wait": rf"race: this thread (reads|writes) \d+ bytes {STATIC}.*(bulk copy wrote|read), with no barrier"
    rf"|bulk copy not waited for: this thread reads 4 bytes {STATIC}",
    "bulk_without_release": rf"race: this thread writes 16 bytes {STATIC}, which .* with no barrier between"
    "|more arrivals at a barrier than the 1 that it was initialised for, or bytes that never come",
    "bulk_without_syncwarp": rf"race: this thread writes 16 bytes {STATIC}, which thread .* read, with no barrier between",
    "bulk_with_too_few_bytes": rf"deadlock: .*waits for phase 0 of the barrier at {STATIC.removeprefix('of ')}: "
    "0 arrivals and 256 bytes are missing",
    "bulk_with_too_many_arrivals": "more arrivals at a barrier than the 1 that it was initialised for",
    "bulk_not_initialised": "a barrier that was not initialised",
    "named_barrier_with_too_few": "deadlock: .*waits at named barrier 3, where 32 of 96 threads have arrived; "
    ".*waits at named barrier 2, where 64 of 96 threads have arrived",
    "wgmma_without_fence": "wgmma reads what ordinary stores wrote: this thread reads 16 bytes of dynamic shared memory.*"
    r"and thread \(.*\) has not called fence_shared_stores after them",
}


@pytest.fixture(scope="module")
def cases() -> Cases:
    assert FOLDER is not None
    return Cases(FOLDER)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("PELTON_EMULATION_WAVE", raising=False)
    monkeypatch.setenv("PELTON_EMULATION_ORDERS", request.param)
    return str(request.param)


def values(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(cases: Cases, name: str, order: str) -> None:
    size = 8192 if name.startswith("wgmma") else 128
    with pytest.raises(RuntimeError, match=MISTAKES[name]) as caught:
        cases.run(name, values(size), 4096)
    assert order == "forward" or f"order {order}" in str(caught.value)


def test_copies_and_barriers(cases: Cases, order: str) -> None:
    x = values(128)
    assert torch.equal(cases.run("copied_in_bulk", x), x)
    assert torch.equal(cases.run("named_barriers", x[:64]), x[:64].flip(0))


def boxes_of(x: Tensor) -> Tensor:
    """What copies of boxes bring, and zeros around the tensor."""
    wide = torch.zeros(16, 200)
    wide[4:9, 64:136] = x.view(5, 72)
    return torch.stack(
        [wide[4 + 3 * i : 8 + 3 * i, 56 + 64 * j : 120 + 64 * j] for i in (0, 1) for j in (0, 1)]
    )


def test_boxes(cases: Cases, order: str) -> None:
    x = torch.arange(1.0, 361)
    assert torch.equal(cases.run("boxes", x, 1024), boxes_of(x).flatten())


@pytest.mark.parametrize("name", ["shared_f16", "shared_bf16", "registers_f16", "registers_rows_of_n_bf16"])
def test_products_of_a_warpgroup(cases: Cases, name: str, order: str) -> None:
    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float16
    x = values(8192).to(dtype).float()
    a, b = x.view(2, 64, 64).double()
    got = cases.run(f"wgmma_{name}", x, 4096).view(64, 64)
    torch.testing.assert_close(got.double(), a @ b.t(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["wgmma_without_wait", "wgmma_without_commit"])
def test_sums_that_were_not_waited_for_are_poison(cases: Cases, name: str, order: str) -> None:
    assert cases.run(name, values(8192), 4096).isnan().all()
