"""Kernels that were compiled into a folder are found, in a process that has none, if they fit."""

import contextlib
import json
import os
import re
import shutil
import sys
import types
import warnings
from pathlib import Path

import cross_compile
import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget

from torch_paged_attn import environment, merge_states, use_compiled
from torch_paged_attn.backends.triton import compile_ahead
from torch_paged_attn.backends.triton.runtime import compiled, compiled_folder
from torch_paged_attn.backends.triton.runtime.compiled_folder import Folder, Unfit, difference
from torch_paged_attn.backends.triton.runtime.target import Target

# the benchmarks are scripts: they import one another as top-level modules
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

HOPPER = GPUTarget("cuda", 90, 32)


def merge(device):
    """The calls of a job: two kernels."""

    def call(dtype):
        out = torch.zeros(3, 2, 64, dtype=dtype, device=device)
        lse = torch.zeros(2, 3, device=device)
        merge_states(out, lse, out, lse)

    return [lambda: call(torch.bfloat16), lambda: call(torch.float16), lambda: call(torch.bfloat16)]


def attend(device):
    """The calls of launcher_calls.py: Hopper's kernel in Gluon, whose launcher takes tensor maps,
    the portable one, and a cache write."""
    from launcher_calls import decode, prefill, write

    for make in (lambda: prefill(32), decode, write):
        make()[0]()


def compile_into(out, *jobs, arch="sm90"):
    jobs = [compile_ahead.Job(job.__name__, job) for job in jobs]
    return compile_ahead.compile_into(out, jobs, arch, 132, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The two kernels of `merge`."""
    out = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        assert compile_into(out, merge) == {"merge": 2}
    return out


def load(folders, cache, job):
    """In a process: which kernels Triton compiles for a job's calls and how many it finds, on a
    driver of empty functions; how often the C compiler runs once launchers are built; warnings.
    """
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    import no_gpu

    no_gpu.pretend()
    from triton.runtime import build

    from torch_paged_attn.backends.triton.runtime import compiled_launchers

    here, found, built = [], [], []
    run_compiler, build_ahead = build._build, compiled_launchers.build

    def note(*, src, cache_hit, **_):
        (found if cache_hit else here).append(src.name)

    def counted(name, *args, **kwargs):
        built.append(name)
        return run_compiler(name, *args, **kwargs)

    def ahead(signatures):
        # as if the kernels were loaded later
        for one in (building := build_ahead(signatures)):
            one.result()
        built.clear()
        return building

    knobs.compilation.listener = note
    build._build, compiled_launchers.build = counted, ahead
    use_compiled(*folders)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for call in job(torch.device("cpu")) or []:
            call()
    said = [str(x.message) for x in warned if issubclass(x.category, RuntimeWarning)]
    return here, len(found), built, said


def loaded(*args):
    with cross_compile.workers(1) as pool:
        return pool.submit(load, *args).result()


@pytest.fixture
def changed(folder, tmp_path):
    """A copy of the folder, a file of machine code in it, and a function that rewrites its manifest
    as the given one does."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)

    def rewrite(change):
        manifest = json.loads((copy / "manifest.json").read_text())
        change(manifest)
        (copy / "manifest.json").write_text(json.dumps(manifest))

    return copy, next(copy.glob("*/*.cubin")), rewrite


def test_a_process_that_finds_its_kernels_compiles_none(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out, before = tmp_path / "out", set(Folder.read(folder).kernels)
    shutil.copytree(folder, out)
    assert compile_into(out, attend) == {"attend": 3}
    # what is in the folder stays
    after = set(Folder.read(out).kernels)
    assert before < after and len(after - before) == 3
    assert {x.suffix for x in out.glob("*/*")} == {".json", ".cubin"}
    here, found, built, said = loaded([out], tmp_path / "cache", attend)
    assert (here, found, built, said) == ([], 3, [], [])


def test_kernels_of_no_folder_are_compiled(folder, tmp_path):
    here, found, _, said = loaded([], tmp_path, merge)
    assert (here, found, said) == (["_merge_kernel"] * 2, 0, [])


def test_a_damaged_file_is_refused_by_name_and_its_kernel_compiled(changed, tmp_path):
    folder, file, _ = changed
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    here, found, _, said = loaded([folder], tmp_path / "cache", merge)
    assert (here, found) == (["_merge_kernel"], 1)
    assert len(said) == 1 and str(folder) in said[0] and file.name in said[0]
    assert "damaged" in said[0] and "compiles it here" in said[0]


def test_a_second_folder_has_what_the_first_lacks(changed, folder, tmp_path):
    copy, file, rewrite = changed
    rewrite(lambda manifest: manifest["kernels"].pop(file.parent.name))
    here, found, _, said = loaded([copy, folder], tmp_path / "cache", merge)
    assert (here, found, said) == ([], 2, [])


def fits(*folders):
    """The folders that a process with Hopper uses, and its warnings."""
    compiled._fitting.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = compiled._fitting(folders, HOPPER)
    compiled._fitting.cache_clear()
    return [x.root for x in found], [str(x.message) for x in warned]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("triton", "3.5.1", "Triton was 3.5.1 when it was compiled and is "),
        ("python", "3.1", "Python was 3.1 when"),
        ("architecture", "sm_80", "the GPU was sm_80 when it was compiled and is sm_90 here"),
        ("package", "0.0.1", "torch_paged_attn was 0.0.1"),
        ("sources", "0" * 64, "the sources of the kernels differ"),
        ("triton_build", "0" * 64, "the files of Triton differ"),
        ("compiler", "ptxas 1.0", "the assembler was ptxas 1.0"),
        ("environment", {"DISABLE_LLVM_OPT": "1"}, "differs in DISABLE_LLVM_OPT"),
        ("options", {}, "options differs in .*debug"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed, name, value, reason):
    folder, _, rewrite = changed
    rewrite(lambda manifest: manifest["made_with"].update({name: value}))
    used, said = fits(folder)
    assert used == [] and len(said) == 1
    assert str(folder) in said[0] and re.search(reason, said[0])


def test_a_folder_for_another_gpu_is_no_fault_beside_one_for_this(changed, folder):
    other, _, rewrite = changed
    rewrite(lambda manifest: manifest["made_with"].update(architecture="sm_80"))
    assert fits(other, folder) == ([folder], [])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(format=2),
        lambda m: m.pop("kernels"),
        lambda m: m["kernels"].update({"../../elsewhere" + "A" * 40: {"x.cubin": "0" * 64}}),
        lambda m: m["kernels"].update({"A" * 52: {"../x.cubin": "0" * 64}}),
        lambda m: m["kernels"].update({"A" * 52: {"x.cubin": "junk"}}),
        lambda m: m["kernels"].update({"A" * 52: ["x.cubin"]}),
        lambda m: m["calls"].update({"0" * 64: [-1]}),
        lambda m: m["calls"].update({"junk": []}),
        lambda m: m.update(launchers=[["*fp32"]]),
    ],
)
def test_a_damaged_manifest_is_refused(changed, change):
    folder, _, rewrite = changed
    rewrite(change)
    with pytest.raises(Unfit, match=r"manifest\.json"):
        Folder.read(folder)
    used, said = fits(folder)
    assert used == [] and len(said) == 1 and str(folder) in said[0]


