"""How large the rounding errors of a correct backward may be, computed from golden's own sums.

As in `scales.py`, with what a backward adds. Each of dq, dk and dv is a sum of weights times
values: dX and K, dX and Q, P and dout. The weights are rounded to q's dtype, and have errors before
that:

- P that of its logit, and all P of a row a common one, that of softmax_lse;
- dP that of a float32 dot product;
- all dS of a row a common one, that of D, because the forward has rounded `out` and the
  probabilities that it was computed from.

A common error of a row adds up in dq, which sums along the row. In dk and dv, which sum over
queries, it is random, but the same for all keys: with few queries it is one random number, however
many keys there are. The mean of a gradient therefore has one draw of luck for each row's own
errors, and one for each query's common ones, as large as what they do to all keys together. Draws
of different sizes add up as the root of the sum of their squares: a query with hundreds of times
the gradient of the others is one draw, not one of many.
"""

import dataclasses
import math

import torch
from torch import Tensor

from torch_paged_attn.backward_call import GRADIENTS, BackwardCall
from torch_paged_attn.reference import BackwardSums
from torch_paged_attn.testing.scales import (
    DEVIATION,
    EPS_BFLOAT16,
    EPS_FLOAT32,
    EXPONENTIAL,
    LOGIT,
    ROW,
    SURE,
    luck_of_mean,
    of_coarse,
    subnormal,
)


@dataclasses.dataclass
class GradientScale:
    """Sizes of the errors of one gradient.

    off: of the gradient's shape, its error that comes from float32
    luck: of the gradient's shape, how much smaller than usual the baseline's errors may be by
        chance, for errors that each row has of its own
    shared: the same for errors that all rows share which one query contributes to
    by_queries: (), the sum over queries of the square of what the shared errors of one do to all
        numbers of the gradient together
    row_error: `shape[:-1]`, the largest norm of a row's error
    row_along: `shape[:-1]`, the largest dot product of a row's error with the row
    """

    off: Tensor
    luck: Tensor
    shared: Tensor
    by_queries: Tensor
    row_error: Tensor
    row_along: Tensor

    @classmethod
    def zeros(cls, shape: torch.Size) -> "GradientScale":
        whole, rows, one = (torch.zeros(s, dtype=torch.float64) for s in (shape, shape[:-1], ()))
        return cls(whole, whole.clone(), whole.clone(), one, rows, rows.clone())

    def luck_of_mean(self) -> float:
        """The luck of the mean of all numbers: independent draws of the rows and of the queries."""
        of_rows = luck_of_mean(self.luck)
        return math.hypot(of_rows, float(self.by_queries) ** 0.5 / max(1, self.luck.numel()))


