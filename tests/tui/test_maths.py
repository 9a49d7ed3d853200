"""Formulas as Unicode."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.tui.transcript.document import Document
from edgelm.tui.transcript.maths import formula_text
from tests.tui.test_transcript import EXAMPLES, show

MATHS = ("frac", "sqrt", "begin", "end", "text", "left", "right", "alpha", "sum", "hat", "mathbb", "foo", "{", "}", ",")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (r"The angle \( \alpha_1 \), the set \( \{2, 3\} \)", "The angle α₁, the set {2, 3}"),
        (r"$2\pi r$, $\alpha + \beta$, $H_2O$, $90^\circ$, $f'(x)$", "2πr, α + β, H₂O, 90°, f′(x)"),
        (r"\(x_{i+1}^2 = y^{n-1}\)", "xᵢ₊₁² = yⁿ⁻¹"),
        (r"$e^{-x/2}$ and $a_{q}$", "e^(−x/2) and a_q"),
        (r"$\frac{1}{2}$, $\frac12 x$, $\frac{dy}{dx}$, $\frac{n(n+1)}{2}$", "½, ½ x, dy/dx, n(n+1)/2"),
        (r"$\frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$", "(−b ± √(b² − 4ac))/(2a)"),
        (r"$\sqrt{x}$, $\sqrt[3]{27}$, $\sqrt{a+b}$", "√x, ∛27, √(a+b)"),
        (r"$\sum_{i=1}^{n} i$, $\lim_{x \to 0} \frac{\sin x}{x}$", "∑ᵢ₌₁ⁿ i, lim_(x → 0) (sin x)/x"),
        (r"$\mathbb{R}^n \to \mathbb{C}$, $\text{if } x \neq \varnothing$", "ℝⁿ → ℂ, if x ≠ ∅"),
        (r"$\left( \frac{a}{b} \right)$, $O(n \log n)$", "( a/b ), O(n log n)"),
        (r"$$A = \begin{pmatrix} 1 & 2 \\ 30 & 4 \end{pmatrix} x$$", "A = ⎛1   2⎞ x\n    ⎝30  4⎠"),
        (r"in a line $\begin{bmatrix} a & b \\ c & d \end{bmatrix}$", "in a line [a b; c d]"),
        (r"\[|x| = \begin{cases} x & x \ge 0 \\ -x & \text{else} \end{cases}\]", "|x| = ⎧x   x ≥ 0\n      ⎩−x  else"),
        ("\\[\n\\begin{aligned}\na &= b \\\\\n  &= c\n\\end{aligned}\n\\]", "a = b\n= c"),
        # What is not known stays as it is, as a whole.
        (r"$\foo{x} + \alpha$", r"$\foo{x} + \alpha$"),
        (r"$x^{$, $\frac{1}$, $\left( x$", r"$x^{$, $\frac{1}$, ( x"),
        (r"$\begin{tikzpicture} \alpha \end{tikzpicture}$", r"$\begin{tikzpicture} \alpha \end{tikzpicture}$"),
        (r"from $5 to $6 and \alpha outside, 5 \%", r"from $5 to $6 and \alpha outside, 5 \%"),
        ("$" + "{" * 42 + "x" + "}" * 42 + "$", "$" + "{" * 42 + "x" + "}" * 42 + "$"),
    ],
)
def test_formulas_are_unicode(source: str, shown: str) -> None:
    assert "\n".join(line for row in show(Document(source), 90) for line in row) == shown


def test_a_short_formula_is_not_broken() -> None:
    (lines,) = show(Document(r"It takes \(O(n \log n)\) on average"), 16)
    assert [line.rstrip() for line in lines] == ["It takes", "O(n log n) on", "average"]
    (table,) = show(Document("| time | what |\n|---|---|\n| $O(n \\log n)$ | it is what most lists take |\n"), 30)
    assert "O(n log n) │ it is what" in "\n".join(table)


@settings(max_examples=EXAMPLES)
@given(
    st.lists(st.sampled_from([*"abx12+-=^_{}()&[] ", "\\\\", *(f"\\{name}" for name in MATHS)]), max_size=30).map(
        "".join
    )
)
def test_any_formula_is_shown_or_refused(body: str) -> None:
    shown = formula_text(f"$${body}$$")
    assert shown is None or "\\" not in shown
