"""How large the rounding errors of a correct kernel may be, computed from golden's own sums.

Rounding a number changes it by at most half an eps of its size; the standard deviation is about
`DEVIATION` of an eps. Independent errors add up as the root of the sum of their squares, and hardly
ever exceed `SURE` standard deviations. If all probabilities of a row are equal, they all have the
same rounding error, and the sum is off by up to half an eps. The sources of errors:

- Probabilities may be rounded to q's dtype, and exponentials may be computed as coarsely.
- Sums are float32. The exponential, its product with v, the sum and the division are four
  roundings, of the size of the sum of |p v|, which is larger than the result if terms cancel.
- Logits are float32: rounded as dot products, when scaled and when the maximum is subtracted. Sums
  of eight products at a time are more accurate than sums of a hundred, and the baseline may have
  either. So with float32 inputs the baseline's error counts as at least that of four standard
  deviations of each logit. A row may be off by twice that: by its own logits, and by those in its
  denominator.
- Hopper adds up float8 products in steps of 32. In each step the 32 products and the sum so far are
  truncated 13 bits below the largest of them. If the test allows that (`cuts_off`), the standard
  deviation of a logit is half such a bit of its magnitude: truncating n numbers of mixed signs is
  off by the root of n / 3 such bits, which is 6.6 for n = 132, and the largest number is a small
  part of the magnitude (tests/reference/test_float8_sums.py measures 0.1 to 0.4 bits). Truncation
  goes towards 0, so the errors of a row's logits also have a common part: a fifth of a bit.
- A probability below the smallest normal number of its dtype, relative to the largest of its row,
  is off by up to half the distance of two subnormal numbers, or is lost if it is smaller than
  that. Dropout's factor magnifies the error.

The baseline's errors may be small by chance, above all if there are few rows: the numbers of a row
share the rounding errors of its probabilities and sums. `luck` is two roundings of the sums plus
two standard deviations of the error of rounded probabilities. The maximum error may be larger by
all of it. The mean is one of independent draws, one for each row, where equal rows count once: it
may be larger by the root of the sum of their squares, divided by how many there are. For n rows of
one size that is 1 / sqrt(n) of it; where one row is much larger than all others, it is that row's.
"""

import dataclasses

import torch
from torch import Tensor

from torch_paged_attn.reference import Sums

EPS_FLOAT32 = torch.finfo(torch.float32).eps
# of an eps: the standard deviation of a rounding error, which is spread evenly over half a unit in
# the last place on either side
DEVIATION = 0.2
SURE = 5.0
LOGIT = 4.0 * DEVIATION * EPS_FLOAT32
CUT_OFF = 2.0**-13
CUT_LOGIT, CUT_LOGITS = 4.0 * 0.5 * CUT_OFF, DEVIATION * CUT_OFF
ROW = 4.0 * EPS_FLOAT32
# the error of an exponential is at most that of rounding it to 16 bits, divided by this
EXPONENTIAL = 2.0**11
EPS_BFLOAT16 = torch.finfo(torch.bfloat16).eps


@dataclasses.dataclass
class Scales:
    """Sizes of the errors of some rows.

    magnitude: `(heads, rows, dim_v)`, the sum of |p v|
    spread: `(heads, rows, dim_v)`, the root of the sum of (p v)^2
    logits: `(heads, rows, dim_v)`, the result's error that comes from rounded logits
    row_error: `(heads, rows)`, the largest norm of a row's error
    row_along: `(heads, rows)`, the largest dot product of a row's error with the row
    lse: `(heads, rows)`, softmax_lse's error that comes from rounded logits
    """

    magnitude: Tensor
    spread: Tensor
    logits: Tensor
    row_error: Tensor
    row_along: Tensor
    lse: Tensor

    @classmethod
    def of(cls, sums: Sums, cuts_off: bool) -> "Scales":
        of_one, of_all = (CUT_LOGIT, CUT_LOGITS) if cuts_off else (LOGIT, 0.0)
        weights, values, eps = sums.weights, sums.values, _probability_eps(sums)
        golden = _times(weights, values)
        square = golden.square().sum(-1)
        magnitude = _times(weights, values.abs())
        spread = _times(weights**2, values**2).sqrt()
        logits = of_one * _times((weights * sums.logits) ** 2, values**2).sqrt()
        lse = of_one * _length(sums.softmax * sums.logits)
        lse = lse + of_all * (sums.softmax * sums.logits).sum(-1)
        float32 = ROW * magnitude + _lost(sums)
        alike, chance = 0.5 * eps, SURE * DEVIATION * eps

        rounded = (alike * square.sqrt()).maximum(chance * _length(spread))
        row_error = rounded + _length(float32) + 2.0 * (_length(logits) + lse * square.sqrt())

        along = weights * _products(golden, values)  # each key's part of the row's squared norm
        rounded = (alike * square).maximum(chance * _length(along))
        rounded = rounded.minimum(alike * along.abs().sum(-1))
        row_along = rounded + (golden.abs() * float32).sum(-1)
        row_along += 2.0 * (of_one * _length(along * sums.logits) + lse * square)
        return cls(magnitude, spread, logits, row_error, row_along, lse)


