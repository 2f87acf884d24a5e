"""`compile --use training` makes the kernels of models that train under a mask of all pairs."""

import json
from pathlib import Path

import pytest
import trained_masks
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from torch_paged_attn import _model_config
from torch_paged_attn._model_config import read_model
from torch_paged_attn.integrations import _transformers_masks as masks

DECODERS = {
    **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
# they add a learned bias to their masks
BIASED = "doge", "inkling_mm_model", "inkling_text", "pix2struct"
# models whose masks are of another pattern than a causal one with or without a window
PATTERNS = "block_sequence_ids=", "or_mask_function=", "create_chunked_causal_mask("
# why nothing is compiled ahead for their masks
EXCUSED = {
    "git": "they are numbers",
    "llama4": "only rows that are longer than a chunk have one",
    "pi0": "its config does not say how many heads there are",
}


@pytest.fixture(scope="module")
def process():
    from cross_compile import workers

    with workers(1) as found:
        yield found


@pytest.mark.parametrize(
    "arch, kind",
    [
        ("sm90", "deepseek_v32"),
        ("sm80", "deepseek_v32"),
        ("sm90", "minimax_m3_vl_text"),
        ("sm90", "gemma4_text"),
        *(
            pytest.param(arch, kind, marks=pytest.mark.thorough)
            for arch, kind in (
                ("sm80", "minimax_m3_vl_text"),
                ("sm80", "gemma4_text"),
                ("gfx942", "deepseek_v32"),
                ("gfx942", "minimax_m3_vl_text"),
            )
        ),
    ],
)
def test_training_steps_take_what_was_compiled(arch, kind, process):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no {kind}")
    made, more, report = process.submit(trained_masks.missed_by_compile, arch, kind).result()
    assert made > 6 and more == 0, report


def layers_of(family, folder):
    """The layers that `compile` reads of a family's config, and the class of its text's config;
    None if Transformers' defaults are no model's, or no decoder's."""
    name = DECODERS[family]
    try:
        config = CONFIG_MAPPING[family]()
        getattr(transformers, name if isinstance(name, str) else name[0])  # imports the models
        text = type(config.get_text_config())
        (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    except Exception:  # of any type, and not of ours
        return None
    try:
        return read_model(folder).layers, text
    except ValueError:  # it says what the config lacks
        return None


def test_models_that_flash_attn_cannot_serve_have_a_mask(tmp_path):
    """Models to which masks of bools are given have their kernels compiled."""
    wrong, count = [], 0
    for family in DECODERS:
        found = layers_of(family, tmp_path)
        if found is None:
            continue
        layers, text = found
        wants = masks._wanted_mask(text)
        is_masked = any(layer.mask for layer in layers)
        count += is_masked
        if wants == masks.PAIRS and is_masked == (family in BIASED):
            wrong.append(f"{family}: no mask")
        if wants in (masks.ADDED, masks.OWN) and is_masked:
            wrong.append(f"{family}: {wants}")
    assert not wrong
    assert count > 10


def test_models_of_other_patterns_have_a_mask():
    found = {
        path.parent.name
        for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
        if any(x in path.read_text() for x in PATTERNS)
    }
    known = {*_model_config.OVERLAID, *EXCUSED}
    assert "gemma3" in found
    assert {x for x in found - known if not x.startswith("gemma4")} == set()
