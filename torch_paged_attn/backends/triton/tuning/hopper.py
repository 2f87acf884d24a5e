"""Tiles of the Hopper kernel: by head size and by how long the sequences are."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """CONSUMERS of 64 rows each, tiles of BLOCK_N keys, stages of the pipelines, registers of a
    consumer's thread, and whether consumers ask for their products one after the other, so that
    those of one run while the others' softmax is computed.
    """

    CONSUMERS: int = 2
    BLOCK_N: int = 128
    KV_STAGES: int = 2
    Q_STAGES: int = 2
    REGISTERS: int = 232
    PINGPONG: bool = True


def choose_hopper_config(
    width: int, mean_length: int, is_causal: bool, has_layout: bool
) -> HopperConfig:
    """`width` is head_dim as it lies in shared memory: 64, 128 or 256."""
    if width == 256:
        return HopperConfig(BLOCK_N=64, Q_STAGES=1, REGISTERS=232, PINGPONG=False)
    stages = 2 if width == 128 else 3
    # a third consumer hides more of the exponentials, but makes tiles that reach further past a
    # causal diagonal, and that are no power of two, as rows of a layout are
    if width == 64 and not has_layout and (not is_causal or mean_length >= 4096):
        return HopperConfig(CONSUMERS=3, REGISTERS=160, KV_STAGES=stages)
    # reading lists takes registers of the producers
    return HopperConfig(REGISTERS=216 if has_layout else 232, KV_STAGES=stages)
