"""Tiles of the Hopper kernel: by head size and by how long the sequences are."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """CONSUMERS of 64 rows each, tiles of BLOCK_N keys, stages of the pipelines, registers of a
    consumer's thread, and whether consumers ask for their products one after the other, so that
    those of one run while the others' softmax is computed. SPLITS_KEYS: two consumers have the same
    64 rows, and each every other tile of keys; stages are an even number then, so that a stage is
    always the same consumer's: a barrier is of use to who waits for all of its phases.
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
    """`width` is head_dim as it lies in shared memory: 64, 128 or 256. With `is_copied`, producers
    copy rows of keys."""
    if width == 256:
        registers = 224 if is_copied else 232
        return HopperConfig(BLOCK_N=64, Q_STAGES=1, REGISTERS=registers, PINGPONG=False)
    stages = 2 if width == 128 else 3
    if is_copied:
        # rows that are copied arrive later than boxes
        return HopperConfig(KV_STAGES=stages + 1, Q_STAGES=1 if width == 128 else 2)
    # a third consumer hides more of the exponentials, but makes tiles that reach further past a
    # causal diagonal, and that are no power of two, as rows of a layout are
    if width == 64 and not has_layout and (not is_causal or mean_length >= 4096):
        return HopperConfig(CONSUMERS=3, REGISTERS=160, KV_STAGES=stages)
    # reading lists takes registers of the producers
    return HopperConfig(REGISTERS=216 if has_layout else 232, KV_STAGES=stages)


def choose_short_config(width: int, rows: int = 0) -> HopperConfig:
    """Where sequences are short and their tiles are taken in turns; `rows` are a sequence's, of all
    heads that share a tile, in the mean."""
    if width == 64 and -(-rows // 192) * 192 < -(-rows // 128) * 128:
        return HopperConfig(CONSUMERS=3, REGISTERS=160, KV_STAGES=3)  # fewer rows are nobody's
    if width == 64:
        return HopperConfig(KV_STAGES=3)
    return HopperConfig(BLOCK_N=64, Q_STAGES=3, KV_STAGES=4)


def choose_8_bit_config(width: int, is_float8: bool) -> HopperConfig:
    """Of 8-bit keys and values, with float8 queries or with 16-bit ones; registers are left to the
    warps that convert them."""
    if width == 256:
        stages = 2 if is_float8 else 1
        return HopperConfig(BLOCK_N=64, KV_STAGES=stages, Q_STAGES=1, REGISTERS=208, PINGPONG=False)
    return HopperConfig(Q_STAGES=2 if is_float8 else 1, REGISTERS=208)


def choose_guessed_config(width: int, is_narrow: bool = False) -> HopperConfig:
    """Where the rows of one consumer hold all queries of a sequence, or tiles are few: as many keys
    on their way as there is room for. `is_narrow`: by small tiles."""
    stages = {64: 6, 128: 3, 256: 3}[width]
    queries = 1 if width == 256 else 2
    keys = 64 if width == 256 else 128
    if is_narrow:
        keys, stages = 64, 6
    return HopperConfig(1, keys, stages, queries, 240, PINGPONG=False)


def choose_split_config(width: int) -> HopperConfig:
    """The same with two consumers, each of which takes every other tile of keys. `width` is 64 or
    128."""
    return HopperConfig(2, 128 if width == 64 else 64, 4, 2, 208, False, SPLITS_KEYS=True)


def choose_guessed_8_bit_config(width: int, is_tall: bool) -> HopperConfig:
    """The same of 8-bit keys and values: their 16-bit tiles take the room of stages. Tall tiles are
    for many keys."""
    if width == 256:
        return HopperConfig(1, 64, 1, 1, 216, PINGPONG=False)
    if width == 128 and is_tall:
        return HopperConfig(1, 128, 2, 1, 216, PINGPONG=False)
    return HopperConfig(1, 128 if width == 64 else 64, 4, 2, 216, PINGPONG=False)


def choose_narrow_config(width: int) -> HopperConfig:
    """Where a window shows few tiles of keys: small ones, of which it hides less."""
    if width == 64:
        return HopperConfig(BLOCK_N=64, Q_STAGES=4, KV_STAGES=6)
    return HopperConfig(BLOCK_N=64, Q_STAGES=3, KV_STAGES=4)


@dataclasses.dataclass(frozen=True)
class HopperBackwardConfig:
    """A kernel of the backward: CONSUMERS of 64 rows of the tile that stays, tiles of PASS rows
    that pass by, stages of the tile that stays and of the two that pass (queries and gradients, or
    keys and values), registers of a consumer's thread, and how many of the two tiles that stay are
    kept in registers. IN_PLACE: dQ leaves from where the queries lay.

    IS_SPLIT: consumers share all rows of the tile that stays, 64, and each has half of the columns
    of the results. P and dS then go through shared memory, by DS_STAGES tiles.

    AT_ONCE: P and dS of a tile wait in registers until the scores of the next are asked for, and
    all products run together (`hopper/backward_keys_at_once.py`); not in one pass.

    In one pass, DQ_SUMS says how dQ is added up (`hopper/sums.py`), and there are DS_STAGES tiles
    of dS and SLOTS for parts of dQ.
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


def choose_keys_config(width: int, width_v: int) -> HopperBackwardConfig:
    """For dK and dV; widths are those of heads as they lie in shared memory."""
    if width == 256:
        if width_v == 256:
            return HopperBackwardConfig(IS_SPLIT=True)
        return HopperBackwardConfig(IS_SPLIT=True, FIRST_STAGES=3, SECOND_STAGES=3, OPERANDS=1)
    if width == 64:
        return HopperBackwardConfig(
            STAY_STAGES=2, FIRST_STAGES=3, SECOND_STAGES=3, OPERANDS=1, AT_ONCE=True
        )
    return HopperBackwardConfig(STAY_STAGES=2, FIRST_STAGES=3)


def choose_queries_config(
    width: int, width_v: int, columns: int, mean_length: int
) -> HopperBackwardConfig:
    """For dQ. `columns` of `width` hold numbers."""
    if width == 256:
        config = HopperBackwardConfig(PASS=32, FIRST_STAGES=3, SECOND_STAGES=3, IN_PLACE=True)
        if (columns, width_v) != (192, 128):
            return config
        # registers that sums of 192 columns leave hold the gradients of 128, which leave shared
        # memory to another tile
        return dataclasses.replace(config, FIRST_STAGES=4, SECOND_STAGES=4, OPERANDS=1)
    if width == 64 and mean_length >= 2048:
        # a third consumer hides more of the exponentials; its tiles are larger
        return HopperBackwardConfig(
            CONSUMERS=3, FIRST_STAGES=4, SECOND_STAGES=4, REGISTERS=160, OPERANDS=1
        )
    return HopperBackwardConfig(FIRST_STAGES=4, SECOND_STAGES=4, OPERANDS=2 if width == 64 else 0)


def choose_one_pass_config(
    width: int, mean_length: int, has_window: bool
) -> HopperBackwardConfig | None:
    """For dK, dV and dQ in one pass; None where two kernels are faster: where sums of dQ, which
    have to be zeroed, added up and rounded, are much of the work."""
    if width == 64:
        return HopperBackwardConfig(
            STAY_STAGES=2, FIRST_STAGES=3, SECOND_STAGES=3, OPERANDS=2, DQ_SUMS=2
        )
    if width == 256 or mean_length <= 2048 or has_window:
        return None
    return HopperBackwardConfig(DQ_SUMS=1, SLOTS=2)
