"""The operators that a call runs."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts operators that are no views."""

    def __init__(self):
        super().__init__()
        self.called = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.called[function.name()] += 1
        return function(*args, **(kwargs or {}))


def operators(call):
    """How often each operator runs in a call, after a first one."""
    call()
    with Operators() as seen:
        call()
    return seen.called
