"""What the rounding errors of an honest backward are as large as, taken from golden's own sums.

As for the forward (`scales.py`), with what a backward has besides. Each of dq, dk and dv is a sum
of weights times values: dX and K, dX and Q, P and dout. The weights are rounded to q's dtype, and
they are off before they are rounded, by what stands in them:

- P by its logit, and a whole row of it by softmax_lse;
- dP by its float32 product;
- a whole row by D, whose `out` was rounded twice: its probabilities, and itself.

What is off by row adds up along the row in dq, and like chance in dk and dv: there all keys share
it, so that of few queries it is one draw, however many keys there are.
"""

import dataclasses

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
    of_coarse,
    subnormal,
)


@dataclasses.dataclass
class GradientScale:
    """Of one gradient, shaped as it but for `row_error` and `row_along`, which are shaped as its
    rows: how far its numbers may be `off` by float32 alone; what they owe to chance, each row by
    itself (`luck`) or all that one query is in (`shared`); how long a row's error may be and how
    far it may point along the row.
    """

    off: Tensor
    luck: Tensor
    shared: Tensor
    row_error: Tensor
    row_along: Tensor

    @classmethod
    def zeros(cls, shape: torch.Size) -> "GradientScale":
        whole, rows = (torch.zeros(s, dtype=torch.float64) for s in (shape, shape[:-1]))
        return cls(whole, whole.clone(), whole.clone(), rows, rows.clone())

    def luck_of(self, queries: int) -> Tensor:
        """What numbers owe to chance, as `assert_close_as_baseline` takes it: it divides by the
        root of the number of rows that have any.
        """
        rows = max(1, int((self.luck + self.shared).any(-1).sum()))
        return self.luck + self.shared * (rows / max(1, queries)) ** 0.5


class GradientObserver:
    """Collects the scales of the gradients of the sequences that a reference shows."""

    def __init__(self, call: BackwardCall) -> None:
        dtype = call.forward.q.dtype
        eps = torch.finfo(dtype).eps
        self._call, self._dtype = call, dtype
        self._eps = eps if eps > EPS_FLOAT32 else 0.0
        self.queries = 0  # that see a key, each head's
        # a number per head counts as a row of one
        shapes = (x.shape if x.dim() > 1 else (*x.shape, 1) for x in call.new_results())
        self.scales = {
            name: GradientScale.zeros(torch.Size(shape))
            for name, shape in zip(GRADIENTS, shapes, strict=True)
        }

    def __call__(self, sums: BackwardSums) -> None:
        call, x = self._call.forward, sums.scored
        self.queries += int(x.visible.any(-1).sum())
        off = _Off.of(sums, self._eps)
        factor = _ratio(sums.dx, sums.ds)  # of softcap
        wanted = dict(zip(GRADIENTS, self._call.wanted, strict=True))
        group = (call.num_kv_heads, call.group_size)

        def transposed(t: Tensor) -> Tensor:
            """`(heads, Lq, n)` as `(kv_heads, n, group * Lq)`: what a key's gradient sums over."""
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
        """Scales of dbias from squares of what is off; one head's are a sum over all heads."""
        scale = self.scales["dbias"]
        if scale.off.shape[0] == 1:
            off, by_row = off.sum(0, keepdim=True), by_row.sum(0, keepdim=True)
        u = (off + by_row).sqrt()
        keys = slice(0, u.shape[-1])
        scale.off[:, rows, keys] = u
        scale.shared[:, rows, keys] = u
        scale.row_error[:, rows] = 2.0 * SURE * u.norm(dim=-1)
        scale.row_along[:, rows] = float("inf")  # elements share no values

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
        """Scales of `weights @ values`, `(heads, rows, n)` and `(heads, n, dim)`: of dq, dk or dv.
        Weights are `off` each by itself and `by_row` with others of a query; results of a query are
        off by `along_row` together.
        """
        shared = torch.zeros_like(weights @ values) if along_row is None else along_row
        if by_row is not None:
            shared = (by_row.square() @ values.square()).sqrt()
            off = (off.square() + by_row.square()).sqrt()
        golden = weights @ values
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

        parts = golden @ values.mT  # of the square of a row's length, by key
        along = weights * parts
        rounded = (alike * square).maximum(chance * along.norm(dim=-1))
        rounded = rounded.minimum(alike * along.abs().sum(-1))
        row_along = rounded + (golden.abs() * float32).sum(-1)
        row_along += 2.0 * ((off * parts).norm(dim=-1) + (golden.abs() * together).sum(-1))

        draws = DEVIATION * self._eps * spread
        if self._call.forward.dropout_p > 0.0:
            # a kernel may scale what dropout leaves before or after it rounds: other draws, and of
            # the last rounding, too, which the mean is granted nothing for
            draws = 2.0 * DEVIATION * self._eps * (spread.square() + golden.square()).sqrt()
        luck = 2.0 * EPS_FLOAT32 * magnitude + draws + deviation
        found = GradientScale(deviation + together, luck, shared, row_error, row_along)
        scale = self.scales[name]
        is_shared = scale.row_error[rows] > 0.0  # keys of another sequence, too
        for field in dataclasses.fields(GradientScale):
            part = getattr(found, field.name).transpose(0, 1)
            getattr(scale, field.name)[rows] += part
        # a sum's error along the sum is more than the parts' along themselves
        scale.row_along[rows] = scale.row_along[rows].masked_fill(is_shared, float("inf"))

    def _lost(self, weights: Tensor, values: Tensor) -> Tensor:
        """What sums miss by weights that are too small for their dtype: see `scales.py`."""
        # a kernel may round before it scales what dropout leaves
        scale = 1.0 / (1.0 - self._call.forward.dropout_p)
        half, smallest = (scale * x for x in subnormal(self._dtype))
        size = weights.abs()
        vanish = size <= half
        coarse = half * weights.sign() * (~vanish & (size < smallest))
        return (size * vanish) @ values.abs() + of_coarse(coarse, values)


@dataclasses.dataclass
class _Off:
    """How far the parts of a sequence's sums may be off before they are rounded to q's dtype.

    `(heads, Lq, Lk)`: `logit`, `ds` and `dx`, but for their rows. `(heads, Lq, 1)`: `lse` and `d`,
    of all of a row at once.
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
        # softmax_lse is rounded when it is saved, and its difference from a logit
        size = sums.lse.abs().masked_fill(sums.lse == float("-inf"), 0.0)
        logit = LOGIT * (magnitudes + size)
        lse = LOGIT * ((sums.p * magnitudes).norm(dim=-1, keepdim=True) + size)
        lse += max(2.0 * EPS_FLOAT32, min(eps, EPS_BFLOAT16) / EXPONENTIAL)
        product = LOGIT * (sums.dout.abs() @ x.v.abs().mT) / kept

        # out is off by its own roundings, in 16 bits by more than by float32
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
    """The softcap's factor of each pair, 1 where it cannot be seen."""
    return torch.where(ds == 0.0, 1.0, dx / ds)
