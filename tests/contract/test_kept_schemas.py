"""`schemas.txt` holds what callers of the last release rely on; nothing of it may go."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import schemas  # noqa: E402

OLD = (
    "op(Tensor q, SymInt n, Tensor? m=None, *, float s=0.0, bool[2] c=[True, False]) -> (Tensor o)"
)


def test_no_operator_breaks_its_callers():
    assert not schemas.all_breaks(schemas.kept(), schemas.current())


def test_every_operator_is_kept():
    # if not: PYTHONPATH=. python tools/schemas.py, which every release does, too
    assert set(schemas.kept()) == set(schemas.current())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("Tensor? m=None", "Tensor? m=None, Tensor? x=None"), None),
        (("False]", "False], int d=1"), None),
        (("SymInt n, ", ""), "SymInt n is now"),
        (("Tensor? m=None, ", ""), "Tensor? m=None is gone"),
        (("float s=0.0", "float s=1.0"), "float s=0.0 is gone"),
        (("float s=0.0, ", ""), "float s=0.0 is gone"),
        (("*, float s", "*, int d=1, float s"), None),
        (("SymInt n", "SymInt count"), "SymInt n is now SymInt count"),
        (("SymInt n", "int n"), "SymInt n is now int n"),
        (("Tensor? m=None", "Tensor? m"), "Tensor? m=None is now Tensor? m"),
        ((", *, float", ", float"), "float s=0.0 is gone"),
        (("Tensor q, ", "Tensor q, Tensor k, "), "SymInt n is now Tensor k"),
        (("False]", "False], int d"), "int d is new and has no default"),
        (("Tensor q", "Tensor(a!) q"), "Tensor q is now Tensor(a!) q"),
        (("-> (Tensor o)", "-> (Tensor o, Tensor p)"), "it returned ['Tensor'], and"),
    ],
    ids=lambda x: x[1] if isinstance(x, tuple) else "",
)
def test_a_change_that_breaks_is_refused(change, said):
    before, after = change
    assert before in OLD
    found = schemas.breaks(OLD, OLD.replace(before, after))
    assert not found if said is None else any(said in x for x in found), found


def test_an_operator_that_goes_is_refused():
    assert schemas.all_breaks({"op": OLD}, {}) == ["op is gone"]


def test_the_command_refuses_a_break(tmp_path, monkeypatch):
    monkeypatch.setattr(schemas, "FILE", tmp_path / "schemas.txt")
    monkeypatch.setattr(sys, "argv", ["schemas.py"])
    schemas.main()
    assert schemas.kept() == schemas.current()
    text = schemas.FILE.read_text().replace("causal", "is_causal")
    schemas.FILE.write_text(text)
    with pytest.raises(SystemExit, match="stays as it is:\nblocksparse: "):
        schemas.main()
    assert schemas.FILE.read_text() == text
    monkeypatch.setattr(sys, "argv", ["schemas.py", "--break"])
    schemas.main()
    assert schemas.kept() == schemas.current()
