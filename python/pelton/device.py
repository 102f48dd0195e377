"""Where the engine runs. The installed kernels decide: a library takes tensors of one kind of device alone."""

from __future__ import annotations

import re
from collections.abc import Callable

from .errors import HardwareMismatch, InvalidValueError, did_you_mean

__all__ = ["check_device_name", "choose_device", "runs_on_gpu"]

_GPU_BACKENDS = ("cuda", "rocm")  # torch calls the devices of both "cuda"
_NAMES = ("auto", "cpu", "cuda")


def check_device_name(wish: object) -> str:
    """The device option as a text: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InvalidValueError: anything else.
    """
    name = str(wish).strip()
    if name not in _NAMES and not re.fullmatch(r"cuda:\d{1,4}", name):
        nearest = " (did you mean 'cuda'?)" if name in ("gpu", "rocm", "hip") else did_you_mean(name, _NAMES)
        raise InvalidValueError(
            f"device must be 'auto', 'cpu', 'cuda' or a numbered GPU like 'cuda:1', found {wish!r}{nearest}"
        )
    return name


def runs_on_gpu(backend: str) -> bool:
    """Whether kernels of this backend take GPU tensors (those of the emulation are tested on the CPU)."""
    return backend in _GPU_BACKENDS


def choose_device(wish: str, backend: str, profile: str, count_gpus: Callable[[], int]) -> str:
    """The device, as torch names it, for the `device` option and the library's backend.

    1. "auto" is what the library has kernels for. 2. Any other wish must agree with that. 3. The GPU must be there;
    without a number it is the first.

    Args:
        profile: of the installed build, for messages; empty when it is not known.
        count_gpus: how many GPUs torch can use.

    Raises:
        InvalidValueError: the library has no kernels for that device, or there is no GPU of that number.
        HardwareMismatch: the library needs a GPU, and torch finds none.
    """
    has_gpu_kernels = runs_on_gpu(backend)
    build = f"this build of pelton ({f'profile {profile}, ' if profile else ''}backend {backend})"
    if wish != "auto" and (wish != "cpu") != has_gpu_kernels:
        has, other = (
            ("GPU", "cpu-avx2 or cpu-avx512")
            if has_gpu_kernels
            else ("CPU", "cuda-sm80, cuda-sm90 or rocm-*")
        )
        raise InvalidValueError(
            f"device={wish!r}: {build} has {has} kernels only. Leave device='auto', or install a wheel of profile "
            f"{other}: pip install --force-reinstall --no-deps --index-url INDEX/p/PROFILE/simple/ pelton   "
            "(INDEX: the address that pelton was installed from)"
        )
    if not has_gpu_kernels:
        return "cpu"
    found = count_gpus()
    if found == 0:
        raise HardwareMismatch(
            f"{build} does not fit this machine",
            found="no GPU that torch can use",
            needed=f"a {'ROCm' if backend == 'rocm' else 'CUDA'} GPU, its driver, and a torch built for it",
            install="check the driver (nvidia-smi, rocm-smi) and that torch.cuda.is_available() is True; or install a "
            "CPU build of pelton (profile cpu-avx2 or cpu-avx512)",
        )
    number = int(wish.partition(":")[2] or 0)
    if number >= found:
        last = f"cuda:0 to cuda:{found - 1}" if found > 1 else "cuda:0 alone"
        raise InvalidValueError(f"device={wish!r}: torch finds {found} GPU(s), {last}: choose one of these")
    return f"cuda:{number}"
