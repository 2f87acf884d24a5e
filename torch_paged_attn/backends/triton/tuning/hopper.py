"""Tile sizes of Hopper's kernels, by head_dim and sequence lengths."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """The configuration of the forward kernel.

    CONSUMERS: warp groups that compute, each with 64 rows of a tile of queries
    BLOCK_N: keys of a tile
    KV_STAGES, Q_STAGES: stages of the pipelines of keys and of queries
    REGISTERS: of a consumer's thread
    PINGPONG: consumers issue their matrix products one after the other, so that the products of one
        run during the softmax of another (FlashAttention-3)
    SPLITS_KEYS: two consumers have the same 64 rows, and each has every other tile of keys. The
        number of stages is even then, so that a stage always belongs to the same consumer, because
        who waits on a barrier has to wait for each of its phases
    """

    CONSUMERS: int = 2
    BLOCK_N: int = 128
    KV_STAGES: int = 2
    Q_STAGES: int = 2
    REGISTERS: int = 232
    PINGPONG: bool = True
    SPLITS_KEYS: bool = False


def _table() -> dict[str, dict[int, HopperConfig]]:
    """Name -> width of a head in shared memory (64, 128 or 256) -> the configuration."""
    of = HopperConfig
    # one consumer: more tiles, for few queries; as many stages of keys as fit
    low: dict[str, Any] = dict(CONSUMERS=1, REGISTERS=240, PINGPONG=False)
    low_8_bit = low | dict(REGISTERS=216)
    wide: dict[str, Any] = dict(BLOCK_N=64, Q_STAGES=1, PINGPONG=False)
    # a third consumer hides more of the exponentials, or shares rows that are copied. But its tiles
    # extend further past a causal diagonal, and their 192 rows are not a power of two
    three: dict[str, Any] = dict(CONSUMERS=3, REGISTERS=160)
    return {
        "low": {
            64: of(**low, KV_STAGES=6),
            128: of(**low, KV_STAGES=3),
            256: of(**low | wide, KV_STAGES=3),
        },
        # small tiles of keys, of which less is masked
        "low small": {x: of(**low, BLOCK_N=64, KV_STAGES=6) for x in (64, 128)},
        "small": {
            64: of(BLOCK_N=64, Q_STAGES=4, KV_STAGES=6),
            128: of(BLOCK_N=64, Q_STAGES=3, KV_STAGES=4),
        },
        "divided": {
            64: of(2, 128, 4, 2, 208, False, SPLITS_KEYS=True),
            128: of(2, 64, 4, 2, 208, False, SPLITS_KEYS=True),
        },
        "tall": {64: of(KV_STAGES=3), 128: of(KV_STAGES=2), 256: of(**wide)},
        "three": {64: of(**three, KV_STAGES=3)},
        # producers need registers to read the lists of a layout
        "layout": {
            64: of(REGISTERS=216, KV_STAGES=3),
            128: of(REGISTERS=216, KV_STAGES=2),
            256: of(**wide),
        },
        # rows of keys are copied, and take longer to arrive than boxes: more stages, small tiles
        "tall, copied": {
            64: of(KV_STAGES=4),
            128: of(BLOCK_N=64, KV_STAGES=5),
            256: of(**wide, REGISTERS=224),
        },
        "three, copied": {
            64: of(**three, BLOCK_N=64, KV_STAGES=6, Q_STAGES=1),
            128: of(**three, BLOCK_N=64, KV_STAGES=5, Q_STAGES=1),
        },
        # the same with as many keys at a time as where they are not copied
        "invariant, copied": {
            64: of(KV_STAGES=4),
            128: of(KV_STAGES=3, Q_STAGES=1),
            256: of(**wide, REGISTERS=224),
        },
        # warps that convert keys and values need registers, too, and their tiles shared memory
        "low, 8 bits": {
            64: of(**low_8_bit, KV_STAGES=4),
            128: of(**low_8_bit, BLOCK_N=64, KV_STAGES=4),
            256: of(**low_8_bit | wide, KV_STAGES=1),
        },
        "low large, 8 bits": {128: of(**low_8_bit, Q_STAGES=1)},
        "tall, 8 bits": {
            64: of(Q_STAGES=1, REGISTERS=208),
            128: of(Q_STAGES=1, REGISTERS=208),
            256: of(**wide, KV_STAGES=1, REGISTERS=208),
        },
        "tall, float8": {
            64: of(REGISTERS=208),
            128: of(REGISTERS=208),
            256: of(**wide, REGISTERS=208),
        },
        # packed sequences whose tiles are taken in turns
        "turns": {64: of(KV_STAGES=3), 128: of(BLOCK_N=64, Q_STAGES=3, KV_STAGES=4)},
    }


FORWARD = _table()


@dataclasses.dataclass(frozen=True)
class HopperBackwardConfig:
    """The configuration of a backward kernel. A program has a fixed tile (keys and values, or
    queries and dout) and loops over tiles of the other two tensors.

    - CONSUMERS: warp groups that compute, each with 64 rows of the fixed tile
    - PASS: rows of a tile of the loop
    - STAY_STAGES: stages of the fixed tile
    - FIRST_STAGES, SECOND_STAGES: stages of the two tiles of the loop
    - REGISTERS: of a consumer's thread
    - OPERANDS: how many of the two tensors of the fixed tile are kept in registers
    - IS_SPLIT: the fixed tile has 64 rows, which the consumers share; each computes half of the
      columns of the results. P and dS go through shared memory then, in DS_STAGES tiles
    - IN_PLACE: dQ is stored from the shared memory of the queries
    - DQ_SUMS: in one pass, how dQ is added up (`hopper/backward/sums.py`); 0 otherwise
    - DS_STAGES: in one pass, tiles of dS in shared memory
    - SLOTS: in one pass, tiles of parts of dQ in shared memory
    - AT_ONCE: P and dS of a tile stay in registers until the next tile's scores are issued, so that
      all products run together (`hopper/backward/dkdv.py`); not in one pass
    """

    CONSUMERS: int = 2
    PASS: int = 64
    STAY_STAGES: int = 1
    FIRST_STAGES: int = 2
    SECOND_STAGES: int = 2
    REGISTERS: int = 240
    OPERANDS: int = 0
    IS_SPLIT: bool = False
    IN_PLACE: bool = False
    DQ_SUMS: int = 0
    DS_STAGES: int = 2
    SLOTS: int = 1
    AT_ONCE: bool = False


def choose_keys_config(width: int, width_v: int, columns: int) -> HopperBackwardConfig:
    """The configuration for dK and dV. `width`, `width_v`: head_dim and head_dim_v rounded up to
    64, 128 or 256, as in shared memory. `columns`: how many of the `width` columns are used.
    """
    if width == 256:
        if width_v == 256:
            return HopperBackwardConfig(IS_SPLIT=True)
        if width_v == 128 and columns <= 192:
            # both sums of a consumer's own keys fit into registers
            return HopperBackwardConfig(PASS=32, FIRST_STAGES=5, SECOND_STAGES=5)
        return HopperBackwardConfig(IS_SPLIT=True, FIRST_STAGES=3, SECOND_STAGES=3, OPERANDS=1)
    if width == 64:
        return HopperBackwardConfig(
            STAY_STAGES=2, FIRST_STAGES=3, SECOND_STAGES=3, OPERANDS=1, AT_ONCE=True
        )
    return HopperBackwardConfig(STAY_STAGES=2, FIRST_STAGES=3)


def choose_queries_config(
    width: int, width_v: int, columns: int, mean_length: int
) -> HopperBackwardConfig:
    """The configuration for dQ. `columns`: how many of the `width` columns are used."""
    if width == 256:
        config = HopperBackwardConfig(PASS=32, FIRST_STAGES=3, SECOND_STAGES=3, IN_PLACE=True)
        if (columns, width_v) != (192, 128):
            return config
        # with sums of 192 columns, dout with 128 columns fits into registers, which leaves shared
        # memory for another stage
        return dataclasses.replace(config, FIRST_STAGES=4, SECOND_STAGES=4, OPERANDS=1)
    if width == 64 and mean_length >= 2048:
        # a third consumer hides more of the exponentials, with larger tiles
        return HopperBackwardConfig(
            CONSUMERS=3, FIRST_STAGES=4, SECOND_STAGES=4, REGISTERS=160, OPERANDS=1
        )
    return HopperBackwardConfig(FIRST_STAGES=4, SECOND_STAGES=4, OPERANDS=2 if width == 64 else 0)


def choose_one_pass_config(
    width: int, mean_length: int, has_window: bool
) -> HopperBackwardConfig | None:
    """The configuration for dK, dV and dQ in one kernel. None if two kernels are faster: if
    zeroing, adding up and rounding dQ takes a large part of the time.
    """
    if width == 64:
        return HopperBackwardConfig(
            STAY_STAGES=2, FIRST_STAGES=3, SECOND_STAGES=3, OPERANDS=2, DQ_SUMS=2
        )
    if width == 256 or mean_length <= 2048 or has_window:
        return None
    return HopperBackwardConfig(DQ_SUMS=1, SLOTS=2)