class Observer:
    """Collects the `Scales` of all sequences, as `Precision.observe` of the reference. `cuts_off`
    is explained at `Truth.of`.
    """

    def __init__(self, cuts_off: bool = False) -> None:
        self._cuts_off = cuts_off
        self._rows: list[slice] = []
        self._scales: list[Scales] = []
        self._probability_eps = 0.0

    def __call__(self, sums: Sums) -> None:
        self._rows.append(sums.rows)
        self._scales.append(Scales.of(sums, self._cuts_off))
        self._probability_eps = _probability_eps(sums)

    def scales(self, out: Tensor) -> Scales:
        """The scales of all rows of `out`, rows first; 0 for rows of no sequence."""
        whole = {}
        for field in dataclasses.fields(Scales):
            parts = [getattr(scales, field.name).transpose(0, 1) for scales in self._scales]
            whole[field.name] = out.new_zeros(
                out.shape if field.name in ELEMENTS else out.shape[:2]
            )
            for rows, part in zip(self._rows, parts, strict=True):
                whole[field.name][rows] = part
        return Scales(**whole)

    def luck(self, golden: Tensor, scales: Scales) -> Tensor:
        """`luck` of each number of the result (see the module's docstring), of golden's shape."""
        luck = 2.0 * EPS_FLOAT32 * scales.magnitude
        luck += 2.0 * DEVIATION * self._probability_eps * scales.spread
        return luck * _alike(golden, luck) ** 0.5

    @property
    def exponential(self) -> float:
        """softmax_lse's error that comes from coarse exponentials."""
        return max(2.0 * EPS_FLOAT32, min(self._probability_eps, EPS_BFLOAT16) / EXPONENTIAL)


ELEMENTS = ("magnitude", "spread", "logits")


def luck_of_mean(luck: Tensor) -> float:
    """The luck of the mean of all numbers, whose rows (of the last dimension) are independent."""
    return float(luck.sum(-1).norm()) / max(1, luck.numel())


def _alike(golden: Tensor, luck: Tensor) -> float:
    """The average number of equal rows, which have equal rounding errors. With softmax_scale 0, for
    example, all rows of a sequence are equal.
    """
    rows = golden[luck.any(-1)].sum(-1).float()
    return rows.numel() / max(1, rows.unique().numel())


def _probability_eps(sums: Sums) -> float:
    eps = torch.finfo(sums.dtype).eps
    return eps if eps > EPS_FLOAT32 else 0.0


def _lost(sums: Sums) -> Tensor:
    """The result's error that comes from probabilities which are too small for their dtype."""
    # kernels round probabilities relative to the largest of the row, the sink's included
    one = sums.softmax.sum(-1, keepdim=True).neg() + 1.0
    if sums.softmax.shape[-1]:
        one = one.maximum(sums.softmax.amax(-1, keepdim=True))
    half, smallest = (one * x for x in subnormal(sums.dtype))
    magnified = (sums.weights / sums.softmax).nan_to_num(0.0)
    vanish, values = sums.softmax <= half, sums.values
    coarse = half * magnified * (~vanish & (sums.softmax < smallest))
    return _times(sums.weights * vanish, values.abs()) + of_coarse(coarse, values)


def subnormal(dtype: torch.dtype) -> tuple[float, float]:
    """Two bounds of a dtype: numbers up to the first may be rounded to zero; numbers from the
    second on are rounded in proportion to their size.
    """
    info = torch.finfo(dtype)
    # devices may flush subnormal float32 numbers to zero
    return max(0.5 * info.eps * info.tiny, torch.finfo(torch.float32).tiny), 2.0 * info.tiny


def of_coarse(off: Tensor, values: Tensor) -> Tensor:
    """The error of `weights @ values` if each weight has an error of up to `off`: the larger of the
    errors if all have the same sign and if signs are random.
    """
    chance = _times(off**2, values**2).sqrt()
    return _times(off, values).abs().maximum(SURE / 3**0.5 * chance)


def _times(weights: Tensor, values: Tensor) -> Tensor:
    """`weights` `(heads, rows, keys)` times `values` `(heads, keys, dim)`, or times values of each
    row's own `(heads, rows, keys, dim)`: `(heads, rows, dim)`.
    """
    if values.dim() == 3:
        return weights @ values
    return (weights[..., None, :] @ values)[..., 0, :]


def _products(rows: Tensor, values: Tensor) -> Tensor:
    """`(heads, rows, keys)`: the dot product of each row `(dim,)` with each of its values."""
    if values.dim() == 3:
        return rows @ values.mT
    return (values @ rows[..., None])[..., 0]


def _length(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()
