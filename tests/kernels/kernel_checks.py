"""What the kernel tests share: dtypes, marks, and the comparison with float64."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pelton import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Where the loaded library takes tensors. ROCm devices are called cuda, too.
DEVICE = "cuda" if ops.backend() in ("cuda", "rocm") else "cpu"

# Tests of what one kind of library does. CPU kernels raise an error for an index that is out of range; GPU
# kernels leave it out, because a launch cannot wait for an answer.
cpu_kernels = pytest.mark.skipif(ops.backend() != "cpu", reason="for a library of CPU kernels")
gpu_kernels = pytest.mark.skipif(ops.backend() == "cpu", reason="for a library of GPU kernels")


def without_sm90() -> str:
    """Why kernels of sm_90 do not run here; empty when they do, on a GPU or in the emulation of one."""
    if ops.backend() == "emulation":
        chosen = os.environ.get("PELTON_EMULATION_ARCH")
        return "" if chosen == "sm_90" else "the emulation is of sm_90 when PELTON_EMULATION_ARCH says so"
    if ops.backend() != "cuda":
        return f"the loaded library's kernels are for {ops.backend()}, not CUDA"
    major, minor = torch.cuda.get_device_capability()
    return "" if (major, minor) == (9, 0) else f"the GPU has compute capability {major}.{minor}, not 9.0"


# Tests that need the GPU itself, its memory or its streams; not in emulation.
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="for a library whose kernels run on a GPU")


def field_cases() -> dict[str, Tensor]:
    """Inputs and results that other implementations gave."""
    return load_file(Path(__file__).parents[1] / "data" / "norm_act_rotary.safetensors", device=DEVICE)


def assert_rounded(got: Tensor, want: Tensor, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    """``got`` is ``want`` (float64) computed in float32 and rounded once to the dtype of ``got``.

    ``rtol`` and ``atol`` allow for the float32 arithmetic; half a unit in the last place of the
    dtype is added for the rounding. NaN and infinity must stand where ``want`` has them.
    """
    assert want.dtype is torch.float64
    assert got.shape == want.shape
    info = torch.finfo(got.dtype)
    overflows = want.abs() > info.max * (1 + info.eps / 2)
    want = torch.where(overflows, want.sign() * float("inf"), want)
    if got.dtype is not torch.float32:
        rtol += info.eps / 2
        atol = max(atol, info.smallest_normal * info.eps)
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol, equal_nan=True)


def random_quantized(
    out_features: int, in_features: int, bits: int, groups: int, zeros: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [out_features, in_features], scales and zero points [groups, out_features]; without `zeros` all of these
    are in the middle."""
    torch.manual_seed(out_features + in_features)
    q = torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8)
    scales = (torch.rand(groups, out_features) * 0.02 + 0.001).to(dtype)
    zero = torch.randint(0, 1 << bits, (groups, out_features), dtype=torch.uint8)
    return q, scales, zero if zeros else torch.full_like(zero, 1 << (bits - 1))


def with_row_stride(x: Tensor, padding: int = 5) -> Tensor:
    """The same values with rows further apart; the gap holds NaN, which must not be read."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + padding), float("nan"), dtype=x.dtype)
    view = wide[..., : x.shape[-1]]
    view.copy_(x)
    return view


def guarded(x: Tensor, margin: int = 512) -> tuple[Tensor, Tensor]:
    """A copy of ``x`` in the middle of a larger buffer, and that buffer, whose margins hold -77."""
    buffer = torch.full((x.numel() + 2 * margin,), -77, dtype=x.dtype)
    inside = buffer[margin : margin + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside, buffer


def assert_margins_untouched(buffer: Tensor, margin: int = 512) -> None:
    assert (buffer[:margin] == -77).all()
    assert (buffer[-margin:] == -77).all()
