"""What a process's first steps take, with and without kernels that were compiled elsewhere.

    python benchmarks/gpu/first_step.py [--json OUT]

`python -m torch_paged_attn compile` fills a folder, in processes that see no GPU. Then processes
that have nothing in Triton's cache make the same steps: `cold` without the folder, `travelled`
with it, and `again` with the cache that `travelled` left. Triton's listener counts what is
compiled. Seconds are those from the first call of the package on, with the CUDA context made:
`warm-up` is an engine's, before it serves; `loop` a decode loop of a few layers over a
PagedKVCache, while sequences join, then `flash_attn_with_kvcache`. Results are compared with the
formula.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
MOST_SEQUENCES, MOST_TOKENS, MOST_LENGTH = 16, 1024, 1024
LAYERS, STEPS = 4, 24
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "hidden_size": HEADS * DIM,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": MOST_LENGTH,
}
KINDS = ("travelled", "again", "cold")


class Compiled:
    """The kernels that Triton loads, by its listener: compiled here, or found."""

    def __init__(self) -> None:
        from triton import knobs

        self.here: list[str] = []
        self.found = 0
        knobs.compilation.listener = self.note

    def note(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            self.found += 1
        else:
            self.here.append(src.name)


def attend_once(lengths: list[tuple[int, int]]) -> float:
    """A step of sequences with so many queries and keys: written, attended to, and compared. Its
    relative error.
    """
    import torch
    from formula import formula

    import torch_paged_attn as tpa

    device, dtype = "cuda", torch.bfloat16
    queries, keys = (list(x) for x in zip(*lengths, strict=True))
    pages = [-(-n // PAGE) for n in keys]
    cache = torch.zeros(sum(pages), KV_HEADS, PAGE, 2 * DIM, dtype=dtype, device=device)
    k_cache, v_cache = cache.split(DIM, -1)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    slots, first = [], 0
    for i, count in enumerate(pages):
        table[i, :count] = torch.arange(first, first + count)
        slots.append(torch.arange(keys[i]) + first * PAGE)
        first += count
    k, v = (torch.randn(sum(keys), KV_HEADS, DIM, dtype=dtype, device=device) for _ in "kv")
    q = torch.randn(sum(queries), HEADS, DIM, dtype=dtype, device=device)
    for i in range(0, sum(keys), MOST_TOKENS):
        part = slice(i, i + MOST_TOKENS)
        here = torch.cat(slots)[part].to(device)
        tpa.reshape_and_cache(k[part], v[part], (k_cache, v_cache), here)
    bounds = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32, device=device)
    out = torch.empty_like(q)
    tpa.flash_varlen_out(
        *(out, q, k_cache, v_cache, bounds),
        max_seqlen_q=max(queries),
        max_seqlen_k=max(keys),
        seqused_k=torch.tensor(keys, dtype=torch.int32, device=device),
        block_table=table.to(device),
        causal=True,
    )
    wants, at_q, at_k = [], 0, 0
    for n, m in lengths:
        of = slice(at_k, at_k + m)
        wants.append(formula(q[at_q : at_q + n], k[of], v[of]))
        at_q, at_k = at_q + n, at_k + m
    want = torch.cat(wants)
    return float((out.float() - want).norm() / want.norm())


def loop() -> None:
    """Decodes over a PagedKVCache, to which a sequence is added at every second step."""
    import torch

    import torch_paged_attn as tpa
    from torch_paged_attn.integrations.flash_attn import flash_attn_with_kvcache

    device, dtype = "cuda", torch.bfloat16
    cache = tpa.PagedKVCache(LAYERS, 4096, KV_HEADS, PAGE, DIM, dtype=dtype, device=device)
    for step in range(STEPS):
        new = min(1 + step // 2, MOST_SEQUENCES)
        ids = list(range(new))
        counts = [1 if s < new - 1 or step % 2 else 40 + 9 * s for s in ids]
        for s, count in zip(ids, counts, strict=True):
            cache.append(s, count)
        batch = cache.batch(ids, counts)
        for layer in range(LAYERS):
            heads = HEADS, KV_HEADS, KV_HEADS
            q, k, v = (torch.randn(sum(counts), h, DIM, dtype=dtype, device=device) for h in heads)
            tpa.reshape_and_cache(k, v, cache.kv_cache[layer], batch.slot_mapping)
            tpa.flash_varlen(q, *cache.kv_cache[layer], **batch.arguments(), causal=True)
    pages = torch.zeros(2, 256, PAGE, KV_HEADS, DIM, dtype=dtype, device=device)
    table = torch.arange(256, dtype=torch.int32, device=device).view(4, 64)
    for step in range(STEPS):
        q = torch.randn(4, 1, HEADS, DIM, dtype=dtype, device=device)
        new_kv = torch.randn(2, 4, 1, KV_HEADS, DIM, dtype=dtype, device=device)
        lengths = torch.full((4,), 100 + step, dtype=torch.int32, device=device)
        flash_attn_with_kvcache(
            q, *pages, *new_kv, cache_seqlens=lengths, block_table=table, causal=True
        )


def child(warms_up: bool) -> dict[str, Any]:
    """The steps, in this process."""
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.manual_seed(0)
    found: dict[str, Any] = {}

    @contextlib.contextmanager
    def timed(name: str) -> Any:
        before, start = len(compiled.here), time.perf_counter()
        yield
        torch.cuda.synchronize()
        seconds = round(time.perf_counter() - start, 3)
        found[name] = {"seconds": seconds, "compiled": len(compiled.here) - before}

    compiled = Compiled()
    if warms_up:
        with timed("warm-up"):
            from torch_paged_attn._model_calls import Sizes, serving_of
            from torch_paged_attn._model_config import Layer
            from torch_paged_attn._serving import warm_up

            layer = Layer(HEADS, KV_HEADS, DIM, DIM, float(DIM**-0.5))
            sizes = MOST_SEQUENCES, MOST_TOKENS, MOST_LENGTH
            serving = serving_of(layer, Sizes(torch.bfloat16, torch.bfloat16, PAGE, *sizes))
            found["calls"] = warm_up(serving, torch.device("cuda", 0), 8)
    errors = []
    with torch.inference_mode():
        with timed("decode"):
            errors.append(attend_once([(1, 500), (1, 90), (1, 1000)]))
        with timed("prefill"):
            errors.append(attend_once([(700, 700), (100, 100)]))
        with timed("mixed"):
            errors.append(attend_once([(400, 900), *[(1, 300 + 11 * i) for i in range(7)]]))
        with timed("loop"):
            loop()
    assert max(errors) < 0.01, f"relative errors {errors}"
    names = sorted({*compiled.here})
    return found | {"found": compiled.found, "compiled": len(compiled.here), "names": names}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warm-up", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="OUT")
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(child(asked.warm_up)))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        start = time.perf_counter()
        options = {
            "--model": folder / "config.json",
            "--arch": "sm_90",
            "--out": folder / "kernels",
            "--page-size": PAGE,
            "--max-num-seqs": MOST_SEQUENCES,
            "--max-num-batched-tokens": MOST_TOKENS,
        }
        arguments = [str(x) for pair in options.items() for x in pair]
        arguments += ["--use", "serving", "--use", "generate"]
        command = [sys.executable, "-m", "torch_paged_attn", "compile", *arguments]
        subprocess.run(command, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        found["compile"] = round(time.perf_counter() - start, 1)
        for warms_up in (False, True):
            caches = {x: folder / f"{x}-{warms_up}" for x in ("travelled", "cold")}
            for kind in KINDS:
                changed = {
                    "TRITON_CACHE_DIR": str(caches["cold" if kind == "cold" else "travelled"])
                }
                if kind != "cold":
                    changed["PAGED_ATTN_KERNELS"] = str(folder / "kernels")
                start = time.perf_counter()
                command = [sys.executable, __file__, "--child", *["--warm-up"] * warms_up]
                done = subprocess.run(
                    command, env=os.environ | changed, capture_output=True, text=True
                )
                name = f"{kind}, {'warm-up' if warms_up else 'no warm-up'}"
                if done.returncode:
                    print(name, "FAILED", done.stderr[-2000:], flush=True)
                    continue
                said = [x for x in done.stderr.splitlines() if "Warning" in x]
                row = json.loads(done.stdout.splitlines()[-1])
                row["process"] = round(time.perf_counter() - start, 1)
                found[name] = row
                print(name, json.dumps(row), *said, flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
