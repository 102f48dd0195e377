"""What the kernel tests share: dtypes and the comparison with float64."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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


def with_row_stride(x: Tensor, padding: int = 5) -> Tensor:
    """The same values with rows further apart; the gap holds NaN, which must not be read."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + padding), float("nan"), dtype=x.dtype)
    view = wide[..., : x.shape[-1]]
    view.copy_(x)
    return view
