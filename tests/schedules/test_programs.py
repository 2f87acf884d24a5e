"""What XLA does around the kernels of some calls, and how it is read."""

import aot
import jax.numpy as jnp
import pytest
from batches import Batch
from contenders import PROBLEMS, ours
from generations import GENERATIONS
from jax import ShapeDtypeStruct, lax
from operations import read_operations


def test_latent_attention_reads_keys_and_values_as_one():
    [problem] = (known for known in PROBLEMS if known.name.startswith("mla_decode"))
    function, arguments = problem.contenders["ours"](GENERATIONS["v5e"])
    program = aot.compile_program(function, arguments, GENERATIONS["v5e"])
    cache = arguments[1]
    around = [operation for operation in program.operations if not operation.is_kernel]
    assert not [x for x in around if x.result_bytes > cache.size // 16]
    [kernel] = program.kernels
    counts = kernel.counts(GENERATIONS["v5e"])
    rows = problem.live_bytes // 576 * cache.shape[-1]
    assert rows <= counts.hbm_bytes < 1.1 * rows
    # queries are widened in the kernel, and a block of pages ends where the table does
    assert not [x for x in around if "pad" in x.name]


def test_a_decode_of_64_heads_is_not_laid_out_on_v4():
    """A decode's tile is a row of each head, which fits VMEM where a prefill's tile does not."""
    batch = Batch.equal(4, 256, 1, 16, num_heads=64, num_kv_heads=64)
    program = aot.compile_program(*ours(batch)(GENERATIONS["v4"]), GENERATIONS["v4"])
    # tiles of a part of the heads take 47
    assert len([x for x in program.operations if not x.is_kernel]) <= 4


def _loop(table, x):
    """A sort, copies and, in a loop, a gather and a product."""
    order = jnp.argsort(table)
    return lax.fori_loop(0, 7, lambda i, x: jnp.sin(x[order]) @ x + i, x)


@pytest.mark.parametrize("name", ["v5e", "tpu7x"])
def test_what_is_dumped_has_the_operations_of_the_compiled_module(name):
    generation = GENERATIONS[name]
    square = ShapeDtypeStruct((512, 512), jnp.float32)
    arguments = ShapeDtypeStruct((512,), jnp.int32), square
    _, compiled, dumped = aot.compile_and_dump(_loop, arguments, generation)
    found = read_operations(*aot.dumped_module(dumped))
    assert found == read_operations(compiled.as_text(), "")
    assert {"sort", "fusion", "copy-start"} <= {operation.opcode for operation in found}
    assert sum(operation.cycles is not None for operation in found) >= 3
