"""Whatever mask Transformers makes of a model's inputs, ours sees the keys that its SDPA sees.

(Its eager attention adds the lowest number of a type, which overflows to NaN in rows without keys.)
"""

import copy

import model_sizes
import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch._dynamo.testing import CompileCounter
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from torch_paged_attn.integrations import transformers as paged
from torch_paged_attn.testing import assert_close_as_baseline

TEXT = model_sizes.TEXT | {
    "max_position_embeddings": 128,
    "initializer_range": 0.6,
    "bos_token_id": None,
    "eos_token_id": None,
}
DECODER = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
TRANSLATOR = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "init_std": 0.6,
    "pad_token_id": 0,
}

DECODERS = {
    "llama": ("LlamaModel", DECODER),
    "mistral": ("MistralModel", {**DECODER, "sliding_window": 5}),
    "gemma3": ("Gemma3TextModel", {**DECODER, **MIXED, "sliding_window": 5}),
    "llama4": (
        "Llama4TextModel",
        {
            **DECODER,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
            "moe_layers": [],
        },
    ),
}
ENCODERS = {
    "bert": ("BertModel", TEXT),
    "splinter": ("SplinterModel", TEXT),
    "modernbert": (
        "ModernBertModel",
        {**TEXT, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": None}
        | {"sep_token_id": None},
    ),
}
# models whose layers compute with a mask before attention sees it
MASK_READERS = {
    "doge": ("DogeModel", DECODER),
    "deepseek_v4": (
        "DeepseekV4Model",
        {
            **{name: DECODER[name] for name in DECODER if name != "num_key_value_heads"},
            "qk_rope_head_dim": 4,
            "q_lora_rank": 16,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
        },
    ),
}
TRANSLATORS = ("Bart", "Marian", "MBart", "Pegasus")
BATCHES = 16  # of three sequences


@pytest.fixture(scope="module", autouse=True)
def registered():
    paged.register()


def make_model(name, options):
    config = getattr(transformers, name.replace("Model", "Config"))(**options)
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()


def tokens(*shape):
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(1))


def assert_like_sdpa(model, run):
    """`run(model)` is as close to float64 as with Transformers' SDPA."""

    def hidden(model, attn_implementation):
        model.set_attn_implementation(attn_implementation)
        with torch.inference_mode():
            return run(model)

    theirs = "sdpa" if model._supports_sdpa else "eager"
    ours, baseline = hidden(model, paged.NAME), hidden(model, theirs)
    precise = copy.deepcopy(model).double()
    if precise._can_set_experts_implementation():
        precise.set_experts_implementation("eager")  # the other ones refuse float64
    golden = hidden(precise, theirs)
    assert_close_as_baseline(ours, golden, (baseline - golden).abs(), torch.zeros_like(golden))


def once(keep=..., **inputs):
    """A forward pass; its hidden states where `keep`."""
    return lambda model: model(**inputs, use_cache=False).last_hidden_state[keep]


def padding(length, left, right):
    """(batch, length) int64: 0 for `left[i]` tokens in front of row i and `right[i]` after it."""
    at = torch.arange(length)
    left, right = torch.tensor(left)[:, None], torch.tensor(right)[:, None]
    return ((at >= left) & (at < length - right)).long()


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_padding(name, side):
    model = make_model(*(DECODERS | ENCODERS)[name])
    mask = {
        "none": padding(20, [0, 0, 0], [0, 0, 0]),
        "left": padding(20, [0, 9, 3], [0, 0, 0]),
        "right": padding(20, [0, 0, 0], [0, 9, 3]),
        "holes": padding(20, [0, 2, 0], [0, 1, 6]),
    }[side]
    if side == "holes":
        mask[:, [7, 8, 11]] = 0
    keep = mask.bool()
    assert_like_sdpa(model, once(keep, input_ids=tokens(3, 20), attention_mask=mask))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("side", [pytest.param("none", marks=pytest.mark.thorough), "left"])
