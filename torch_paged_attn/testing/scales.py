"""What the rounding errors of an honest kernel are as large as, taken from golden's own sums.

A rounding changes a number by half an eps of it or less, and by `DEVIATION` of an eps on average;
such errors add up as the root of the sum of their squares, so `SURE` of these deviations are
hardly ever exceeded. Where they are all alike, because all probabilities of a row are, they add up
to half an eps of the sum instead. What errors come from:

- Probabilities may be rounded to the dtype of q, and their exponentials be as much coarser.
- The sums are float32. An exponential, its product, the sum and its division cost four roundings of
  the sum of |p v|, which cancellation makes larger than the result.
- Logits are float32: they are rounded as products, scaled and shifted. A library's routine for
  small matrices adds eight products where others add a hundred, and ALiBi is exact before it is
  multiplied by log2(e): in float32 no baseline counts as closer than four deviations of it. A row
  may be twice as far off, by its own logits and by those that it is divided by.
- Hopper adds up products of float8 by steps: 32 of them, and what there is, are each cut off 13
  bits below the largest. Where a kernel is said to do that, a deviation of a logit is half such a
  bit of its magnitude: cutting n numbers off loses a root of n / 3 of them if signs are mixed, 6.6
  for 132, of a largest number that is a small part of what is added up (tests/reference/
  test_float8_sums.py measures 0.1 to 0.4). What is cut off is nearer to 0, so that logits of a row,
  the large ones more than the rest, err alike: by a fifth of a bit.
- Below the smallest normal number of their dtype probabilities, over the largest of their row, are
  no longer rounded in proportion: each may be off by half the distance of two such numbers, either
  way, or all of it be lost if it is less than that, before dropout magnifies it.

The baseline may have been lucky, the more so the fewer rows there are: a row's numbers share the
roundings of its probabilities and of its sums. `luck` is two roundings of the sums and two
deviations of what rounding the probabilities does: the largest error is granted all of it, the mean
of n rows, those that are alike counted once, a part in sqrt(n).
"""

import dataclasses

import torch
from torch import Tensor

from torch_paged_attn.reference import Sums

EPS_FLOAT32 = torch.finfo(torch.float32).eps
# a number's rounding error is as likely anywhere in half a unit in its last place on either side
DEVIATION = 0.2
SURE = 5.0
LOGIT = 4.0 * DEVIATION * EPS_FLOAT32
CUT_OFF = 2.0**-13
CUT_LOGIT, CUT_LOGITS = 4.0 * 0.5 * CUT_OFF, DEVIATION * CUT_OFF
ROW = 4.0 * EPS_FLOAT32
# exponentials are off by no more than a part in EXPONENTIAL of what rounding them to 16 bits does
EXPONENTIAL = 2.0**11
EPS_BFLOAT16 = torch.finfo(torch.bfloat16).eps


@dataclasses.dataclass
class Scales:
    """Of some rows. `(heads, rows, dim_v)`: `magnitude`, the sum of |p v|, `spread`, the root of
    the sum of (p v)^2, and `logits`, what the roundings of logits do to the result.
    `(heads, rows)`: `row_error`, how long a row's error may be, `row_along`, how far it may point
    along the row, and `lse`, what the roundings of logits do to softmax_lse.
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

        along = weights * _products(golden, values)  # a key's part of the square of the length
        rounded = (alike * square).maximum(chance * _length(along))
        rounded = rounded.minimum(alike * along.abs().sum(-1))
        row_along = rounded + (golden.abs() * float32).sum(-1)
        row_along += 2.0 * (of_one * _length(along * sums.logits) + lse * square)
        return cls(magnitude, spread, logits, row_error, row_along, lse)


class Observer:
    """Collects the scales of the sequences that a reference shows. `cuts_off`: products are those
    of float8, which a kernel adds up as Hopper does."""

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
        """Of all rows of `out`, laid as they lie there; rows that no sequence has have no error."""
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
        """What each number of a result owes to chance, each row by itself."""
        luck = 2.0 * EPS_FLOAT32 * scales.magnitude
        luck += 2.0 * DEVIATION * self._probability_eps * scales.spread
        return luck * _alike(golden, luck) ** 0.5

    @property
    def exponential(self) -> float:
        """What softmax_lse owes to exponentials."""
        return max(2.0 * EPS_FLOAT32, min(self._probability_eps, EPS_BFLOAT16) / EXPONENTIAL)


ELEMENTS = ("magnitude", "spread", "logits")


def _alike(golden: Tensor, luck: Tensor) -> float:
    """How many rows are one draw of luck, being alike: all of a sequence's where the scale is 0."""
    rows = golden[luck.any(-1)].sum(-1).float()
    return rows.numel() / max(1, rows.unique().numel())


def _probability_eps(sums: Sums) -> float:
    eps = torch.finfo(sums.dtype).eps
    return eps if eps > EPS_FLOAT32 else 0.0


def _lost(sums: Sums) -> Tensor:
    """What numbers of the result miss by probabilities that are too small for their dtype."""
    # the largest probability, the sink's too, is 1 when they are rounded
    one = sums.softmax.sum(-1, keepdim=True).neg() + 1.0
    if sums.softmax.shape[-1]:
        one = one.maximum(sums.softmax.amax(-1, keepdim=True))
    half, smallest = (one * x for x in subnormal(sums.dtype))
    magnified = (sums.weights / sums.softmax).nan_to_num(0.0)
    vanish, values = sums.softmax <= half, sums.values
    coarse = half * magnified * (~vanish & (sums.softmax < smallest))
    return _times(sums.weights * vanish, values.abs()) + of_coarse(coarse, values)


def subnormal(dtype: torch.dtype) -> tuple[float, float]:
    """What a number may be and still be rounded to zero, and what it has to be to be as exact as
    any.
    """
    info = torch.finfo(dtype)
    # float32 may be flushed to zero
    return max(0.5 * info.eps * info.tiny, torch.finfo(torch.float32).tiny), 2.0 * info.tiny


def of_coarse(off: Tensor, values: Tensor) -> Tensor:
    """What a sum of values is off by that come with weights, each of them `off` by up to as much:
    all alike, or each by chance.
    """
    chance = _times(off**2, values**2).sqrt()
    return _times(off, values).abs().maximum(SURE / 3**0.5 * chance)


def _times(weights: Tensor, values: Tensor) -> Tensor:
    """`(heads, rows, keys)` times values of all rows, or of each row."""
    if values.dim() == 3:
        return weights @ values
    return (weights[..., None, :] @ values)[..., 0, :]


def _products(rows: Tensor, values: Tensor) -> Tensor:
    """`(heads, rows, keys)`: each row times each of its values."""
    if values.dim() == 3:
        return rows @ values.mT
    return (values @ rows[..., None])[..., 0]


def _length(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()
