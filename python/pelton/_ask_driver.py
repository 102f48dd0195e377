"""Asks the NVIDIA driver which GPUs a CUDA program would see, and prints the answer as JSON.

It runs as a program of its own (``python -I -S _ask_driver.py``), never in the process that asks: `cuInit` fixes
CUDA_VISIBLE_DEVICES for a process and makes CUDA unusable in its forks, and a broken driver may hang or crash. No
context is created, so no GPU memory is taken.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

# Under WSL the driver lies in a folder that the loader does not know.
LIBRARIES = ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")
NO_DEVICE = 100
MAJOR, MINOR = 75, 76  # attributes: compute capability


def ask() -> dict[str, object]:
    """`driver`: the CUDA version that the driver supports, empty when there is none; `library`: its file; `gpus`; `note`:
    what went wrong."""
    for library in LIBRARIES:
        try:
            cuda = ctypes.CDLL(library)
            break
        except OSError:
            continue
    else:
        return {"driver": "", "library": "", "gpus": [], "note": f"{LIBRARIES[0]} is not there"}
    path = mapped(library)
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)):
        return {"driver": "", "library": path, "gpus": [], "note": "the driver does not tell its version"}
    answer: dict[str, object] = {
        "driver": f"{number.value // 1000}.{number.value % 1000 // 10}",
        "library": path,
        "gpus": [],
        "note": "",
    }
    status = cuda.cuInit(0)
    if status == NO_DEVICE:
        return answer
    if status:
        return {**answer, "note": f"cuInit answers {status} ({error_name(cuda, status)})"}
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    gpus = []
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
        cuda.cuDeviceGetName(name, 255, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        gpus.append(
            {
                "arch": f"sm_{major.value}{minor.value}",
                "name": name.value.decode(errors="replace"),
                "memory": memory.value,
            }
        )
    return {**answer, "gpus": gpus}


def mapped(library: str) -> str:
    """The file that was loaded under a name."""
    name = library.rpartition("/")[2].partition(".so")[0]
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        paths = [line.split(None, 5)[5] for line in lines if f"/{name}.so" in line]
    except (OSError, IndexError):
        paths = []
    return paths[0] if paths else library


def error_name(cuda: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(text))
    return (text.value or b"unknown").decode(errors="replace")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(ask()) + "\n")
