"""`flash_varlen_backward` on Neuron: see `kernels/attention_backward.py` for the algorithm.

Two things are computed around the kernel, in plain PyTorch, which the graph compiler fuses: the
gradient of the sinks, and the place of each number of a bias's gradient.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.attention import options_of, refuse_wide, rows_of
from torch_paged_attn.backends.neuron.backward_plan import backward_tile_sizes, plan_backward
from torch_paged_attn.backends.neuron.bias import BiasTask
from torch_paged_attn.backends.neuron.kernels.attention_backward import attention_backward_kernel
from torch_paged_attn.backends.neuron.kernels.query_tile import LOWEST, MASKED
from torch_paged_attn.backends.neuron.runtime import launch
from torch_paged_attn.backends.neuron.tables import Heads, per_token, philox_words, sequences_of
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops.lacking import OPTIONAL, refuse_lacking

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def flash_varlen_backward(*args: Any, **kwargs: Any) -> Gradients:
    """Arguments as in `ops.flash_varlen_backward`."""
    call = BackwardCall.flash_varlen(*args, **kwargs)
    forward = call.forward
    refuse_lacking(call.named_forward(), "neuron", OPTIONAL)
    refuse_wide(call.op, forward.k, forward.v)
    dq, dk, dv, dbias, dsinks = (x.zero_() for x in call.new_results())
    numbers = RowNumbers.of(call)
    if dsinks.numel():
        assert forward.sinks is not None  # asked for
        dsinks = numbers.gradient_of(forward.sinks)
    has_pairs = forward.total_q > 0 and forward.k.shape[0] > 0
    if has_pairs and any(x.numel() for x in (dq, dk, dv, dbias)):
        dq, dk, dv, dbias = _launch_all(call, numbers, (dq, dk, dv, dbias))
    return dq, dk, dv, dbias, dsinks


@dataclasses.dataclass(frozen=True)
class RowNumbers:
    """What each query row has to itself, `(total_q, num_heads)`, and its dout and out."""

    dout: Tensor  # contiguous: sums along it have the same bits whatever its strides were
    out: Tensor
    lse: Tensor  # float32
    dlse: Tensor  # float32; 0 in rows that see no key, whatever the caller's dlse is there
    is_empty: Tensor

    @classmethod
    def of(cls, call: BackwardCall) -> "RowNumbers":
        """The rows of a call."""
        lse = call.softmax_lse.float().mT
        is_empty = lse == float("-inf")
        dlse = torch.zeros_like(lse) if call.dlse is None else call.dlse.mT
        dlse = dlse.float().masked_fill(is_empty, 0.0)
        dout, out = call.dout.contiguous(), call.out.contiguous()
        if call.forward.attn_bias is not None:
            # its mask alone leaves rows that the plan does not know to be empty
            dout, out = (x.masked_fill(is_empty[..., None], 0.0) for x in (dout, out))
        return cls(dout, out, lse, dlse, is_empty)

    def gradient_of(self, sinks: Tensor) -> Tensor:
        """The sink is a key without a value: its gradient is -P delta, summed over the queries."""
        delta = (self.dout.float() * self.out.float()).sum(-1) - self.dlse
        p = (sinks - self.lse).exp() * delta
        return -p.masked_fill(self.is_empty, 0.0).sum(0)

    def scalars(self, call: AttentionCall, heads: Heads) -> Tensor:
        """`(total_q * num_heads, NUM_SCALARS)`, as the kernel reads them."""
        slopes = per_token(call.alibi_slopes, 0.0, sequences_of(call), heads)
        slopes = slopes.transpose(1, 2).flatten(1, 2)
        minus_lse = -self.lse.clamp(min=LOWEST)
        minus_lse = minus_lse.masked_fill(self.is_empty, MASKED)
        return torch.stack([minus_lse, self.dlse, slopes], 2).flatten(0, 1)


def _launch_all(
    call: BackwardCall, numbers: RowNumbers, results: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dbias; `results` are zeros, or `(0,)` where a gradient is not asked for."""
    forward, device = call.forward, call.forward.q.device
    k, v = (rows_of(x, forward, by_head=True) for x in (forward.k, forward.v))
    tiles = backward_tile_sizes(forward)
    wants_dq, wants_dbias = results[0].numel() > 0, results[3].numel() > 0
    wants_dkv = results[1].numel() + results[2].numel() > 0
    wants = wants_dq, wants_dkv, wants_dbias
    launches, heads = plan_backward(forward, tiles, (k, v), wants), tiles.heads
    adds_dq = any(step.options.adds_dq for step in launches)
    adds_dkv = any(step.options.adds_dkv for step in launches)
    dq = _target(results[0], forward.q, wants_dq, adds_dq)
    dk = _target(results[1], forward.k, wants_dkv, adds_dkv)
    dv = _target(results[2], forward.v, wants_dkv, adds_dkv)
    dbias = torch.zeros(results[3].shape, device=device)

    q, dout, out = (x.reshape(-1, x.shape[2]) for x in (forward.q, numbers.dout, numbers.out))
    words, scalars = philox_words(forward), numbers.scalars(forward, heads)
    for step in launches:
        task = BiasTask.of(forward, step.info, heads, wants_dbias)
        dq, dk, dv, task.gradient = launch(
            attention_backward_kernel,
            dq=dq,
            dk=dk,
            dv=dv,
            dbias=task.gradient,
            q=q,
            k=k.storage,
            v=v.storage,
            dout=dout,
            out=out,
            **task.info.tables,
            words=words,
            row_scalars=scalars,
            bias=task.rows,
            options=dataclasses.replace(
                options_of(forward, step.info, tiles, (k, v)),
                sees_all_keys=step.sees_all_keys,
                backward=step.options,
            ),
        )
        if wants_dbias:
            task.add_to(dbias, heads)
    dq, dk, dv, dbias = (
        x.view(result.shape).to(result.dtype) if result.numel() else result
        for x, result in zip((dq, dk, dv, dbias), results, strict=True)
    )
    return dq, dk, dv, dbias


def _target(result: Tensor, like: Tensor, is_wanted: bool, is_sum: bool) -> Tensor:
    """Zeros, as rows, that the kernel takes for a result: its own memory, or float32 for sums."""
    dim, device = like.shape[-1], like.device
    if not is_wanted:
        return torch.zeros(1, dim, dtype=like.dtype, device=device)
    if is_sum or not result.numel():
        dtype = torch.float32 if is_sum else like.dtype
        return torch.zeros(like.numel() // dim, dim, dtype=dtype, device=device)
    return result.view(-1, dim)
