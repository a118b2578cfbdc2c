"""Settings from the environment and from a file: which takes precedence, and the error for a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazyckpt import settings
from lazyckpt.errors import ConfigError


@pytest.fixture(autouse=True)
def only_what_the_test_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.DEFAULTS:
        monkeypatch.delenv(settings.PREFIX + name.upper(), raising=False)
    monkeypatch.delenv(settings.FILE_VARIABLE, raising=False)


def test_the_environment_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    file, other = tmp_path / "lazyckpt.yaml", tmp_path / "other.yaml"
    file.write_text("max_in_flight: 4\naudit: true\n")
    other.write_text("max_in_flight: 7\n")
    assert settings.gather(file, {}) == {"max_in_flight": 4, "audit": True}
    monkeypatch.setenv("LAZYCKPT_MAX_IN_FLIGHT", "5")
    monkeypatch.setenv("LAZYCKPT_AUDIT", "off")
    assert settings.gather(file, {}) == {"max_in_flight": 5, "audit": False}
    assert settings.gather(file, {"max_in_flight": 6}) == {"max_in_flight": 6, "audit": False}
    monkeypatch.delenv("LAZYCKPT_MAX_IN_FLIGHT")
    monkeypatch.setenv("LAZYCKPT_CONFIG_FILE", str(other))
    assert settings.gather(file, {}) == {"max_in_flight": 7, "audit": False}


@pytest.mark.parametrize(("text", "writers"), [("all", "all"), ("2", 2), (" node ", "node")])
def test_writers_are_a_word_or_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, writers: str | int
) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "lazyckpt.yaml"
    file.write_text(f"writers: {text}\n")
    assert settings.gather(file, {}) == {"writers": writers}
    monkeypatch.setenv("LAZYCKPT_WRITERS", text)
    assert settings.gather(tmp_path / "none.yaml", {}) == {"writers": writers}
    assert settings.gather(file, {"writers": "rank0"}) == {"writers": "rank0"}


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("LAZYCKPT_MAX_IN_FLIGHT", "two", "max_in_flight='two'.*set in LAZYCKPT_MAX_IN_FLIGHT"),
        ("LAZYCKPT_AUDIT", "maybe", "LAZYCKPT_AUDIT: audit='maybe': expected true or false"),
        ("LAZYCKPT_WITNESS", "copy", "witness='copy' was removed: .*set in LAZYCKPT_WITNESS"),
        ("LAZYCKPT_WRITERS", "some", "writers='some'.*set in LAZYCKPT_WRITERS"),
        ("LAZYCKPT_WRITERS", "0", "writers=0.*set in LAZYCKPT_WRITERS"),
        ("LAZYCKPT_MAX_INFLIGHT", "2", "did you mean LAZYCKPT_MAX_IN_FLIGHT"),
        ("LAZYCKPT_CONFIG_FILE", "/nowhere.yaml", "LAZYCKPT_CONFIG_FILE=/nowhere.yaml: there is no such file"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=problem):
        settings.gather(Path("/nowhere/lazyckpt.yaml"), {})


def test_a_misspelt_setting_is_told_with_what_was_meant(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "lazyckpt.yaml"
    file.write_text("max_inflight: 4\n")
    with pytest.raises(
        ConfigError, match=r"lazyckpt\.yaml: 'max_inflight' is not a setting; did you mean 'max_in_flight'"
    ):
        settings.gather(file, {})
    with pytest.raises(
        ConfigError, match="the code: 'colour' is not a setting; there is: enabled, writers, host_buffer_bytes"
    ):
        settings.gather(tmp_path / "none.yaml", {"colour": "red"})
    with pytest.raises(ConfigError, match="the JSON: keep_last: use total_limit"):
        settings.gather(None, {"keep_last": 3}, "use total_limit", "the JSON")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a\n", "one 'setting: value' per line"),
        ("a: [1\n", "not YAML"),
        ("max_in_flight: many\n", "max_in_flight='many'"),
        ("audit: 3\n", "expected true or false"),
        ("writers: [0, 1]\n", "writers=[0, 1]"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(tmp_path: Path, text: str, problem: str) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "lazyckpt.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        settings.gather(file, {})
    (line,) = str(raised.value).splitlines()
    assert problem in line and str(file) in line


def test_variables_of_others_are_none_of_our_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYCKPT_TORTURE", "1")
    assert settings.gather(Path("/nowhere/lazyckpt.yaml"), {}) == {}
