"""Kinds of tensors that no operator takes: the errors say which argument, and what to do."""

import json
from pathlib import Path

import pytest
import torch
from right_calls import BASES

import torch_paged_attn
from torch_paged_attn.integrations import flash_attn

BOUNDS = torch.tensor([0, 3, 7], dtype=torch.int32)


def nested(*lengths, heads=4, dim=16):
    rows = [torch.randn(length, heads, dim) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


NESTED = {
    "flash_varlen": lambda x: torch_paged_attn.flash_varlen(x, x, x, BOUNDS),
    "flash_varlen ": lambda x: torch_paged_attn.flash_varlen(x.values(), x, x, BOUNDS),
    "reshape_and_cache": lambda x: torch_paged_attn.reshape_and_cache(
        x, x, torch.zeros(2, 2, 4, 8, 16), torch.arange(7)
    ),
    "flash_attn_func": lambda x: flash_attn.flash_attn_func(x, x, x),
    "flash_attn_varlen_func": lambda x: flash_attn.flash_attn_varlen_func(x, x, x, BOUNDS),
    "flash_attn_with_kvcache": lambda x: flash_attn.flash_attn_with_kvcache(
        x, torch.zeros(2, 8, 4, 16), torch.zeros(2, 8, 4, 16)
    ),
}


@pytest.mark.parametrize("function", NESTED)
def test_nested_tensors(function):
    text = rf"^{function.strip()}\(\): expected \w+ to be a plain tensor: .*values\(\).*offsets\(\)"
    with pytest.raises(TypeError, match=text):
        NESTED[function](nested(3, 4))


def test_vmap_over_nothing():
    x = torch.randn(0, 7, 4, 16)
    attend = torch.func.vmap(lambda q: torch_paged_attn.flash_varlen(q, q, q, BOUNDS)[0])
    with pytest.raises(NotImplementedError, match=r"flash_varlen\(\): vmap .* size 0 .*: leave"):
        attend(x)


DTENSORS = """
import json
import torch
import torch.distributed as dist
import torch_paged_attn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_paged_attn.integrations import flash_attn

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
place = lambda x, at: distribute_tensor(x, mesh, [at])
dense = place(torch.randn(2, 7, 4, 16), Shard(0))
rows = place(torch.randn(7, 4, 16), Shard(1))
bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
calls = {
    "dense": lambda: flash_attn.flash_attn_func(dense, dense, dense),
    "cache": lambda: flash_attn.flash_attn_with_kvcache(dense, dense, dense),
    "plain": lambda: torch_paged_attn.flash_varlen(rows, rows, rows, bounds),
    "rules": lambda: torch_paged_attn.flash_varlen(rows, rows, rows, place(bounds, Replicate())),
}
said = {}
for name, call in calls.items():
    try:
        call()
    except NotImplementedError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


def test_dtensors(programs):
    said = json.loads(programs.run(DTENSORS, str(Path(torch_paged_attn.__file__).parents[1])))
    assert "import torch_paged_attn.distributed.sharding" in said.pop("rules")
    assert set(said) == {"dense", "cache", "plain"}
    for text in said.values():
        assert (
            text.startswith("flash_varlen(): DTensors beside plain tensors") and "local_map" in text
        )


INT64 = ["cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "k_start", "q_position"]


@pytest.mark.parametrize("name", INT64)
def test_the_operators_say_how_to_cast_int64(name):
    """The public functions cast it, `torch.ops` do not."""
    given = BASES["paged" if name in ("seqused_k", "block_table") else "packed"][1]()
    like = given.get(name)
    given[name] = torch.zeros(2, dtype=torch.int64) if like is None else like.long()
    given |= {"max_seqlen_q": 4, "max_seqlen_k": 8}
    given.setdefault("cu_seqlens_k", None)
    text = rf"expected {name} to be int32 \(.*torch\.ops does not: \.int\(\)\), got int64"
    with pytest.raises(ValueError, match=text):
        torch.ops.paged_attn.flash_varlen(**given)


BYTES = torch.zeros(2, 8, 4, 16, dtype=torch.uint8)
UINT8 = {
    "k": lambda: torch_paged_attn.flash_varlen(
        torch.randn(7, 4, 16), BYTES[0, :7], BYTES[0, :7], BOUNDS
    ),
    "kv_cache": lambda: torch_paged_attn.reshape_and_cache(
        torch.randn(7, 8, 16), torch.randn(7, 8, 16), BYTES[:, None], torch.arange(4)
    ),
    "k_cache": lambda: flash_attn.flash_attn_with_kvcache(torch.randn(2, 1, 4, 16), BYTES, BYTES),
}


@pytest.mark.parametrize("name", UINT8)
def test_bytes_of_float8(name):
    """As vLLM's caches hold them."""
    text = rf"expected {name}('s head_dim)? to be .*float8.*\.view\(torch\.float8_e4m3fn\)\), got"
    with pytest.raises(ValueError, match=text):
        UINT8[name]()
