"""Errors for arguments of a wrong type, of an unknown name, or of a kind of tensor that has no
kernel: torch's dispatcher refuses them before any check here."""

import difflib
import re
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.ops.accepted import Operator, are_accepted, as_accepted
from torch_paged_attn.ops.checks import fail, refuse
from torch_paged_attn.ops.repeated import repeat

# what a schema calls a type -> the Python types that are right, and their name in an error
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((Tensor,), "a tensor"),
    "ScalarType": ((torch.dtype,), "a dtype"),
    "bool": ((bool, torch.SymBool), "True or False"),
    "float": ((int, float, torch.SymInt, torch.SymFloat), "a number"),
    "int": ((int, torch.SymInt), "an integer"),
}

# how other libraries call an argument -> its name here
FOREIGN = {
    **dict.fromkeys(("scale", "sm_scale", "scaling"), "softmax_scale"),
    **dict.fromkeys(("is_causal", "causal_mask"), "causal"),
    **dict.fromkeys(("window", "sliding_window"), "window_size_left"),
    **dict.fromkeys(("dropout", "dropout_rate"), "dropout_p"),
    **dict.fromkeys(("attn_mask", "attention_mask", "mask", "bias"), "attn_bias"),
    **dict.fromkeys(("logits_soft_cap", "logit_cap", "soft_cap"), "softcap"),
    **dict.fromkeys(("s_aux", "learnable_sink", "sink"), "sinks"),
    **dict.fromkeys(("block_tables", "page_table", "page_tables"), "block_table"),
    **dict.fromkeys(("cache_seqlens", "seq_lens", "context_lens", "seqlens_k"), "seqused_k"),
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens", "qo_indptr"), "cu_seqlens_q"),
    **dict.fromkeys(("cu_seq_lens_k", "cu_seqlens_kv", "kv_indptr"), "cu_seqlens_k"),
    **dict.fromkeys(("k_scale",), "k_descale"),
    **dict.fromkeys(("v_scale",), "v_descale"),
    **dict.fromkeys(("alibi", "alibi_bias"), "alibi_slopes"),
    "kv_scale": "k_descale and v_descale",
    "window_size": "window_size_left and window_size_right",
    "qv": "q_latent",
}


def call_operator(operator: Operator, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What the operator returns for arguments by position and by name, in the forms that the public
    functions take (`accepted.py`).

    Raises:
        TypeError: an argument is of the wrong type, or has a name that no argument has.
        NotImplementedError: DTensors without their rules, or beside plain tensors; vmap over a
            dimension of size 0.
    """
    # arguments of a call like an earlier one have the operator's form, which goes by no more than a
    # plan does
    if (results := repeat(operator.full_name, args, options)) is not NotImplemented:
        return results
    if not are_accepted(operator, args, options):
        args, options = as_accepted(operator, args, options)
        if (results := repeat(operator.full_name, args, options)) is not NotImplemented:
            return results
    op = operator.op
    try:
        return op(*args, **options)
    except RuntimeError as error:
        _refuse_names(op, options)
        _refuse_types(error, op, args, options)
        _refuse_tensors(error, op, args, options)
        raise


def _refuse_names(op: torch._ops.OpOverload, options: dict[str, Any]) -> None:
    """Raise TypeError for a name that no argument has. The dispatcher's own text prints the whole
    schema.
    """
    known = [x.name for x in op._schema.arguments]
    for name in options:
        if name not in known:
            near = FOREIGN.get(name) or "".join(difflib.get_close_matches(name, known, 1))
            function = op._schema.name.removeprefix("paged_attn::")
            instead = f"; did you mean {near}?" * bool(near)
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'{instead}")


def _refuse_types(
    error: RuntimeError, op: torch._ops.OpOverload, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Raise TypeError if `error` is the dispatcher's for an argument of the wrong type. The
    dispatcher's own text prints the values and the whole schema.
    """
    refused = re.search(r"Expected a value of type .* for argument '(\w+)'", str(error))
    if refused is None:
        return
    schema = op._schema
    given = {x.name: value for x, value in zip(schema.arguments, args, strict=False)} | options
    for argument in schema.arguments:
        if argument.name == refused[1]:
            name, kind = schema.name.removeprefix("paged_attn::"), str(argument.real_type)
            _refuse(name, argument.name, given[argument.name], kind)


def refuse_nested(op: str, name: str, value: Any) -> None:
    """Raise TypeError for a nested tensor."""
    if isinstance(value, Tensor) and value.is_nested:
        expected = (
            "a plain tensor: of a nested one with layout=torch.jagged, pass values() as the packed"
            " rows and offsets() as cu_seqlens"
        )
        fail(op, name, "a nested tensor", expected, TypeError)


def _refuse_tensors(
    error: RuntimeError, op: torch._ops.OpOverload, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Raise for nested tensors, DTensors and vmap, of which torch's own text names the operator,
    and not what to do.
    """
    function, text = op._schema.name.removeprefix("paged_attn::"), str(error)
    names = [x.name for x in op._schema.arguments]
    for name, value in zip(names, args, strict=False):
        refuse_nested(function, name, value)
    if "does not have a sharding strategy" in text:
        problem = "DTensors have no rules yet"
        refuse(function, problem, "import torch_paged_attn.distributed.sharding")
    if "mixed torch.Tensor and DTensor" in text:
        refuse(
            function,
            "DTensors beside plain tensors are not supported",
            "make all tensors DTensors, with torch_paged_attn.distributed.sharding imported; call"
            " functions that make tensors themselves (flash_attn_func, flash_attn_with_kvcache)"
            " inside torch.distributed.tensor.experimental.local_map",
        )
    if "vmap over dims of size 0" in text:
        problem = "vmap over a dimension of size 0 is not supported"
        refuse(function, problem, "leave the call out where it is empty")


def _refuse(op: str, name: str, value: Any, kind: str) -> None:
    """Raise unless the value is of a kind of the schema, such as `List[Tensor]`."""
    if kind.startswith("Optional["):
        kind = kind[len("Optional[") : -1]
    got = "None" if value is None else type(value).__name__
    if kind.startswith("List["):
        if not isinstance(value, tuple | list):
            fail(op, name, got, "a list or a tuple", TypeError)
        for i, element in enumerate(value):
            _refuse(op, f"{name}[{i}]", element, kind[len("List[") : -1])
    elif not isinstance(value, TYPES[kind][0]):
        fail(op, name, got, TYPES[kind][1], TypeError)
