"""CONTRIBUTING's table of sizes follows the tree."""

import sizes

# the table may be behind by so many files, and by one line of so many
FILES, LINES = 3, 20


def test_every_backend_has_a_row():
    folders = {path.name for path in (sizes.ROOT / "torch_paged_attn" / "backends").iterdir()}
    rows = {folder.rpartition("/")[2] for folder in sizes.FOLDERS.values()} - {"csrc"}
    assert rows == {name for name in folders if not name.startswith("_")}


def test_the_table_follows_the_tree():
    written, found = sizes.written(), sizes.sizes()
    assert written.keys() == found.keys()
    for name, (files, lines) in found.items():
        is_near = abs(written[name][0] - files) <= FILES
        is_near = is_near and abs(written[name][1] - lines) * LINES <= lines
        assert is_near, f"{name}: run python tools/sizes.py"
