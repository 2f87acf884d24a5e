"""Hypothesis strategies that draw a `Problem`. Tensors are built from it and not drawn themselves,
because Hypothesis shrinks a few small numbers better.
"""

import dataclasses

import torch
from hypothesis import strategies as st

from torch_paged_attn.attention_call import LATENT_COLUMNS
from torch_paged_attn.testing import Layout, Problem, Selected

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

HEAD_DIMS = st.one_of(st.sampled_from((1, 8, 16, 32, 64, 80, 96, 128, 256)), st.integers(1, 256))
PAGE_SIZES = st.one_of(st.sampled_from((1, 2, 16, 32, 64, 256)), st.integers(1, 256))
WINDOWS = st.one_of(st.just(-1), st.integers(0, 70))

# (query_len, context_len) of one sequence, for each kind of batch: if both numbers were drawn
# uniformly, a batch would hardly ever be pure decode
decode = st.tuples(st.just(1), st.one_of(st.integers(0, 70), st.integers(0, 2200)))
prefill = st.tuples(st.integers(0, 140), st.just(0))
chunk = st.tuples(st.integers(0, 40), st.integers(0, 200))
short = st.integers(0, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(-n, 0)))


def batches(min_size=0):
    """Batches that are decode, prefill, chunked prefill, have more queries than keys, or are mixed,
    each with equal probability.
    """
    kinds = (decode, prefill, chunk, short, st.one_of(decode, prefill, chunk, short))
    return st.one_of(*(st.lists(kind, min_size=min_size, max_size=4).map(tuple) for kind in kinds))


def sometimes(value, default):
    """`default` with probability 3/4, else `value`."""
    return st.integers(0, 3).flatmap(lambda n: value if n == 0 else st.just(default))


DESCALES = sometimes(st.sampled_from(("scalar", "heads", "batch")), "")
NO_LAYOUT = st.none()
layouts = st.builds(
    Layout,
    q_block_size=st.sampled_from((16, 32, 64, 128, 256)),
    k_block_size=st.sampled_from((16, 32, 64, 128, 256)),
    heads=st.sampled_from(("one", "kv", "all")),
    batched=st.booleans(),
    density=st.sampled_from((0.0, 0.3, 0.7, 1.0)),
)


@st.composite
def extras(draw, problem, optional, trains):
    """`problem` with some of the arguments `optional` (names in `ops.lacking.OPTIONAL`)."""
    changes = {}

    def wants(name):
        return name in optional and draw(st.integers(0, 2)) == 0

    if problem.page_size is None and wants("k_start"):
        changes["k_ranges"] = draw(st.sampled_from(("apart", "shared")))
        changes["lengths"] = draw(st.sampled_from(("seqused_k", "cu_seqlens_k")))
    if wants("q_position"):
        near = st.one_of(st.integers(-20, 150), st.integers(-20, 2200))
        sizes = len(problem.seqs)
        changes["q_positions"] = tuple(draw(st.lists(near, min_size=sizes, max_size=sizes)))
    if wants("key_ranks"):
        ranks = changes["key_ranks"] = draw(st.integers(2, 5))
        changes["key_rank"] = draw(st.integers(0, ranks - 1))
        changes["key_interleave"] = draw(st.sampled_from((1, 2, 3, 16, 64)))
    if wants("tail_mask"):
        changes["tail"] = True
    if wants("batch_invariant"):
        changes["batch_invariant"] = True
    if problem.dropout_p and wants("rng_state[2:]"):
        changes["dropout_base"] = tuple(draw(st.integers(0, 9)) for _ in range(3))
    if not trains and wants("k_descale by token"):
        changes["descale"] = "tokens"
    if not trains and wants("k in int4"):
        even = {n: getattr(problem, n) for n in ("head_dim", "head_dim_v") if getattr(problem, n)}
        changes |= {n: size + size % 2 for n, size in even.items()}
        changes["kv_dtype"] = torch.uint8
        problem = dataclasses.replace(problem, **changes)
    if not trains and problem.cache_layout != "mla" and wants("q_latent"):
        changes["latent"] = True
        changes["v_dtype"] = draw(sometimes(st.sampled_from((problem.dtype, *FLOAT8)), None))
        if "descale" not in changes and wants("v_descale by column"):
            columns = LATENT_COLUMNS * draw(st.integers(1, 4))
            changes |= {"descale": "columns", "head_dim_v": columns}
            if problem.page_size is not None and draw(st.booleans()):
                changes["cache_layout"] = "rows"
    return dataclasses.replace(problem, **changes)


