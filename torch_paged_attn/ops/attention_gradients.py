"""How `flash_varlen` and `blocksparse` are differentiated, and which calls are not.

Both have a backward that is an operator of its own. Where there is none, the forward that would
need it is refused, by what stands here on every device, or by what a backend says of itself.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import backward_call
from torch_paged_attn.attention_call import AttentionCall, arguments, listed
from torch_paged_attn.backward_call import GRADIENTS, BackwardCall
from torch_paged_attn.ops import paths
from torch_paged_attn.ops._gradients import ALLOWED
from torch_paged_attn.ops.attention_checks import check_attention
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.checks import (
    FLOAT,
    check_devices,
    check_dim,
    check_dtype,
    check_shape,
    fail,
    names,
)

# what has no gradient
CONSTANTS = ("alibi_slopes", "q_descale", "k_descale", "v_descale", "out_scale")


def check_backward(call: BackwardCall) -> None:
    """Raise for metadata that the contract forbids for a backward."""
    op, forward = call.op, call.named_forward()
    check_attention(forward)
    check_dtype(op, "q", forward.q, FLOAT)
    check_dtype(op, "k", forward.k, (forward.q.dtype,))
    shape = "(total_q, num_heads, head_dim_v)"
    sizes = (forward.total_q, forward.num_heads, forward.head_dim_v)
    for name, tensor in (("dout", call.dout), ("out", call.out)):
        check_dim(op, name, tensor, shape)
        check_dtype(op, name, tensor, (forward.q.dtype,))
        check_shape(op, name, tensor, sizes, shape)
    lses = {"softmax_lse": call.softmax_lse}
    if call.dlse is not None:
        lses["dlse"] = call.dlse
    for name, tensor in lses.items():
        check_dtype(op, name, tensor, (torch.float32,))
        check_shape(op, name, tensor, sizes[1::-1], "(num_heads, total_q)")
    if len(call.output_mask) != 5:
        came = f"has {len(call.output_mask)} entries"
        fail(op, "output_mask", came, f"one each for {', '.join(GRADIENTS)}")
    own = {x.name: getattr(call, x.name) for x in listed(BackwardCall) if x.is_tensor}
    check_devices(op, forward.q.device, own)


def refuse_gradients(call: AttentionCall, asking: Sequence[str]) -> None:
    """Raise NotImplementedError for what no device has a gradient of."""
    refuse = functools.partial(fail, call.op, error=NotImplementedError)
    where = f"where {asking[0]} requires grad"
    for name in CONSTANTS:
        if name in asking:
            refuse(name, "requires grad, and has no gradient", "a tensor that does not")
        if name != "alibi_slopes" and getattr(call, name) is not None:
            came = f"came {where}, and there is no backward for 8 bits"
            refuse(name, came, f"none, or {ALLOWED}")
    if call.q_latent is not None:
        came = f"came {where}, and there is no backward for it yet"
        refuse("q_latent", came, f"q and k with the latents' columns, or {ALLOWED}")
    if call.block_table is not None:
        came = f"came {where}, and there is no backward for paged keys"
        refuse("block_table", came, f"packed k and v, or {ALLOWED}")
    for name, dtype, allowed in (
        ("q", call.q.dtype, FLOAT),
        ("k", call.k.dtype, (call.q.dtype,)),
        ("out_dtype", call.result_dtype, (call.q.dtype,)),
    ):
        if dtype not in allowed:
            refuse(name, f"is {names((dtype,))} {where}", f"{names(allowed)}, or {ALLOWED}")


class AttentionDerivative:
    """The derivative of `flash_varlen` or `blocksparse`: a call of its backward."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.inputs = [x.name for x in arguments(op) if not x.keyword_only]
        given = backward_call.arguments(f"{op}_backward")
        self.positional = [x.name for x in given if not x.keyword_only]
        self.options = [x.name for x in given if not x.is_tensor and x.name != "output_mask"]
        own = [x.name for x in listed(BackwardCall)]
        self.tensors = [x.name for x in given if x.is_tensor and x.name not in own]

    def check(self, asking: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        call = getattr(AttentionCall, self.op)(*args, **options)
        refuse_gradients(call, asking)
        if call.q.is_meta:
            return
        backend, _ = serving_device(call.q.device)
        reason = None if backend is None else backend.why_no_gradients(call)
        if reason is not None:
            came = f"requires grad, and {reason}"
            fail(self.op, asking[0], came, ALLOWED, NotImplementedError)

    def save(
        self, ctx: Any, args: tuple[Any, ...], options: dict[str, Any], results: tuple[Tensor, ...]
    ) -> None:
        given = getattr(AttentionCall, self.op)(*args, **options).given()
        ctx.save_for_backward(*(given[name] for name in self.tensors), *results)
        ctx.options = {name: given[name] for name in self.options}

    def backward(
        self, ctx: Any, asked: Sequence[bool], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        *tensors, out, softmax_lse = ctx.saved_tensors
        dout, dlse = gradients
        given = ctx.options | dict(zip(self.tensors, tensors, strict=True))
        given |= {"out": out, "softmax_lse": softmax_lse, "dlse": dlse}
        given["dout"] = torch.zeros_like(out) if dout is None else dout
        is_asked = dict(zip(self.inputs, asked, strict=False))
        given["output_mask"] = [is_asked.get(name, False) for name in GRADIENTS.values()]
        args = [given.pop(name) for name in self.positional]
        operator = getattr(torch.ops.paged_attn, f"{self.op}_backward").default
        operator = paths.profiled(f"{self.op}_backward", operator)
        results = dict(zip(GRADIENTS.values(), operator(*args, **given), strict=True))
        return tuple(results[name] if is_asked[name] else None for name in is_asked)
