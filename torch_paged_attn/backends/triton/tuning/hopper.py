"""Tile sizes of Hopper's kernels, by head_dim and sequence lengths."""

import dataclasses


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


def choose_hopper_config(
    width: int, mean_length: int, is_causal: bool, has_layout: bool, is_copied: bool = False
) -> HopperConfig:
    """The configuration of ordinary calls. `width`: head_dim rounded up to 64, 128 or 256, as in
    shared memory; `is_copied`: producers copy rows of keys instead of using TMA.
    """
    if width == 256:
        registers = 224 if is_copied else 232
        return HopperConfig(BLOCK_N=64, Q_STAGES=1, REGISTERS=registers, PINGPONG=False)
    stages = 2 if width == 128 else 3
    if is_copied:
        # copied rows take longer to arrive than TMA boxes, so there are more stages
        return HopperConfig(KV_STAGES=stages + 1, Q_STAGES=1 if width == 128 else 2)
    # a third consumer hides more of the exponentials. But its tiles extend further past a causal
    # diagonal, and their 192 rows are not a power of two, as blocks of a layout are
    if width == 64 and not has_layout and (not is_causal or mean_length >= 4096):
        return HopperConfig(CONSUMERS=3, REGISTERS=160, KV_STAGES=stages)
    # with a layout, producers need registers to read the lists
    return HopperConfig(REGISTERS=216 if has_layout else 232, KV_STAGES=stages)


def choose_copied_config(width: int, consumers: int = 2) -> HopperConfig:
    """Where producers copy rows of keys for tiles of many rows: small tiles of keys, of which more
    are on their way."""
    if consumers == 3:
        stages = 6 if width == 64 else 5
        return HopperConfig(BLOCK_N=64, KV_STAGES=stages, Q_STAGES=1, CONSUMERS=3, REGISTERS=160)
    return HopperConfig(BLOCK_N=64, KV_STAGES=5)


def choose_short_config(width: int, rows: int = 0) -> HopperConfig:
    """The configuration for short sequences whose tiles are taken in turns. `rows`: the mean number
    of rows of a sequence, over all heads that share a tile.
    """
    if width == 64 and -(-rows // 192) * 192 < -(-rows // 128) * 128:
        return HopperConfig(CONSUMERS=3, REGISTERS=160, KV_STAGES=3)  # fewer rows are unused
    if width == 64:
        return HopperConfig(KV_STAGES=3)
    return HopperConfig(BLOCK_N=64, Q_STAGES=3, KV_STAGES=4)


def choose_8_bit_config(width: int, is_float8: bool) -> HopperConfig:
    """The configuration for 8-bit keys and values, with float8 or 16-bit queries. The warps that
    convert keys and values need registers, too.
    """
    if width == 256:
        stages = 2 if is_float8 else 1
        return HopperConfig(BLOCK_N=64, KV_STAGES=stages, Q_STAGES=1, REGISTERS=208, PINGPONG=False)
    return HopperConfig(Q_STAGES=2 if is_float8 else 1, REGISTERS=208)


def choose_guessed_config(width: int, is_narrow: bool = False) -> HopperConfig:
    """The configuration with one consumer, if its rows are enough for all queries of a sequence, or
    if there are few tiles. It has as many stages of keys as fit. `is_narrow`: with small tiles of
    keys.
    """
    stages = {64: 6, 128: 3, 256: 3}[width]
    queries = 1 if width == 256 else 2
    keys = 64 if width == 256 else 128
    if is_narrow:
        keys, stages = 64, 6
    return HopperConfig(1, keys, stages, queries, 240, PINGPONG=False)


def choose_split_config(width: int) -> HopperConfig:
    """The same with two consumers, each with every other tile of keys. `width`: 64, 128."""
    return HopperConfig(2, 128 if width == 64 else 64, 4, 2, 208, False, SPLITS_KEYS=True)


def choose_guessed_8_bit_config(width: int, is_tall: bool) -> HopperConfig:
    """The same for 8-bit keys and values, with fewer stages, because the converted tiles need
    shared memory. `is_tall`: with large tiles, for many keys.
    """
    if width == 256:
        return HopperConfig(1, 64, 1, 1, 216, PINGPONG=False)
    if width == 128 and is_tall:
        return HopperConfig(1, 128, 2, 1, 216, PINGPONG=False)
    return HopperConfig(1, 128 if width == 64 else 64, 4, 2, 216, PINGPONG=False)


def choose_narrow_config(width: int) -> HopperConfig:
    """The configuration for narrow windows: small tiles of keys, of which less is masked."""
    if width == 64:
        return HopperConfig(BLOCK_N=64, Q_STAGES=4, KV_STAGES=6)
    return HopperConfig(BLOCK_N=64, Q_STAGES=3, KV_STAGES=4)


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
    - DQ_SUMS: in one pass, how dQ is added up (`hopper/sums.py`); 0 otherwise
    - DS_STAGES: in one pass, tiles of dS in shared memory
    - SLOTS: in one pass, tiles of parts of dQ in shared memory
    - AT_ONCE: P and dS of a tile stay in registers until the next tile's scores are issued, so that
      all products run together (`hopper/backward_keys_at_once.py`); not in one pass
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
