"""Whether a change leaves every compiled kernel as it was: for renames, moves and merges.

    python tools/same_kernels.py HEAD~1 [--chips sm90 gfx942] [--only REGEX] [--processes N]

The kernels of each call of tests/helpers/compiled_calls.py are those of a launch on the chip, which
need not be here, once by the commit and once by the working tree. Both are compared after Triton's
first stage, when all functions are inlined: what is equal there is equal later. The calls whose
kernels differ there are compiled further and compared as PTX or AMD's assembly; those that still
differ are named, and the exit status is 1. What was found for a commit or for an unchanged kernel
is kept in Triton's cache, so a second run takes a fraction of the first one's minutes.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CHIPS = ("sm90",)
ASSEMBLY = ("ptx", "amdgcn")

# call -> the name of each kernel and a hash of it
Found = dict[str, list[list[str]]]


def without_places(text: str) -> str:
    """Code without the modules, files and lines that it is from."""
    text = re.sub(r"\n\s*\.section\s+\.debug.*", "", text, flags=re.S)
    text = re.sub(r"^\s*(\.loc|\.file|//|;|\$L__tmp\d+:|\.Ltmp\d+:).*\n?", "", text, flags=re.M)
    text = re.sub(r"[ \t]*(//|;).*$", "", text, flags=re.M)
    text = re.sub(r"\bloc\(.*?\)$|^#loc\d*.*\n", "", text, flags=re.M)
    return re.sub(r"torch_paged_attn\.backends(\.\w+)*\.(?=\w)", "", text)


def digest(text: str) -> str:
    return hashlib.sha256(without_places(text).encode()).hexdigest()[:16]


def early(src: Any, target: Any, options: dict[str, Any], _env_vars: Any = None) -> str:
    """A hash of a kernel's code after the first stage, in place of `triton.compiler.compile`."""
    import triton
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(target)
    parsed = backend.parse_options(dict(options, **src.parse_options()))
    key = hashlib.sha256((get_cache_key(src, backend, parsed, {}) + RULES).encode()).hexdigest()
    kept = Path(triton.knobs.cache.dir) / "same_kernels" / key
    if kept.exists():
        return kept.read_text()
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(parsed)
    module = src.make_ir(target, parsed, functions, backend.get_module_map(), context)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, parsed, src.language)
    module = stages[src.ext](module, {})
    # options decide about the later stages
    found = digest(module.str_nodebug() + repr(sorted(parsed.__dict__.items(), key=str)))
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = kept.with_suffix(f".{os.getpid()}")
    beside.write_text(found)
    beside.replace(kept)
    return found


# a hash is kept for as long as these rules made it
RULES = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def kernels_of(arch: str, stage: str, name: str) -> list[list[str]]:
    """The kernels that a call launches on a chip, with hashes after a stage."""
    import triton.compiler
    from cross_compile import CALLS, elsewhere
    from triton.runtime.jit import JITFunction

    found: list[list[str]] = []
    launch, compile_all = JITFunction.run, triton.compiler.compile

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = launch(kernel, *args, grid=grid, warmup=True, **options)
        if not isinstance(made, str):
            made = digest(next(made.asm[x] for x in ASSEMBLY if x in made.asm))
        found.append([kernel.__name__, made])
        return made

    JITFunction.run = note
    if stage == "early":
        triton.compiler.compile = early
    try:
        with elsewhere(arch):
            CALLS[name]()()
    except Exception as error:  # what does not compile differs from what does
        found.append([type(error).__name__, str(error)[-500:]])
    finally:
        JITFunction.run, triton.compiler.compile = launch, compile_all
    return sorted(found)


def find(arch: str, stage: str, names: list[str], only: str, processes: int) -> Found:
    """The kernels of this process's tree: of the named calls, or of those that `only` matches."""
    from cross_compile import CALLS, workers

    names = [x for x in names or CALLS if x in CALLS and re.search(only, x)]
    with workers(processes) as pool:
        found = pool.map(functools.partial(kernels_of, arch, stage), names)
        return dict(zip(names, found, strict=True))


def found_in(tree: Path, *options: str) -> Found:
    """What `find` returns in another process, with a tree's package and tests."""
    helpers, tools = tree / "tests" / "helpers", ROOT / "tools"
    environ = {"PYTHONPATH": os.pathsep.join(map(str, (tree, helpers, tools)))}
    environ["TRITON_INTERPRET"] = "0"
    command = [sys.executable, __file__, "--here", *options]
    done = subprocess.run(
        command, cwd=tree, env=os.environ | environ, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def compare(base: Path, arch: str, only: str, processes: int) -> list[str]:
    """The calls whose kernels differ, of this tree's and of another one's."""
    options = ["--only", only, "--processes", str(processes), "--chips", arch]
    before, after = (found_in(tree, "--stage", "early", *options) for tree in (base, ROOT))
    unlike = sorted(x for x in before.keys() & after.keys() if before[x] != after[x])
    print(f"{arch}: {len(before.keys() & after.keys())} calls, {len(unlike)} differ early")
    for side, names in (("before", before.keys() - after), ("after", after.keys() - before)):
        if names:
            print(f"{arch}: only {side}: {', '.join(sorted(names))}")
    if unlike:
        options = ["--stage", "late", *options, "--calls", *unlike]
        before, after = (found_in(tree, *options) for tree in (base, ROOT))
    return [x for x in unlike if before[x] != after[x]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", nargs="?", help="the commit to compare with")
    parser.add_argument("--chips", nargs="+", default=CHIPS)
    parser.add_argument("--only", default="", help="calls in whose name this is found")
    parser.add_argument("--calls", nargs="+", default=[], help="these calls")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--stage", choices=("early", "late"), default="early")
    parser.add_argument("--here", action="store_true", help="print the kernels of this tree")
    given = parser.parse_args()
    if given.here:
        found = find(given.chips[0], given.stage, given.calls, given.only, given.processes)
        print(json.dumps(found))
        return
    if given.base is None:
        parser.error("expected a commit to compare with")
    unlike = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), given.base], check=True)
        try:
            for arch in given.chips:
                for name in compare(tree, arch, given.only, given.processes):
                    unlike.append(f"{arch} {name}")
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    print("\n".join(["other kernels:", *unlike]) if unlike else "the same kernels")
    raise SystemExit(bool(unlike))


if __name__ == "__main__":
    main()
