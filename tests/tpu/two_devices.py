"""The TPU's functions under `jax.shard_map`, on two devices of the host: heads, and a ring."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, PartitionSpec

from torch_paged_attn import reference
from torch_paged_attn.backends.tpu.functions import flash_varlen, merge_states
from torch_paged_attn.backends.tpu.tile_sizes import Config
from torch_paged_attn.testing import Truth, assert_accurate

TOKENS, HEADS, KV_HEADS, DIM = 24, 4, 2, 16
P = PartitionSpec
IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
attend = functools.partial(
    flash_varlen, config=Config(block_k=128, step_k=128, tile_rows=64), interpret=True
)
hints = {"max_seqlen_q": TOKENS, "max_seqlen_k": TOKENS}


def by_heads(q, k, v, bounds):
    return attend(q, k, v, bounds, **hints, causal=True)


def round_the_ring(q, k, v, bounds):
    """The first device has the document's first half, and must see nothing of the second."""
    rank = jax.lax.axis_index("x")
    out, lse = attend(q, k, v, bounds, **hints, causal=True)
    others = [jax.lax.ppermute(x, "x", [(0, 1), (1, 0)]) for x in (k, v)]
    seen = jnp.array([0, 1], jnp.int32) * jnp.where(rank == 1, TOKENS // 2, 0)
    return merge_states(out, lse, *attend(q, *others, bounds, seen, **hints))


def main():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(TOKENS, n, DIM, generator=g) for n in (HEADS, KV_HEADS, KV_HEADS))
    whole = torch.tensor([0, TOKENS], dtype=torch.int32)
    truth = Truth.of(reference.flash_varlen, q, k, v, whole, **hints, causal=True)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows, heads = P("x"), P(None, "x")
    arrays = [jnp.asarray(x.numpy()) for x in (q, k, v)]
    half = whole // 2
    for function, at, results, bounds in (
        (by_heads, heads, (heads, P("x")), whole),
        (round_the_ring, rows, (rows, heads), half),
    ):
        # a Pallas call says nothing of the devices that its results vary over
        run = jax.shard_map(
            function, mesh=mesh, in_specs=(at, at, at, P()), out_specs=results, check_vma=False
        )
        out, lse = jax.jit(run)(*arrays, jnp.asarray(bounds.numpy()))
        if function is by_heads and IS_THOROUGH:
            alone = jax.jit(by_heads)(*arrays, jnp.asarray(whole.numpy()))
            assert all((a == b).all() for a, b in zip((out, lse), alone, strict=True))
        assert_accurate(torch.from_numpy(np.array(out)), torch.from_numpy(np.array(lse)), truth)
    print(f"right on {len(jax.devices())} devices")


if __name__ == "__main__":
    main()
