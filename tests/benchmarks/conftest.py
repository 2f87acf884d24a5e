import sys
from pathlib import Path

# the benchmarks are scripts: they import one another as the top-level modules beside run.py
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
# behind it, for a `run` and a `report` are there too
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
