"""The signatures of NKI 0.6 that kernels here may use, as its documentation gives them.

The emulator is checked against this table, the linter binds every call to it and to what 0.7 has
otherwise (`NEWER`), and where the wheel is installed the wheel is checked against both, too.
`tests/neuron/test_published.py` holds the tables against what AWS publishes.
"""

import inspect

ISA = {
    "activation": "dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None,"
    " reduce_cmd=0, name=None",
    "dma_copy": "dst, src, priority=None, oob_mode=0, dge_mode=0, engine=0, name=None",
    "dma_transpose": "dst, src, axes=None, priority=None, dge_mode=0, oob_mode=0, name=None",
    "exponential": "dst, src, max_value=0.0, reduce_res=None, reduce_cmd=0, reduce_init=0.0,"
    " name=None",
    "get_nc_version": "",
    "iota": "dst, pattern, offset=0, channel_multiplier=0, name=None",
    "memset": "dst, value, engine=0, name=None",
    "nc_matmul": "dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False,"
    " is_transpose=False, accumulate=None, tile_position=(), tile_size=(), perf_mode=0, name=None",
    "nc_transpose": "dst, data, engine=0, name=None",
    "range_select": "dst, on_true_tile, comp_op0, comp_op1, bound0, bound1, reduce_cmd=0,"
    " reduce_res=None, reduce_op=0, range_start=0, on_false_value=0, name=None",
    "reciprocal": "dst, data, name=None",
    "register_alloc": "x=None",
    "register_load": "dst, src",
    "register_move": "dst, src",
    "register_store": "dst, src",
    "scalar_tensor_tensor": "dst, data, op0, operand0, op1, operand1, reverse0=False,"
    " reverse1=False, name=None",
    "tensor_copy": "dst, src, engine=0, name=None",
    "tensor_copy_predicated": "dst, src, predicate, reverse_pred=False, name=None",
    "tensor_reduce": "dst, op, data, axis, negate=False, keepdims=False, name=None",
    "tensor_scalar": "dst, data, op0, operand0, reverse0=False, op1=None, operand1=None,"
    " reverse1=False, engine=0, name=None",
    "tensor_tensor": "dst, data1, data2, op, engine=0, name=None",
}
# what 0.7 has otherwise
NEWER = {
    "activation": "dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None,"
    " reduce_cmd=0, engine=0, name=None",
    "scalar_tensor_tensor": "dst, data, op0, operand0, op1, operand1, reverse0=False,"
    " reverse1=False, reduce_cmd=0, reduce_op=0, reduce_res=None, name=None",
}
LANGUAGE = {
    "ds": "start, size",
    "fori_loop": "lower, upper, body_fun, step=1",
    "ndarray": "shape, dtype, buffer=None, name='', address=None",
    "num_programs": "axes=0",
    "program_id": "axis=0",
    "shared_identity_matrix": "n, dtype=None, dst=None",
}
METHODS = {
    "ap": "pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0,"
    " dtype=None",
    "reshape": "shape",
    "view": "dtype",
}


def signature(parameters: str) -> inspect.Signature:
    """Names, and which of them may be left out; enumerations stand as 0."""
    scope: dict = {}
    exec(f"def documented({parameters}): ...", scope)
    return inspect.signature(scope["documented"])


def same_parameters(documented: str, found: inspect.Signature) -> bool:
    """Same names in the same order, the same of them optional."""

    def shape(s: inspect.Signature) -> list[tuple[str, bool]]:
        return [(p.name, p.default is p.empty) for p in s.parameters.values() if p.name != "self"]

    return shape(signature(documented)) == shape(found)
