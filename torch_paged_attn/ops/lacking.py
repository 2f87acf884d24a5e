"""Attention arguments, and forms of them, that a backend need not support, and the error for a call
that gives one.

Each of them changes the result, so a backend that does not support one has to refuse it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch_paged_attn.attention_call import arguments, defaults, is_by_column, is_by_token
from torch_paged_attn.ops.checks import refuse

_LISTED = [x for x in arguments("flash_varlen") if x.is_optional]
# the offsets of dropout's head, row and column
_OFFSETS = "rng_state[2:]"
# of a cache: a scale for each token and head, and two numbers a byte
TOKEN_SCALES = ("k_descale by token", "v_descale by token")
INT4 = ("k in int4", "v in int4")
# of latents: scales of each token and head for LATENT_COLUMNS columns each
COLUMN_SCALES = ("v_descale by column",)
OPTIONAL = (*(x.name for x in _LISTED), _OFFSETS, *COLUMN_SCALES, *TOKEN_SCALES, *INT4)
# those that a backward takes as well
OF_BACKWARD = (*(x.name for x in _LISTED if x.in_backward), _OFFSETS)

_DEFAULTS = defaults("flash_varlen")

# forms of an argument that others have: whether a value of a call has one
_FORMS: dict[str, Callable[[Any, Any], bool]] = {
    # `rng_state` has 5 entries of int64, or more if a backend has split it into 32-bit words
    "[2:]": lambda x, call: x.shape[0] >= 5,
    " by token": lambda x, call: (
        is_by_token(x, call.cu_seqlens_q.shape[0] - 1) and not is_by_column(x, call.k)
    ),
    " by column": lambda x, call: is_by_column(x, call.k),
    " in int4": lambda x, call: "uint8" in str(x.dtype),  # of torch or of JAX
}


def lacking(call: Any, names: Sequence[str]) -> str | None:
    """The first of the arguments `names` that a call gives; None if it gives none of them.

    call: an object whose attributes are the arguments
    names: entries of `OPTIONAL`; "key_ranks of blocksparse" counts in calls of that op only
    """
    for entry in names:
        name, _, op = entry.partition(" of ")
        if op and not call.op.startswith(op):
            continue
        form = next((x for x in _FORMS if name.endswith(x)), "")
        value = getattr(call, name.removesuffix(form))
        if value is None:
            continue
        if _FORMS[form](value, call) if form else _is_given(name, value):
            return name
    return None


def all_but(supported: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Those of the arguments `names` that are not `supported`, as `lacking` takes them.

    supported: entries of `names`; "tail_mask but of blocksparse" is not supported in calls of that
        op only, and there may be several such entries of a name
    """
    but_of: dict[str, list[str]] = {}
    for entry in supported:
        name, _, op = entry.partition(" but of ")
        but_of.setdefault(name, []).extend([op] if op else [])
    if unknown := but_of.keys() - set(names):
        raise ValueError(f"no optional argument of attention: {', '.join(sorted(unknown))}")
    lacked = []
    for name in names:
        ops = but_of.get(name)
        lacked += [name] if ops is None else [f"{name} of {op}" for op in ops]
    return tuple(lacked)


def _is_given(name: str, value: Any) -> bool:
    # an argument whose default is None is a tensor, and must not be compared
    return _DEFAULTS[name] is None or value != _DEFAULTS[name]


def in_all(lacked: Sequence[str], ops: Sequence[str]) -> frozenset[str]:
    """Those of `OPTIONAL` that a backend supports in calls of each of the ops.

    lacked: what it does not support, as `lacking` takes it
    """
    entries = (entry.partition(" of ") for entry in lacked)
    return frozenset(OPTIONAL) - {
        name for name, _, op in entries if any(x.startswith(op) for x in ops)
    }


def refuse_lacking(call: Any, backend: str, names: Sequence[str]) -> None:
    """Raise NotImplementedError if a call gives one of the arguments `names`, which the backend
    does not support.
    """
    if (name := lacking(call, names)) is not None:
        instead = "pass (seed, offset) alone" if name.endswith("[2:]") else ""
        refuse(call.op, f"{name} is not supported by the {backend} backend", instead)
