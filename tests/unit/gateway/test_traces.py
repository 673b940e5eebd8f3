"""What is logged of an exception names places and kinds, and quotes nothing."""

from __future__ import annotations

from kvloop.gateway.traces import shape_of


def raised(secret: str) -> BaseException:
    try:
        try:
            int(secret)
        except ValueError as error:
            raise KeyError(secret) from error
    except KeyError as error:
        return error


def test_kinds_and_places_of_all_causes_are_told_and_no_message() -> None:
    shape = shape_of(raised("a secret prompt"))
    assert "KeyError" in shape
    assert "ValueError" in shape
    assert "test_traces.py" in shape
    assert "a secret prompt" not in shape


def test_groups_are_opened() -> None:
    group = ExceptionGroup("all that was wrong", [raised("an inner prompt")])
    shape = shape_of(group)
    assert "ValueError" in shape
    assert "inner prompt" not in shape
    assert "all that was wrong" not in shape


def test_an_exception_that_causes_itself_ends() -> None:
    error = ValueError("x")
    error.__cause__ = error
    assert shape_of(error).count("ValueError") == 1


def test_nothing_is_no_exception() -> None:
    assert shape_of(None) == "no exception"
