"""Compiles Pallas Mosaic GPU kernels to code for Hopper (sm_90a) on a machine that has no GPU.

The compiler is a function of jax's CUDA plugin; all it wants of a GPU is a few calls of the driver,
which `cuda_driver_stub.c` answers. Needed beside jax, and of the same version as jax:

    pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION

a C compiler, and of the CUDA 13 toolkit `ptxas` and libdevice, from `pip install nvidia-cuda-nvcc
nvidia-nvvm` or installed on its own.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STUB = Path(__file__).parent / "cuda_driver_stub.c"


class MissingPartError(Exception):
    """Something of the compiler is not installed."""


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes."""

    registers: int  # of a thread
    spilled_bytes: int  # stored and loaded, of a thread
    shared_memory: int  # bytes of a block
    threads: int  # of a block


class Compiler:
    """Compiles the kernels of functions. Make one before the first use of jax, and one only.

    Raises:
        MissingPartError: naming the part that is not installed.
    """

    def __init__(self, cuda: Path | None = None):
        for module in ("jax_cuda13_plugin", "jax_plugins.xla_cuda13"):
            if not _installed(module):
                raise MissingPartError("jax-cuda13-plugin or jax-cuda13-pjrt")
        cuda = _cuda_toolkit() if cuda is None else cuda
        c_compiler = shutil.which("cc")
        if c_compiler is None:
            raise MissingPartError("a C compiler called cc")
        self._folder = tempfile.TemporaryDirectory(prefix="mosaic_gpu_")
        self._dump = Path(self._folder.name)
        runtime = Path(importlib.util.find_spec("jax_cuda13_plugin").submodule_search_locations[0])
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "MOSAIC_GPU_CUDA_ROOT": str(cuda),
            "MOSAIC_GPU_RUNTIME_LIB_PATH": str(runtime / "libmosaic_gpu_runtime.so"),
            "MOSAIC_GPU_DUMP_TO": str(self._dump),
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
        }
        driver = self._dump / "libcuda.so.1"
        subprocess.run(
            [c_compiler, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", driver, STUB], check=True
        )
        ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)

        from jax_plugins import xla_cuda13

        self._compile = ctypes.CDLL(str(xla_cuda13._get_library_path())).MosaicGpuCompile
        self._compile.argtypes, self._compile.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p

    def __call__(self, function: Callable, *arguments: Any) -> Resources:
        """Of the one kernel in `function`, for arguments that may be `jax.ShapeDtypeStruct`s.

        Raises:
            RuntimeError: if there is not just one kernel, or it does not compile.
        """
        import jax

        for old in self._dump.glob("*.*"):
            if old.suffix != ".1":
                old.unlink()
        kernels = list(_kernels(jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))))
        if len(kernels) != 1:
            raise RuntimeError(f"expected one Mosaic GPU kernel, the function has {len(kernels)}")
        if not self._compile(kernels[0], len(kernels[0])):
            raise RuntimeError("the kernel did not compile: see the message above")
        [report], [ptx], [sizes] = (
            list(self._dump.glob(pattern)) for pattern in ("*.ptxas", "*.ptx", "*.resources.txt")
        )
        text = report.read_text()
        stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text).groups()
        return Resources(
            registers=int(re.search(r"Used (\d+) registers", text)[1]),
            spilled_bytes=int(stores) + int(loads),
            shared_memory=int(re.search(r"smem_scratch_bytes=(\d+)", sizes.read_text())[1]),
            threads=int(re.search(r"\.maxntid (\d+)", ptx.read_text())[1]),
        )


def _kernels(lowered: Any) -> Iterator[bytes]:
    """The serialized module of each Mosaic GPU kernel in a lowered function."""

    def walk(operation: Any) -> Iterator[bytes]:
        for region in operation.regions:
            for block in region:
                for op in block:
                    if op.operation.name == "stablehlo.custom_call" and "mosaic_gpu" in str(
                        op.attributes["call_target_name"]
                    ):
                        yield op.attributes["mhlo.backend_config"]["module"].value_bytes
                    yield from walk(op.operation)

    return walk(lowered.compiler_ir("stablehlo").operation)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _cuda_toolkit() -> Path:
    places = ["/usr/local/cuda"]
    if _installed("nvidia.cu13"):
        places = [*importlib.util.find_spec("nvidia.cu13").submodule_search_locations, *places]
    for place in map(Path, places):
        if (place / "bin" / "ptxas").exists() and list(place.glob("nvvm/libdevice/*.bc")):
            return place
    raise MissingPartError("ptxas and libdevice of a CUDA 13 toolkit, in nvidia-cuda-nvcc or /usr/local/cuda")
