"""The error tree: each class has a status and an exit code, and the drawing at its top is the tree."""

import re

from disagg import errors
from disagg.errors import ConfigError, DisaggError, Problem


def _all_classes(root: type[DisaggError]) -> list[type[DisaggError]]:
    below = [c for sub in root.__subclasses__() if sub.__module__ == errors.__name__ for c in _all_classes(sub)]
    return [root, *below]


def test_the_drawing_lists_every_error_with_its_status_and_exit_code() -> None:
    """The picture at the top of the module cannot drift from the classes."""
    assert errors.__doc__ is not None
    drawn = {m[1]: (int(m[2]), int(m[3])) for m in re.finditer(r"(\w+Error) +(\d{3}) +(\d)", errors.__doc__)}
    concrete = {c.__name__: (c.status, c.exit_code) for c in _all_classes(DisaggError) if c.__name__ in drawn}
    assert drawn == concrete
    undrawn = {c.__name__ for c in _all_classes(DisaggError)} - set(re.findall(r"\w+Error", errors.__doc__))
    assert undrawn == set()


def test_client_errors_are_never_retried_and_upstream_errors_may_be() -> None:
    """A retry of a 4xx would repeat the same mistake on another engine."""
    for cls in _all_classes(errors.ClientError):
        assert not cls.retry_safe
        assert 400 <= cls.status < 600
    for cls in _all_classes(errors.UpstreamError):
        assert cls.retry_safe
        assert cls.status >= 500


def test_a_config_error_shows_every_problem_with_its_place() -> None:
    """Users mend a file once, not once per mistake."""
    error = ConfigError([Problem("--port", "0 is not a port"), Problem("t.yaml:3: decode.ports", "needs two")])
    assert "2 problems" in str(error)
    assert "--port: 0 is not a port" in str(error)
    assert "t.yaml:3: decode.ports: needs two" in str(error)


def test_a_hint_follows_the_message() -> None:
    """What to do stands behind what is wrong."""
    assert str(DisaggError("Broken.", hint="Mend it.")) == "Broken. Mend it."
