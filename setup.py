"""Builds the CPU kernels as an optional extension; metadata lives in pyproject.toml.

PAGED_ATTN_BUILD_CPP=auto (default) installs pure Python with a warning when the build fails, 1
makes that an error, 0 does not try. The extension uses only the libtorch stable ABI: one library
serves every supported torch and Python.
"""

import os
import platform
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import setup

WANTED = os.environ.get("PAGED_ATTN_BUILD_CPP", "auto")
TORCH_2_11 = "0x020b000000000000"

SOURCES = [*map(str, sorted(Path("csrc/ops").glob("*.cpp"))), "csrc/core/schedule.cpp"]
SOURCES += ["csrc/core/backward_plan.cpp", "csrc/dispatch.cpp", "csrc/engines.cpp"]

# the processor that it is for: Python's own variable says of which system a cross-compiler builds
MACHINE = os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine()).rpartition("-")[2]

# One object per ISA, csrc/isa/<name>.cpp, with flags of its own; dispatch.cpp picks at run time.
ISA_FLAGS = {"generic": []}
if MACHINE in ("aarch64", "arm64"):
    ISA_FLAGS |= {"neon": [], "neon_bf16": ["-march=armv8.2-a+bf16"]}
elif MACHINE in ("x86_64", "AMD64"):
    ISA_FLAGS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    ISA_FLAGS["avx512"] = ISA_FLAGS["avx2"] + [
        f"-mavx512{part}" for part in ("f", "bw", "vl", "dq")
    ]
    ISA_FLAGS["avx512bf16"] = [*ISA_FLAGS["avx512"]]
    ISA_FLAGS["avx512bf16"] += [f"-mavx512{part}" for part in ("bf16", "vbmi", "vnni")]
    ISA_FLAGS["amx"] = [*ISA_FLAGS["avx512bf16"], "-mamx-tile", "-mamx-bf16"]
KERNEL_FLAGS = ["-O3", "-g0", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions"]
KERNEL_FLAGS += ["-fno-rtti", "-ffp-contract=fast", "-fno-math-errno"]
# GCC's own header leaves the unused half of a reduction undefined
KERNEL_FLAGS += ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
EXTRA_FLAGS = os.environ.get("PAGED_ATTN_EXTRA_CFLAGS", "").split()


def extension_options() -> dict:
    from setuptools.errors import CompileError, LinkError
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    # a compiler that is missing, refuses to say its version, fails to compile, fails to link
    failures = (OSError, subprocess.SubprocessError, CompileError, LinkError, RuntimeError)

    class BuildKernels(BuildExtension):
        """Compiles the torch-free ISA files apart from the rest, each with flags of its own."""

        def build_extensions(self) -> None:
            self.compile_plain = self.compiler.compile
            self.compiler.compile = self.compile_at_once
            try:
                super().build_extensions()
            except failures as error:
                if WANTED == "1":
                    raise
                self.extensions.clear()
                warnings.warn(
                    f"torch-paged-attn: the CPU kernels were not built ({error}); installing"
                    " without them. PAGED_ATTN_BUILD_CPP=1 makes this an error.",
                    stacklevel=1,
                )

        def build_extension(self, extension) -> None:
            def compile_isa(isa: str) -> list[str]:
                return self.compile_plain(
                    [f"csrc/isa/{isa}.cpp"],
                    output_dir=self.build_temp,
                    extra_postargs=[*KERNEL_FLAGS, *ISA_FLAGS[isa], *EXTRA_FLAGS],
                )

            # compilers are processes: a thread for each, those that take longest first
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                compiling = {isa: threads.submit(compile_isa, isa) for isa in reversed(ISA_FLAGS)}
            without = {isa: error for isa, c in compiling.items() if (error := c.exception())}
            if "avx512bf16" in without:  # whose table amx.cpp needs
                without.setdefault("amx", without["avx512bf16"])
            for error in without.values():
                if WANTED == "1" or "generic" in without or not isinstance(error, failures):
                    raise error
            for isa, error in without.items():
                extension.define_macros.append((f"PAGED_ATTN_WITHOUT_{isa}", "1"))
                warnings.warn(
                    f"torch-paged-attn: no kernels for {isa}, which this compiler does not build"
                    f" ({error}); PAGED_ATTN_BUILD_CPP=1 makes this an error.",
                    stacklevel=1,
                )
            for isa in compiling.keys() - without.keys():
                extension.extra_objects += compiling[isa].result()
            super().build_extension(extension)

        def compile_at_once(self, sources, **options) -> list[str]:
            """As many files at once as there are cores; setuptools compiles one by one."""
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                objects = threads.map(lambda path: self.compile_plain([path], **options), sources)
            return [path for paths in objects for path in paths]

    flags = [
        "-O2",
        "-g0",
        "-fvisibility=hidden",
        "-DTORCH_STABLE_ONLY",
        f"-DTORCH_TARGET_VERSION={TORCH_2_11}",
    ]
    extension = CppExtension(
        "torch_paged_attn._C",
        SOURCES,
        depends=[str(path) for path in Path("csrc").rglob("*.*")],
        py_limited_api=True,
        extra_compile_args={"cxx": [*flags, *EXTRA_FLAGS]},
        extra_link_args=EXTRA_FLAGS,
    )
    build_ext = BuildKernels.with_options(use_ninja=False)
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": build_ext, "bdist_wheel": wheel_for_every_python()},
    }


def wheel_for_every_python() -> type:
    """The command that makes a wheel: the library needs torch, and nothing of Python."""
    try:
        from setuptools.command.bdist_wheel import bdist_wheel
    except ImportError:  # before setuptools 70.1
        from wheel.bdist_wheel import bdist_wheel

    class Wheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    return Wheel


def options() -> dict:
    if WANTED == "0":
        return {}
    try:
        return extension_options()
    except ImportError as error:
        if WANTED == "1":
            raise
        warnings.warn(
            f"torch-paged-attn: no torch to build the CPU kernels with ({error}); installing"
            " without them. Install with --no-build-isolation to use this environment's torch.",
            stacklevel=1,
        )
        return {}


if not (find_spec("setuptools.command.bdist_wheel") or find_spec("wheel")):
    raise SystemExit(
        "torch-paged-attn: this setuptools builds wheels only with the package wheel beside it;"
        " pip install wheel, or pip install 'setuptools>=77'"
    )
setup(license="Apache-2.0", **options())
