"""The build: what a compiler refuses is left out and said, by whatever compilers are here."""

import os
import platform
import runpy
import shutil
import site
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import compile_commands
import pytest
import setuptools
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parents[2]
NAMES = ["g++", *(f"g++-{n}" for n in range(12, 16)), *(f"clang++-{n}" for n in range(16, 22))]
COMPILERS = [name for name in (*NAMES, "clang++") if shutil.which(name)]
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


@pytest.fixture
def setup(monkeypatch):
    """setup.py's own names, and what it hands to setuptools, under "options"."""
    options = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: options.update(given))
    monkeypatch.setenv("PAGED_ATTN_BUILD_CPP", "auto")
    monkeypatch.setenv("PAGED_ATTN_BUILD_FOR", "all")
    return runpy.run_path(str(ROOT / "setup.py")) | {"options": options}


@pytest.fixture
def build(setup, monkeypatch):
    """Builds with a compiler that refuses some ISAs; the kernels that it builds, and the macros
    that the operators get.
    """
    extension, *_ = setup["options"]["ext_modules"]
    command = setup["options"]["cmdclass"]["build_ext"](setuptools.Distribution())
    command.build_temp = ""

    def run(*refused):
        def compile_plain(sources, *, extra_postargs, **_):
            run.flags += extra_postargs
            if Path(sources[0]).stem in refused:
                raise CompileError("no such instruction")
            return [Path(sources[0]).stem]

        def compile_operators(sources, macros):
            run.macros = [name for name, _ in macros]
            return []

        def build_extension(command, extension):
            run.objects = command.compiler.compile(["ops.cpp"], macros=extension.define_macros)

        monkeypatch.setattr(build_ext, "build_extension", build_extension)
        command.compile_plain = compile_plain
        command.compiler = types.SimpleNamespace(compile=compile_operators)
        command.build_extension(extension)
        assert command.compiler.compile is compile_operators
        return run.objects, run.macros

    run.all, run.flags = [*setup["ISA_FLAGS"]], []
    return run


def test_every_isa_is_built(build):
    objects, macros = build()
    assert sorted(objects) == sorted(build.all) and not macros


def test_an_isa_that_is_refused_is_left_out(build):
    refused = build.all[-1]
    with pytest.warns(UserWarning, match=f"no kernels for {refused}.*no such instruction"):
        objects, macros = build(refused)
    assert sorted(objects) == sorted(build.all[:-1])
    assert macros == [f"PAGED_ATTN_WITHOUT_{refused}"]


def test_nothing_is_built_without_the_plain_kernels(build):
    with pytest.raises(CompileError):
        build("generic")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="amx is of x86-64")
def test_amx_needs_the_vectors_that_it_falls_back_on(build):
    with pytest.warns(UserWarning, match="no kernels for amx"):
        objects, macros = build("avx512bf16")
    assert not {"amx", "avx512bf16"} & {*objects}
    assert {*macros} == {"PAGED_ATTN_WITHOUT_avx512bf16", "PAGED_ATTN_WITHOUT_amx"}


@pytest.mark.parametrize(
    ("flags", "named", "runs"),
    [
        (["-mavx2", "-mfma"], "fpu avx2 fma f16c", True),
        (["-mavx512bf16"], "fpu avx2 fma f16c", False),
        (["-mavx512bf16", "-mavx512vnni"], "avx512_bf16 avx512_vnni", True),
        (["-mamx-tile", "-mamx-bf16"], "amx_bf16 amx_tile", True),
        ([], "fpu", True),
    ],
)
def test_a_build_for_here_knows_the_processor(flags, named, runs, setup):
    assert setup["runs_here"](flags, named) == runs


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
def test_a_build_for_tests_optimises_the_best_kernels(setup, monkeypatch):
    monkeypatch.setitem(setup["level_of"].__globals__, "BUILD_FOR", "tests")
    found = {isa: setup["level_of"](isa, "flags : fpu avx2 fma f16c") for isa in setup["ISA_FLAGS"]}
    assert found.pop("generic") == ["-O1"] and found.pop("avx2") == []
    assert found and all(level == ["-fsyntax-only"] for level in found.values())
    # what says nothing of its processor may have everything
    assert setup["level_of"]("amx", "Features : fp asimd") == []

    def optimised(best):
        named = " ".join(x[2:].replace("-", "_") for x in setup["ISA_FLAGS"][best])
        levels = {x: setup["level_of"](x, f"flags : {named}") for x in setup["ISA_FLAGS"]}
        return {isa for isa, level in levels.items() if not level}

    assert optimised("avx2") == {"avx2"} and optimised("avx512") == {"avx512"}
    # some of its calls are served by the others
    assert optimised("amx") == {"avx512", "avx512bf16", "amx"}