@st.composite
def problems(draw, layout=NO_LAYOUT, trains=False, optional=()):
    """Any call that the contract allows, small enough for the float64 reference.

    layout: a strategy for the block layout
    trains: whether the call has to have gradients
    optional: names in `ops.lacking.OPTIONAL` of arguments that it may give
    """
    dtype = draw(st.sampled_from(FLOATS if trains else FLOATS + FLOATS + FLOAT8))
    kv_heads = draw(st.integers(1, 3))
    head_dim = draw(HEAD_DIMS)
    page_size = kv_dtype = out_dtype = None
    if not trains:
        page_size = draw(st.one_of(st.none(), PAGE_SIZES))
        kv_dtype = draw(sometimes(st.sampled_from((*FLOAT8, torch.int8)), None))
        out_dtype = draw(sometimes(st.sampled_from(FLOATS + FLOAT8), None))
    seqs = draw(batches())
    if page_size is None:
        square = all(context == 0 for _, context in seqs)
        lengths = draw(st.sampled_from(("seqused_k", "cu_seqlens_k", "none")[: 3 if square else 2]))
        cache_layout, head_dim_v = "hnd", draw(sometimes(HEAD_DIMS, None))
    else:
        lengths = draw(st.sampled_from(("seqused_k", "cu_seqlens_k")))
        cache_layout = draw(st.sampled_from(("hnd", "nhd", "interleaved", "packed_last", "mla")))
        smaller = st.integers(1, head_dim) if cache_layout == "mla" else HEAD_DIMS
        head_dim_v = draw(sometimes(smaller, None))
    problem = Problem(
        "fuzzed",
        seqs,
        num_heads=kv_heads * draw(st.sampled_from((1, 2, 3, 4, 8))),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        kv_dtype=kv_dtype,
        out_dtype=out_dtype,
        out_scale=(out_dtype or dtype) in FLOAT8 and draw(st.booleans()),
        page_size=page_size,
        cache_layout=cache_layout,
        page_seed=draw(st.integers(0, 5)),
        lengths=lengths,
        padding_rows=draw(sometimes(st.integers(1, 5), 0)),
        fused_qkv=draw(st.booleans()),
        causal=draw(st.booleans()),
        window_size_left=draw(sometimes(WINDOWS, -1)),
        window_size_right=draw(sometimes(WINDOWS, -1)),
        softmax_scale=draw(sometimes(st.sampled_from((0.0, 0.02, 1.0, -0.3)), None)),
        softcap=draw(sometimes(st.sampled_from((0.5, 5.0, 50.0)), 0.0)),
        alibi=draw(sometimes(st.sampled_from(("heads", "batch")), "")),
        bias=draw(sometimes(st.sampled_from(("float", "bool")), "")),
        bias_heads=draw(st.sampled_from(("one", "all"))),
        sinks=draw(sometimes(st.booleans(), False)),
        descale="" if trains else draw(DESCALES),
        dropout_p=draw(sometimes(st.sampled_from((0.1, 0.9)), 0.0)),
        layout=draw(layout),
        seed=draw(st.integers(0, 2**16)),
    )
    return draw(extras(problem, optional, trains)) if optional else problem


# those of `ops.lacking.OPTIONAL` that `extras` adds to calls of `selected_attention`
OF_SELECTED = {
    *("k_start", "q_latent", "batch_invariant", "k_descale by token", "k in int4"),
    "v_descale by column",
}


@st.composite
def selected_problems(draw, trains=False, optional=()):
    """Any call of `selected_attention` that the contract allows, small enough for the reference.

    trains: whether the call has to have gradients
    optional: names in `ops.lacking.OPTIONAL` of arguments that it may give
    """
    size = draw(st.sampled_from((1, 1, 2, 4, 16, 64, 128, 256)))
    page_size = None if trains else draw(st.sampled_from((None, 1, 16, 64, 544)))
    is_mla = page_size is not None and draw(st.integers(0, 3)) == 0
    kv_heads = 1 if is_mla else draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from((1, 16, 33, 64, 80)))
    slots = page_size is not None and page_size % size == 0 and draw(st.integers(0, 2)) == 0
    queries = st.one_of(st.just(1), st.integers(0, 9))
    context = st.one_of(st.integers(-5, 70), st.integers(0, 400))
    seqs = draw(st.lists(st.tuples(queries, context), max_size=3))
    if slots:  # whole units: no length cuts one
        seqs = [(n, -n % size + size * (max(c, 0) // size)) for n, c in seqs]
    else:
        seqs = [(n, max(c, -n)) for n, c in seqs]
    selected = Selected(
        units=draw(st.sampled_from((0, 1, 3, 17, "all"))),
        size=size,
        heads=draw(st.sampled_from(("one", "kv"))),
        holes=draw(st.sampled_from((0.0, 0.3, 1.0))),
        counted=draw(st.booleans()),
        past=not slots and draw(st.booleans()),
        slots=slots,
        own=not slots and draw(st.booleans()),
    )
    kv_dtype = None if trains else draw(sometimes(st.sampled_from((*FLOAT8, torch.int8)), None))
    positions = st.lists(st.integers(-9, 300), min_size=len(seqs), max_size=len(seqs)).map(tuple)
    problem = Problem(
        "fuzzed",
        tuple(seqs),
        num_heads=kv_heads * draw(st.sampled_from((1, 2, 3, 8))),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=draw(sometimes(st.integers(1, head_dim), None)),
        dtype=draw(st.sampled_from(FLOATS)),
        kv_dtype=kv_dtype,
        page_size=page_size,
        cache_layout="mla" if is_mla else draw(st.sampled_from(("hnd", "nhd", "interleaved"))),
        page_seed=draw(st.integers(0, 5)),
        padding_rows=draw(sometimes(st.integers(1, 5), 0)),
        causal=not slots and draw(st.booleans()),
        window_size_left=-1 if slots else draw(sometimes(WINDOWS, -1)),
        window_size_right=-1 if slots else draw(sometimes(WINDOWS, -1)),
        softcap=draw(sometimes(st.sampled_from((0.5, 5.0)), 0.0)),
        sinks=draw(sometimes(st.booleans(), False)),
        descale="" if trains else draw(DESCALES),
        q_positions=None if slots else draw(sometimes(positions, None)),
        selected=selected,
        seed=draw(st.integers(0, 2**16)),
    )
    return draw(extras(problem, OF_SELECTED.intersection(optional), trains))
