"""The TPU generations that libtpu compiles for, and what the models of time know of them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Generation:
    name: str
    topology: str  # a slice that libtpu accepts without a TPU
    clock_ghz: float  # from the peak rate that jax states for bfloat16
    hbm_bytes_per_second: float  # of one TensorCore, as jax states it
    vmem_bytes: int
    delay_slots: int  # bundles after a branch that are still executed
    granule_bytes: int  # the unit of DMA sizes and of semaphores that count DMAs
    matrix_units: int
    rows_per_cycle: int  # rows of a left operand that one matrix unit takes

    @property
    def hbm_bytes_per_cycle(self) -> float:
        return self.hbm_bytes_per_second / (self.clock_ghz * 1e9)


GENERATIONS = {
    generation.name: generation
    for generation in (
        Generation("v4", "v4:2x2x1", 1.05, 6.15e11, 16 << 20, 1, 512, 4, 1),
        Generation("v5e", "v5e:2x2", 1.5, 8.2e11, 128 << 20, 4, 32, 4, 1),
        Generation("v5p", "v5p:2x2x1", 1.75, 1.23e12, 64 << 20, 4, 32, 4, 1),
        Generation("v6e", "v6e:2x2", 1.75, 1.64e12, 128 << 20, 4, 32, 2, 2),
        Generation("tpu7x", "tpu7x:2x2x1", 2.2, 3.7e12, 64 << 20, 6, 32, 2, 2),
    )
}
