"""The emulation of GPU kernels: what it computes is what a GPU computes, and each kind of mistake is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from emulated import Cases, emulated_folder

FOLDER = emulated_folder()
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="PELTON_LIBRARY names no emulated build (nox -s emulate)"
)

ORDERS = ["forward", "reverse", "shuffled:1", "shuffled:2"]


@pytest.fixture(scope="module")
def cases() -> Cases:
    assert FOLDER is not None
    return Cases(FOLDER)


@pytest.fixture(autouse=True)
def plain_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PELTON_EMULATION_ORDERS", raising=False)
    monkeypatch.delenv("PELTON_EMULATION_WAVE", raising=False)


def values(count: int = 64) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


# --- mistakes -------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[str, ...]] = {
    # name of the kernel: what its error says, whatever the order of the threads
    "missing_barrier": ("race: this thread", "4 bytes of static shared memory", "with no barrier between"),
    "missing_second_barrier": ("race: this thread", "4 bytes of static shared memory", "with no barrier between"),
    "histogram_read_too_early": ("race: this thread", "4 bytes of static shared memory", "with no barrier between"),
    "syncwarp_for_two_warps": ("race: this thread", "with no barrier between"),
    "exchange_without_syncwarp": ("race: this thread", "with no barrier between"),
    "early_return": ("divergent barrier", "__syncthreads() at tests/emulation/cases.cu:", "has returned"),
    "barrier_in_a_branch": ("divergent barrier", "waits in __syncthreads() at", ", and others in __syncthreads() at"),
    "divergent_shuffle": ("divergent warp operation", "__shfl_xor_sync", "waits in __syncthreads()"),
    "two_operations": ("divergent warp operation", "__ballot_sync", "__shfl_xor_sync"),
    "inactive_lane": ("__shfl_sync: reads lane 20, which is inactive", "0x0000ffff"),
    "lane_that_returned": ("__shfl_sync: reads lane 7, which is inactive",),
    "tree_over_missing_lanes": ("__shfl_xor_sync: reads lane", "which is inactive"),
    "mask_without_itself": ("__shfl_sync: the mask 0xfffffffe does not name the calling lane, 0",),
    "uninitialised_static": ("uninitialised shared memory", "4 bytes of static shared memory", "thread (63,0,0) of"),
    "uninitialised_dynamic": ("uninitialised shared memory: this thread reads 4 bytes of dynamic shared memory",),
    "uninitialised_in_the_second_block": ("uninitialised shared memory", "block (1,0,0) of (2,1,1)"),
    "past_static": ("out of bounds: index 64 of an array", "float [64]"),
    "past_dynamic": ("out of bounds", "writes 4 bytes 0 bytes past the end of 'dynamic shared memory' (256 bytes)"),
    "before_dynamic": ("out of bounds", "writes 4 bytes 4 bytes before the start of 'dynamic shared memory'"),
    "far_past_dynamic": ("out of bounds", "past the end of 'dynamic shared memory' (256 bytes)"),
    "read_before_wait": ("cp.async not waited for: this thread reads 4 bytes of static shared memory",),
    "waits_for_the_wrong_group": ("cp.async not waited for: this thread reads 4 bytes of static shared memory",),
    "waits_without_a_barrier": ("race: this thread", "with no barrier between"),
    "copies_into_what_is_read": ("race: this thread", "with no barrier between"),
    "misaligned": ("misaligned access", "must be a multiple of 16", "'in'"),
    "null_pointer": ("an access through a null pointer",),
    "division_by_zero": ("integer division by zero",),
    "others_local_variable": ("reads 4 bytes of a local variable of thread (0,0,0)",),
    "everybody_writes_one": ("race: this thread writes 4 bytes of global memory, at byte 0 of 'out'", "wrote"),
    "blocks_write_one": ("race between blocks", "writes 4 bytes", "'out'", "wrote, and blocks have no order"),
    "block_reads_the_one_before": ("race between blocks", "4 bytes of global memory", "and blocks have no order"),
    "last_block_without_fence": ("race between blocks: this thread reads 4 bytes", "'out'"),
    "mma_by_some_lanes": ("mma.sync.m16n8k16 needs all 32 lanes",),
    "ldmatrix_misaligned": ("misaligned ldmatrix", "multiple of 16"),
    "wmma_different_halves": ("wmma_f32_16x16x16: lane 16 brings another A or B than lane 0",),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(cases: Cases, name: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every order of the threads: a finding does not hang on the luck of one."""
    monkeypatch.setenv("PELTON_EMULATION_ORDERS", order)
    with pytest.raises(RuntimeError) as caught:
        cases.run(name, values(1024 if name.startswith(("mma", "ld", "wmma")) else 64))
    text = str(caught.value)
    assert text.startswith(f"{name}, block (")
    assert order == "forward" or f"order {order}" in text
    for part in MISTAKES[name]:
        assert part in text


def test_the_error_says_where(cases: Cases) -> None:
    with pytest.raises(RuntimeError, match=r"thread \(1,0,0\).* \[tests/emulation/cases.cu:\d+\]"):
        cases.run("everybody_writes_one", values(), 1)


