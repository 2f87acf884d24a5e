"""Print which calls give other results, or NaN, when a process makes them for the first time.

    python tests/helpers/first_calls.py

Every multiprocessor of a GPU has its first programs of a kernel then: code and descriptors come
from memory, and shared memory has what other kernels have left there.
"""

import dataclasses

import torch

from torch_paged_attn.testing import Problem, Selected, build

bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
TOKENS = 136
DECODES = ((1, 700),) * TOKENS
BY_COLUMN = dict(v_dtype=e4m3, cache_layout="rows", latent=True, descale="columns")
LISTS = dict(selected=Selected(400, 1, "one", 0.0))
MLA = Problem("mla", DECODES, 16, 1, 576, 512, dtype=bf16, page_size=64, cache_layout="mla")
ROWS = dataclasses.replace(MLA, head_dim=64, **BY_COLUMN)
GQA = Problem("gqa", DECODES, 32, 8, 128, dtype=bf16, page_size=16)
CALLS = {
    f"{name}, {heads} heads": dataclasses.replace(problem, num_heads=heads, **changes)
    for name, problem, changes in (
        ("decode of latents", MLA, {}),
        ("lists of latents", MLA, LISTS),
        ("decode of latents of 8 bits", dataclasses.replace(MLA, kv_dtype=e4m3), {}),
        ("decode of latents by column", ROWS, {}),
        ("lists of latents by column", ROWS, LISTS),
    )
    for heads in (8, 16, 128)
    if heads < 128 or "by column" not in name
} | {
    "decode": GQA,
    "decode of 8 bits": dataclasses.replace(GQA, kv_dtype=e4m3),
    "prefill": dataclasses.replace(GQA, seqs=((500, 0),) * 8),
    "mixed": dataclasses.replace(GQA, seqs=(*DECODES, (500, 1500))),
    "blocks": dataclasses.replace(
        GQA, num_heads=64, num_kv_heads=4, page_size=128, seqs=((300, 1700),) * 4,
        selected=Selected(16, 128),
    ),
}  # fmt: skip


TRAINING = {
    "training": dataclasses.replace(GQA, seqs=((1000, 0),) * 8, page_size=None),
    "training of narrow heads": Problem("narrow", ((1000, 0),) * 8, 16, 4, 64, dtype=bf16),
    "training of wide keys": Problem("wide", ((700, 0),) * 4, 16, 16, 192, 128, dtype=bf16),
    "training of lists": Problem("lists", ((700, 0),) * 4, 32, 1, 64, dtype=bf16, **LISTS),
}


def results(call) -> list[torch.Tensor]:
    """The result of a call, and its gradients if q needs one."""
    out = call.run()[0]
    tensors = [call.args[name] for name in "qkv"]
    if not tensors[0].requires_grad:
        return [out.clone()]
    return [out, *torch.autograd.grad(out, tensors, torch.ones_like(out))]


def main() -> None:
    for name, problem in (CALLS | TRAINING).items():
        call = build(problem).to("cuda")
        if name in TRAINING:
            for x in "qkv":
                call.args[x].requires_grad_()
        first, *later = (results(call) for _ in range(4))
        same = all(torch.equal(x, y) for found in later for x, y in zip(first, found, strict=True))
        if not (same and all(x.isfinite().all() for x in first)):
            print(name)


if __name__ == "__main__":
    main()
