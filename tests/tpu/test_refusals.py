"""Types of numbers that no TPU kernel takes are refused by name, with those that are supported."""

import jax.numpy as jnp
import pytest

from torch_paged_attn.backends.tpu.functions import flash_varlen

BOUNDS = jnp.array([0, 3], jnp.int32)


@pytest.mark.parametrize(
    ("types", "out_dtype", "text"),
    [
        (("int16", "int16"), None, "q has dtype int16; supported: float32, bfloat16, float16, "),
        (("bfloat16", "float32"), None, "k has dtype float32; supported: bfloat16, float8_e4m3fn"),
        # the bits of float16, which only a cache may hold
        (("float16", "int16"), None, "k has dtype int16; supported: float16, float8_e4m3fn, "),
        (("float32", "float32"), "int8", "out_dtype is int8; supported: float32, bfloat16, "),
    ],
)
def test_a_type_without_a_kernel(types, out_dtype, text):
    q, k = (jnp.ones((3, 2, 8), jnp.dtype(name)) for name in types)
    with pytest.raises(NotImplementedError) as raised:
        flash_varlen(q, k, k, BOUNDS, out_dtype=out_dtype)
    expected = f"flash_varlen(): not supported by the tpu backend: {text}"
    assert str(raised.value).startswith(expected)
