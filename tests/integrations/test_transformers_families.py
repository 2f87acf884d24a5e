"""Models of all families that shrink, beside their eager attention; keywords of all layers."""

import ast
import copy
import inspect
import re
from pathlib import Path

import families
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from torch_paged_attn.integrations import transformers as paged
from torch_paged_attn.integrations._transformers_short import ShortMask
from torch_paged_attn.testing import assert_as_right_as

# what is special about them: lists of keys, layers that do not know that they
# are causal or have a window, masks whose queries are cut off
SAMPLE = (
    *("deepseek_v32", "hy_v4", "minimax_m3_vl_text", "pegasus_x", "phimoe"),
    *("gemma4_text", "gpt_oss", "gemma2", "qwen3", "t5", "bart", "modernbert"),
)
OTHERS = [x for x in CONFIG_MAPPING if x not in SAMPLE]


@pytest.fixture(scope="module", autouse=True)
def registered():
    paged.register()


def shrunk(family):
    """The model, and its logits by eager attention of full and left-padded rows."""
    mask = torch.ones(2, 20, dtype=torch.long)
    padded = mask.clone()
    padded[0, :6] = 0
    try:
        model = families.small_model(family)
        return model, [(x, families.run(model, x)) for x in (mask, padded)]
    except Exception as error:  # not of ours: this family wants other sizes or inputs
        pytest.skip(f"{family}: {error!r}"[:200])


def golden_of(model, mask):
    """In float64. Eager attention adds the lowest number twice to what a padded token does not see,
    which is NaN then; SDPA has no such rows, but no softcap either. None: neither has an answer.
    """
    for attention in ("eager", "sdpa"):
        if attention == "eager" or (model._supports_sdpa and not softcap_of(model)):
            model.set_attn_implementation(attention)
            try:
                golden = families.run(model, mask)
            except RuntimeError as error:
                if "dtype" not in str(error):
                    raise
                return None  # a layer converts to float32, and multiplies by float64
            if golden.dtype == torch.float64 and golden.isfinite().all():
                return golden
    return None


def softcap_of(model):
    return getattr(model.config, "attn_logit_softcapping", None)


def assert_like_eager(family):
    model, cases = shrunk(family)
    precise = copy.deepcopy(model).double()
    model.set_attn_implementation(paged.NAME)
    goldens = [golden_of(precise, mask) for mask, _ in cases]
    for (mask, theirs), golden in zip(cases, goldens, strict=True):
        ours = families.run(model, mask)
        if golden is not None:
            assert_as_right_as(ours, golden, theirs)
    if goldens[0] is None:
        pytest.skip(f"{family}: it computes no float64")


@pytest.mark.parametrize("family", [x for x in SAMPLE if x in CONFIG_MAPPING])
def test_families_of_every_kind(family):
    assert_like_eager(family)


