"""Shapes that a model cannot have are refused, each cause once, all at once."""

from __future__ import annotations

import pytest

from disagg.catalog.model import Model
from disagg.cost.checks import shape_problems
from disagg.cost.plan import Shape
from tests.support.cost_examples import DEEPSEEK_V3, HYBRID, LLAMA_8B, MIXTRAL


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (LLAMA_8B, Shape()),
        (LLAMA_8B, Shape(8, 4)),
        (LLAMA_8B, Shape(16)),
        (DEEPSEEK_V3, Shape(8, attention_data=8, expert=8)),
        (DEEPSEEK_V3, Shape(1, expert=32)),
        (DEEPSEEK_V3, Shape(8, context=8)),
        (MIXTRAL, Shape(8, expert=4)),
        (HYBRID, Shape(4)),
    ],
)
def test_possible_shapes(model: Model, shape: Shape) -> None:
    """Heads may be divided or repeated, experts spread wider than attention."""
    assert shape_problems(model, shape) == []


@pytest.mark.parametrize(
    ("model", "shape", "text"),
    [
        (LLAMA_8B, Shape(3), "tensor: 3 ranks do not divide the 32 heads"),
        (LLAMA_8B, Shape(12), "tensor: 12 ranks do not divide the 32 heads"),
        (LLAMA_8B, Shape(1, 33), "pipeline: 33 stages are more than the 32 layers"),
        (LLAMA_8B, Shape(1, expert=4), "expert: llama-3.1-8b has no experts"),
        (LLAMA_8B, Shape(4, attention_data=3), "attention data: 3 does not divide the 4"),
        (LLAMA_8B, Shape(4, context=3), "context: 3 does not divide the 4"),
        (LLAMA_8B, Shape(0), "tensor: must be 1 at least, not 0"),
        (MIXTRAL, Shape(16, expert=16), "expert: 16 ranks do not divide the 8 experts"),
        (MIXTRAL, Shape(8, expert=3), "expert: 3 does not divide the 8 devices"),
        (DEEPSEEK_V3, Shape(8, expert=12), "expert: 12 is no multiple of the 8 ranks"),
        (HYBRID, Shape(16), "tensor: 16 ranks do not divide the 4 key and 8 value heads"),
    ],
)
def test_impossible_shapes(model: Model, shape: Shape, text: str) -> None:
    """The field and the numbers that do not fit are named."""
    assert any(text in str(problem) for problem in shape_problems(model, shape))


def test_every_cause_is_told_once_and_belongs_to_its_pool() -> None:
    """5 ranks divide neither heads nor KV heads nor the inner width; each is said once, with the pool's name."""
    problems = shape_problems(LLAMA_8B, Shape(5), "decode ")
    assert [problem.where for problem in problems] == ["decode tensor"] * 3
    assert len({problem.message for problem in problems}) == 3
    both = shape_problems(LLAMA_8B, Shape(4, 40, attention_data=3))
    assert [problem.where for problem in both] == ["attention data", "pipeline"]
