"""Compiles the CPU kernels, or stops with one sentence; metadata lives in pyproject.toml.

PAGED_ATTN_BUILD_CPP: by default, instruction sets that the compiler does not know are left out with
a warning; 1 makes that an error; 0 builds a package without CPU kernels. PAGED_ATTN_BUILD_FOR: here
has the kernels that this machine's processor takes by itself; tests has those that it can run
besides, optimised little, and parses the others; all has every kernel, as a wheel for other
machines needs. With PAGED_ATTN_BUILD_CPP=1 the default is all, else here. `setup.py build_kernels`
compiles the kernels, which need no torch, while torch is still fetched; build_ext then takes their
objects.
PAGED_ATTN_TORCH names the folder of the torch whose headers are used; by default that of this
Python (`tools/build_backend` finds it in the environment that pip installs into). Only libtorch's
stable ABI is used: one library serves every supported torch and Python. Beside it is a small one of
Python's stable ABI that starts Triton's kernels, and needs no CUDA.
"""

import functools
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

WANTED = os.environ.get("PAGED_ATTN_BUILD_CPP", "auto")
OLDEST_TORCH, TORCH_2_11 = (2, 11), "0x020b000000000000"
LAUNCH = "torch_paged_attn._launch"
# the commands that compile
COMPILING = {"build_ext", "bdist_wheel", "editable_wheel", "build", "install", "develop"}

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
BUILD_FOR = os.environ.get("PAGED_ATTN_BUILD_FOR", "all" if WANTED == "1" else "here")
CPUINFO, PARSE = Path("/proc/cpuinfo"), "-fsyntax-only"


def runs_here(flags: list[str], named: str) -> bool:
    """Whether a processor with these features, as Linux names them, has what -m flags ask for."""
    wanted = {x[2:].replace("-", "") for x in flags}
    return wanted <= set(named.replace("_", "").split())


def level_of(isa: str, cpuinfo: str) -> list[str] | None:
    """The flag for kernels that the processor of `cpuinfo` does not take by itself; None if they
    are not needed: tests run them beside its best ones, and parse those that it cannot run.
    """
    named = re.search(r"^flags\s*: (.*)", cpuinfo, re.MULTILINE)
    if named is None:  # not x86-64: it may have everything
        return []
    run = [x for x, flags in ISA_FLAGS.items() if runs_here(flags, named[1])]
    # csrc/dispatch.cpp: some calls of the last ones are served by the others
    best = [x for x in run if x in ("avx512", "avx512bf16", "amx")] or run[-1:]
    if isa in best:
        return []
    return None if BUILD_FOR != "tests" else ["-O1"] if isa in run else [PARSE]


def levels_here() -> dict[str, list[str] | None]:
    """By instruction set, what PAGED_ATTN_BUILD_FOR adds to its flags; None: it is left out."""
    is_for_here = BUILD_FOR != "all" and CPUINFO.exists()
    return {x: level_of(x, CPUINFO.read_text()) if is_for_here else [] for x in ISA_FLAGS}


def without_macros(isas: set[str]) -> list[tuple[str, str]]:
    """What tells the operators that these instruction sets have no kernels."""
    return [(f"PAGED_ATTN_WITHOUT_{isa}", "1") for isa in sorted(isas)]


def kernel_sources() -> list[Path]:
    """What the objects of the instruction sets are made of, and by."""
    return [Path("setup.py"), *Path("csrc").rglob("*.*")]


def stop(missing: str) -> None:
    raise SystemExit(
        f"torch-paged-attn: cannot compile the CPU kernels: {missing}, or set"
        " PAGED_ATTN_BUILD_CPP=0 for a package without CPU kernels."
    )


def torch_folder() -> Path:
    """The installed package torch, which is not imported."""
    if not (folder := os.environ.get("PAGED_ATTN_TORCH")):
        spec = find_spec("torch")
        if spec is None or not spec.origin:
            stop("there is no torch to build with; install torch 2.11 or later first")
        folder = Path(spec.origin).parent
    found = re.search(r"__version__ = '(\d+)\.(\d+)", (Path(folder) / "version.py").read_text())
    if found is None or (int(found[1]), int(found[2])) < OLDEST_TORCH:
        stop(f"the torch in {folder} is too old; install torch 2.11 or later")
    return Path(folder)


def compiler() -> list[str]:
    """The compiler that setuptools will call."""
    asked = os.environ.get("CXX") or os.environ.get("CC")
    return shlex.split(asked or sysconfig.get_config_var("CXX") or "c++")