@pytest.mark.parametrize(
    ("cpp", "asked", "wanted"),
    [("auto", None, "here"), ("1", None, "all"), ("auto", "all", "all"), ("1", "here", "here")],
)
def test_a_wheel_for_other_machines_has_all_kernels(cpp, asked, wanted, monkeypatch):
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("PAGED_ATTN_BUILD_CPP", cpp)
    monkeypatch.delenv("PAGED_ATTN_BUILD_FOR", raising=False)
    if asked:
        monkeypatch.setenv("PAGED_ATTN_BUILD_FOR", asked)
    assert runpy.run_path(str(ROOT / "setup.py"))["BUILD_FOR"] == wanted


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
@pytest.mark.parametrize(
    ("asked", "linked"), [("here", ["avx2"]), ("tests", ["avx2", "generic"])], ids=["here", "tests"]
)
def test_a_build_links_what_runs_here(asked, linked, setup, build, tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : fpu avx2 fma f16c\n")
    names = setup["level_of"].__globals__
    monkeypatch.setitem(names, "BUILD_FOR", asked)
    monkeypatch.setitem(names, "CPUINFO", cpuinfo)
    monkeypatch.setitem(names, "works_in_parts", lambda: False)
    objects, macros = build()
    assert sorted(objects) == linked
    assert {*macros} == {f"PAGED_ATTN_WITHOUT_{isa}" for isa in {*build.all} - {*linked}}
    if asked == "here":
        with pytest.raises(CompileError):
            build("avx2")


def test_an_object_is_taken_if_it_was_made_of_the_same_by_the_same(setup, tmp_path, monkeypatch):
    """`build_kernels` compiles them while torch is fetched, and `build_ext` takes them."""
    command = setup["options"]["cmdclass"]["build_kernels"](setuptools.Distribution())
    command.build_temp, compiled = str(tmp_path), []
    source = tmp_path / "source.h"
    source.touch()
    os.utime(source, (0, 0))
    monkeypatch.setitem(
        type(command).compile_isa.__globals__, "kernel_sources", lambda: [source, Path("setup.py")]
    )

    def compile_plain(sources, **_):
        compiled.append(sources)
        target = tmp_path / "csrc/isa/generic.o"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        return [str(target)]

    def compiles(level=()):
        before = len(compiled)
        assert command.compile_isa("generic", [*level]) == [str(tmp_path / "csrc/isa/generic.o")]
        return len(compiled) > before

    command.compile_plain = compile_plain
    assert compiles() and not compiles()
    assert compiles(["-O1"]) and not compiles(["-O1"])
    os.utime(source, (2**33, 2**33))
    assert compiles(["-O1"])
    os.utime(source, (0, 0))
    assert not compiles(["-O1"])
    monkeypatch.setenv("CXX", "another")
    assert compiles(["-O1"])


@pytest.mark.skipif("g++" not in COMPILERS, reason="needs GCC")
def test_code_that_is_made_by_a_process_for_each_core_is_plain(setup, tmp_path, monkeypatch):
    """An object of -flto becomes one of machine code, whose local symbols stay its own."""
    monkeypatch.setenv("CXX", "g++")
    names = setup["generate_code"].__globals__
    assert not setup["works_in_parts"]()  # a wheel for other machines
    setup["works_in_parts"].cache_clear()
    monkeypatch.setitem(names, "BUILD_FOR", "here")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert setup["works_in_parts"]()
    source, target = tmp_path / "some.cpp", tmp_path / "some.o"
    functions = "".join(
        f"int own_{i}(int n) {{ return n ? own_{i - 1}(n - 1) + {i} : 0; }}\n" for i in range(1, 9)
    )
    functions = f"namespace {{\nint own_0(int n) {{ return n; }}\n{functions}}}\n"
    source.write_text(f"{functions}int (*table)(int) = own_8;\n")
    # each function in a part of its own, all of them called from another
    flags = [*setup["KERNEL_FLAGS"], "-fno-inline", "-fno-ipa-cp", "-flto", "-flto-partition=max"]
    subprocess.run(["g++", *flags, "-c", source, "-o", target], check=True)
    setup["generate_code"](target, flags, "table")
    listed = subprocess.run(["nm", target], check=True, capture_output=True, text=True).stdout
    kinds = [line.split()[-2:] for line in listed.splitlines()]
    assert ["D", "table"] in kinds and "gnu_lto" not in listed
    assert sum(kind == "t" and "own_" in name for kind, name in kinds) == 9
    assert not [name for kind, name in kinds if kind in "TVW"]


def test_every_file_is_in_one_of_two_objects(setup, tmp_path):
    command = setup["options"]["cmdclass"]["build_ext"](setuptools.Distribution())
    command.build_temp, texts = str(tmp_path), []

    def compile_plain(sources, *, include_dirs, **_):
        assert include_dirs[0] == "."  # they are named as seen from here
        texts.append(Path(sources[0]).read_text())
        return sources

    command.compile_plain = compile_plain
    files = setup["SOURCES"]
    assert len(command.compile_at_once(files, include_dirs=["torch"])) == len(texts) == 2
    assert sorted("".join(texts).splitlines()) == sorted(f'#include "{x}"' for x in files)


def test_other_builds_optimise_all_kernels(build):
    build()
    assert {flag for flag in build.flags if flag.startswith("-O")} == {"-O3"}


@pytest.mark.skipif(not COMPILERS, reason="needs a compiler")
def test_the_dispatch_names_no_table_that_is_left_out(setup, tmp_path):
    """Whatever is left out, alone or all of it."""
    isas = [*setup["ISA_FLAGS"]]
    for left_out in [*([isa] for isa in (isas if THOROUGH else isas[-1:])), isas]:
        target = str(tmp_path / "dispatch.o")
        flags = [f"-DPAGED_ATTN_WITHOUT_{isa}" for isa in left_out]
        source = ["-std=c++20", "-c", "csrc/dispatch.cpp", "-o", target]
        command = [COMPILERS[0], *source, *flags]
        subprocess.run(command, cwd=ROOT, check=True)
        undefined = subprocess.run(["nm", target], check=True, capture_output=True, text=True)
        names = {line.split()[-1] for line in undefined.stdout.splitlines() if " U " in line}
        for isa in left_out:
            table = f"kernels_{isa}"
            assert f"_ZN10paged_attn{len(table)}{table}E" not in names


@pytest.mark.thorough(on_gpu=False)  # `make install` compiles with the first
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiles(compiler, setup):
    for isa, flags in setup["ISA_FLAGS"].items():
        command = [compiler, *setup["KERNEL_FLAGS"], *flags, f"csrc/isa/{isa}.cpp"]
        command += ["-c", "-o", os.devnull, "-Wno-unknown-warning-option"]
        subprocess.run(command, cwd=ROOT, check=True)


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """Runs the build backend in an environment that holds this torch; the build's requirements."""

    def requirements(version, **environment):
        for name in ("PAGED_ATTN_TORCH", "PAGED_ATTN_BUILD_CPP"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        if version:
            (tmp_path / "torch").mkdir(exist_ok=True)
            (tmp_path / "torch/version.py").write_text(f"__version__ = '{version}'\n")
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        names = runpy.run_path(str(ROOT / "tools/build_backend/build_backend.py"))
        return names["_torch"](), os.environ.get("PAGED_ATTN_TORCH")

    return requirements


def test_the_torch_that_is_there_is_built_with(backend, tmp_path):
    assert backend("2.13.0+cpu") == ([], str(tmp_path / "torch"))


@pytest.mark.parametrize("version", [None, "2.9.1"])
def test_without_one_torch_comes_from_the_index(backend, version):
    assert backend(version) == (["torch>=2.11"], None)


def test_no_torch_is_asked_for_where_nothing_is_compiled(backend):
    assert backend(None, PAGED_ATTN_BUILD_CPP="0") == ([], None)


def test_without_a_compiler_one_sentence_says_so(setup, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match=r"there is no C\+\+ compiler 'no-such-compiler'; install"):
        setup["check_compiler"]()


def test_an_old_torch_is_refused(setup, monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '2.9.1'\n")
    monkeypatch.setenv("PAGED_ATTN_TORCH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"is too old; install torch 2\.11"):
        setup["torch_folder"]()


@pytest.mark.skipif(not COMPILERS, reason="needs a compiler")
def test_editors_know_how_each_file_is_compiled(setup):
    known = {entry["file"]: entry for entry in compile_commands.commands()}
    others = {f"csrc/isa/{path.name}" for path in ROOT.glob("csrc/isa/*.cpp")}
    others -= {f"csrc/isa/{isa}.cpp" for isa in setup["ISA_FLAGS"]}
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.cpp")}
    assert {*known} == files - others
    # the first by flags of all operators; of the others, which take seconds, what they include
    preprocess = ["-E", "-o", os.devnull]
    for file, how in (
        ("csrc/dispatch.cpp", ["-fsyntax-only"]),
        ("csrc/ops/announce.cpp", preprocess),
        ("csrc/isa/generic.cpp", preprocess),
    ):
        entry = known[file]
        command = [COMPILERS[0], *entry["arguments"][1:], *how]
        subprocess.run(command, cwd=entry["directory"], check=True)
