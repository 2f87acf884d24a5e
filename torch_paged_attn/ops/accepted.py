"""What the public functions take besides what the operators do.

An operator takes one form of each argument, so that kernels are for one. Callers have others at
hand: `cumsum` makes int64, a module in bfloat16 keeps its sinks and slopes in bfloat16. These are
turned into the operator's form here, on their device, before the operator is called: eagerly, in a
traced graph and with gradients alike. The operators' checks refuse what is still wrong then.
"""

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.ops.checks import fail, storage_fault

INT32 = torch.iinfo(torch.int32)

# most calls name them
WINDOWS = "window_size_left", "window_size_right"

# operator -> the positions of k and block_table
_PLACES: dict[str, tuple[int, int]] = {}

# (the operator's name, the argument's, its value, the arguments by position) -> the value to pass.
# It returns the same object if the operator takes it, or is to refuse it
Form = Callable[[str, str, Any, tuple[Any, ...]], Any]


class Operator(NamedTuple):
    """An operator, and the arguments of its calls at which `as_accepted` looks."""

    op: torch._ops.OpOverload
    name: str
    full_name: str  # with the overload
    positions: tuple[tuple[int, str], ...]  # of arguments with a form
    behind: int  # the number of arguments that every call passes by position
    lengths: tuple[int, ...]  # the positions of the lengths among them
    others: frozenset[str]  # arguments with a form that are given by name, but windows
    indices: frozenset[str]  # those of them that are taken in int64, too


def operator_of(op: torch._ops.OpOverload) -> Operator:
    """An operator as `as_accepted` takes it."""
    listed = [x.name for x in op._schema.arguments]
    positions = tuple((i, name) for i, name in enumerate(listed) if name in FORMS)
    # `block_table` is the last that the public functions of attention name
    behind = listed.index("block_table") + 1 if "block_table" in listed else 0
    lengths = tuple(i for i, _ in positions if i < behind)
    others = frozenset(name for _, name in positions).difference(WINDOWS)
    name, overload = op._schema.name.removeprefix("paged_attn::"), op._schema.overload_name
    full_name = f"{name}.{overload}" if overload else name
    if "block_table" in listed:
        _PLACES[name] = listed.index("k"), listed.index("block_table")
    return Operator(
        op, name, full_name, positions, behind, lengths, others, others.intersection(_INDICES)
    )  # fmt: skip


def are_accepted(operator: Operator, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether the arguments of a call are such as most decode steps have, and in the operator's
    form.
    """
    if len(args) != operator.behind or not _are_usual(options, operator.others, operator.indices):
        return False
    for at in operator.lengths:
        if (x := args[at]) is not None and getattr(x, "dtype", None) is torch.int64:
            return False
    return True


def as_accepted(
    operator: Operator, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, by position and by name, as the operator takes them."""
    if are_accepted(operator, args, options):
        return args, options
    name, positions, others = operator.name, operator.positions, operator.others
    found = list(args)
    for at, argument in positions:
        if at < len(found) and found[at] is not None:
            found[at] = FORMS[argument](name, argument, found[at], args)
    # torch 2.11 does not trace the intersection of two sets of names
    named = {n: x for n, x in options.items() if n in others or n in WINDOWS}
    return tuple(found), options | {n: FORMS[n](name, n, x, args) for n, x in named.items()}


def _are_usual(options: dict[str, Any], others: frozenset[str], indices: frozenset[str]) -> bool:
    """Whether windows and indices among the options are as operators take them, and no other of
    them has a form.
    """
    for name, x in options.items():
        if name in others and (
            name not in indices or getattr(x, "dtype", torch.int64) is torch.int64
        ):
            return False
    left, right = options.get(WINDOWS[0], -1), options.get(WINDOWS[1], -1)
    return type(left) is int and type(right) is int and left >= -1 <= right


def as_int32(op: str, name: str, x: Any, args: tuple[Any, ...] = ()) -> Any:
    """int64 lengths, page ids or indices as int32. On a CPU, numbers that int32 does not hold raise
    ValueError; in a traced graph they become the nearest that it holds.
    """
    if not isinstance(x, Tensor) or x.dtype is not torch.int64:
        return x
    if x.device.type == "cpu":
        if _is_readable(x):
            if fault := storage_fault(x):
                fail(op, name, *fault)
            least, most = torch.aminmax(x)
            for value in (int(least), int(most)):
                if not INT32.min <= value <= INT32.max:
                    fail(op, name, f"the entry {value}", "integers of 32 bits")
        x = x.clamp(INT32.min, INT32.max)
    return x.to(torch.int32)


def _is_readable(x: Tensor) -> bool:
    """Whether the host can read the values of a tensor on a CPU, and there are some."""
    if type(x) is not Tensor or torch.compiler.is_compiling() or not x.numel():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _float32(op: str, name: str, x: Any, args: tuple[Any, ...]) -> Any:
    """Sinks, slopes and scales of 16 bits, as a module in a 16-bit dtype holds them, in float32."""
    is_short = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if is_short else x


def _scale(op: str, name: str, x: Any, args: tuple[Any, ...]) -> Any:
    """A scale of shape (1,) or (1, 1), for all heads, as one of shape ()."""
    x = _float32(op, name, x, args)
    return x.reshape(()) if isinstance(x, Tensor) and x.shape in ((1,), (1, 1)) else x


def _bias(op: str, name: str, x: Any, args: tuple[Any, ...]) -> Any:
    """A bias `(total_q or 1, Lk or 1)` without heads, or with one row for all queries or one column
    for all keys, as an expanded view.
    """
    if not isinstance(x, Tensor) or not isinstance(q := args[0], Tensor) or not q.dim():
        return x
    if x.dim() == 2:
        x = x[None]
    if x.dim() == 3 and x.shape[1] == 1 != q.shape[0]:
        x = x.expand(-1, q.shape[0], -1)
    if x.dim() == 3 and x.shape[2] == 1 < (most := _most_keys(op, args)):
        x = x.expand(-1, -1, most)
    return x


def _most_keys(op: str, args: tuple[Any, ...]) -> int:
    """The most keys that a sequence can have, by the shapes of k and of the block table; 0 if these
    are no tensors, which the checks refuse.
    """
    k, table = (args[at] if at < len(args) else None for at in _PLACES[op])
    if not isinstance(k, Tensor):
        return 0
    if table is None:
        return k.shape[0] if k.dim() == 3 else 0
    is_paged = isinstance(table, Tensor) and table.dim() == 2 and k.dim() == 4
    return table.shape[1] * k.shape[2] if is_paged else 0


def _window(op: str, name: str, x: Any, args: tuple[Any, ...]) -> Any:
    """A negative window as -1, unbounded, which is what flash-attn's are."""
    # an abstract class takes microseconds to ask
    return -1 if (type(x) is int or isinstance(x, numbers.Integral)) and x < -1 else x


_INDICES = (
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "k_start", "q_position"),
    *("crow_indices", "col_indices", "key_indices", "num_selected"),
)
_SCALES = "q_descale", "k_descale", "v_descale", "k_scale", "v_scale"

FORMS: dict[str, Form] = {
    **dict.fromkeys(_INDICES, as_int32),
    **dict.fromkeys(_SCALES, _scale),
    **dict.fromkeys(("sinks", "alibi_slopes"), _float32),
    "attn_bias": _bias,
    "window_size_left": _window,
    "window_size_right": _window,
}
