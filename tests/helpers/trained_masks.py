"""Training steps of models of Transformers under a mask of all pairs, and the kernels that
`compile --use training` makes for them; for a process in which Triton does not interpret."""

import json
import tempfile
from pathlib import Path

import torch
import transformers
from kernel_counts import counted

from torch_paged_attn._model_calls import Sizes, jobs_of
from torch_paged_attn._model_config import read_model
from torch_paged_attn.integrations import transformers as paged

COMMON = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
DSA = {
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 2, "n_group": 1},
    **{"topk_group": 1, "num_experts_per_tok": 1, "first_k_dense_replace": 2},
    **{"moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 64, "v_head_dim": 128},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "index_topk": 32, "index_n_heads": 2},
    **{"index_head_dim": 64},
}
M3 = {
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 2},
    **{"num_experts_per_tok": 1, "index_n_heads": 2, "index_head_dim": 64, "index_block_size": 16},
    **{"index_topk_blocks": 4, "index_local_blocks": 1, "mlp_layer_types": ["dense"] * 2},
    **{"layer_types": ["full_attention", "minimax_m3_sparse"]},
}
GEMMA4 = {
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "global_head_dim": 128},
    **{"sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"] * 2},
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    **{"vocab_size_per_layer_input": 97},
}
# model type: its sizes, and how many of these layers have a mask
MODELS = {"deepseek_v32": DSA, "minimax_m3_vl_text": M3, "gemma4_text": GEMMA4}
# rows and their tokens: multiples of 16 and not, in few tiles and many
STEPS = (1, 40), (2, 64), (1, 300), (2, 320), (3, 411), (2, 512)


def missed_by_compile(arch: str, kind: str) -> tuple[int, int, str]:
    """How many kernels `compile --use training` makes for a model's layers with masks, and how many
    more its training steps take."""
    paged.register()
    config = transformers.AutoConfig.for_model(kind, **COMMON | MODELS[kind])
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=paged.NAME, dtype=torch.bfloat16
    ).train()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config.to_dict()))
        layers = read_model(path).layers
    sizes = Sizes(torch.bfloat16, torch.bfloat16, 16, 4, 2048, 1024)
    with counted(arch) as kernels:
        for layer in layers:
            for _, make in jobs_of(layer, "training", sizes):
                for call in make(torch.device("cpu")):
                    call()
        made = len(kernels)
        for batch, length in STEPS:
            ids = torch.full((batch, length), 5)
            model(ids, labels=ids, use_cache=False).loss.backward()
        return made, len(kernels) - made, kernels.report()
