"""Acceptance rates converge and outlive the process, and a damaged file is ignored."""

from __future__ import annotations

import json
import logging
import math
import random
from pathlib import Path

import pytest

from edgelm.engine.speculation.acceptance import DEPTHS, MAX_DRAFT, Acceptance
from edgelm.engine.speculation.ngram_counts import Evidence, kind_of

SEEN_ONCE: Evidence = (7, 1, kind_of(1, 0, False))
OTHER: Evidence = (9, 4, kind_of(4, 0, False))


def chance(acceptance: Acceptance, current: Evidence | None, past: Evidence | None = None) -> float:
    return 1 / (1 + math.exp(-acceptance.judge(current, past)[1]))


def teach(acceptance: Acceptance, current: Evidence | None, past: Evidence | None, share: float, times: int) -> None:
    """Let the chosen token be right with a probability of `share`."""
    rng = random.Random(1)
    for _ in range(times):
        token, odds, slot, _ = acceptance.judge(current, past)
        right = rng.random() < share
        guess = (token, 1 / (1 + math.exp(-odds)), slot, current, past)
        acceptance.learn([guess], [token if right else token + 1])


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.99])
def test_the_chance_converges_to_the_observed_share(share: float) -> None:
    acceptance = Acceptance()
    before = chance(acceptance, OTHER)
    teach(acceptance, SEEN_ONCE, None, share, 2_000)
    assert chance(acceptance, SEEN_ONCE) == pytest.approx(share, abs=0.06)
    assert chance(acceptance, OTHER) == pytest.approx(before, abs=0.1)  # another kind does not change


def test_guesses_behind_a_wrong_one_teach_nothing() -> None:
    acceptance = Acceptance()
    token, odds, slot, _ = acceptance.judge(SEEN_ONCE, None)
    guess = (token, 0.25, slot, SEEN_ONCE, None)
    assert acceptance.learn([guess] * 4, [token, token + 1, token, token]) == [0.75, -0.25]
    assert acceptance.learn([guess] * 4, [token]) == [0.75]
    assert acceptance.judge(SEEN_ONCE, None)[1] > odds


def test_the_chance_follows_a_change() -> None:
    acceptance = Acceptance()
    teach(acceptance, SEEN_ONCE, None, 0.95, 3_000)
    teach(acceptance, SEEN_ONCE, None, 0.2, 1_500)
    assert chance(acceptance, SEEN_ONCE) == pytest.approx(0.2, abs=0.1)


def test_before_anything_is_learnt_better_evidence_is_worth_more() -> None:
    fresh = Acceptance()
    by_length = [chance(fresh, (7, level, kind_of(level, 0, False))) for level in range(5)]
    by_count = [chance(fresh, (7, 1, kind_of(1, state, False))) for state in range(5)]
    assert by_length == sorted(by_length)
    assert by_count == sorted(by_count)
    assert chance(fresh, (7, 1, kind_of(1, 0, True))) > chance(fresh, SEEN_ONCE)
    assert chance(fresh, SEEN_ONCE) > chance(fresh, None, SEEN_ONCE)  # this conversation counts more than past answers


def test_the_likelier_of_two_tokens_is_chosen() -> None:
    acceptance = Acceptance()
    assert acceptance.judge(SEEN_ONCE, OTHER)[0] == OTHER[0]
    teach(acceptance, None, OTHER, 0.02, 2_000)
    token, _, _, level = acceptance.judge(SEEN_ONCE, OTHER)
    assert (token, level) == (SEEN_ONCE[0], SEEN_ONCE[1])


def test_agreement_is_learnt() -> None:
    acceptance = Acceptance()
    teach(acceptance, SEEN_ONCE, (7, 0, 0), 0.97, 600)
    teach(acceptance, SEEN_ONCE, None, 0.5, 600)
    assert chance(acceptance, SEEN_ONCE, (7, 0, 0)) > chance(acceptance, SEEN_ONCE) + 0.1


def test_short_acceptances_lower_the_reach() -> None:
    acceptance = Acceptance()
    expected = [0.9**depth for depth in range(1, MAX_DRAFT + 1)]
    before = list(acceptance.reach.shares(1))
    for _ in range(2_000):
        acceptance.reach.learn(1, expected, 2)
    after = acceptance.reach.shares(1)
    assert after[0] > before[0]
    assert after[DEPTHS[10]] < 0.1
    assert acceptance.reach.shares(2) == before  # drafts that begin at another level


def test_acceptance_outlives_the_process(tmp_path: Path) -> None:
    learnt = Acceptance()
    teach(learnt, SEEN_ONCE, OTHER, 0.9, 300)
    learnt.reach.learn(1, [0.9, 0.8, 0.7], 1)
    learnt.save(tmp_path / "sub" / "model.json")
    again = Acceptance.load(tmp_path / "sub" / "model.json")
    assert again.judge(SEEN_ONCE, OTHER) == learnt.judge(SEEN_ONCE, OTHER)
    assert again.reach.shares(1) == pytest.approx(learnt.reach.shares(1))
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["model.json"]


def damaged(path: Path) -> list[str]:
    Acceptance().save(path)
    state = json.loads(path.read_text())
    return [
        "",
        "{",
        "[]",
        "null",
        path.read_text()[:-100],
        json.dumps(state | {"orders": [1, 2, 3]}),
        json.dumps(state | {"seen": state["seen"][:-1]}),
        json.dumps(state | {"seen": [0.0] * len(state["seen"])}),
        json.dumps(state | {"right": ["1"] * len(state["right"])}),
        json.dumps(state | {"right": [float("nan")] * len(state["right"])}),
        json.dumps(state | {"right": [-1.0] * len(state["right"])}),
        json.dumps(state | {"seen": [10**400] * len(state["seen"])}),
        json.dumps(state | {"offsets": None}),
        "[" * 100_000,
        json.dumps(state | {"offsets": [1e300] * len(state["offsets"])}),
        json.dumps(state | {"reached": []}),
        json.dumps(state | {"expected": [[0.0] * 9] * 5}),
    ]


def test_a_damaged_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    for text in damaged(path):
        path.write_text(text)
        loaded = Acceptance.load(path)
        assert loaded.judge(SEEN_ONCE, OTHER) == Acceptance().judge(SEEN_ONCE, OTHER), text[:80]
        assert loaded.reach.shares(3) == pytest.approx(Acceptance().reach.shares(3))
    path.write_bytes(b"\xff\xfe")
    assert Acceptance.load(path).judge(SEEN_ONCE, None) == Acceptance().judge(SEEN_ONCE, None)


def test_a_disk_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        Acceptance().save(tmp_path / "file" / "model.json")
    assert "cannot be written" in caplog.text