def generate_code(parsed: Path, flags: list[str], exported: str, **streams: int) -> None:
    """Replace an object of GCC's -flto by one of machine code, made by a process for each core:
    nearly all the time that a file of kernels takes. What these processes share with each other
    becomes local again, all but `exported`.
    """
    target = str(parsed.with_suffix(".whole.o"))
    options = [*flags, f"-flto={os.cpu_count()}", "-r", "-flinker-output=nolto-rel"]
    subprocess.run([*compiler(), *options, str(parsed), "-o", target], check=True, **streams)
    command = ["objcopy", f"--keep-global-symbol={exported}", target, str(parsed)]
    subprocess.run(command, check=True, **streams)
    Path(target).unlink()


@functools.cache
def works_in_parts() -> bool:
    """Whether this compiler does that, for a build of this machine's kernels on several cores."""
    if BUILD_FOR == "all" or EXTRA_FLAGS or os.cpu_count() == 1:
        return False
    with tempfile.TemporaryDirectory() as folder:
        target, flags = Path(folder, "probe.o"), ["-O1", "-fPIC", "-flto"]
        command = [*compiler(), *flags, "-c", "-x", "c++", "-", "-o", str(target)]
        try:
            subprocess.run(command, input=b"int x;", check=True, stderr=subprocess.DEVNULL)
            generate_code(target, flags, "x", stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            return False
    return True


def check_compiler() -> None:
    """Stop unless the compiler that setuptools will call compiles a line of C++."""
    cxx = compiler()
    command = [*cxx, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    done, program = None, "#include <vector>\n"
    try:
        done = subprocess.run(command, input=program, text=True, capture_output=True)
    except OSError:
        stop(f"there is no C++ compiler {cxx[0]!r}; install one (Debian: apt-get install g++)")
    if done is not None and done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        stop(f"{cxx[0]!r} does not compile C++20 ({reason}); install g++ 12 or later")


class BuildKernels(build_ext):
    """Compiles the torch-free ISA files apart from the rest, each with flags of its own."""

    def build_extensions(self) -> None:
        self.compile_plain = self.compiler.compile
        self.compiler.compile = self.compile_at_once
        super().build_extensions()

    def compile_isa(self, isa: str, level: list[str]) -> list[str]:
        """The object of an ISA: the one that is there if it was made of the same by the same."""
        flags = [*KERNEL_FLAGS, *ISA_FLAGS[isa], *level, *EXTRA_FLAGS]
        in_parts = PARSE not in level and works_in_parts()
        if in_parts:
            flags.append("-flto")
        made_by = repr([os.environ.get("CXX"), os.environ.get("CC"), *flags])
        target = Path(self.build_temp, f"csrc/isa/{isa}.o")
        told = target.with_suffix(".flags")
        if told.exists() and told.read_text() == made_by:
            if target.stat().st_mtime > max(path.stat().st_mtime for path in kernel_sources()):
                return [str(target)]
            told.unlink()
        source = f"csrc/isa/{isa}.cpp"
        objects = self.compile_plain([source], output_dir=self.build_temp, extra_postargs=flags)
        if in_parts:
            table = f"kernels_{isa}"
            generate_code(target, flags, f"_ZN10paged_attn{len(table)}{table}E")
        if target.exists():
            told.write_text(made_by)
        return objects

    def compile_kernels(self, levels: dict[str, list[str] | None]) -> dict[str, Future]:
        """Starts it, by a thread for each since compilers are processes; the longest come first."""
        with_level = {x: level for x, level in reversed(levels.items()) if level is not None}
        threads = ThreadPoolExecutor(os.cpu_count())
        return {x: threads.submit(self.compile_isa, x, level) for x, level in with_level.items()}

    def build_extension(self, extension: Extension) -> None:
        """The kernels and the operators, at once; what operators are told of kernels is known
        before, unless a compiler has not built some: then they are compiled again.
        """
        if extension.name == LAUNCH:
            return super().build_extension(extension)
        levels = levels_here()
        compiling = self.compile_kernels(levels)
        parsed = {isa for isa, level in levels.items() if level is None or PARSE in level}
        extension.define_macros += without_macros(parsed)
        compile_operators = self.compiler.compile

        def compile_both(sources: list[str], **options) -> list[str]:
            objects = compile_operators(sources, **options)
            without = self.not_built(compiling)
            if without:
                options["macros"] = [*(options.get("macros") or []), *without_macros(without)]
                objects = compile_operators(sources, **options)
            built = compiling.keys() - without - parsed
            return objects + [path for isa in sorted(built) for path in compiling[isa].result()]

        self.compiler.compile = compile_both
        try:
            super().build_extension(extension)
        finally:
            self.compiler.compile = compile_operators

    def not_built(self, compiling: dict[str, Future]) -> set[str]:
        """Waits for the kernels: the instruction sets that this compiler does not build."""
        without = {isa: error for isa, c in compiling.items() if (error := c.exception())}
        if "avx512bf16" in without:  # whose table amx.cpp needs
            without.setdefault("amx", without["avx512bf16"])
        for isa, error in without.items():
            is_needed = "generic" in without or without.keys() == compiling.keys()
            if WANTED == "1" or is_needed or not isinstance(error, CompileError):
                raise error
            warnings.warn(
                f"torch-paged-attn: no kernels for {isa}, which this compiler does not build"
                f" ({error}); PAGED_ATTN_BUILD_CPP=1 makes this an error.",
                stacklevel=1,
            )
        return set(without)

    def compile_at_once(self, sources: list[str], **options) -> list[str]:
        """Two objects of all C++ files, at once: most of what one takes are torch's headers."""
        if len(sources) == 1 or not all(path.endswith(".cpp") for path in sources):
            return self.compile_plain(sources, **options)
        halves = []
        for i in range(2):
            half = Path(self.build_temp, f"ops_{i}.cpp")
            half.parent.mkdir(parents=True, exist_ok=True)
            half.write_text("".join(f'#include "{path}"\n' for path in sources[i::2]))
            halves.append(str(half))
        options["include_dirs"] = [".", *(options.get("include_dirs") or [])]
        with ThreadPoolExecutor() as threads:
            objects = threads.map(lambda path: self.compile_plain([path], **options), halves)
        return [path for paths in objects for path in paths]


class BuildObjects(BuildKernels):
    """Compiles the objects that BuildKernels takes, and no more."""

    description = "compile the CPU kernels, which need no torch"

    def run(self) -> None:
        check_compiler()
        super().run()

    def build_extension(self, extension: Extension) -> None:
        if extension.name == LAUNCH:
            return
        for made in self.compile_kernels(levels_here()).values():
            made.result()

    def copy_extensions_to_source(self) -> None:
        """There is none yet."""


def extension() -> Extension:
    """The library of the kernels, and where torch is if this command compiles."""
    flags = ["-O2", "-g0", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-DTORCH_STABLE_ONLY"]
    flags.append(f"-DTORCH_TARGET_VERSION={TORCH_2_11}")
    folders = {}
    if COMPILING & set(sys.argv):
        check_compiler()
        torch = torch_folder()
        headers = torch / "include", torch / "include/torch/csrc/api/include"
        folders = {
            "include_dirs": [*map(str, headers)],
            "library_dirs": [str(torch / "lib")],
            "libraries": ["c10", "torch", "torch_cpu"],
        }
    return Extension(
        "torch_paged_attn._C",
        SOURCES,
        depends=[str(path) for path in Path("csrc").rglob("*.*")],
        py_limited_api=True,
        language="c++",
        extra_compile_args=[*flags, *EXTRA_FLAGS],
        extra_link_args=EXTRA_FLAGS,
        **folders,
    )


def launch_extension() -> Extension:
    """The library that starts Triton's kernels: one for every Python. Without it, where Python's
    headers are missing, Triton's own launchers do.
    """
    flags = ["-O2", "-g0", "-fvisibility=hidden"]
    sources = sorted(map(str, Path("csrc/python").glob("*.c")))
    options = {"py_limited_api": True, "extra_compile_args": flags, "optional": True}
    return Extension(LAUNCH, sources, depends=["csrc/python/python.h"], **options)


def wheel_for_every_python() -> type:
    """The command that makes a wheel: its libraries need the stable ABIs of torch and Python."""
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
    # it calls the dynamic linker of Linux
    launching = [launch_extension()] if sys.platform == "linux" else []
    commands = {"build_ext": BuildKernels, "build_kernels": BuildObjects}
    commands["bdist_wheel"] = wheel_for_every_python()
    return {"ext_modules": [extension(), *launching], "cmdclass": commands}


if not (find_spec("setuptools.command.bdist_wheel") or find_spec("wheel")):
    raise SystemExit(
        "torch-paged-attn: this setuptools builds wheels only with the package wheel beside it;"
        " pip install wheel, or pip install 'setuptools>=77'"
    )
setup(license="Apache-2.0", **options())