def test_a_manifest_that_ends_too_early_is_refused(changed):
    folder, _, _ = changed
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[:-9])
    with pytest.raises(Unfit, match=r"no manifest\.json can be read"):
        Folder.read(folder)


def test_no_link_leads_out_of_the_folder(changed, tmp_path):
    folder, file, _ = changed
    outside = tmp_path / "outside"
    file.rename(outside)
    file.symlink_to(outside)
    with pytest.raises(Unfit, match="outside the folder"):
        Folder.read(folder).find(file.parent.name)


def test_a_missing_file_is_named(changed):
    folder, file, _ = changed
    file.unlink()
    with pytest.raises(Unfit, match=file.name):
        Folder.read(folder).find(file.parent.name)


def test_no_kernels_are_added_to_those_that_were_compiled_with_something_else(folder):
    with pytest.raises(Unfit, match="the GPU was sm_90 when it was compiled and is sm_80 here"):
        compile_into(folder, merge, arch="sm80")


def test_a_process_that_fails_says_why(tmp_path):
    with pytest.raises(compile_ahead.Failed, match=r"1 of 1 failed; the first: .*refuse_calls"):
        compile_into(tmp_path, refuse_calls)
    assert not (tmp_path / "manifest.json").exists()


def refuse_calls(device):
    raise ValueError("refuse_calls refuses")


def test_all_that_must_agree_has_a_name():
    here = compiled_folder.made_with(HOPPER)
    assert set(here) == set(compiled_folder._TITLES) and difference(here, here) is None
    assert json.loads(json.dumps(here)) == here


def test_use_compiled_wants_a_manifest(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(environment, "KERNELS", ())
    with pytest.raises(ValueError, match=r"use_compiled\(\): expected folders .*manifest\.json"):
        use_compiled(folder, tmp_path)
    assert environment.KERNELS == ()
    use_compiled(str(folder))
    assert (folder,) == environment.KERNELS
    use_compiled()
    assert environment.KERNELS == ()


def test_an_engine_remembers_its_calls_by_the_folder(folder, monkeypatch):
    """The next start plans nothing: the folder says which calls take all kernels."""
    active = types.SimpleNamespace(get_current_target=lambda: HOPPER)
    monkeypatch.setattr(compile_ahead, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(compile_ahead, "target_of", lambda _: Target.of_arch("sm90", 132))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(environment, "KERNELS", (folder,))
    with compile_ahead.remembered("merge", torch.device("cpu")) as known:
        assert known.calls == [0, 1]
    with compile_ahead.remembered("others", torch.device("cpu")) as known:
        assert known.calls is None
    monkeypatch.setattr(environment, "KERNELS", ())
    assert compile_ahead.compiled_elsewhere("merge", torch.device("cpu")) is None


def test_triton_s_own_manager_is_back_afterwards(monkeypatch, folder):
    class Own(compiled.FileCacheManager):
        pass

    for before in (None, Own):
        if before is not None:
            monkeypatch.setitem(vars(knobs.cache), "manager_class", before)
        monkeypatch.setattr(environment, "KERNELS", (folder,))
        with compiled.compiled_first(), compiled.compiled_first():
            assert knobs.cache.manager_class is compiled.Compiled
            assert compiled.Compiled.otherwise is (before or compiled.FileCacheManager)
        assert knobs.cache.manager_class is before
    monkeypatch.setattr(environment, "KERNELS", ())
    with compiled.compiled_first():
        assert knobs.cache.manager_class is Own
