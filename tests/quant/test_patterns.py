"""Regular expressions of checkpoints: those that writers use pass, those that never end do not."""

from __future__ import annotations

import re

import pytest

from pelton.quant.patterns import LIMIT, most_ways

GOOD = [
    "",
    "lm_head",
    r".*self_attn.*",
    r".*\.layers\.\d+\.mlp\.(gate|up|down)_proj$",
    r"model\.layers\.(0|1|2|10|11|12|79)\..*(q|k|v|o)_proj.*",
    r"^(?!.*lm_head)(?!.*gate).*$",
    r".*\.block_sparse_moe\.gate",
    r"(?:model\.)?layers\.[0-9]{1,2}\.(?:self_attn|mlp)\..*",
    r".*vision.*|.*multi_modal_projector.*|.*audio.*|lm_head",
    r"(\w)(\d*)\1?",
    r"(?>a+)b*+",
    r"(\.[a-z])*x",
    r"(ab|cd)+",
    r".+\.layers\.\d+\.mlp\.experts\.\d+\..+",
    r".*a.*b.*c.*d",
]
NEVER_ENDING = [
    r"(([a-z._0-9])+)+$!",
    r"(a+)+$",
    r"(.*)*x",
    r"(.*a){20}x",
    r"(a|a)*$",
    r"(a|ab|b)*$!",
    r"(a?){40}a{40}",
    r"(.?.?.?)*$!",
    r"(?:(?:[a-z]+)_?)+\d",
    r"(\w+\s?)*!",
    r"(?=(.+)+$)",
    r"(?i)(ab|AB)*$!",
    r"(x)?(?(1)(a+)+|(b+)+)$",
    ".*" * 9 + "$!",
    "a?" * 60 + "a" * 60,
    "(|)" * 60 + "!",
]


@pytest.mark.parametrize("pattern", GOOD)
def test_usual_patterns_pass(pattern: str) -> None:
    re.compile(pattern)
    assert most_ways(pattern) <= LIMIT


@pytest.mark.parametrize("pattern", NEVER_ENDING)
def test_patterns_that_never_end(pattern: str) -> None:
    re.compile(pattern)
    assert most_ways(pattern) > LIMIT
