"""Front ends: packages that put torch tensors on a TPU and run JAX functions on them.

torch_tpu (PyTorch's PrivateUse1 backend named `tpu`) and torch_xla (the XLA key, which AWS Neuron
shares) carry our ops by dispatch; torchax by registration (`binding.py`).
"""

import functools
import importlib.util
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import environment

# (JAX function of positional arrays, its tensors, number of results) -> the result or a tuple; one
# of `DONATING` also takes the places of tensors whose memory the results get
Run = Callable[..., Any]


def current() -> Run:
    """The front end of this process: a backend is called when `unsupported` has no reason."""
    return run_torch_tpu if _is_torch_tpu() else run_torch_xla


def unsupported() -> str | None:
    """Why no front end leads to a TPU here, or None. A process has one front end at most."""
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed: pip install 'torch-paged-attn[tpu]'"
    if _is_torch_tpu():
        return None
    if importlib.util.find_spec("torch_xla") is None:
        return "neither torch_tpu nor torch_xla is installed"
    import torch_xla.runtime

    device = torch_xla.runtime.device_type()
    if device == "TPU" or (device == "CPU" and environment.TPU_INTERPRET):
        return None
    return f"torch_xla's device is a {device}, not a TPU"


def _is_torch_tpu() -> bool:
    # the key belongs to the package that renamed it first
    return torch._C._get_privateuse1_backend_name() == "tpu"


def run_torch_xla(function: Callable[..., Any], tensors: list[Tensor], _outputs: int) -> Any:
    import torch_xla.core.xla_builder

    return torch_xla.core.xla_builder.call_jax(function, tuple(tensors))


def run_torch_tpu(
    function: Callable[..., Any],
    tensors: list[Tensor],
    outputs: int,
    donated: tuple[int, ...] = (),
) -> Any:
    return _as_jax_op(function, len(tensors), outputs, donated)(*tensors)


DONATING = {run_torch_tpu}


_NUMBERS = itertools.count()


@functools.cache
def _as_jax_op(
    function: Callable[..., Any], inputs: int, outputs: int, donated: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """One custom op of torch_tpu's for each function: it wants names, and types spelled out."""
    import jax

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(f"x{i}", kind, annotation=jax.Array) for i in range(inputs)]
    several = types.GenericAlias(tuple, (jax.Array,) * outputs)
    result = jax.Array if outputs == 1 else several

    @functools.wraps(function)
    def call(*arrays: Any) -> Any:
        return function(*arrays)

    del call.__wrapped__
    call.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore
    name = f"paged_attn_tpu::{function.__name__}_{next(_NUMBERS)}"
    options = {"donate_argnums": list(donated)} if donated else {}
    return torch.tpu.pallas.jax_op(name, call, **options)  # type: ignore[attr-defined]
