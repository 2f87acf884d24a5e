"""CONTRIBUTING's table of sizes follows the tree."""

import pytest
import sizes

ALLOWED = 0.05


def test_every_backend_has_a_row():
    folders = {path.name for path in (sizes.ROOT / "torch_paged_attn" / "backends").iterdir()}
    rows = {folder.rpartition("/")[2] for folder in sizes.FOLDERS.values()} - {"csrc"}
    assert rows == {name for name in folders if not name.startswith("_")}


def test_the_table_follows_the_tree():
    written, found = sizes.written(), sizes.sizes()
    assert written.keys() == found.keys()
    for name, (files, lines) in found.items():
        assert written[name] == (
            pytest.approx(files, rel=ALLOWED, abs=2),
            pytest.approx(lines, rel=ALLOWED),
        ), f"{name}: run python tools/sizes.py"
