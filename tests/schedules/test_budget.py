"""No kernel's schedule grows unnoticed: at most 5 % over the budget, `run.py --budget` sets it."""

import json

import pytest
from contenders import BUDGET, PROBLEMS, measure
from generations import GENERATIONS

ALLOWED = 1.05
BUDGETS = [
    (generation, problem, budget)
    for generation, problems in json.loads(BUDGET.read_text()).items()
    for problem, budget in problems.items()
]


@pytest.mark.parametrize(
    ("generation", "problem", "budget"), BUDGETS, ids=[f"{g}-{p}" for g, p, _ in BUDGETS]
)
def test_schedule_is_within_budget(generation, problem, budget):
    [build] = (known.contenders["ours"] for known in PROBLEMS if known.name == problem)
    found = measure(build, GENERATIONS[generation])
    for count, limit in budget.items():
        assert found[count] <= ALLOWED * limit, (
            f"{count}: {found[count]:,} where the budget is {limit:,}"
        )
