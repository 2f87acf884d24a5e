"""How the kernels are cut for a TPU generation: explicit, else by the chip, else for any chip."""

import dataclasses

import jax

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of one launch; a result differs by them in rounding only.

    `num_cores` is the number of TensorCores that one kernel runs on: 2 on v4 and v5p.
    """

    block_k: int = 1024  # keys of a block: fetched together, rounded to whole pages
    step_k: int = 512  # keys of a step of a long tile: computed on together
    num_buffers: int = 3  # blocks in VMEM: one is computed on, the others are on their way
    tile_rows: int = 512  # query rows (tokens times the group's heads) of a prefill tile
    num_cores: int = 1
    vmem_bytes: int = 100 * MIB

    def with_bias(self) -> "Config":
        """With a bias, whose blocks are as many floats as there are scores."""
        block_k = min(self.block_k, 256)
        return dataclasses.replace(
            self, block_k=block_k, step_k=min(self.step_k, block_k), tile_rows=128
        )


# by `device_kind`
CHIPS = {
    "TPU v4": Config(block_k=512, num_cores=2, vmem_bytes=15 * MIB, tile_rows=256),
    "TPU v5": Config(num_cores=2),
    "TPU v5p": Config(num_cores=2),
    "TPU v5 lite": Config(),
    "TPU v5e": Config(),
    "TPU v6 lite": Config(),
    "TPU v6e": Config(),
    "TPU7x": Config(vmem_bytes=56 * MIB),
}


def choose_config(config: Config | None) -> Config:
    """The caller's, else that of the chip which is there."""
    if config is not None:
        return config
    kind = jax.devices()[0].device_kind if jax.default_backend() == "tpu" else ""
    return CHIPS.get(kind, Config())
