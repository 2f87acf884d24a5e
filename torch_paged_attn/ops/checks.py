"""Checks that several operators share. `fail` and `refuse` give all error messages one form."""

from typing import NoReturn

import torch
from torch import Tensor

FLOAT = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUERY = FLOAT + FLOAT8
QUANTISED = (*FLOAT8, torch.int8)
INT4 = torch.uint8  # two numbers a byte

# the largest scale or softcap: it, its reciprocal, and both times 2 log2(e) have to fit in float32
LARGEST_SCALE = 2.0**126


def fail(
    function: str, argument: str, got: object, expected: str, error: type[Exception] = ValueError
) -> NoReturn:
    """Raise `error` with the message "function(): expected argument to be expected, got got".

    got: a noun, such as "int64" or "shape (3, 2)", without a verb
    expected: follows "to be", such as "int32" or "at least 1"
    """
    raise error(f"{function}(): expected {argument} to be {expected}, got {got}")


def refuse(
    function: str, problem: str, instead: str = "", error: type[Exception] = NotImplementedError
) -> NoReturn:
    """Raise `error` with the message "function(): problem: instead", for a call that is not wrong
    but not supported.

    problem: such as "no gradient for paged keys"
    instead: what the caller can do, such as "pass packed k and v"; "" if there is nothing
    """
    raise error(f"{function}(): {problem}{': ' * bool(instead)}{instead}")


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """`(torch.float32, torch.int8)` as `float32, int8`."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_dim(op: str, name: str, tensor: Tensor | None, shape: str) -> None:
    """Raise unless the tensor has as many dimensions as `shape` names, such as
    `(total_q, num_heads, head_dim)`.
    """
    if tensor is None:  # torch accepts None for a required Tensor
        fail(op, name, "None", f"a tensor {shape}")
    if tensor.dim() != shape.count(",") + 1:
        fail(op, name, f"shape {tuple(tensor.shape)}", shape)


def check_dtype(
    op: str, name: str, tensor: Tensor | None, allowed: tuple[torch.dtype, ...]
) -> None:
    if tensor is None:
        fail(op, name, "None", f"a tensor of {names(allowed)}")
    if tensor.dtype not in allowed:
        expected = names(allowed)
        if tensor.dtype is torch.int64 and allowed == (torch.int32,):
            expected += " (torch_paged_attn's functions cast int64, torch.ops does not: .int())"
        if tensor.dtype is torch.uint8 and torch.float8_e4m3fn in allowed:
            expected += " (bytes of float8 as such: .view(torch.float8_e4m3fn))"
        fail(op, name, names((tensor.dtype,)), expected)


def check_shape(op: str, name: str, tensor: Tensor, shape: tuple, meaning: str) -> None:
    if tensor.shape != shape:
        fail(op, name, f"shape {tuple(tensor.shape)}", f"{meaning} = {tuple(shape)}")


def check_rows(op: str, name: str, tensor: Tensor) -> None:
    """Raise unless the last dimension is contiguous, because kernels read whole rows. The other
    strides may be anything.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        fail(op, name, f"strides {tensor.stride()}", "contiguous in its last dimension")


def check_devices(op: str, device: torch.device, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            fail(op, name, tensor.device, f"on {device}, as the first tensor")


def storage_fault(tensor: Tensor) -> tuple[str, str] | None:
    """What a tensor has whose storage is too small for it, and what it needs: the texts `got` and
    `expected` of `fail`. None if the storage is large enough.

    A storage can be freed after the tensor was made: FSDP does it to gathered parameters, by
    `untyped_storage().resize_(0)`. Not for FakeTensors.
    """
    # on other devices a storage need not consist of bytes
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout is not torch.strided:
        return None
    held, size = tensor.untyped_storage().nbytes(), tensor.element_size()
    room = held - tensor.storage_offset() * size
    if (tensor.nbytes <= room and tensor.is_contiguous()) or not tensor.numel():
        return None
    strided = zip(tensor.shape, tensor.stride(), strict=True)
    needed = size + sum((count - 1) * stride * size for count, stride in strided)
    if needed <= room:
        return None
    least = held - room + needed
    return f"a storage of {held} bytes", f"backed by a storage of at least {least} bytes"


def check_lengths(op: str, name: str, tensor: Tensor, batch: int, meaning: str) -> None:
    """Raise unless the tensor is int32 `(batch,)`; `meaning` spells this shape, as "(batch)"."""
    check_dtype(op, name, tensor, (torch.int32,))
    check_shape(op, name, tensor, (batch,), meaning)


def check_per_head(
    op: str, name: str, tensor: Tensor, heads_name: str, heads: int, batch: int, or_else: str = ""
) -> None:
    """Raise unless the tensor is float32 `(heads,)` or `(batch, heads)`; `or_else` names further
    shapes for the message.
    """
    check_dtype(op, name, tensor, (torch.float32,))
    if tensor.shape not in ((heads,), (batch, heads)):
        fail(
            op,
            name,
            f"shape {tuple(tensor.shape)}",
            f"{or_else}({heads_name}) = ({heads},) or (batch, {heads_name}) = ({batch}, {heads})",
        )
