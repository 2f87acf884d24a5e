"""Programs that need a process of their own: forks of one that has imported torch, and its compiler
where programs need it, which takes two or three seconds of a core each time.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback


class Forks:
    """The process that is forked, which imports `module`; it is started with the first program."""

    def __init__(self, module="torch._dynamo"):
        self.module, self.server = module, None

    def run(self, code, *paths, **environment):
        """What a program prints; `paths` come first where it looks for modules."""
        status, out, errors = self.end(code, *paths, **environment)
        assert status == 0, out + errors
        return out

    def end(self, code, *paths, **environment):
        """The status that a program ends with, what it prints, and its errors."""
        if self.server is None:
            # what stands in PYTHONPATH is not for the programs, nor that memory is kept (Makefile)
            ours = ("PYTHONPATH", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
            without = {name: x for name, x in os.environ.items() if name not in ours}
            command = [sys.executable, "-P", __file__, self.module]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.server = subprocess.Popen(command, text=True, env=without, **pipes)
        environment = {**os.environ, **environment}
        print(json.dumps([code, paths, environment]), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())

    def close(self):
        if self.server is not None:
            self.server.communicate()


def serve(module):
    """Answer every line of the input: a program, paths, the environment."""
    importlib.import_module(module)

    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                os._exit(finished(*json.loads(line)))
            _, status = os.waitpid(child, 0)
            out.seek(0)
            errors.seek(0)
            found = os.waitstatus_to_exitcode(status), out.read(), errors.read()
            print(json.dumps(found), flush=True)


def finished(code, paths, environment):
    """Run a program; the status that its process ends with."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = paths
    status = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as ended:
        status = ended.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    serve(*sys.argv[1:])
