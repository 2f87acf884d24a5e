"""Time the operators beside their peers and the machine's own ceilings.

    python benchmarks/run.py --backend cpu                       everything, one thread and all
    python benchmarks/run.py --problems '*/decode_*' --threads 1
    python benchmarks/run.py --base main~3                       this checkout beside another commit
    python benchmarks/run.py --isa avx2                          beside one instruction set, not all
    python benchmarks/run.py --backend cuda --help               another backend's own script

A problem whose result is not accurate is not timed. With one thread the figures are the smallest
CPU time of interleaved samples; with more, the median wall time, marked ~ if the machine was busy.
Where another instruction set than the one that is chosen would be faster, the report fails.
"""

import argparse
import contextlib
import fnmatch
import gc
import os
import sys
from pathlib import Path
from typing import Any

import baselines
import ort_peer
import report
import torch
import vllm_peer
from measure import interleave, sampler
from problems import BENCHMARKS
from rich.console import Console
from workloads import AttentionWorkload, BackwardWorkload, Workload, make
from worktree import ROOT, built, remote_sampler

# a backend whose figures are of another kind has a script of its own
SCRIPTS = {"cuda": "gpu/run.py", "tpu": "tpu/run.py", "neuron": "neuron/cost.py"}

console = Console()
if not console.is_terminal:
    console = Console(width=160)


def prepare_peers(workload: Workload, flex: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Peers that compute the same thing, ready to run; and why the others do not."""
    if isinstance(workload, AttentionWorkload):
        subject: Any = workload.call
        slow = baselines.SLOW_PEERS if flex else ()
        others = (*vllm_peer.VLLM_PEERS, ort_peer.OnnxRuntime())
        peers: Any = (*baselines.TORCH_PEERS, *others, *slow)
        wrong = workload.check_peer
    elif isinstance(workload, BackwardWorkload):
        subject, peers, wrong = workload, baselines.BACKWARD_PEERS, workload.check_peer
    else:
        subject, peers = workload, (baselines.IndexPut(), vllm_peer.VllmWrite())

        def wrong(_: Any) -> str | None:
            return None

    ready, reasons = {}, {}
    for peer in peers:
        reason = peer.unavailable(subject)
        if reason is None:
            try:
                prepared = peer.prepare(subject)
                reason = wrong(prepared.out(prepared.run()))
            except RuntimeError as error:  # a kernel that does not know this CPU or dtype
                reason = f"raises {str(error).splitlines()[0]}"
        if reason is None:
            ready[peer.name] = prepared.run
        else:
            reasons[peer.name] = reason
    return ready, reasons


def measure(name: str, options: argparse.Namespace, base: Path | None) -> list[dict[str, Any]]:
    """One row of results for each number of threads, or one that says why there is none."""
    torch.set_num_threads(max(options.threads))
    workload = make(BENCHMARKS[name])
    try:
        checked = workload.check()
    except (AssertionError, NotImplementedError) as error:
        refused = {"bound": workload.bound, "refused": str(error) or type(error).__name__}
        return [{"problem": name, **refused}]
    peers, reasons = prepare_peers(workload, options.flex)
    ceiling = workload.ceiling()

    rows = []
    for threads in [1] if workload.bound == "call" else options.threads:
        torch.set_num_threads(threads)
        calls = {"ours": workload.run, **peers}
        if ceiling is not None:
            calls[ceiling.name] = ceiling.call
        with contextlib.ExitStack() as stack:
            samplers = {contender: sampler(call) for contender, call in calls.items()}
            if base is not None:
                remote = remote_sampler(base, name, threads)
                samplers["base"] = stack.enter_context(remote)
            for isa in options.isa:
                forced = remote_sampler(ROOT, name, threads, isa)
                samplers[isa + report.FORCED] = stack.enter_context(forced)
            timings = interleave(samplers, options.seconds, threads)
        rows.append(
            {
                "problem": name,
                "threads": threads,
                "bound": workload.bound,
                "isa": torch.ops.paged_attn.cpu_isa(),
                "work": workload.work,
                "checked": checked,
                "ceiling": None
                if ceiling is None
                else {"name": ceiling.name, "work": ceiling.work},
                "timings": {contender: report.plain(t) for contender, t in timings.items()},
                "unavailable": reasons,
            }
        )
    return rows


def arguments() -> argparse.Namespace:
    backend = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    backend.add_argument("--backend", choices=["cpu", *SCRIPTS], default="cpu")
    chosen, rest = backend.parse_known_args()
    if chosen.backend in SCRIPTS:
        script = str(Path(__file__).parent / SCRIPTS[chosen.backend])
        os.execv(sys.executable, [sys.executable, script, *rest])
    parser = argparse.ArgumentParser(
        parents=[backend],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    all_threads = sorted({1, torch.get_num_threads()})
    parser.add_argument("--problems", metavar="GLOB", default="*", help="names to run")
    parser.add_argument("--base", metavar="REF", help="time this commit too")
    parser.add_argument(
        "--isa", metavar="NAME", nargs="*", help="time our kernels on these too; by default on all"
    )
    parser.add_argument("--threads", metavar="N", type=int, nargs="+", default=all_threads)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each contender")
    parser.add_argument("--flex", action="store_true", help="compile flex_attention as a peer")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write the results")
    parser.add_argument("--plot", metavar="OUT", type=Path, help="draw them")
    parser.add_argument("--markdown", action="store_true", help="print its tables as markdown")
    parser.add_argument(
        "--from",
        metavar="JSON",
        type=Path,
        dest="source",
        help="measure nothing: show these results",
    )
    parser.add_argument("--list", action="store_true", help="print the problems' names")
    options = parser.parse_args()
    if options.isa is None:
        options.isa = torch.ops.paged_attn.cpu_isas().split()
    if options.isa:  # beside the one that is chosen
        options.isa = list(dict.fromkeys([*options.isa, torch.ops.paged_attn.cpu_isa()]))
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for."""
    names = fnmatch.filter(BENCHMARKS, options.problems)
    if not names:
        sys.exit(f"no problem is called {options.problems!r}; --list shows the names")
    document = report.new_document(options.base)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        base = stack.enter_context(built(options.base)) if options.base else None
        for name in names:
            with console.status(name):
                rows = measure(name, options, base)
            report.extend(document, rows)
            console.print(*report.one_line(rows), style="dim")
            if options.json:  # after every problem: what is measured is kept
                report.write(options.json, document)
            gc.collect()
    return document


def main() -> None:
    options = arguments()
    if options.list:
        print("\n".join(BENCHMARKS))
        return
    document = report.read(options.source) if options.source else run(options)
    report.print_tables(console, document)
    if options.markdown:
        print(report.markdown(document))
    if options.plot:
        from plot import draw

        draw(document, options.plot)
    if slower := report.slower_by_default(document):
        sys.exit("the default is slower than a forced instruction set:\n" + "\n".join(slower))


if __name__ == "__main__":
    main()
