"""Build the C library of CPU kernels, ``csrc``, while the package is installed.

Each instruction set is one file with its own compiler flags; which of them runs is decided on the
machine that runs it. One that the compiler does not know is left out. Without a compiler there is
no library, the install goes on, and products run through torch.

Both setup.py files use this: the one beside it and the one of the repository.
"""

import platform
from collections.abc import Sequence
from pathlib import Path

from setuptools import Extension
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError, PlatformError

COMMON_FLAGS = [
    "-std=c11",
    "-O3",
    "-fvisibility=hidden",
    # The bits of torch: no fused multiply-add. The other two let loops be vectorised.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]

AVX512 = [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512vnni",
    "-mprefer-vector-width=512",
]
ISA_FLAGS = {
    "x86_64": {
        "avx512bf16": [*AVX512, "-mavx512bf16"],
        "avx512vnni": AVX512,
        "avxvnni": ["-mavx2", "-mfma", "-mavxvnni"],
        "avx2": ["-mavx2", "-mfma"],
    },
    "aarch64": {"neondot": ["-march=armv8.2-a+dotprod"]},
}
CHOICE = "isa.c"
"""The file that chooses among the instruction sets; it is told which ones there are."""
MACHINE_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def native_extension(csrc: str, package: str) -> Extension:
    """The library ``package``/libmegabit_kernels.so.

    Args:
        csrc: folder of the C sources, relative to setup.py.
        package: that ships the library.
    """
    folder = Path(csrc)
    return Extension(
        f"{package}.libmegabit_kernels",
        sources=[str(path) for path in sorted(folder.glob("*.c"))],
        depends=[str(path) for path in sorted(folder.glob("*.h"))],
        optional=True,
    )


class AnyPython(bdist_wheel):
    """One wheel for every Python 3 of a platform, since the library is loaded through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BuildNative(build_ext):
    """Compiles a plain shared library, which no Python header or symbol is part of."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            self._build(ext)
        except (CompileError, LinkError, PlatformError):
            compiler = " ".join(getattr(self.compiler, "compiler", [])[:1]) or "no known compiler"
            self.warn(
                f"the native CPU kernels were not built ({compiler} failed): ternary products on "
                "the CPU run through torch, several times slower. Install gcc or clang, then this "
                "package once more."
            )

    def _build(self, ext: Extension) -> None:
        if self.compiler.compiler_type != "unix":
            raise PlatformError(f"{self.compiler.compiler_type} is neither gcc nor clang")
        machine = platform.machine().lower()
        flags = ISA_FLAGS.get(MACHINE_NAMES.get(machine, machine), {})
        sources = {Path(path).name: path for path in ext.sources}
        with_flags = {f"isa_{name}.c" for known in ISA_FLAGS.values() for name in known}
        plain = [path for name, path in sources.items() if name not in {*with_flags, CHOICE}]
        objects = self._compile(plain)
        found: list[tuple[str, str | None]] = []
        for name in flags:
            try:
                objects += self._compile([sources[f"isa_{name}.c"]], flags[name])
            except CompileError:
                self.warn(f"the compiler cannot build the kernels for {name}; they are left out")
            else:
                found.append((f"WITH_{name.upper()}", None))
        objects += self._compile([sources[CHOICE]], macros=found)
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(objects, target, extra_postargs=["-pthread"])

    def _compile(
        self,
        sources: list[str],
        flags: Sequence[str] = (),
        macros: Sequence[tuple[str, str | None]] = (),
    ) -> list[str]:
        return self.compiler.compile(
            sources,
            output_dir=self.build_temp,
            macros=list(macros),
            extra_postargs=[*COMMON_FLAGS, *flags],
        )
