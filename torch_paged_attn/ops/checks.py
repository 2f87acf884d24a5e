"""Rules that several operators have, and the one form of every refusal."""

from typing import NoReturn

import torch
from torch import Tensor

FLOAT = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUERY = FLOAT + FLOAT8
QUANTISED = (*FLOAT8, torch.int8)

# of a scale: kernels hold it, its reciprocal and either times 2 log2(e) in float32
LARGEST_SCALE = 2.0**126


def fail(
    op: str, argument: str, came: str, allowed: str, error: type[Exception] = ValueError
) -> NoReturn:
    """Raise `error` in the one form every refusal has: op, argument, what came, what is allowed."""
    raise error(f"paged_attn::{op}: {argument} {came}; allowed: {allowed}")


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """`(torch.float32, torch.int8)` as `float32, int8`."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_dim(op: str, name: str, tensor: Tensor | None, shape: str) -> None:
    """`shape` spells the dimensions, as in `(total_q, num_heads, head_dim)`."""
    if tensor is None:  # which a schema's Tensor lets through
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
    """Kernels read whole rows: only the last dimension has to be contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        fail(op, name, f"has strides {tensor.stride()}", "any strides whose last one is 1")


def check_devices(op: str, device: torch.device, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            fail(op, name, f"is on {tensor.device}", f"the device of the first tensor, {device}")


def storage_fault(tensor: Tensor) -> tuple[str, str] | None:
    """What came and what is allowed, of a tensor whose storage was freed or cut after it was made:
    FSDP frees those of gathered parameters by `untyped_storage().resize_(0)`. None if the tensor
    has its storage. Not for FakeTensors.
    """
    # the storages of other devices' tensors need not be of bytes
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
    """One int32 vector of lengths or bounds per sequence."""
    check_dtype(op, name, tensor, (torch.int32,))
    check_shape(op, name, tensor, (batch,), meaning)


def check_per_head(
    op: str, name: str, tensor: Tensor, heads_name: str, heads: int, batch: int, or_else: str = ""
) -> None:
    """One float32 number per head, or per sequence and head."""
    check_dtype(op, name, tensor, (torch.float32,))
    if tensor.shape not in ((heads,), (batch, heads)):
        fail(
            op,
            name,
            f"has shape {tuple(tensor.shape)}",
            f"{or_else}({heads_name}) = ({heads},) or (batch, {heads_name}) = ({batch}, {heads})",
        )
