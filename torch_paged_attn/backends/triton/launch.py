"""Starting a kernel, whether its call runs or is being traced by torch.compile."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_local = threading.local()

# Tensors that choose which rows a program writes: torch.compile follows an address back through the
# functions that loaded them and takes them for results. A kernel gets copies of these, lest a graph
# that would write its inputs be kept from running as a CUDA graph.
LENGTHS = ("cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seqused_k_ptr")

# what a launch tells the compiler about programs; everything else is an argument of the kernel
COMPILER_OPTIONS = ("num_warps", "num_stages", "maxnreg")


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Within it, launches become nodes of the graph that is being traced."""
    _local.is_traced = True
    try:
        yield
    finally:
        _local.is_traced = False


def is_traced() -> bool:
    """Whether launches become nodes of a graph."""
    return getattr(_local, "is_traced", False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`."""
    if is_traced():
        own = [
            x.clone() if name in LENGTHS and x is not None else x
            for name, x in zip(kernel.arg_names, args, strict=False)
        ]
        _trace(kernel, options)[grid](*own, **options)
    else:
        kernel[grid](*args, **options)


def _trace(kernel: Any, options: dict[str, Any]) -> Any:
    """The kernel as torch.compile takes it: options for the compiler travel as the one choice of a
    tuned kernel, since a graph has no other place for some of them."""
    import triton
    from torch.library import wrap_triton

    known = set(kernel.arg_names)
    chosen = {name: options.pop(name) for name in list(options) if name not in known}
    common = {name: chosen.pop(name) for name in COMPILER_OPTIONS if name in chosen}
    if common or chosen:
        kernel = triton.autotune([triton.Config(chosen, **common)], key=[])(kernel)
    return wrap_triton(kernel)
