"""`python -m torch_paged_attn [--json]`: what is installed, and which backend answers which op.

With `--check` the exit status is 1 if the report names a problem. `hub` prints the value of the
environment variable LOCAL_KERNELS with which Hugging Face programs use this package's kernels
(integrations/hub). `compile` compiles a model's GPU kernels into a folder, without a GPU.
`conformance` runs the named problems on a device and writes a report.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from torch_paged_attn import _compile
from torch_paged_attn._doctor import printed, report
from torch_paged_attn.integrations.hub import local_kernels


def main() -> None:
    if hasattr(signal, "SIGPIPE"):  # `| head -n 1` ends it without a traceback
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    summary = __doc__.splitlines()[0].partition(": ")[2]
    parser = argparse.ArgumentParser(prog="python -m torch_paged_attn", description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit status 1 if there is a problem")
    verbs = parser.add_subparsers(dest="verb", metavar="")
    verbs.add_parser("hub", help="print LOCAL_KERNELS for Hugging Face programs")
    judge = verbs.add_parser("conformance", help="run the named problems on a device")
    judge.add_argument("--device", default="cpu", help="cpu, cuda, xla, tpu or neuron")
    judge.add_argument("--only", default="*", help="a pattern for test/problem: 'gradients/*'")
    judge.add_argument("--out", type=Path, default=Path("conformance.json"), metavar="FILE")
    summary = "compile a model's GPU kernels into a folder, without a GPU"
    _compile.add_arguments(verbs.add_parser("compile", help=summary, description=summary))
    asked = parser.parse_args()
    if asked.verb == "compile":
        _compile.compile_model(asked)
        return
    if asked.verb == "hub":
        print(local_kernels())
        return
    if asked.verb == "conformance":
        from torch_paged_attn import _conformance  # which the report does not need

        try:
            sys.exit(not _conformance.run(asked.device, asked.only, asked.out))
        except ValueError as error:
            parser.error(str(error))
    known = report()
    print(json.dumps(known, indent=2) if asked.json else printed(known))
    sys.exit(asked.check and bool(known["problems"]))


if __name__ == "__main__":
    main()
