"""The derivative of `flash_varlen` and the other ops of attention, and which calls have none.

The backward is an operator of its own. A forward call whose inputs require grad is refused if its
backward does not exist: on any device (`refuse_gradients`), or on this one
(`Backend.unsupported_gradients`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import backward_call
from torch_paged_attn.argument import listed
from torch_paged_attn.attention_call import AttentionCall, arguments
from torch_paged_attn.backward_call import GRADIENTS, BackwardCall
from torch_paged_attn.ops import paths
from torch_paged_attn.ops._gradients import INSTEAD
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
    refuse,
)

# arguments that have no gradient
CONSTANTS = tuple(x.name for x in arguments("flash_varlen") if x.is_constant)


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
        expected = f"5 entries, one each for {', '.join(GRADIENTS)}"
        fail(op, "output_mask", f"{len(call.output_mask)}", expected)
    own = {x.name: getattr(call, x.name) for x in listed(BackwardCall) if x.is_tensor}
    check_devices(op, forward.q.device, own)


def refuse_gradients(call: AttentionCall, required: Sequence[str]) -> None:
    """Raise NotImplementedError if the call has no gradient on any device.

    required: names of the tensors that require grad
    """
    for name in CONSTANTS:
        if name in required:
            refuse(call.op, f"no gradient of {name}", f"pass {name}.detach()")
        if name != "alibi_slopes" and getattr(call, name) is not None:
            problem = f"no gradient with {name}, which is for 8 bits"
            refuse(call.op, problem, f"omit it, or {INSTEAD}")
    if call.block_table is not None:
        refuse(call.op, "no gradient for paged keys", f"pass packed k and v, or {INSTEAD}")
    if call.is_slots:
        refuse(call.op, "no gradient for keys in pages", f"pass packed keys, or {INSTEAD}")
    for name, dtype, allowed in (
        ("q", call.q.dtype, FLOAT),
        ("k", call.k.dtype, (call.q.dtype,)),
        ("v", call.v.dtype, (call.q.dtype,)),
        ("out_dtype", call.result_dtype, (call.q.dtype,)),
    ):
        if dtype not in allowed:
            problem = f"no gradient where {name} is {names((dtype,))}"
            refuse(call.op, problem, f"pass {names(allowed)}, or {INSTEAD}")


def _with_latents(given: dict[str, Any], latent: Tensor) -> dict[str, Any]:
    """The backward's arguments without q_latent: q becomes `[q, q_latent]` and k becomes `[k, v]`,
    whose product is `q . k + q_latent . v`.
    """
    q, k, v, scale = (given[name] for name in ("q", "k", "v", "softmax_scale"))
    return given | {
        "q": torch.cat((q, latent), -1),
        "k": torch.cat((k, v), -1),
        "softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale,
    }


def _of_latents(
    results: dict[str, Tensor], head_dim: int, wanted: dict[str, bool]
) -> dict[str, Tensor]:
    """The gradients of q, q_latent, k and v from those of the call that `_with_latents` makes.

    wanted: which of the results that call was asked for. Not by their size: of no queries, or of no
        keys, they are empty in any case

    v has two gradients, as keys and as values. Each is rounded before they are added, as autograd
    does for a tensor that is used twice.
    """
    found = dict(results)
    if wanted["q"]:
        dq = results["q"]
        found["q"], found["q_latent"] = dq[..., :head_dim], dq[..., head_dim:]
    if wanted["k"]:
        dk = results["k"]
        found["k"] = dk[..., :head_dim]
        if wanted["v"]:
            found["v"] = results["v"] + dk[..., head_dim:]
    return found


class AttentionDerivative:
    """The derivative of an op of attention: a call of its backward."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.inputs = [x.name for x in arguments(op) if not x.keyword_only]
        given = backward_call.arguments(f"{op}_backward")
        self.positional = [x.name for x in given if not x.keyword_only]
        self.options = [x.name for x in given if not x.is_tensor and x.name != "output_mask"]
        own = [x.name for x in listed(BackwardCall)]
        self.tensors = [x.name for x in given if x.is_tensor and x.name not in own]

    def check(
        self, required: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        call = getattr(AttentionCall, self.op)(*args, **options)
        refuse_gradients(call, required)
        if call.q.is_meta:
            return
        backend, _ = serving_device(call.q.device)
        if call.q_latent is not None:  # the backward gets wider q and k, see `_with_latents`
            q, k = call.q, call.k
            columns = q.shape[-1] + call.head_dim_v
            wide = [x.new_empty(1).expand(*x.shape[:-1], columns) for x in (q, k)]
            call = dataclasses.replace(call, q=wide[0], k=wide[1], q_latent=None)
        reason = None if backend is None else backend.unsupported_gradients(call)
        if reason is not None:
            refuse(self.op, f"{required[0]} requires grad, and {reason}", INSTEAD)

    def save(
        self, ctx: Any, args: tuple[Any, ...], options: dict[str, Any], results: tuple[Tensor, ...]
    ) -> None:
        given = getattr(AttentionCall, self.op)(*args, **options).given()
        tensors = [given[name] for name in self.tensors]
        ctx.save_for_backward(*tensors, given["q_latent"], *results)
        ctx.options = {name: given[name] for name in self.options}

    def backward(
        self, ctx: Any, needed: Sequence[bool], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        *tensors, latent, out, softmax_lse = ctx.saved_tensors
        dout, dlse = gradients
        given = ctx.options | dict(zip(self.tensors, tensors, strict=True))
        given |= {"out": out, "softmax_lse": softmax_lse, "dlse": dlse}
        given["dout"] = torch.zeros_like(out) if dout is None else dout
        is_needed = dict(zip(self.inputs, needed, strict=False))
        wanted = {name: is_needed.get(name, False) for name in GRADIENTS.values()}
        head_dim = given["q"].shape[-1]
        if latent is not None:
            wanted["q"] |= is_needed["q_latent"]
            wanted["k"] |= wanted["v"]
            given = _with_latents(given, latent)
        given["output_mask"] = [*wanted.values()]
        args = [given.pop(name) for name in self.positional]
        operator = getattr(torch.ops.paged_attn, f"{self.op}_backward").default
        operator = paths.profiled(f"{self.op}_backward", operator)
        results = dict(zip(GRADIENTS.values(), operator(*args, **given), strict=True))
        if latent is not None:
            results = _of_latents(results, head_dim, wanted)
        return tuple(results[name] if is_needed[name] else None for name in is_needed)