@pytest.mark.parametrize("name", MASK_READERS)
def test_models_that_compute_with_masks(name, side, compiled):
    model = make_model(*MASK_READERS[name])
    mask = padding(20, [0, 9, 3] if side == "left" else [0, 0, 0], [0, 0, 0])
    inputs = {"input_ids": tokens(3, 20), "attention_mask": mask}
    torch.compiler.reset()

    def run(model):
        if compiled and model.config._attn_implementation == paged.NAME:
            model = torch.compile(model, backend="eager")
        return once(mask.bool(), **inputs)(model)

    assert_like_sdpa(model, run)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_that_takes_no_attention_is_refused(compiled):
    """Its own formula would read a mask of ours, or none, as its own, and see the future."""
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomModel._from_config(config, attn_implementation=paged.NAME)
    torch.compiler.reset()
    if compiled:
        model = torch.compile(model, backend="eager")
    with pytest.raises(NotImplementedError, match="models of BloomConfig attend by formulas of"):
        model(tokens(2, 9))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_cache(name, static, padded):
    """A prompt in two chunks, then token by token."""
    model = make_model(*DECODERS[name])
    ids = tokens(3, 24)
    mask = padding(24, [0, 9, 3] if padded else [0, 0, 0], [0, 0, 0])

    def run(model):
        cache = (
            transformers.StaticCache(model.config, max_cache_len=32)
            if static
            else transformers.DynamicCache(config=model.config)
        )
        states = []
        for begin, end in [(0, 12), (12, 19), *((i, i + 1) for i in range(19, 24))]:
            out = model(
                input_ids=ids[:, begin:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                position_ids=torch.arange(begin, end)[None],
            )
            states.append(out.last_hidden_state)
        return torch.cat(states, 1)[mask.bool()]

    assert_like_sdpa(model, run)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4"])
def test_packed_rows(name):
    """A batch of rows, each of several documents, which positions alone tell."""
    model = make_model(*DECODERS[name])
    lengths = [[12, 1, 7], [20], [3, 17]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    assert_like_sdpa(model, once(input_ids=tokens(3, 20), position_ids=positions))


@pytest.mark.parametrize("name", ["mistral", "modernbert", "llama"])
@pytest.mark.parametrize("kind", ["bool", "float", "all heads", "keys"])
def test_own_mask(name, kind):
    """A mask of four dimensions replaces causality and windows."""
    model = make_model(*(DECODERS | ENCODERS)[name])
    shape = {"keys": (3, 1, 1, 20), "all heads": (3, 4, 20, 20)}.get(kind, (3, 1, 20, 20))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[..., 0] = True
    if kind in ("float", "all heads"):
        mask = torch.zeros(shape).masked_fill(~mask, torch.finfo(torch.float32).min)

    def run(model):
        of_type = mask if mask.dtype == torch.bool else mask.to(model.dtype)
        own = {"full_attention": of_type, "sliding_attention": of_type}
        return once(
            input_ids=tokens(3, 20), attention_mask=own if name == "modernbert" else of_type
        )(model)

    assert_like_sdpa(model, run)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("target_len", [24, 10, 1])
@pytest.mark.parametrize("name", TRANSLATORS)
def test_cross_attention(name, target_len, padded):
    model = make_model(f"{name}Model", TRANSLATOR)
    # so many that the errors of one target token each are alike in the mean
    batch = 3 * BATCHES
    mask = padding(24, [0] * batch, ([0, 15, 4] if padded else [0, 0, 0]) * BATCHES)
    inputs = {"input_ids": tokens(batch, 24), "attention_mask": mask}
    assert_like_sdpa(model, once(**inputs, decoder_input_ids=tokens(batch, target_len)))


@pytest.mark.parametrize("left, right", [(0, 0), (3, 0), (0, 3)], ids=["full", "left", "right"])
def test_bias_of_positions(left, right):
    model = make_model("T5Model", model_sizes.T5)
    source = padding(24, [0, 0, 0], [0, left and 15, 4 * (right > 0)])
    target = padding(9, [0, left, 0], [0, right, 0])
    ids = {"input_ids": tokens(3, 24), "decoder_input_ids": tokens(3, 9)}
    masks = {"attention_mask": source, "decoder_attention_mask": target}
    assert_like_sdpa(model, once(target.bool(), **ids, **(masks if left + right else {})))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_bias_of_positions_when_decoding(cache):
    torch.manual_seed(0)
    config = transformers.T5Config(**model_sizes.T5, eos_token_id=None)
    model_class = transformers.T5ForConditionalGeneration
    model = model_class._from_config(config, attn_implementation="sdpa").eval()
    inputs = {"input_ids": tokens(3, 24), "attention_mask": padding(24, [0, 0, 0], [0, 15, 4])}
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    wanted = model.generate(**inputs, **options)
    model.set_attn_implementation(paged.NAME)
    assert torch.equal(model.generate(**inputs, **options), wanted)


@pytest.mark.parametrize("padded", [False, True])
def test_blocks_that_see_themselves(padded):
    """Image tokens see all of their image, text tokens what came before."""
    model = make_model(*DECODERS["gemma3"])
    blocks = torch.full((3, 20), -1)
    blocks[0, 4:10], blocks[1, 12:18], blocks[2, 0:6] = 0, 0, 0
    mask = padding(20, [0, 9, 0], [0, 0, 0])

    def run(model):
        states = model.get_input_embeddings()(tokens(3, 20))
        masks = {
            kind: make(model.config, states, mask, None, block_sequence_ids=blocks)
            for kind, make in [
                ("full_attention", create_causal_mask),
                ("sliding_attention", create_sliding_window_causal_mask),
            ]
        }
        return once(mask.bool(), inputs_embeds=states, attention_mask=masks)(model)

    assert_like_sdpa(model, run)


def test_a_mask_function_of_the_callers():
    model = make_model(*DECODERS["llama"])

    def run(model):
        states = model.get_input_embeddings()(tokens(2, 20))

        def causal_mask_function(batch_idx, head_idx, q_idx, kv_idx):  # not Transformers' own
            return (kv_idx % 3 == 0) | (kv_idx == q_idx)

        mask = create_causal_mask(
            model.config, states, None, None, and_mask_function=causal_mask_function
        )
        return once(inputs_embeds=states, attention_mask=mask)(model)

    assert_like_sdpa(model, run)


def test_autocast_of_a_padded_batch():
    model = make_model(*DECODERS["llama"])
    mask = padding(20, [0, 9, 3], [0, 0, 0])
    model.set_attn_implementation(paged.NAME)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        states = model(tokens(3, 20), attention_mask=mask).last_hidden_state
    assert states.isfinite().all()


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize(
    "name",
    [
        *("llama4", "bert"),
        # rows of any length and of several sequences have llama's graph
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("llama", "mistral")),
    ],
)
def test_compiles_whole(name, padded):
    """One graph, even where a mask's values decide how much of it is needed."""
    torch.compiler.reset()
    model = make_model(*(DECODERS | ENCODERS)[name])
    mask = padding(20, [0, 9, 3], [0, 0, 0])
    inputs = {"input_ids": tokens(3, 20)} | ({"attention_mask": mask} if padded else {})

    def run(model):
        if model.config._attn_implementation == paged.NAME:
            model = torch.compile(model, fullgraph=True, backend="eager")
        return once(mask.bool() if padded else ..., **inputs)(model)

    assert_like_sdpa(model, run)


THOROUGH = pytest.mark.thorough
# gemma3 has mistral's windows, and packed rows
ROWS = [("llama", False, 2), ("gemma3", True, 2)]
MORE_ROWS = {
    (n, p, b) for n in ("llama", "mistral", "gemma3") for p in (False, True) for b in (1, 2)
}


@pytest.mark.parametrize(
    ("name", "packed", "batch"),
    [*ROWS, *(pytest.param(*row, marks=THOROUGH) for row in sorted(MORE_ROWS - {*ROWS}))],
)
def test_rows_of_several_sequences_compile_whole(name, packed, batch):
    """Their positions say how many sequences there are, which no compiler knows beforehand."""
    torch.compiler.reset()
    model = make_model(*DECODERS[name])
    row = torch.cat([torch.arange(n) for n in ((9, 1, 10) if packed else (20,))])
    positions = torch.stack([row, torch.arange(20)][:batch])
    inputs = {"input_ids": tokens(batch, 20)} | ({"position_ids": positions} if packed else {})

    def run(model):
        if model.config._attn_implementation == paged.NAME:
            model = torch.compile(model, fullgraph=True, backend="aot_eager")
        return once(**inputs)(model)

    assert_like_sdpa(model, run)


@pytest.mark.parametrize(
    ("name", "exported"),
    [
        pytest.param("llama", False, id="llama-compiled"),
        pytest.param("bert", True, id="bert-exported"),
        pytest.param("llama", True, id="llama-exported", marks=pytest.mark.thorough),
        pytest.param("bert", False, id="bert-compiled", marks=pytest.mark.thorough),
        pytest.param("mistral", False, id="mistral-compiled", marks=pytest.mark.thorough),
        pytest.param("mistral", True, id="mistral-exported", marks=pytest.mark.thorough),
    ],
)
def test_one_graph_for_rows_of_any_length(name, exported):
    torch.compiler.reset()
    model = make_model(*(DECODERS | ENCODERS)[name])
    model.set_attn_implementation(paged.NAME)
    lengths = {1: torch.export.Dim("length", min=4, max=64)}
    cache = {} if name == "bert" else {"use_cache": False}
    with torch.inference_mode():
        if exported:
            shapes = {"input_ids": lengths} | dict.fromkeys(cache)
            inputs = {"input_ids": tokens(2, 13)} | cache
            program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
            run = program.module()
        else:
            graphs = CompileCounter()
            run = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
        for length in (13, 20, 37):
            ids = tokens(2, length)
            found = run(input_ids=ids, **cache).last_hidden_state
            assert torch.equal(found, model(input_ids=ids, **cache).last_hidden_state)
    assert exported or graphs.frame_count == 1


def test_a_mask_of_three_dimensions_is_refused():
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"2 or 4 dimensions.*\(1, 3, 3\)"):
        paged.attention_forward(None, query, query, query, torch.ones(1, 3, 3))
