"""CUDA C++ in this folder to cubins, through NVRTC: no nvcc, no toolkit, no GPU needed.

A cubin is cached under ``$XDG_CACHE_HOME/kconvert/kernels`` (``~/.cache`` by default), keyed by the
compiler's version, the GPU architecture, the options and every source the kernel could include.
"""

import hashlib
import io
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent

# What ptxas -v says of one entry: "Function properties", then stack and spills, then "Used".
_RESOURCES = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(.*?)$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Resources:
    """What the assembler reports for a kernel. Bytes, except registers (a thread's)."""

    registers: int
    stack: int
    spills: int
    static_shared: int
    serialized: bool  # the assembler makes each warpgroup MMA wait for the one before
    wrong_copies: int  # copies that end in an illegal instruction, see _wrong_copies


def entry_of(kernel: str) -> str:
    """The one entry in ``<kernel>.cu``: "moe/w13" has moe_w13."""
    return kernel.replace("/", "_")


def compile_cubin(
    kernel: str, arch: str, defines: Mapping[str, int], report: bool = False
) -> tuple[bytes, str]:
    """Compile ``<kernel>.cu`` ("moe/w13") for ``arch`` ("sm_90a") with these macros.

    Returns the cubin and the compiler's log; with ``report`` the log holds the resource usage.
    Raises cuda.core's NVRTCError, whose text is the compiler's log, when the source does not build.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=f"{kernel}.cu",
        arch=arch,
        std="c++17",
        include_path=str(SOURCES),
        define_macro=[(name, str(value)) for name, value in sorted(defines.items())] or None,
        ptxas_options=["-v"] if report else None,
    )
    log = io.StringIO()
    program = Program((SOURCES / f"{kernel}.cu").read_text(), "c++", options)
    cubin = program.compile("cubin", logs=log).code
    return bytes(cubin), log.getvalue()


def resources(kernel: str, arch: str, defines: Mapping[str, int]) -> Resources:
    """Compile and read the assembler's report of the one kernel in the file."""
    cubin, log = compile_cubin(kernel, arch, defines, report=True)
    reports = _RESOURCES.findall(log)
    if len(reports) != 1:
        raise ValueError(f"{kernel}.cu for {arch}: expected one entry in the report, got:\n{log}")
    stack, stores, loads, registers, rest = reports[0]
    shared = re.search(r"(\d+) bytes smem", rest)
    return Resources(
        registers=int(registers),
        stack=int(stack),
        spills=int(stores) + int(loads),
        static_shared=int(shared.group(1)) if shared else 0,
        serialized="wgmma.mma_async instructions are serialized" in log,
        wrong_copies=_wrong_copies(cubin),
    )


def _wrong_copies(cubin: bytes) -> int:
    # NVRTC 13.0 encodes a cp.async with a cache hint (LDGSTS, 16 bytes) to an address that is a
    # lane's register plus a uniform one with uniform registers 0 and 1, whichever hold the values:
    # an H200 called that instruction illegal. Opcode and flags are as disassembled there.
    words = [int.from_bytes(cubin[i : i + 16], "little") for i in range(0, len(cubin) - 15, 16)]
    return sum(word & 0xFFF == 0xDAE and word >> 72 & 0xFFFFFF == 0x0B901C for word in words)


@cache
def sources_digest() -> str:
    """sha256 over the names and bytes of every kernel source, in hex."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.cu*")):
        name = path.relative_to(SOURCES).as_posix()
        digest.update(f"{name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _compiler() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def cached_cubin(kernel: str, arch: str, defines: Mapping[str, int]) -> bytes:
    """The cubin from the cache, compiled first if it is not there.

    Safe with several processes at once: a file appears whole, under its final name, or not at all.
    """
    options = " ".join(f"{name}={value}" for name, value in sorted(defines.items()))
    key = hashlib.sha256(f"{_compiler()} {sources_digest()} {kernel} {arch} {options}".encode())
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"{entry_of(kernel)}-{arch}-{key.hexdigest()[:32]}.cubin"
    path = Path(base) / "kconvert" / "kernels" / name
    if path.is_file():
        return path.read_bytes()
    cubin, _ = compile_cubin(kernel, arch, defines)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(cubin)
    os.replace(file.name, path)
    return cubin