@pytest.mark.thorough
@pytest.mark.parametrize("family", OTHERS)
def test_every_family(family):
    try:
        assert_like_eager(family)
    except NotImplementedError as error:
        assert "formulas of" in str(error)  # the family takes no attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_sink_of_each_query(biased, masked):
    """Inkling 2 hands its layers' sinks on by this keyword."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = draw(3, 4, 7, 16), draw(3, 2, 9, 16), draw(3, 2, 9, 16)
    sinks, bias = draw(3, 4, 7, 1), draw(1, 4, 7, 9) if biased else None
    seen = torch.ones(7, 9, dtype=torch.bool).tril(2).expand(3, 1, 7, 9)

    def formula(dtype):
        query, key, value, sink = (x.to(dtype) for x in (q, k, v, sinks))
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        logits = query @ key.mT / 4 + (0 if bias is None else bias.to(dtype))
        logits = torch.cat([logits.masked_fill(~seen, float("-inf")), sink], -1)
        return (logits.softmax(-1)[..., :-1] @ value).transpose(1, 2)

    floats = [x.float() for x in (q, k, v)]
    options = {"sinks": sinks.float(), "position_bias": None if bias is None else bias.float()}
    mask = seen if masked else None
    ours = paged.attention_forward(None, *floats, mask, 0.25, is_causal=True, **options)[0]
    assert_as_right_as(ours, formula(torch.float64), formula(torch.float32))


def calls_of(name, text):
    """The calls of a function in a page, as they stand there."""
    for found in re.finditer(rf"\b{name}\(", text):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield text[found.start() : end]


def keywords_of_layers():
    """Keywords by which the installed models call attention: name -> a file that has it."""
    # most models have the same calls; to parse whole files would take half a minute
    files = {}
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        files |= dict.fromkeys(calls_of("attention_interface", file.read_text()), file.name)
    found = {}
    for call, file in files.items():
        keywords = ast.parse(call, mode="eval").body.keywords
        found |= {x.arg: file for x in keywords if x.arg is not None}
    return found


def test_every_keyword_of_a_layer_is_applied_or_known():
    found = keywords_of_layers()
    assert {"scaling", "dropout", "indices", "s_aux"} <= found.keys()
    applied = inspect.signature(paged.attention_forward).parameters.keys()
    unknown = found.keys() - applied - paged.IGNORED
    assert not unknown, {name: found[name] for name in unknown}


def test_another_keyword_is_refused_by_name():
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="temperature"):
        paged.attention_forward(torch.nn.Module(), x, x, x, None, temperature=0.5)
    paged.attention_forward(torch.nn.Module(), x, x, x, None, temperature=None)


def test_weights_are_not_promised():
    x = torch.zeros(1, 2, 3, 4)
    with pytest.warns(UserWarning, match="output_attentions"):
        paged.attention_forward(torch.nn.Module(), x, x, x, None, output_attentions=True)


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU, and the copies of keys."""

    WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")

    def __init__(self, key_numel):
        super().__init__()
        self.waits, self.copies, self.key_numel = 0, 0, key_numel

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.waits += func.name() in self.WAITS
        if func.name() in ("aten::clone", "aten::index.Tensor", "aten::contiguous"):
            self.copies += isinstance(out, torch.Tensor) and out.numel() >= self.key_numel
        return out


@pytest.mark.parametrize(("padded", "most"), [(False, 1), (True, 4)])
@pytest.mark.parametrize("layers", [2, 6])
def test_a_decode_step_waits_no_more_often_for_more_layers(layers, padded, most):
    """And it copies no keys of the cache, but for the cache's own `cat`."""
    model = families.small_model("llama", num_hidden_layers=layers)
    model.set_attn_implementation(paged.NAME)
    cache = transformers.DynamicCache(config=model.config)
    ids, mask = torch.full((2, 20), 5), torch.ones(2, 21, dtype=torch.long)
    if padded:
        mask[0, :6] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask[:, :20], past_key_values=cache)
        with Reads(2 * 2 * 21 * 8) as seen:
            model(ids[:, :1], attention_mask=mask, past_key_values=cache)
    assert seen.waits <= most and seen.copies == 0


def test_a_short_mask_is_the_mask_to_all_but_us():
    full = torch.rand(2, 1, 3, 4) < 0.5
    mask = ShortMask.of(lambda: full, (2, 1, 3, 4), "cpu", True, -1, 4)
    assert mask.shape == full.shape and mask.dim() == mask.ndim == 4
    assert mask.device == full.device and mask.dtype == torch.bool
    assert torch.equal(mask[:, :, 1:], full[:, :, 1:])
    assert torch.equal(mask & full, full) and torch.equal(torch.where(mask, 1, 0), full.int())
    assert mask.to("cpu") is mask and torch.equal(mask.to(torch.float32), full.float())
    assert type(mask.to("meta")) is ShortMask and mask.to("meta").device.type == "meta"


def test_pages_are_used_by_generate_batch(monkeypatch):
    """Whatever version: the tokens would be the same without them."""
    from small_models import generate_batch, make_model

    calls = []
    continuous = paged.continuous
    monkeypatch.setattr(paged, "continuous", lambda *args: calls.append(args) or continuous(*args))
    model = paged.use(make_model("full", "eager"))
    generate_batch(model, [[5, 6, 7], [8] * 30], 16, 256)
    assert len(calls) == 2 * 12  # layers, steps