class GradientObserver:
    """Collects the `GradientScale`s of all sequences, as `Precision.observe` of the reference."""

    def __init__(self, call: BackwardCall) -> None:
        dtype = call.forward.q.dtype
        eps = torch.finfo(dtype).eps
        self._call, self._dtype = call, dtype
        self._eps = eps if eps > EPS_FLOAT32 else 0.0
        # dsinks has one number per head, each of which counts as a row
        shapes = (x.shape if x.dim() > 1 else (*x.shape, 1) for x in call.new_results())
        self.scales = {
            name: GradientScale.zeros(torch.Size(shape))
            for name, shape in zip(GRADIENTS, shapes, strict=True)
        }

    def __call__(self, sums: BackwardSums) -> None:
        call, x = self._call.forward, sums.scored
        off = _Off.of(sums, self._eps)
        factor = _ratio(sums.dx, sums.ds)  # the derivative of softcap
        wanted = dict(zip(GRADIENTS, self._call.wanted, strict=True))
        group = (call.num_kv_heads, call.group_size)

        def transposed(t: Tensor) -> Tensor:
            """`(heads, Lq, n)` as `(kv_heads, n, group * Lq)`: dk sums over the last dimension."""
            return t.unflatten(0, group).flatten(1, 2).mT

        if wanted["dq"]:
            values = call.scale * x.k
            along_row = (sums.p * factor @ values) * off.d
            along_row = along_row.abs() + (sums.dx @ values).abs() * off.lse
            self._add("dq", x.rows, sums.dx, off.dx, values, along_row)
        if wanted["dk"]:
            by_row = ((sums.p * factor * off.d).square() + (sums.dx * off.lse).square()).sqrt()
            weights, u, by_row = map(transposed, (sums.dx, off.dx, by_row))
            values = transposed(call.scale * x.q).mT
            self._add("dk", sums.keys, weights, u, values, by_row=by_row)
        if wanted["dv"]:
            weights, u, by_row = map(
                transposed, (sums.dropped, sums.dropped * off.logit, sums.dropped * off.lse)
            )
            self._add("dv", sums.keys, weights, u, transposed(sums.dout).mT, by_row=by_row)
        if wanted["dbias"]:
            by_row = (sums.p * off.d).square() + (sums.ds * off.lse).square()
            self._add_bias(x.rows, off.ds.square(), by_row)
        if wanted["dsinks"]:
            self._add_sinks(sums, off)

    def _add_bias(self, rows: slice, off: Tensor, by_row: Tensor) -> None:
        """Add the scales of dbias, from the squared errors of its numbers (`off`, `by_row`). A bias
        with one head gets the sum over all heads.
        """
        scale = self.scales["dbias"]
        if scale.off.shape[0] == 1:
            off, by_row = off.sum(0, keepdim=True), by_row.sum(0, keepdim=True)
        u = (off + by_row).sqrt()
        keys = slice(0, u.shape[-1])
        scale.off[:, rows, keys] = u
        scale.luck[:, rows, keys] = u
        scale.row_error[:, rows] = 2.0 * SURE * u.norm(dim=-1)
        scale.row_along[:, rows] = float("inf")  # not judged: a row of dbias is no sum of values

    def _add_sinks(self, sums: BackwardSums, off: "_Off") -> None:
        call, scale = self._call.forward, self.scales["dsinks"]
        assert call.sinks is not None
        weight = (call.sinks.double()[:, None, None] - sums.lse).exp()
        weight = weight.masked_fill(sums.lse == float("-inf"), 0.0)
        u = ((weight * off.d).square() + (weight * sums.d * off.lse).square()).sum(1)
        scale.off.copy_((scale.off.square() + u).sqrt() + ROW * (weight * sums.d).abs().sum(1))
        scale.luck.copy_(scale.off)
        scale.row_error.copy_(2.0 * scale.off[:, 0])
        scale.row_along.fill_(float("inf"))

    def _add(
        self,
        name: str,
        rows: slice,
        weights: Tensor,
        off: Tensor,
        values: Tensor,
        along_row: Tensor | None = None,
        by_row: Tensor | None = None,
    ) -> None:
        """Add the scales of dq, dk or dv, which is `weights @ values`.

        weights, values: `(heads, rows, n)` and `(heads, n, dim)`
        off: of weights' shape, independent errors of the weights
        along_row: of the result's shape, the result's error that comes from the common error of a
            query's weights (for dq)
        by_row: of weights' shape, the common errors of a query's weights (for dk, dv)
        """
        golden = weights @ values
        own = (off.square() @ values.square()).sqrt()
        shared, by_queries = torch.zeros_like(golden), golden.new_zeros(())
        if along_row is not None:  # each query has a row
            own = own + along_row
        if by_row is not None:
            shared = (by_row.square() @ values.square()).sqrt()
            by_queries = (by_row.sum(1) * values.abs().sum(-1)).square().sum()
            off = (off.square() + by_row.square()).sqrt()
        square = golden.square().sum(-1)
        magnitude = weights.abs() @ values.abs()
        spread = (weights.square() @ values.square()).sqrt()
        deviation = (off.square() @ values.square()).sqrt()
        together = torch.zeros_like(golden) if along_row is None else along_row
        float32 = ROW * magnitude + self._lost(weights, values)
        alike, chance = 0.5 * self._eps, SURE * DEVIATION * self._eps

        rounded = (alike * square.sqrt()).maximum(chance * spread.norm(dim=-1))
        row_error = rounded + float32.norm(dim=-1)
        row_error += 2.0 * (deviation.norm(dim=-1) + together.norm(dim=-1))

        parts = golden @ values.mT  # times the weight: each key's part of the row's squared norm
        along = weights * parts
        rounded = (alike * square).maximum(chance * along.norm(dim=-1))
        rounded = rounded.minimum(alike * along.abs().sum(-1))
        row_along = rounded + (golden.abs() * float32).sum(-1)
        row_along += 2.0 * ((off * parts).norm(dim=-1) + (golden.abs() * together).sum(-1))

        draws = DEVIATION * self._eps * spread
        if self._call.forward.dropout_p > 0.0:
            # a kernel may round before or after it divides by 1 - dropout_p, which gives other
            # rounding errors than the baseline's, those of the result included
            draws = 2.0 * DEVIATION * self._eps * (spread.square() + golden.square()).sqrt()
        luck = 2.0 * EPS_FLOAT32 * magnitude + draws + own
        found = GradientScale(deviation + together, luck, shared, by_queries, row_error, row_along)
        scale = self.scales[name]
        scale.by_queries += by_queries
        is_shared = scale.row_error[rows] > 0.0  # rows that are keys of another sequence as well
        for field in ("off", "luck", "shared", "row_error", "row_along"):
            getattr(scale, field)[rows] += getattr(found, field).transpose(0, 1)
        # not judged: the bound of a sum's dot product is not the sum of the parts' bounds
        scale.row_along[rows] = scale.row_along[rows].masked_fill(is_shared, float("inf"))

    def _lost(self, weights: Tensor, values: Tensor) -> Tensor:
        """The error that comes from weights too small for their dtype, see `scales.py`."""
        # a kernel may round before it divides by 1 - dropout_p
        scale = 1.0 / (1.0 - self._call.forward.dropout_p)
        half, smallest = (scale * x for x in subnormal(self._dtype))
        size = weights.abs()
        vanish = size <= half
        coarse = half * weights.sign() * (~vanish & (size < smallest))
        return (size * vanish) @ values.abs() + of_coarse(coarse, values)


