"""The choice that a budget allows: against trying all, and its promises where there are too many to try."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.making.quantization.budget import Choice, choose
from tests.counts import Count

EXAMPLES = Count(test=60, soak=20_000)


def sizes(most: int, unit: int) -> st.SearchStrategy[list[list[Choice]]]:
    choice = st.builds(Choice, st.integers(0, most).map(lambda n: n * unit), st.floats(0, 10))
    return st.lists(st.lists(choice, min_size=1, max_size=4), min_size=1, max_size=5)


def total(groups: list[list[Choice]], indexes: list[int] | tuple[int, ...]) -> Choice:
    chosen = [group[index] for group, index in zip(groups, indexes, strict=True)]
    return Choice(sum(choice.nbytes for choice in chosen), sum(choice.cost for choice in chosen))


def smallest(groups: list[list[Choice]]) -> int:
    return sum(min(choice.nbytes for choice in group) for group in groups)


@settings(max_examples=EXAMPLES)
@given(sizes(40, 32), st.integers(0, 4000))
def test_no_other_choice_within_the_budget_costs_less(groups: list[list[Choice]], spare: int) -> None:
    budget = smallest(groups) + spare
    found = total(groups, choose(groups, budget))
    assert found.nbytes <= budget
    every = (total(groups, indexes) for indexes in product(*(range(len(group)) for group in groups)))
    least = min(choice.cost for choice in every if choice.nbytes <= budget)
    assert found.cost <= least + 1e-9


@settings(max_examples=EXAMPLES)
@given(sizes(10**11, 1), st.floats(0, 1.2))
def test_large_sizes_fit_the_budget_and_leave_no_better_choice_of_one_group(
    groups: list[list[Choice]], share: float
) -> None:
    largest = sum(max(choice.nbytes for choice in group) for group in groups)
    budget = smallest(groups) + int(share * (largest - smallest(groups)))
    indexes = choose(groups, budget)
    found = total(groups, indexes)
    assert found.nbytes <= budget
    for place, group in enumerate(groups):
        for index in range(len(group)):
            other = total(groups, [*indexes[:place], index, *indexes[place + 1 :]])
            assert other.nbytes > budget or other.cost >= found.cost - 1e-9
