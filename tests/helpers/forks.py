"""Programs that need a process of their own: forks of one that has imported torch and its compiler,
which takes three seconds of a core each time.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback


class Forks:
    """The process that is forked; it is started with the first program."""

    def __init__(self):
        self.server = None

    def run(self, code, *paths, **environment):
        """What a program prints; `paths` come first where it looks for modules."""
        if self.server is None:
            # what stands in PYTHONPATH is not for the programs
            without = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
            command = [sys.executable, "-P", __file__]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.server = subprocess.Popen(command, text=True, env=without, **pipes)
        environment = {**os.environ, **environment}
        print(json.dumps([code, paths, environment]), file=self.server.stdin, flush=True)
        status, out, errors = json.loads(self.server.stdout.readline())
        assert status == 0, out + errors
        return out

    def close(self):
        if self.server is not None:
            self.server.communicate()


def serve():
    """Answer every line of the input: a program, paths, the environment."""
    import torch._dynamo  # noqa: F401

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
            print(json.dumps([status, out.read(), errors.read()]), flush=True)


def finished(code, paths, environment):
    """Run a program; the status that its process ends with."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = paths
    status = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as ended:
        status = int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    serve()
