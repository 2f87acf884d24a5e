"""Attention of some heads of a call, which writes into slices of the results of all heads.

`distributed/arriving.py` uses it for heads whose keys have been copied, while the keys of other
heads are still being copied. Only Hopper's kernel supports it.
"""

import functools
from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, tensor_names
from torch_paged_attn.backends.triton.flash_varlen import choose, said_of_longest
from torch_paged_attn.backends.triton.hopper.forward import plan as hopper
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan

OP = "flash_varlen"
TENSORS = tensor_names(OP)


def attend(given: dict[str, Any], out: Tensor, lse: Tensor) -> bool:
    """Write the results of `flash_varlen(**given)`, a checked call with packed keys, to `out`
    `(total_q, heads, head_dim_v)`, with any strides, and to `lse` `(heads, total_q)` float32,
    contiguous. Returns False, and writes nothing, if Hopper's kernel does not run the call.
    """
    given = dict(given)
    longest = said_of_longest(given.pop("max_seqlen_q"), given.pop("max_seqlen_k"), True)
    tensors = *(given.pop(name, None) for name in TENSORS), out, lse
    name = f"{OP} of some heads, {longest} queries"
    return bool(launch_cache.call(name, functools.partial(_plan, longest), tensors, given))


def _plan(longest: int, *tensors: Tensor | None, **options: Any) -> Plan:
    *inputs, out, lse = tensors
    named: dict[str, Any] = dict(zip(TENSORS, inputs, strict=True))
    call = AttentionCall(OP, **named, **options)
    assert out is not None and lse is not None
    choice = choose(call, longest)
    if call.total_q == 0 or choice.kernel != "hopper":
        return lambda tensors, addresses: False
    start = hopper.plan_launches(call, out, form=choice.form)

    def run(tensors: tuple[Any, ...], addresses: Any) -> bool:
        *own, out, lse = tensors
        start(tuple(own), None if addresses is None else addresses[:-2], out, lse)
        return True

    return run
