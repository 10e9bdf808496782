"""What can be searched, and how it is written."""

import re

import pytest

from rl_tools.tune.space import Choice, Interval, Parameter, Space, parse_domain

SPACE = Space(
    (
        Parameter("objective", Choice(("gspo", "dapo"))),
        Parameter("rate", Interval(1e-5, 1e-3, log=True)),
        Parameter("clip", Interval(0.1, 0.3), ("objective", ("gspo",))),
        Parameter("steps", Interval(1, 4, whole=True)),
    )
)
WRITTEN = {
    "log:1e-5..1e-3": Interval(1e-5, 1e-3, log=True),
    "int:1..8": Interval(1, 8, whole=True),
    "log:int:2..64": Interval(2, 64, log=True, whole=True),
    "int:log:2..64": Interval(2, 64, log=True, whole=True),
    "0.5..1.5": Interval(0.5, 1.5),
    "-1..1": Interval(-1, 1),
    "4,8,16": Choice(("4", "8", "16")),
    "gspo,dapo": Choice(("gspo", "dapo")),
    "1-2,3-4": Choice(("1-2", "3-4")),
    "-1,1": Choice(("-1", "1")),
}
REFUSED = {
    "1..1": "a range goes from a number to a larger one, got 1..1",
    "2..1": "to a larger one",
    "0..inf": "to a larger one, got 0..inf",
    "log:0..1": "begins above 0",
    "int:1..2.5": "ends with integers",
    "a..b": "its ends are numbers",
    "log:3": "is no range",
    "1..": "is no range",
    "4": "two different values or more, got '4'",
    "4,4": "two different values",
    "4,,8": "two different values",
}


@pytest.mark.parametrize(("text", "domain"), WRITTEN.items())
def test_domains(text, domain):
    assert parse_domain(text) == domain


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_what_is_no_domain(text, message):
    with pytest.raises(ValueError, match=message):
        parse_domain(text)


OTHERWISE = (
    "{}...{}",
    "log:{}...{}",
    "{}....{}",
    "uniform({},{})",
    "LogUniform({}, {})",
    "[{},{}]",
    "({}, {})",
    "{}-{}",
)
OTHERWISE += ("{}:{}", "{} to {}", "log:{},{}", "log:{}-{}", "int:{}, {}")


@pytest.mark.parametrize("form", OTHERWISE)
@pytest.mark.parametrize("ends", [("1e-5", "1e-3"), ("0.5", "1.5"), ("1", "8"), ("-1", "1"), ("2", "1E1")])
def test_a_range_as_other_programs_write_it_is_refused_with_the_range_that_it_is(form, ends):
    low, high = ends
    log = form.lower().startswith("log") and float(low) > 0
    with pytest.raises(ValueError, match=r"is no range: ") as refused:
        parse_domain(form.format(*ends))
    ours = re.search(r"is no range: (\S+) is one, and (\S+) a choice", str(refused.value))
    assert ours is not None and parse_domain(ours[1]) == Interval(float(low), float(high), log=log)
    assert parse_domain(ours[2]) == Choice(ends)


@pytest.mark.parametrize("domain", WRITTEN.values(), ids=list(WRITTEN))
def test_points_have_the_ends_of_the_domain(domain):
    ends = (domain.low, domain.high) if isinstance(domain, Interval) else (domain.values[0], domain.values[-1])
    points = domain.points(5)
    assert (points[0], points[-1]) == ends and len(set(points)) == len(points)


def test_values_that_do_not_apply_are_left_out():
    values = {"objective": "gspo", "rate": 1e-4, "clip": 0.2, "steps": 2}
    assert SPACE.active(values) == values
    assert SPACE.active(values | {"objective": "dapo"}) == {"objective": "dapo", "rate": 1e-4, "steps": 2}


def test_conditions_stand_on_a_choice_before():
    rate = Parameter("rate", Interval(0, 1))
    for parameters in ((), (rate, rate), (rate, Parameter("x", Interval(0, 1), ("rate", ("a",))))):
        with pytest.raises(ValueError, match=r"nothing to search|twice|which is no choice before it"):
            Space(parameters)
