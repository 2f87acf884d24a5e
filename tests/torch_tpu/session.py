"""One process of torch_tpu's, with no device: prints what it finds as one JSON object."""

import json
import os

os.environ |= {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
}

import jax
import torch
from jax import export
from torch._subclasses import FakeTensorMode
from torch_tpu import _loader

_loader._init_device_impl("tpu")  # what importing torch_tpu does where there is a TPU

import torch_paged_attn  # noqa: E402
from torch_paged_attn.backends.tpu.torch_side import front_ends  # noqa: E402
from torch_paged_attn.backends.tpu.torch_side.binding import flash_varlen  # noqa: E402
from torch_paged_attn.ops.backend import serving  # noqa: E402

BATCH, PAGES, PAGE, KV_HEADS, HEADS, DIM = 8, 8, 128, 8, 32, 128


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="tpu")


class Decode(torch.nn.Module):
    def forward(self, q, k, v, cu_seqlens_q, seqused_k, block_table):
        return torch_paged_attn.flash_varlen(
            q, k, v, cu_seqlens_q, None, 1, 1024, seqused_k, block_table, causal=True
        )


def lower(function, tensors, outputs):
    """A front end that does not run: the JAX function lowered for a TPU, and as torch_tpu's op."""
    shapes = [jax.ShapeDtypeStruct(x.shape, str(x.dtype).removeprefix("torch.")) for x in tensors]
    allowed = [export.DisabledSafetyCheck.custom_call("tpu_custom_call")]
    lowered = export.export(jax.jit(function), platforms=["tpu"], disabled_checks=allowed)(*shapes)
    found["lowered_to_a_kernel"] = "tpu_custom_call" in lowered.mlir_module()
    op = front_ends._as_jax_op(function, len(tensors), outputs)
    found["jax_op_schema"] = str(op._opoverload._schema)
    return op(*tensors)


found = {"backend": serving("PrivateUse1")[0].name}
with FakeTensorMode() as mode:
    cache = (BATCH * PAGES, KV_HEADS, PAGE, DIM)
    arguments = (
        empty(BATCH, HEADS, DIM),
        empty(*cache),
        empty(*cache),
        empty(BATCH + 1, dtype=torch.int32),
        empty(BATCH, dtype=torch.int32),
        empty(BATCH, PAGES, dtype=torch.int32),
    )
    out, lse = Decode()(*arguments)
    found["fake"] = [list(out.shape), str(out.device), list(lse.shape)]
    program = torch.export.export(Decode(), arguments)
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    found["exported"] = [str(target) for target in calls if "paged_attn" in str(target)]
    q, k, v, cu_seqlens_q, seqused_k, block_table = arguments
    out, lse = flash_varlen(
        q, k, v, cu_seqlens_q, None, 1, 1024, seqused_k, block_table, causal=True, run=lower
    )
    found["fake_jax_op"] = [list(out.shape), list(lse.shape)]
print("FOUND", json.dumps(found))
