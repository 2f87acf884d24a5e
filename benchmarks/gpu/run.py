"""Time the kernels of one GPU beside the peers found there, and beside its ceilings.

    python benchmarks/gpu/run.py --json OUT                    every part
    python benchmarks/gpu/run.py --only attention host --problems 'decode*'
    python benchmarks/gpu/run.py --fa3 _vllm_fa3_C.abi3.so --vllm blocksparse_attention_kernel.py

A result that is wrong is not timed. Rows are printed and written as they come, so that a run that
is cut short keeps what it has. `report.py` makes tables and a plot of them, on any machine.
"""

import argparse
import datetime
import fnmatch
import gc
import importlib
import json
import platform
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import attention
import backward
import blocksparse
import cache_write
import first_call
import float8
import host
import latent
import portable
import scaled_caches
import selected
import selected_families
import selected_gradients
import torch
import train_step
import triton
import vllm_triton

MODULES = (
    *(attention, float8, latent, backward, train_step),
    *(portable, blocksparse, selected, selected_families, selected_gradients),
    *(cache_write, scaled_caches, host, first_call),
)
PARTS = {part.__name__: part for part in MODULES}


def load(file: Path) -> ModuleType:
    """A module that is not on the path."""
    sys.path.append(str(file.parent))
    return importlib.import_module(file.stem)


def find_peers(
    fa3: Path | None = None,
    fa4: Path | None = None,
    flash_mla: Path | None = None,
    vllm: Path | None = None,
    vllm_triton_files: Path | None = None,
    attention_gym: Path | None = None,
) -> dict[str, Any]:
    """The peers that torch does not bring along."""
    peers: dict[str, Any] = {}
    if fa3:
        peers["FA3"] = load(fa3.with_name("fa3_peer.py"))
        peers["FA3"].load(str(fa3))
    if fa4:
        peers["FA4"] = load(fa4.with_name("fa4_peer.py"))
        peers["FA4"].load(str(fa4))
    if flash_mla:
        torch.ops.load_library(flash_mla)
        peers["FlashMLA"] = torch.ops._flashmla_C
    if vllm:
        peers["vLLM"] = load(vllm)
    if vllm_triton_files:
        peers["vLLM's Triton"] = vllm_triton.load(vllm_triton_files)
    if attention_gym:
        sys.path.append(str(attention_gym))
        name = "attn_gym.sparse.selected_attention.impl.triton.backward"
        peers["attention-gym"] = importlib.import_module(name)
    return peers


def git_commit() -> str:
    """The checkout's commit; nothing where there is no checkout, or no git."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def describe_machine(commit: str) -> dict[str, Any]:
    """What the figures depend on; the CPU is behind the host's times."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "gpu": torch.cuda.get_device_name(),
        "cpu": cpu[1] if cpu else platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
    }


def show(row: dict[str, Any]) -> None:
    """Print a row of results."""
    shown = row.get("figures", {}) | row
    texts = [
        f"{name} {value}" if isinstance(value, str) else f"{name} {value:.4g}"
        for name, value in shown.items()
        if name not in ("problem", "unit", "figures")
    ]
    print(f"{row['problem']:48} {row.get('unit', ''):8} {'  '.join(texts)}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--problems", default="*", metavar="GLOB", help="names to run")
    parser.add_argument(
        "--fa3", type=Path, metavar="SO", help="FA3's library, fa3_peer.py beside it"
    )
    parser.add_argument(
        "--fa4", type=Path, metavar="SO", help="FA4's backward, fa4_peer.py beside it"
    )
    parser.add_argument("--flash-mla", type=Path, metavar="SO", help="FlashMLA's library")
    parser.add_argument("--vllm", type=Path, metavar="FILE", help="vLLM's block-sparse kernel")
    parser.add_argument(
        "--vllm-triton", type=Path, metavar="DIR", help="the folder that vLLM's vllm/ is in"
    )
    parser.add_argument(
        "--attention-gym",
        type=Path,
        metavar="DIR",
        help="the folder that attn_gym is in; it wants Triton 3.7",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results")
    parser.add_argument("--commit", default=git_commit(), help="where git does not say it")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    peers = find_peers(
        *(options.fa3, options.fa4, options.flash_mla),
        *(options.vllm, options.vllm_triton, options.attention_gym),
    )
    parts: dict[str, list[dict[str, Any]]] = {}
    machine, ceilings = describe_machine(options.commit), attention.ceilings()
    document = {"machine": machine, "ceilings": ceilings, "parts": parts}
    print(machine, ceilings, sep="\n", flush=True)
    failed = False
    for part in (name for name in PARTS if name in options.only):
        gc.collect()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        parts[part] = []
        for problem, measure in PARTS[part].problems(peers).items():
            if not fnmatch.fnmatch(problem, options.problems):
                continue
            try:
                row = measure()
            except Exception as error:  # the other rows have their figures all the same
                traceback.print_exc()
                row, failed = {"refused": f"{type(error).__name__}: {error}"}, True
            parts[part].append({"problem": problem, **row})
            show(parts[part][-1])
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
