"""Models that list the keys of each query: by `selected_attention`, and by a mask of all pairs."""

import copy

import families
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from torch_paged_attn.integrations import _transformers_selected as selected
from torch_paged_attn.integrations import transformers as paged
from torch_paged_attn.testing import assert_as_right_as

FAMILIES = [
    pytest.param(
        name, marks=() if name in ("deepseek_v32", "glm_moe_dsa") else pytest.mark.thorough
    )
    for name in ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4", "dots3_note")
    if name in CONFIG_MAPPING
]
INF = float("inf")


@pytest.fixture(scope="module", autouse=True)
def registered():
    paged.register()


@pytest.fixture
def calls(monkeypatch):
    """The calls of selected_attention."""
    made = []
    attend = selected.selected_attention
    monkeypatch.setattr(
        selected, "selected_attention", lambda *a, **k: made.append(a) or attend(*a, **k)
    )
    return made


@pytest.fixture(params=[True, False], ids=["selected", "dense"])
def is_selected(request, monkeypatch):
    """Whether all calls that can run as selected_attention do, or none."""
    monkeypatch.setattr(selected, "reads_less", lambda *sizes: request.param)
    return request.param


def logits(model, mask):
    """Of a prompt of 9 tokens, 3 further ones together, and 2 alone; without padded queries."""
    ids = torch.randint(3, 97, mask.shape, generator=torch.Generator().manual_seed(1))
    cache, found, start = transformers.DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for end in (9, 12, 13, 14):
            # each token has the position that it has in its sequence
            positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, start:]
            out = model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions,
                past_key_values=cache,
            ).logits
            found.append(out[mask[:, start:end].bool()])
            start = end
    return torch.cat(found)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_like_eager(family, padded, calls, is_selected):
    model = families.small_model(family)
    mask = torch.ones(2, 14, dtype=torch.long)
    if padded:
        mask[0, :4] = 0
    theirs = logits(model, mask)
    # eager attention adds the lowest number twice to what a padded token does not see
    precise = copy.deepcopy(model).double()
    precise.set_attn_implementation("sdpa")
    golden = logits(precise, mask)
    model.set_attn_implementation(paged.NAME)
    ours = logits(model, mask)
    assert golden.isfinite().all()
    assert_as_right_as(ours, golden, theirs)
    assert len(calls) == is_selected * 4 * model.config.num_hidden_layers


def test_decode_is_selected_and_a_short_prompt_is_not(calls):
    model = families.small_model("deepseek_v32")
    model.set_attn_implementation(paged.NAME)
    logits(model, torch.ones(1, 14, dtype=torch.long))
    assert [x[0].shape[0] for x in calls] == [3] * 2 + [1] * 4  # queries


def test_what_reads_less():
    assert selected.reads_less(2048, 1, 2048) and not selected.reads_less(2049, 1, 2048)
    # MiniMax M3, 16 query heads for a KV head: a prompt of 8,192 tokens
    lists, rows = 8192 * 16 * 128, 8192 * 16
    assert selected.reads_less(lists, rows, 98304) and not selected.reads_less(lists, rows, 8192)


class Module(torch.nn.Module):
    """A layer, as far as attention reads it."""

    def __init__(self, size):
        super().__init__()
        self.indexer = torch.nn.Module()
        self.indexer.block_size = size


def masks(query_len, key_len):
    """Forms of a mask: what attention gets, its keywords, and which keys it shows."""
    key = torch.arange(key_len)
    query = torch.arange(key_len - query_len, key_len)[:, None]
    causal = key <= query
    g = torch.Generator().manual_seed(3)
    any_pairs = torch.rand(2, 1, query_len, key_len, generator=g) < 0.6
    keys = torch.ones(2, key_len, dtype=torch.bool)
    keys[0, :5] = False
    of_all = keys[:, None, None]
    bias = torch.zeros(any_pairs.shape).masked_fill(~any_pairs, -INF)
    return {
        "none": (None, {}, causal),
        "window": (None, {"sliding_window": 6}, causal & (key > query - 6)),
        "both sides": (None, {"is_causal": False}, torch.ones_like(causal)),
        "keys": (keys.long(), {}, causal & keys[:, None, None]),
        "pairs": (any_pairs, {}, any_pairs),
        "one for all": (any_pairs[:1], {}, any_pairs[:1]),
        "of all queries": (of_all, {}, of_all.expand(2, 1, query_len, -1)),
        "added": (bias, {}, any_pairs),
    }


@pytest.mark.parametrize("query_len", [1, 7])
@pytest.mark.parametrize("kind", ["keys", "blocks", "blocks of each head"])
@pytest.mark.parametrize("form", masks(1, 8))
def test_lists_under_every_form_of_a_mask(form, kind, query_len, calls, is_selected):
    key_len, size = 21, 1 if kind == "keys" else 4
    g = torch.Generator().manual_seed(query_len)
    q = torch.randn(2, 4, query_len, 16, generator=g, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, key_len, 16, generator=g, dtype=torch.float64)
    groups = 2 if kind == "blocks of each head" else 1
    count = -(-key_len // size)
    entries = torch.rand(2, groups, query_len, count + 2, generator=g).argsort(-1)[..., :4]
    entries[:, :, 0, 1] = -1
    mask, options, shown = masks(query_len, key_len)[form]
    named = entries.masked_fill(entries < 0, count + 2)
    listed = torch.zeros(2, groups, query_len, count + 3, dtype=torch.bool).scatter(3, named, True)
    listed = listed[..., :count].repeat_interleave(size, -1)[..., :key_len]
    seen = shown & listed.repeat_interleave(4 // groups, 1)

    def formula(dtype):
        query, key, value = (x.to(dtype) for x in (q, k, v))
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        scores = (query @ key.mT / 4).masked_fill(~seen, -INF).softmax(-1)
        return (scores.nan_to_num() @ value).transpose(1, 2)

    name = "indices" if kind == "keys" else "block_indices"
    lists = {name: entries[:, 0] if kind == "keys" else entries}
    floats = [x.float() for x in (q, k, v)]
    options = {"is_causal": True} | options | lists
    ours, _ = paged.attention_forward(Module(size), *floats, mask, 0.25, **options)
    assert_as_right_as(ours, formula(torch.float64), formula(torch.float32))
    assert len(calls) == (is_selected and form != "added")


@pytest.mark.parametrize(
    ("options", "name"),
    [({"cache": object()}, "cache"), ({"cu_seq_lens_q": [0, 3]}, "cu_seq_lens")],
)
def test_packed_rows_with_lists_are_refused(options, name):
    x = torch.zeros(1, 2, 3, 4)
    indices = torch.zeros(1, 3, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=name):
        paged.attention_forward(Module(1), x, x, x, None, indices=indices, **options)
