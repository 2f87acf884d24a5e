"""A small model of each family of Transformers that shrinks by the usual names of sizes."""

import copy
import inspect

import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_MAPPING,
)
MOST_PARAMETERS = 5_000_000
WIDTHS = {
    32: "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size",
    48: "intermediate_size ffn_dim d_ff d_inner n_inner ffn_hidden_size encoder_ffn_dim"
    " decoder_ffn_dim",
    97: "vocab_size vocab_size_per_layer_input",
    128: "max_position_embeddings n_positions n_ctx max_target_positions",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank"
    " moe_shared_expert_intermediate_size qk_head_dim",
    8: "head_dim d_kv attention_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim"
    " attention_chunk_size local_attention index_head_dim hidden_size_per_layer_input"
    " relative_attention_num_buckets",
    5: "sliding_window",
    4: "num_attention_heads n_head n_heads num_heads num_experts num_local_experts"
    " encoder_attention_heads decoder_attention_heads n_routed_experts moe_num_experts index_topk"
    " num_global_attention_heads",
    2: "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers"
    " decoder_layers num_key_value_heads num_experts_per_tok moe_topk moe_k index_n_heads",
    1: "n_group topk_group first_k_dense_replace n_shared_experts max_window_layers",
    0: "num_kv_shared_layers",
}
SIZES = {name: size for size, names in WIDTHS.items() for name in names.split()}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# what a family needs besides
LATENT = {"num_key_value_heads": 4}
EXTRA = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "axk1", "axk2"), LATENT),
    **dict.fromkeys(
        ("glm4_moe_lite", "kimi_linear", "minicpm3", "youtu", "bailing_hybrid"), LATENT
    ),
    # its second kind of layer
    "phimoe": {"sliding_window": 5},
    # layers that share keys cut queries off their masks
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def model_class(family):
    """The class of the family's models."""
    config_class = CONFIG_MAPPING[family]
    found = next(x[config_class] for x in MAPPINGS if config_class in x)
    return found[0] if isinstance(found, tuple) else found


def small_model(family, **options):
    """A model of the family in float32; raises whatever a family raises that does not shrink."""
    config_class = CONFIG_MAPPING[family]
    given = config_class().to_dict()
    sizes = {n: x for n, x in SIZES.items() if type(given.get(n)) in (int, float)}
    sizes |= {n: x for n, x in TOKENS.items() if n in given}
    if "head_dim" in given:
        sizes["head_dim"] = SIZES["head_dim"]
    if given.get("layer_types"):
        kinds = list(dict.fromkeys(given["layer_types"]))
        sizes["layer_types"] = (2 * kinds)[: max(2, len(kinds))]
        layers = {"num_hidden_layers", "n_layer", "num_layers"} & sizes.keys()
        sizes |= dict.fromkeys(layers, len(sizes["layer_types"]))
    config = config_class(**copy.deepcopy(sizes | EXTRA.get(family, {}) | options))
    with torch.device("meta"):
        made = model_class(family)._from_config(copy.deepcopy(config), attn_implementation="eager")
    if (count := sum(x.numel() for x in made.parameters())) > MOST_PARAMETERS:
        raise ValueError(f"{family} has {count} parameters")
    model = model_class(family)._from_config(config, attn_implementation="eager").eval().float()
    torch.manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() > 1:
                x.normal_(0, 0.3)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the other ones refuse float64
    return model


def run(model, mask):
    """What the model says of fixed tokens; of a decoder, where `mask` (batch, length) is not 0."""
    ids = torch.randint(3, 97, mask.shape, generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :9]
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        inputs["use_cache"] = False
    with torch.no_grad():
        out = model(**inputs)
    out = out.logits if hasattr(out, "logits") else out[0]
    return out if model.config.is_encoder_decoder else out[mask.bool()]
