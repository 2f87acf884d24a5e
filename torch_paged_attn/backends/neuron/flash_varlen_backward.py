"""`flash_varlen_backward` on Neuron: see `kernels/attention_backward.py` for the algorithm.

Around the kernel, in plain PyTorch, which the graph compiler fuses: each row's delta, the gradient
of the sinks, and where a bias's gradient belongs.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.attention import is_dynamic, refuse, rows_of, unsupported
from torch_paged_attn.backends.neuron.backward_plan import plan_backward
from torch_paged_attn.backends.neuron.bias import BiasRows, lay_out_bias
from torch_paged_attn.backends.neuron.kernels.attention_backward import attention_backward_kernel
from torch_paged_attn.backends.neuron.kernels.backward_groups import BackwardOptions
from torch_paged_attn.backends.neuron.kernels.groups import RowLayout
from torch_paged_attn.backends.neuron.kernels.philox import NUM_WORDS
from torch_paged_attn.backends.neuron.kernels.query_tile import LOWEST, MASKED, P
from torch_paged_attn.backends.neuron.philox import philox_words
from torch_paged_attn.backends.neuron.row_scalars import per_token, sequences_of
from torch_paged_attn.backends.neuron.runtime import launch
from torch_paged_attn.backends.neuron.work_info import Heads, WorkInfo
from torch_paged_attn.backward_call import BackwardCall

# a factor of scores that keeps what is masked far below every other score
SMALLEST_FACTOR = 1e-6

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def flash_varlen_backward(*args: Any, **kwargs: Any) -> Gradients:
    """Arguments as in `ops.flash_varlen`'s backward."""
    return differentiate(BackwardCall.flash_varlen(*args, **kwargs))


def differentiate(call: BackwardCall) -> Gradients:
    """Results of a checked call."""
    forward = call.forward
    reason = unsupported(forward.k, forward.v)
    if reason is not None:
        refuse("flash_varlen_backward", reason)
    dq, dk, dv, dbias, dsinks = (x.zero_() for x in call.new_results())
    rows = RowNumbers.of(call)
    if dsinks.numel():
        assert forward.sinks is not None
        dsinks = rows.gradient_of(forward.sinks)
    has_pairs = forward.total_q > 0 and forward.k.shape[0] > 0
    if not has_pairs or not any(x.numel() for x in (dq, dk, dv, dbias)):
        return dq, dk, dv, dbias, dsinks

    sums = _launch_all(call, rows, Sums(dq, dk, dv, dbias))
    return sums.dq, sums.dk, sums.dv, sums.dbias, dsinks


@dataclasses.dataclass(frozen=True)
class RowNumbers:
    """What each query row has to itself, `(total_q, num_heads)` float32."""

    lse: Tensor
    delta: Tensor  # dout . out - dlse; 0 in a row that sees nothing, whatever dout holds there
    is_empty: Tensor

    @classmethod
    def of(cls, call: BackwardCall) -> "RowNumbers":
        """The rows of a call."""
        lse = call.softmax_lse.float().mT
        delta = (call.dout.float() * call.out.float()).sum(-1)
        if call.dlse is not None:
            delta = delta - call.dlse.mT
        is_empty = lse == float("-inf")
        return cls(lse, delta.masked_fill(is_empty, 0.0), is_empty)

    def gradient_of(self, sinks: Tensor) -> Tensor:
        """The sink is a key without a value: its gradient is -P delta, summed over the queries."""
        p = (sinks - self.lse).exp().masked_fill(self.is_empty, 0.0)
        return -(p * self.delta).sum(0)

    def scalars(self, call: AttentionCall, heads: Heads) -> Tensor:
        """`(total_q * num_heads, NUM_SCALARS)`, as the kernel reads them."""
        slopes = per_token(call.alibi_slopes, 0.0, sequences_of(call), heads).transpose(1, 2).flatten(1, 2)
        minus_lse = -self.lse.clamp(min=LOWEST)
        minus_lse = minus_lse.masked_fill(self.is_empty, MASKED)
        return torch.stack([minus_lse, self.delta, slopes], 2).flatten(0, 1)


