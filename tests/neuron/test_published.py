"""The emulator's signatures are those that AWS publishes: `published_signatures.json`, which
`tools/nki_signatures.py` writes from the stubs of a release, and which names the pages of those
releases whose stubs are not public.
"""

import json
from pathlib import Path

import pytest
from nki_emulator.signatures import ISA, LANGUAGE, METHODS, NEWER, signature

PUBLISHED = json.loads((Path(__file__).parent / "published_signatures.json").read_text())
OLDER, NEWEST = (PUBLISHED[release]["signatures"] for release in ("0.6.0", "0.7.0"))
TABLES = {"nisa": ISA, "nl": LANGUAGE, "NkiTensor": METHODS}
OURS = {f"{owner}.{name}": x for owner, table in TABLES.items() for name, x in table.items()}


def names(parameters):
    """As the file has them: in order, those that may be left out with a question mark."""
    found = signature(parameters).parameters.values()
    return ", ".join(p.name + "?" * (p.default is not p.empty) for p in found)


NOT_FOUND = PUBLISHED["0.7.0"]["not_found"]


def test_every_name_has_a_page_of_0_7_or_is_listed_as_without():
    """What was not found stands in the file, and is held against the stubs of 0.6 alone."""
    assert sorted([*NEWEST, *NOT_FOUND]) == sorted(OURS)
    assert {name.partition(".")[0] for name in NEWEST} == PUBLISHED["0.7.0"]["pages"].keys()


@pytest.mark.parametrize("name", sorted(OURS))
def test_of_0_6(name):
    assert names(OURS[name]) == OLDER[name]


@pytest.mark.parametrize("name", sorted(NEWEST))
def test_of_0_7(name):
    owner, _, function = name.partition(".")
    newer = NEWER if owner == "nisa" else {}
    assert names(newer.get(function, OURS[name])) == NEWEST[name]


@pytest.mark.parametrize("name", sorted(NEWER))
def test_what_came_may_be_left_out(name):
    """Calls by keyword that 0.6 takes, 0.7 takes too."""
    old, new = (names(x).split(", ") for x in (ISA[name], NEWER[name]))
    assert [x for x in new if x in old] == old
    assert all(x.endswith("?") for x in new if x not in old)
