"""Names of tensors on the way in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lazyckpt
from lazyckpt.providers.rename import checked, renamed, suggestion

NAMES = ["embed.weight", "layers.0.weight", "layers.0.bias", "head.weight"]


@pytest.mark.parametrize(
    "rename, name, new",
    [
        ({"module.": ""}, "module.head.weight", "head.weight"),
        ({"module.": ""}, "head.module.weight", "head.module.weight"),
        ({"": "model."}, "head.weight", "model.head.weight"),
        ({"a.": "x.", "a.b.": "y."}, "a.b.c", "y.c"),
        ({"head.": None}, "head.weight", None),
        (lambda name: name.upper(), "head", "HEAD"),
        (lambda name: None, "head", None),
    ],
)
def test_a_name_gets_its_longest_prefix_replaced(rename: Any, name: str, new: str | None) -> None:
    assert renamed([name], rename) == ({} if new is None else {name: new})


def test_two_names_must_not_become_one() -> None:
    with pytest.raises(lazyckpt.ConfigError, match=r"both 'a.w' and 'b.w' become 'w'"):
        renamed(["a.w", "b.w"], {"a.": "", "b.": ""})


@pytest.mark.parametrize("rename", ["module.", 3, {"a": 1}, {1: "a"}])
def test_what_is_no_renaming_is_refused(rename: Any) -> None:
    with pytest.raises(lazyckpt.ConfigError, match="rename"):
        checked(rename)


def test_a_function_must_return_a_name() -> None:
    with pytest.raises(lazyckpt.ConfigError, match="'a' becomes 7"):
        renamed(["a"], lambda name: 7)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "encoder.base."])
def test_one_prefix_is_recognized_on_either_side(prefix: str) -> None:
    longer = [prefix + name for name in NAMES]
    for saved, live in ((longer, NAMES), (NAMES, longer)):
        rename = suggestion(saved, live) or {}
        assert set(renamed(saved, rename).values()) == set(live)


def test_wrappers_within_names_are_recognized() -> None:
    saved = [name.replace("layers.0.", "layers.0._orig_mod.") for name in NAMES]
    rename = suggestion(saved, NAMES) or {}
    assert set(renamed(saved, rename).values()) == set(NAMES)
    assert str(rename) == 'lambda name: name.replace("_orig_mod.", "")'


@pytest.mark.parametrize("saved", [NAMES, NAMES[:-1], [*NAMES, "more"], ["other.embed.weight", *NAMES[1:]], []])
def test_other_differences_are_no_prefix(saved: list[str]) -> None:
    assert suggestion(saved, NAMES) is None


@given(st.sets(st.from_regex(r"[ab](\.[ab]){0,3}", fullmatch=True), min_size=1), st.sampled_from(["a.", "b.a.", "x."]))
def test_whatever_is_suggested_makes_the_names_equal(names: set[str], prefix: str) -> None:
    for saved, live in (({prefix + name for name in names}, names), (names, {prefix + name for name in names})):
        rename = suggestion(saved, live)
        assert rename is not None or saved == live
        assert set(renamed(saved, rename or {}).values()) == live
