"""Two processes, forks of one that imports: FSDP2 shards a model that trains, beside the whole one.

Each process has half of the documents; the parameters after the steps must be as close to those of
one process with all of them in float64 as that process is in float32.
"""

import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parent))
from test_training import (
    LENGTHS,
    LLAMA,
    assert_all_as_right_as,
    documents,
    golden_of,
    model_of,
)

from torch_paged_attn.integrations import transformers as paged

STEPS = 3


def step(model, optimizer, rows, tokens):
    """One step on documents laid end to end; the loss is that of `tokens` predictions."""
    row = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(x)) for x in rows])[None]
    labels = row.masked_fill(positions == 0, -100)
    loss = model(
        row, position_ids=positions, labels=labels, num_items_in_batch=tokens, use_cache=False
    ).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main(rank):
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2
    )
    paged.register()
    whole, sharded = (model_of(LlamaForCausalLM, LLAMA, paged.NAME) for _ in range(2))
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    tokens = sum(LENGTHS) - len(LENGTHS)
    # FSDP takes the mean of both processes' gradients
    golden = golden_of(LlamaForCausalLM, LLAMA)
    for model, rows, share in (
        (golden, documents(), tokens),
        (whole, documents(), tokens),
        (sharded, documents()[rank::2], tokens / 2),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            step(model, optimizer, rows, share)
    gathered = {name: x.full_tensor() for name, x in sharded.named_parameters()}
    golden, whole = (dict(model.named_parameters()) for model in (golden, whole))
    assert_all_as_right_as(gathered, golden, whole)
    print("equal to one process")
    dist.barrier()  # neither leaves while the other is still in a collective
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = [multiprocessing.get_context("fork").Process(target=main, args=(i,)) for i in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
