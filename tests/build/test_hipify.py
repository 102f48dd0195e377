"""CUDA sources as HIP sources, and the plan of the emulated library."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pelton_build.emulation import emulated_sources
from pelton_build.hipify import HipifyError, hipified_name, hipify_text, main, with_headers
from pelton_build.table import load_table, parse_table

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """#include <cuda_runtime.h>
#include "../common/gpu.cuh"

template <class T>
__global__ void scale(T* x, int n) {
  if (threadIdx.x < n) x[threadIdx.x] *= 2;
}

int launch(float* x, int n, void* stream) {
  scale<float><<<1, 32, 0, cudaStream_t(stream)>>>(x, n);
  return int(cudaGetLastError());
}
"""


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    return Path(spec.origin).parent


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernels" / "scale" / "gpu.cu"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("quant/marlin/gpu.cu", "quant/marlin/gpu.hip"),
        ("norm/gpu.cu", "norm/gpu.hip"),
        ("common/gpu.cuh", "common/gpu.cuh"),
        ("common/gpu.h", "common/gpu.h"),
        ("a.cu.b/x.cu", "a.cu.b/x.hip"),
    ],
)
def test_names(path: str, name: str) -> None:
    assert hipified_name(path) == name


def test_a_source_becomes_hip(source: Path) -> None:
    made = hipify_text(source, "kernels/scale/gpu.cu", torch_folder())
    for part in (
        "hip/hip_runtime.h",
        "hipLaunchKernelGGL(( scale<float>), dim3(1), dim3(32), 0,",
        "hipGetLastError",
    ):
        assert part in made
    assert "cuda" not in made.lower().replace("from kernels/scale/gpu.cu", "")
    assert '#include "../common/gpu.cuh"' in made, "includes between sources must hold as they are"


def test_lines_keep_their_numbers(source: Path) -> None:
    head, _, body = hipify_text(source, "kernels/scale/gpu.cu", torch_folder()).partition(
        '#line 1 "kernels/scale/gpu.cu"\n'
    )
    assert head.startswith("// Made from kernels/scale/gpu.cu")
    assert str(source.parent) not in head + body
    theirs, ours = body.split("\n"), SOURCE.split("\n")
    assert len(theirs) == len(ours)
    assert theirs[4] == ours[4]  # the kernel's first line


def test_the_same_source_makes_the_same_output(source: Path, tmp_path: Path) -> None:
    """Many at once, as a build runs them: each output is whole."""
    torch = torch_folder()
    want = hipify_text(source, "x.cu", torch)
    command = [
        sys.executable,
        "-m",
        "pelton_build",
        "hipify",
        "--torch",
        str(torch),
        "--name",
        "x.cu",
        str(source),
    ]
    outputs = [tmp_path / "out" / f"{i % 2}.hip" for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for done in pool.map(
            lambda output: subprocess.run([*command, str(output)], cwd=ROOT / "python", check=False), outputs
        ):
            assert done.returncode == 0
    assert [path.read_text(encoding="utf-8") for path in sorted(set(outputs))] == [want, want]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["0.hip", "1.hip"]


def test_torch_is_not_imported(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pelton_build.hipify import main; status = main(sys.argv[1:]); "
        "sys.exit(status or ('torch' in sys.modules))"
    )
    arguments = ["--torch", str(torch_folder()), str(source), str(tmp_path / "made.hip")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT / "python", check=False)
    assert done.returncode == 0


def test_an_output_is_newer_than_its_source(source: Path, tmp_path: Path) -> None:
    """Also when it says the same as before, else a build would make it again and again."""
    output = tmp_path / "made.hip"
    arguments = ["--torch", str(torch_folder()), str(source), str(output)]
    assert main(arguments) == 0
    source.touch()
    assert main(arguments) == 0
    assert output.stat().st_mtime_ns >= source.stat().st_mtime_ns


def test_headers_are_followed(tmp_path: Path) -> None:
    files = {
        "a/gpu.cu": '#include <vector>\n#include "../b/x.cuh"\n#include "torch/y.h"\n',
        "b/x.cuh": '#pragma once\n  #  include "z.h"  // indented\n#include "../a/own.h"\n',
        "b/z.h": '#include "x.cuh"\n',
        "a/own.h": "",
        "a/other.cuh": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert with_headers(tmp_path, ["a/gpu.cu"]) == ("a/gpu.cu", "b/x.cuh", "b/z.h", "a/own.h")


def test_what_is_missing_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(HipifyError, match=r"none\.cu: cannot be read"):
        hipify_text(tmp_path / "none.cu", "none.cu", torch_folder())
    # In a process of its own: here a module that is loaded already would do.
    command = [
        sys.executable,
        "-m",
        "pelton_build",
        "hipify",
        "--torch",
        str(tmp_path),
        str(source),
        "made.hip",
    ]
    done = subprocess.run(command, cwd=ROOT / "python", check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{tmp_path} has no utils/hipify; --torch must be the folder of the torch package" in done.stderr
    assert "Traceback" not in done.stderr


TABLE = """
[library]
name = "pelton"
package = "pelton"
torch = "2.10"

[family.common]
support = true
op = ["op.cpp", { path = "graph.cpp", backends = ["cpu"] }]
cuda = ["gpu.cu"]

[family.norm]
op = ["norm/op.cpp"]
cpu = ["norm/cpu.cpp"]
cuda = ["norm/gpu.cu"]
rocm = ["norm/amd.cu"]

[family.amd]
op = ["amd/op.cpp"]
rocm = ["amd/gpu.cu"]

[family.gptq]
op = ["quant/gptq/op.cpp"]
cuda = ["quant/gptq/gpu.cu"]
rocm = ["quant/gptq/gpu.cu"]

[family.attention]
op = ["attention/op.cpp"]
cuda = ["attention/gpu.cu", { path = "attention/gpu_sm90.cu", archs = ["sm_90a"] }, { path = "attention/gpu_sm100.cu", archs = ["sm_100a"] }]

[family.linear]
op = ["linear/op.cpp"]
cpu = ["linear/cpu.cpp"]
instead.cuda = "torch"
"""


def test_emulated_are_the_gpu_sources_for_every_arch_and_for_hopper() -> None:
    sources = emulated_sources(parse_table(TABLE))
    assert sources.gpu == (
        "gpu.cu",
        "norm/gpu.cu",
        "norm/amd.cu",
        "amd/gpu.cu",
        "quant/gptq/gpu.cu",
        "attention/gpu.cu",
        "attention/gpu_sm90.cu",
    )
    assert sources.definitions == ("PELTON_HAS_SM90=1",)
    assert sources.op == ("op.cpp", "norm/op.cpp", "amd/op.cpp", "quant/gptq/op.cpp", "attention/op.cpp")
    assert [text.partition(" (")[0] for text in sources.left_out] == [
        "attention/gpu_sm100.cu",
        "family linear",
    ]


def test_every_gpu_family_is_emulated() -> None:
    table = load_table(ROOT)
    sources = emulated_sources(table)
    for family in table.families:
        device = (*family.device.get("cuda", ()), *family.device.get("rocm", ()))
        assert {source.path for source in device} <= set(sources.gpu), family.name
    assert not [text for text in sources.left_out if not text.startswith("family ")]
