"""Arguments of attention that a backend may lack, and the one refusal of a call that gives one.

Each of them changes what is computed: a kernel that has not heard of one would answer wrongly.
"""

from collections.abc import Sequence
from typing import Any

from torch_paged_attn.attention_call import defaults
from torch_paged_attn.ops.checks import fail

# `rng_state[2:]` is where dropout's head, row and column begin
OPTIONAL = (
    *("q_latent", "tail_mask", "k_start", "q_position"),
    *("batch_invariant", "key_ranks", "key_rank", "key_interleave"),
    "rng_state[2:]",
)
# those that a backward takes, too
OF_BACKWARD = tuple(x for x in OPTIONAL if x not in ("q_latent", "batch_invariant"))

_DEFAULTS = defaults("flash_varlen")


def lacking(call: Any, names: Sequence[str]) -> str | None:
    """The first argument of these names that a call gives; None if it gives none. `call` is
    anything that has the arguments under their names. "key_ranks of blocksparse" is of one op.
    """
    for entry in names:
        name, _, op = entry.partition(" of ")
        if op and not call.op.startswith(op):
            continue
        value = getattr(call, name.removesuffix("[2:]"))
        if value is None:
            continue
        # of int64, or of words: then seed takes two
        if value.shape[0] >= 5 if name.endswith("[2:]") else _is_given(name, value):
            return name
    return None


def _is_given(name: str, value: Any) -> bool:
    # a tensor is not compared
    return _DEFAULTS[name] is None or value != _DEFAULTS[name]


def refuse_lacking(call: Any, backend: str, names: Sequence[str]) -> None:
    """Raise NotImplementedError for a call with an argument that a backend does not have."""
    if (name := lacking(call, names)) is not None:
        allowed = "(seed, offset) alone" if name.endswith("[2:]") else f"{_DEFAULTS[name]}"
        came = f"came, which the {backend} backend does not have yet"
        fail(call.op, name, came, allowed, NotImplementedError)