REFUSED = {
    "too_many_threads": "nothing: a block must have 1 to 1024 threads, at most 64 in z, found (32,33,1)",
    "no_block": "nothing: a grid must have 1 to 2147483647 blocks in x and 1 to 65535 in y and z, found (1,0,1)",
    "too_many_blocks": "nothing: a grid must have 1 to 2147483647 blocks in x and 1 to 65535 in y and z, found "
    "(1,65536,1)",
    "too_much_shared": "nothing: 50000 bytes of dynamic shared memory are more than the 49152 that the kernel may use",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_launches_that_no_gpu_takes_are_refused(cases: Cases, name: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        cases.run(name, values())
    assert str(caught.value).startswith(REFUSED[name])


def test_a_block_must_not_wait_for_a_later_one(cases: Cases) -> None:
    with pytest.raises(RuntimeError, match=r"waits without end.*blocks run one after another"):
        cases.run("waits_for_a_later_block", values(2), 1)


@pytest.mark.parametrize(
    ("name", "at_end", "says"),
    [
        ("reads_past", True, ("out of bounds", "0 bytes past the end of 'in' (256 bytes)", "reads_past", "thread (63,0,0)")),
        ("writes_past", True, ("out of bounds", "0 bytes past the end of 'out' (256 bytes)", "writes_past")),
        ("reads_before", False, ("out of bounds", "4 bytes before the start of 'in' (256 bytes)", "thread (0,0,0)")),
        ("writes_before", False, ("out of bounds", "4 bytes before the start of 'out' (256 bytes)")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("orders", ["forward", "forward,reverse"])
def test_accesses_outside_of_a_buffer_are_named(
    cases: Cases, name: str, at_end: bool, says: tuple[str, ...], orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PELTON_EMULATION_ORDERS", orders)
    with pytest.raises(RuntimeError) as caught:
        cases.run(name, values(), at_end=at_end)
    for part in (*says, "tests/emulation/cases.cu:"):
        assert part in str(caught.value)


def test_the_result_must_not_depend_on_the_order(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of floats by atomics has no race; only runs in several orders show that it is not determined."""
    given = 10.0 ** torch.linspace(-6, 6, 64)
    cases.run("sum_by_atomics", given, 1)
    monkeypatch.setenv("PELTON_EMULATION_ORDERS", "forward,reverse")
    with pytest.raises(RuntimeError, match=r"depends on the order of threads: .*'out'.*forward.*reverse"):
        cases.run("sum_by_atomics", given, 1)


def test_a_mistake_is_reported_once(cases: Cases) -> None:
    with pytest.raises(RuntimeError, match="race"):
        cases.run("missing_barrier", values())
    assert torch.equal(cases.run("neighbour", values()), values().roll(-1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PELTON_EMULATION_ORDERS", "backward"),
        ("PELTON_EMULATION_ORDERS", "forward,"),
        ("PELTON_EMULATION_ORDERS", "shuffled"),
        ("PELTON_EMULATION_WAVE", "16"),
        ("PELTON_EMULATION_WAVE", "32x"),
    ],
)
def test_bad_settings_are_refused(
    cases: Cases, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"{name} must .* found {value}"):
        cases.run("neighbour", values())


# --- what is right --------------------------------------------------------------------------------------------


def histogram(x: Tensor) -> Tensor:
    return torch.stack([(x.int() % 8 == i).sum() for i in range(8)]).float()


def swap_halves(x: Tensor) -> Tensor:
    """Lanes 0 to 15 exchange with their neighbours once, the others three times."""
    return x.view(-1, 2).flip(1).flatten()


def zero_fourth(x: Tensor) -> Tensor:
    """The fourth copy has been told to copy nothing."""
    made = x.clone()
    made[12:16] = 0
    return made


RIGHT: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "neighbour": (values(), lambda x: x.roll(-1)),
    "dynamic_in_order": (values(), lambda x: x.flip(0)),
    "histogram": (torch.arange(64.0) ** 2 % 100, histogram),
    "halves_apart": (values(32), swap_halves),
    "exchange_through_shared": (values(), lambda x: x.view(-1, 2).flip(1).flatten()),
    "copied": (values(), zero_fourth),
    "doubled": (values(100), lambda x: 2 * x),
}


@pytest.mark.parametrize("wave", ["32", "64"])
@pytest.mark.parametrize("orders", [*ORDERS, ",".join(ORDERS)])
@pytest.mark.parametrize("name", RIGHT)
def test_kernels_without_mistakes_pass(
    cases: Cases, name: str, orders: str, wave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PELTON_EMULATION_ORDERS", orders)
    monkeypatch.setenv("PELTON_EMULATION_WAVE", wave)
    given, reference = RIGHT[name]
    want = reference(given)
    assert torch.equal(cases.run(name, given, want.numel()), want)


def test_reductions(cases: Cases) -> None:
    x = torch.arange(64.0)
    assert torch.equal(cases.run("sum_of_a_warp", x), x.view(2, 32).sum(1).repeat_interleave(32))


def test_a_wrong_reduction_tree_gives_a_wrong_sum(cases: Cases) -> None:
    x = torch.arange(64.0)
    got = cases.run("wrong_tree", x)
    assert not torch.equal(got, x.view(2, 32).sum(1).repeat_interleave(32))
    assert torch.equal(got, x.view(2, 16, 2).sum(1, keepdim=True).expand(2, 16, 2).flatten())


def test_barriers_that_count(cases: Cases) -> None:
    x = values()
    count = int((x > 0).sum())
    assert 0 < count < 64
    assert cases.run("counting_barriers", x).tolist() == [count + 1000.0] * 64
    assert cases.run("counting_barriers", x.abs() + 1).tolist() == [64 + 11000.0] * 64
    assert cases.run("counting_barriers", -x.abs() - 1).tolist() == [0.0] * 64


def test_operations_of_a_warp(cases: Cases) -> None:
    x = (values(32) * 3).round()
    got = cases.run("votes", x, 32 * 8).view(32, 8)
    ballot = sum(1 << i for i in range(32) if x[i] > 0)
    lanes = torch.arange(32)
    want = torch.stack(
        [
            torch.full((32,), float(ballot & 0xFFFF)),
            torch.full((32,), float(ballot >> 16)),
            (x.view(-1, 1) == x).sum(1).float(),
            torch.full((32,), 496.0),
            torch.full((32,), 31.0),
            x[torch.where(lanes < 3, lanes, lanes - 3)],
            x[torch.where(lanes % 8 + 3 > 7, lanes, lanes + 3)],
            torch.full((32,), 1.0),
        ],
        dim=1,
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("wave", [32, 64])
def test_waves(cases: Cases, wave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's names work on the lanes of a wave, 64 of them on CDNA."""
    monkeypatch.setenv("PELTON_EMULATION_WAVE", str(wave))
    x = values()
    got = cases.run("wave", x, 64 * 4).view(64, 4)
    waves = x.view(-1, wave)
    assert got[:, 0].tolist() == [float(wave)] * 64
    assert torch.equal(got[:, 1], (waves > 0).sum(1).float().repeat_interleave(wave))
    assert torch.equal(got[:, 2], waves[:, -1].repeat_interleave(wave))
    assert torch.equal(got[:, 3], x.view(-1, 2).flip(1).flatten())


def test_the_last_block_sees_what_all_have_written(cases: Cases) -> None:
    x = values(4)
    torch.testing.assert_close(cases.run("last_block", x, 6)[0], x.sum())


# --- matrices -------------------------------------------------------------------------------------------------


def product(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A, B and C one after another as a kernel takes them, and A B + C in float64."""
    generator = torch.Generator().manual_seed(m * n * k)
    a, b = (torch.randn(shape, generator=generator).to(dtype).float() for shape in ((m, k), (k, n)))
    c = torch.randn(m, n, generator=generator)
    return torch.cat([a.flatten(), b.flatten(), c.flatten()]), a.double() @ b.double() + c.double()


MATRICES = {
    "mma_f16": (16, 8, 16, torch.float16, "32"),
    "mma_bf16": (16, 8, 16, torch.bfloat16, "32"),
    "mma_through_shared": (16, 8, 16, torch.float16, "32"),
    "mfma_16_f16": (16, 16, 16, torch.float16, "64"),
    "mfma_16_bf16": (16, 16, 16, torch.bfloat16, "64"),
    "mfma_32_f16": (32, 32, 8, torch.float16, "64"),
    "mfma_32_bf16": (32, 32, 8, torch.bfloat16, "64"),
    "wmma_f16": (16, 16, 16, torch.float16, "32"),
    "wmma_bf16": (16, 16, 16, torch.bfloat16, "32"),
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrix_operations_are_products(cases: Cases, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k, dtype, wave = MATRICES[name]
    monkeypatch.setenv("PELTON_EMULATION_WAVE", wave)
    given, want = product(m, n, k, dtype)
    got = cases.run(name, given, m * n).view(m, n)
    assert torch.equal(got, want.float())


def test_a_wrong_fragment_gives_a_wrong_product(cases: Cases) -> None:
    given, want = product(16, 8, 16, torch.float16)
    got = cases.run("mma_wrong_fragment", given, 128).view(16, 8)
    assert not torch.allclose(got, want.float(), atol=0.1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix(cases: Cases, count: int, transposed: bool) -> None:
    x = torch.arange(128.0)
    got = cases.run(f"ldmatrix_x{count}" + ("_transposed" if transposed else ""), x, count * 64)
    matrices = x.view(2, 8, 8)[:count]
    want = matrices.transpose(1, 2) if transposed else matrices
    assert torch.equal(got, want.flatten())


def test_fast_math_is_within_its_bound(cases: Cases) -> None:
    """e^x with the feature fast-math and without: the bounds that docs/features.md states."""
    x = torch.linspace(-80, 80, 1024)
    exact = x.double().exp()
    usual, fast = (
        (cases.run(name, x).double() / exact - 1).abs() for name in ("exponentials", "exponentials_fast")
    )
    assert (usual <= 2.0**-22).all()
    assert (fast <= 2.0**-21 + x.abs() * 2.0**-23).all()
    assert fast.max() > 8 * usual.max()  # or there would be nothing to switch