@dataclasses.dataclass
class _Off:
    """Errors of the terms of one sequence's gradients, before they are rounded to q's dtype.

    `logit`, `ds` and `dx` are `(heads, Lq, Lk)`, independent of each other. `lse` and `d` are
    `(heads, Lq, 1)`, each a common error of a whole row; `ds` and `dx` do not contain these.
    """

    logit: Tensor
    ds: Tensor
    dx: Tensor
    lse: Tensor
    d: Tensor

    @classmethod
    def of(cls, sums: BackwardSums, eps: float) -> "_Off":
        x = sums.scored
        softcap, kept = x.call.softcap, 1.0 - x.call.dropout_p
        magnitudes = x.magnitudes()
        # softmax_lse is rounded to float32, and so is its difference from a logit
        size = sums.lse.abs().masked_fill(sums.lse == float("-inf"), 0.0)
        logit = LOGIT * (magnitudes + size)
        lse = LOGIT * ((sums.p * magnitudes).norm(dim=-1, keepdim=True) + size)
        lse += max(2.0 * EPS_FLOAT32, min(eps, EPS_BFLOAT16) / EXPONENTIAL)
        product = LOGIT * (sums.dout.abs() @ x.v.abs().mT) / kept

        # out was rounded to q's dtype, and computed from rounded probabilities
        sixteen = 0.5 * SURE * DEVIATION * eps
        by_out = (sums.dout * sums.out).norm(dim=-1, keepdim=True)
        by_p = (sums.p * sums.dp).norm(dim=-1, keepdim=True)
        by_logits = (sums.p * logit * (sums.dp - sums.d)).norm(dim=-1, keepdim=True)
        d = (sixteen + LOGIT) * (by_out.square() + by_p.square()).sqrt() + by_logits
        d += LOGIT * sums.d.abs()

        ds = ((sums.ds * logit).square() + (sums.p * product).square()).sqrt()
        factor = _ratio(sums.dx, sums.ds)
        dx = (ds * factor).square()
        if softcap > 0.0:
            t = x.scores / softcap
            of_tanh = (1.0 - t.square()) * logit / softcap + 4.0 * EPS_FLOAT32
            dx += (sums.ds * 2.0 * t * of_tanh).square()
        return cls(logit, ds, dx.sqrt(), lse, d)


def _ratio(dx: Tensor, ds: Tensor) -> Tensor:
    """dx / ds, the derivative of softcap for each pair; 1 if ds is 0."""
    return torch.where(ds == 0.0, 1.0, dx / ds)
