"""Named tuples of numbers that kernels name."""

import triton.language as tl


class Names(tl.constexpr):
    """A named tuple whose fields a kernel names: a constant that is part of the kernel's key."""

    def __getattr__(self, name):
        if name.startswith("_") or name == "value":
            raise AttributeError(name)
        return getattr(self.value, name)
