"""onnxruntime's GroupQueryAttention as a peer: PyPI's onnxruntime and onnx, which are optional.

Its cache is contiguous, one buffer of keys and one of values that a step appends to. It multiplies
float32 and float16 on the CPU, and has no bfloat16 there.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from baselines import Batch, Prepared, assemble, batches
from torch import Tensor
from workloads import sequence_lengths

from torch_paged_attn.ops import flash_varlen
from torch_paged_attn.testing import Call

# arguments that say where keys are or that the operator has by itself
KNOWN = {
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k",
    "block_table", "softmax_scale", "causal", "k_descale", "v_descale", "batch_invariant",
    "deterministic",
}  # fmt: skip


def model(num_heads: int, num_kv_heads: int, scale: float, dtype: str, bits: int = 0) -> bytes:
    """A model of one operator; with `bits` (8 or 4) its cache has integers, and each channel of a
    KV head a scale.
    """
    from onnx import TensorProto, helper

    number = TensorProto.FLOAT if dtype == "float32" else TensorProto.FLOAT16
    stored = {0: number, 8: TensorProto.INT8, 4: TensorProto.UINT8}[bits]
    inputs = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_length"]
    outputs = ["output", "present_key", "present_value"]
    attributes: dict[str, Any] = {"scale": scale}
    if bits:
        inputs += [*[""] * 5, "k_scale", "v_scale"]
        attributes |= dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
        attributes["kv_cache_bit_width"] = bits
    node = helper.make_node(
        "GroupQueryAttention",
        inputs,
        outputs,
        domain="com.microsoft",
        num_heads=num_heads,
        kv_num_heads=num_kv_heads,
        **attributes,
    )
    types = {name: (number, [None] * 3) for name in ("query", "key", "value", "output")}
    types |= {f"{when}_{x}": (stored, [None] * 4) for when in ("past", "present") for x in
              ("key", "value")}  # fmt: skip
    types |= {"seqlens_k": (TensorProto.INT32, [None]), "total_length": (TensorProto.INT32, [1])}
    types |= {name: (TensorProto.FLOAT, [None] * 2) for name in ("k_scale", "v_scale")}
    described = {name: helper.make_tensor_value_info(name, *types[name]) for name in types}
    graph = helper.make_graph(
        [node],
        "attention",
        [described[x] for x in inputs if x],
        [described[x] for x in outputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def start(made: bytes, threads: int) -> Any:
    """A session of a model, which uses as many threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # no thread of it takes a core from the contender that is timed next
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(made, options, providers=["CPUExecutionProvider"])


@functools.cache
def session(num_heads: int, num_kv_heads: int, scale: float, dtype: str, threads: int) -> Any:
    """A session of one operator, which uses as many threads."""
    return start(model(num_heads, num_kv_heads, scale, dtype), threads)


def bound(part: Batch, scale: float) -> tuple[Callable[[], None], Tensor]:
    """A function that runs a batch into a result (sequences, Lq, num_heads * head_dim)."""
    import onnxruntime

    def value(x: Tensor) -> Any:
        return onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy())

    sequences, num_heads, query_len, head_dim = part.q.shape
    num_kv_heads, key_len = part.k.shape[1:3]
    # the last tokens of the cache are those that the step brings
    new = {name: x[:, :, key_len - query_len :] for name, x in (("key", part.k), ("value", part.v))}
    tensors = {"query": part.q} | new
    tensors = {name: x.transpose(1, 2).flatten(2).contiguous() for name, x in tensors.items()}
    out = torch.empty(sequences, query_len, num_heads * head_dim, dtype=part.q.dtype)
    tensors["seqlens_k"] = torch.full((sequences,), key_len - 1, dtype=torch.int32)
    tensors["total_length"] = torch.tensor([key_len], dtype=torch.int32)
    values = {name: value(x) for name, x in tensors.items()}
    caches = {"key": value(part.k), "value": value(part.v)}
    made: dict[int, tuple[Any, Any]] = {}

    def run() -> None:
        threads = torch.get_num_threads()
        if threads not in made:
            dtype = str(part.q.dtype).removeprefix("torch.")
            used = session(num_heads, num_kv_heads, scale, dtype, threads)
            binding = used.io_binding()
            for name, x in values.items():
                binding.bind_ortvalue_input(name, x)
            for name, x in caches.items():  # one buffer: the step is appended to it
                binding.bind_ortvalue_input(f"past_{name}", x)
                binding.bind_ortvalue_output(f"present_{name}", x)
            binding.bind_ortvalue_output("output", value(out))
            made[threads] = used, binding
        used, binding = made[threads]
        used.run_with_iobinding(binding)

    return run, out


class OnnxRuntime:
    """GroupQueryAttention, one call for each pair of lengths."""

    name = "onnxruntime"

    def unavailable(self, call: Call) -> str | None:
        if not all(importlib.util.find_spec(name) for name in ("onnxruntime", "onnx")):
            return "needs onnxruntime and onnx"
        if call.args["q"].dtype not in (torch.float32, torch.float16):
            return f"has no {str(call.args['q'].dtype).removeprefix('torch.')} on the CPU"
        if call.op != "flash_varlen":
            return f"has no {call.op}"
        defaults = inspect.signature(flash_varlen).parameters
        more = [name for name, x in call.args.items()
                if name not in KNOWN and x is not None and x is not defaults[name].default
                and (isinstance(x, Tensor) or x != defaults[name].default)]  # fmt: skip
        if more:
            return "has no " + ", ".join(more)
        if call.args["q"].shape[-1] != call.args["v"].shape[-1]:
            return "keys and values are of one size"
        lengths = sequence_lengths(call)
        if not call.args["causal"] or any(1 < q_len != key_len for q_len, key_len in lengths):
            return "decode steps and whole causal prompts only"
        return None

    def prepare(self, call: Call) -> Prepared:
        parts = batches(call)
        scale = call.args.get("softmax_scale") or call.args["q"].shape[-1] ** -0.5
        ready = [bound(part, scale) for part in parts]

        def run() -> None:
            for attend, _ in ready:
                attend()

        def out(_: None) -> Tensor:
            shape = -1, call.args["q"].shape[-1]
            outs = [x.unflatten(2, shape).transpose(1, 2) for _, x in ready]
            return assemble(call, outs, [part.rows for part in parts])

        return Prepared(run, out)
