"""Checks that several operators share. `fail` gives all their error messages one form."""

from typing import NoReturn

import torch
from torch import Tensor

FLOAT = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUERY = FLOAT + FLOAT8
QUANTISED = (*FLOAT8, torch.int8)

# the largest scale or softcap: it, its reciprocal, and both times 2 log2(e) have to fit in float32
LARGEST_SCALE = 2.0**126


def fail(
    op: str, argument: str, came: str, allowed: str, error: type[Exception] = ValueError
) -> NoReturn:
    """Raise `error` with the message "paged_attn::op: argument came; allowed: allowed".

    came: what is wrong with the argument, such as "has 3 heads"; allowed: what would be right
    """
    raise error(f"paged_attn::{op}: {argument} {came}; allowed: {allowed}")


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """`(torch.float32, torch.int8)` as `float32, int8`."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_dim(op: str, name: str, tensor: Tensor | None, shape: str) -> None:
    """Raise unless the tensor has as many dimensions as `shape` names, such as
    `(total_q, num_heads, head_dim)`.
    """
    if tensor is None:  # torch accepts None for a required Tensor
        fail(op, name, "is None", f"a tensor {shape}")
    if tensor.dim() != shape.count(",") + 1:
        fail(op, name, f"has shape {tuple(tensor.shape)}", shape)


def check_dtype(
    op: str, name: str, tensor: Tensor | None, allowed: tuple[torch.dtype, ...]
) -> None:
    if tensor is None:
        fail(op, name, "is None", f"a tensor of {names(allowed)}")
    if tensor.dtype not in allowed:
        fail(op, name, f"has dtype {names((tensor.dtype,))}", names(allowed))


def check_shape(op: str, name: str, tensor: Tensor, shape: tuple, meaning: str) -> None:
    if tensor.shape != shape:
        fail(op, name, f"has shape {tuple(tensor.shape)}", f"{meaning} = {tuple(shape)}")


def check_rows(op: str, name: str, tensor: Tensor) -> None:
    """Raise unless the last dimension is contiguous, because kernels read whole rows. The other
    strides may be anything.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        fail(op, name, f"has strides {tensor.stride()}", "any strides whose last one is 1")


def check_devices(op: str, device: torch.device, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            fail(op, name, f"is on {tensor.device}", f"the device of the first tensor, {device}")


def storage_fault(tensor: Tensor) -> tuple[str, str] | None:
    """What is wrong with a tensor whose storage is too small for it, and what would be right: the
    texts `came` and `allowed` of `fail`. None if the storage is large enough.

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
    allowed = f"at least {held - room + needed}, which its shape, strides and offset need"
    return f"has a storage of {held} bytes", allowed


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
            f"has shape {tuple(tensor.shape)}",
            f"{or_else}({heads_name}) = ({heads},) or (batch, {heads_name}) = ({batch}, {heads})",
        )
