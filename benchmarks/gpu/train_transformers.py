"""Training steps of Transformers' models: the first of a process, and later ones beside SDPA.

    python benchmarks/gpu/train_transformers.py

Two rows of TOKENS tokens, bfloat16, random weights. `cold` is a process with an empty Triton cache,
`folder` one that has the kernels of `python -m torch_paged_attn compile --use training`. Their
first step is forward, backward and AdamW's update, in seconds; all else is forward and backward, in
milliseconds, the least and the most of some turns. The first loss is compared with eager
attention's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from first_step import Compiled
from transformers import AutoConfig, AutoModelForCausalLM

from torch_paged_attn.integrations import transformers as paged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, REPEATS = 2048, 5
# of the ways, whose steps are timed one way after the other
TURNS = 3
COMMON = {"vocab_size": 32000, "max_position_embeddings": 8192, "use_cache": False}
# name: (model type, sizes)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3 of 4 layers, 16/4 heads of 128": (
        "qwen3",
        dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16)
        | dict(num_key_value_heads=4, head_dim=128),
    ),
    "DeepSeek V3.2 of 3 layers, 16 heads of 192/128, lists of 512 keys": (
        "deepseek_v32",
        dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=16)
        | dict(num_key_value_heads=16, n_routed_experts=8, num_experts_per_tok=2, n_group=2)
        | dict(topk_group=1, first_k_dense_replace=3, moe_intermediate_size=512, q_lora_rank=512)
        | dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
        | dict(index_topk=512, index_n_heads=8, index_head_dim=128),
    ),
}


def config_of(name: str) -> Any:
    kind, sizes = MODELS[name]
    return AutoConfig.for_model(kind, **sizes, **COMMON)


class Training:
    """A model and its tokens."""

    def __init__(self, name: str, tokens: int) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16)
        self.model = model.to(DEVICE).train()
        self.tokens = torch.randint(COMMON["vocab_size"], (2, tokens), device=DEVICE)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def forward_and_backward(self, attention: str) -> float:
        self.model.set_attn_implementation(attention)
        loss = self.model(self.tokens, labels=self.tokens).loss
        loss.backward()
        return loss.item()

    def first_step(self) -> dict[str, Any]:
        compiled, start = Compiled(), time.perf_counter()
        loss = self.forward_and_backward(paged.NAME)
        self.optimizer.step()
        _synchronize()
        seconds = round(time.perf_counter() - start, 1)
        return {"seconds": seconds, "loss": loss, "compiled": sorted(compiled.here)}

    def milliseconds(self, attention: str) -> float:
        for _ in range(2):
            self.forward_and_backward(attention)
        _synchronize()
        start = time.perf_counter()
        for _ in range(REPEATS):
            self.forward_and_backward(attention)
        _synchronize()
        return round((time.perf_counter() - start) / REPEATS * 1e3, 1)


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def child(name: str, tokens: int, is_cold: bool) -> dict[str, Any]:
    """The steps, in this process."""
    paged.register()
    training = Training(name, tokens)
    found = training.first_step()
    if is_cold:
        eager = training.forward_and_backward("eager")
        assert abs(found["loss"] - eager) < 1e-3, (found["loss"], eager)
        ways = {"later": paged.NAME, "SDPA": "sdpa", "eager": "eager"}
        figures: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(TURNS):
            for way, attention in ways.items():
                figures[way].append(training.milliseconds(attention))
        found |= {way: f"{min(of)} to {max(of)}" for way, of in figures.items()}
    return found


def measure(name: str, tokens: int, folder: Path) -> None:
    """Print a row of the table."""
    config_of(name).save_pretrained(folder)
    kernels = folder / "kernels"
    command = [sys.executable, "-m", "torch_paged_attn", "compile", "--use", "training"]
    command += ["--model", str(folder / "config.json"), "--arch", "sm_90", "--out", str(kernels)]
    subprocess.run(
        command, check=True, stdout=sys.stderr, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    found = {}
    for kind, more in ("cold", {}), ("folder", {"PAGED_ATTN_KERNELS": str(kernels)}):
        command = [sys.executable, __file__, "--tokens", str(tokens), "--child", name, kind]
        cache = {"TRITON_CACHE_DIR": str(folder / kind)}
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | cache | more
        )
        found[kind] = json.loads(done.stdout.splitlines()[-1])
    cold, folder_ = found["cold"], found["folder"]
    print(
        f"| {name} | {cold['seconds']} s ({len(cold['compiled'])} kernels) |"
        f" {folder_['seconds']} s ({len(folder_['compiled'])}) | {cold['later']} ms |"
        f" {cold['SDPA']} ms | {cold['eager']} ms |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help="of a row (2,048)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        name, kind = asked.child
        print(json.dumps(child(name, asked.tokens, kind == "cold")))
        return
    machine = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"{machine}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    print("| | first step | with a folder | later | SDPA | eager |\n|---|---:|---:|---:|---:|---:|")
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            measure(name, asked.tokens, Path(folder))


if __name__ == "__main__":
    main()