@dataclasses.dataclass
class Sums:
    """The gradients that launches add to: of the results' shapes, or `(0,)` where not asked for."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor


def _launch_all(call: BackwardCall, numbers: RowNumbers, results: Sums) -> Sums:
    forward, device = call.forward, call.forward.q.device
    k, v = (rows_of(x, forward, by_head=True) for x in (forward.k, forward.v))
    plan = plan_backward(forward, (k, v))
    dims = forward.head_dim, forward.head_dim_v
    num_queries = forward.total_q * forward.num_heads
    wants_dq, wants_dbias = results.dq.numel() > 0, results.dbias.numel() > 0
    wants_dkv = results.dk.numel() + results.dv.numel() > 0

    def rows(result: Tensor, like: Tensor, wanted: bool, is_added: bool) -> Tensor:
        """Zeros that the kernel takes for a result: its own memory, or float32 for sums."""
        if not wanted:
            return torch.zeros(1, like.shape[-1], dtype=like.dtype, device=device)
        if is_added or not result.numel():
            kind = torch.float32 if is_added else like.dtype
            result = torch.zeros(like.shape, dtype=kind, device=device)
        return result.view(-1, like.shape[-1])

    dq = rows(results.dq, forward.q, wants_dq, plan.adds_dq)
    dk = rows(results.dk, forward.k, wants_dkv, plan.adds_dkv)
    dv = rows(results.dv, forward.v, wants_dkv, plan.adds_dkv)
    dbias = torch.zeros(results.dbias.shape, device=device)
    bias = forward.attn_bias
    words = torch.zeros(1, NUM_WORDS, dtype=torch.int32, device=device)
    if forward.dropout_p > 0.0:
        assert forward.rng_state is not None  # checked
        words = philox_words(forward.rng_state, forward.dropout_p)
    q = forward.q.reshape(num_queries, dims[0])
    dout = call.dout
    if bias is not None:
        # its mask alone leaves rows that the plan does not know to be empty
        dout = dout.masked_fill(numbers.is_empty[..., None], 0.0)
    heads = Heads(forward.num_kv_heads, forward.group_size, forward.num_kv_heads)
    scalars = numbers.scalars(forward, heads)

    for step in plan.launches:
        info, tile_k = step.info, step.info.work.tile_k
        bias_rows = torch.zeros(1, tile_k, device=device)
        dbias_rows = torch.zeros(1, tile_k, device=device)
        laid_out = None
        if bias is not None:
            info, laid_out = _with_bias(bias, info, heads, wants_dbias)
            bias_rows = laid_out.rows
            if wants_dbias:
                lines = forward.group_size * len(laid_out.lines.item)
                dbias_rows = torch.zeros(lines, tile_k, device=device)
        dq, dk, dv, dbias_rows = launch(
            attention_backward_kernel,
            dq=dq,
            dk=dk,
            dv=dv,
            dbias=dbias_rows,
            q=q,
            k=k.storage,
            v=v.storage,
            dout=dout.reshape(num_queries, dims[1]),
            indices=info.indices,
            bounds=info.bounds,
            positions=info.positions,
            count=info.count,
            words=words,
            row_scalars=scalars,
            bias=bias_rows,
            options=BackwardOptions(
                num_kv_heads=1,
                group_size=forward.group_size,
                splits_heads=False,
                k_row=RowLayout(*k.layout),
                v_row=RowLayout(*v.layout),
                depth=info.work.depth,
                chunks=tile_k // P,
                run=1,
                width=step.width,
                levels=step.levels,
                scale=_factor(forward),
                softcap=float(forward.softcap),
                out_scale=float(forward.scale),
                keep_scale=1.0 / (1.0 - forward.dropout_p),
                is_shaped=_is_shaped(forward),
                has_alibi=forward.alibi_slopes is not None,
                has_bias=bias is not None,
                has_dropout=forward.dropout_p > 0.0,
                wants_dq=wants_dq,
                wants_dkv=wants_dkv,
                wants_dbias=wants_dbias,
                adds_dq=step.adds_dq,
                adds_dkv=step.adds_dkv,
                sums_dkv=plan.adds_dkv,
                is_dynamic=is_dynamic(info, 1),
            ),
        )
        if laid_out is not None and wants_dbias:
            _place_bias_gradient(dbias, dbias_rows, info, laid_out, forward)
    return Sums(
        *(
            result if not result.numel() else summed.view(result.shape).to(result.dtype)
            for result, summed in (
                (results.dq, dq),
                (results.dk, dk),
                (results.dv, dv),
                (results.dbias, dbias),
            )
        )
    )


def _factor(call: AttentionCall) -> float:
    return float(call.scale / call.softcap if call.softcap > 0.0 else call.scale)


def _is_shaped(call: AttentionCall) -> bool:
    has_more = call.alibi_slopes is not None or call.attn_bias is not None
    return call.softcap > 0.0 or has_more or call.scale < SMALLEST_FACTOR


def _with_bias(
    bias: Tensor, info: WorkInfo, heads: Heads, wants_dbias: bool
) -> tuple[WorkInfo, BiasRows]:
    """The tables with the columns of a bias, and of its gradient, which each head has its own of."""
    laid_out = lay_out_bias(bias, info, heads, 1)
    work, lines = info.work, laid_out.lines
    absent = laid_out.absent.unflatten(1, (-1, P)).transpose(1, 2)
    columns = [info.indices, laid_out.index.to(info.indices.device)]
    if wants_dbias:
        row = lines.of_row + (work.member * len(lines.item))[work.stack]
        row = row.where(work.is_row[work.stack], torch.tensor(-1))[info.items]
        row = row.where(~info.is_idle[:, None, None], torch.tensor(-1)).transpose(1, 2)
        columns.append(row.to(torch.int32).to(info.indices.device))
    with_bias = dataclasses.replace(
        info,
        indices=torch.cat(columns, 2),
        bounds=torch.cat([info.bounds, absent.float()], 2),
    )
    return with_bias, laid_out


def _place_bias_gradient(
    dbias: Tensor, rows: Tensor, info: WorkInfo, laid_out: BiasRows, call: AttentionCall
) -> None:
    """Add each head's rows (member, line, column) where their tokens and keys are in `dbias`.

    Heads go one after the other: no element is added to twice at once.
    """
    work, lines = info.work, laid_out.lines
    column = torch.arange(work.tile_k)
    is_seen = column >= work.key_start[lines.item, None]
    is_seen &= column < work.key_stop[lines.item, None]
    rows = rows.view(call.group_size, -1, work.tile_k)
    plane = work.plane[work.stack][lines.item]
    for kv_head in range(call.num_kv_heads):
        line, column = (is_seen & (plane == kv_head)[:, None]).nonzero(as_tuple=True)
        places = lines.token[line], lines.keys[line, column], line, column
        token, key, line, column = (x.to(dbias.device) for x in places)
        for member in range(call.group_size):
            head = 0 if dbias.shape[0] == 1 else kv_head * call.group_size + member
            dbias[head, token, key] += rows[member, line, column]
