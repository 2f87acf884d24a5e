"""TRL's padding-free training on our attention, in an environment made by hand.

`pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0 pytest`, then
`pytest --confcutdir tests/trl tests/trl`.
"""

import importlib.util

if importlib.util.find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]
