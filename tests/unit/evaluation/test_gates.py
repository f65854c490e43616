import pytest

from mfs_trt.errors import ConfigError
from mfs_trt.evaluation.gates import Gate, check_gates, parse_gate, with_changes

METRICS = {"loss.small": 3.0, "acceptance.small.large": 0.6}


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("loss.small<=3.2", Gate("loss.small", "<=", 3.2)),
        (" acceptance.small.large >= .5 ", Gate("acceptance.small.large", ">=", 0.5)),
        ("change.loss.large<=-1e-2", Gate("change.loss.large", "<=", -0.01)),
    ],
)
def test_gate_is_read_from_text(text, gate):
    assert parse_gate(text) == gate


@pytest.mark.parametrize("text", ["loss.small", "loss.small<3", "<=3", "loss.small<=much", ""])
def test_malformed_gate_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"loss\.small<=3\.2"):
        parse_gate(text)


def test_gates_pass_at_their_threshold_and_fail_beyond():
    texts = ["loss.small<=3.0", "loss.small<=2.99", "loss.small>=3.0", "loss.small>=3.01"]
    results = check_gates([parse_gate(text) for text in texts], METRICS)
    assert [result.is_passed for result in results] == [True, False, True, False]
    assert {result.value for result in results} == {3.0}


def test_figure_that_is_not_a_number_never_passes():
    results = check_gates([parse_gate("x<=1"), parse_gate("x>=1")], {"x": float("nan")})
    assert not any(result.is_passed for result in results)


def test_unknown_figure_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="loss.small, acceptance.small.large, got 'loss.tiny'"):
        check_gates([parse_gate("loss.tiny<=1")], METRICS)


def test_changes_are_relative_to_the_baseline_and_only_of_shared_figures():
    found = with_changes({"a": 3.3, "b": 1.0}, {"a": 3.0, "c": 1.0})
    assert found == {"a": 3.3, "b": 1.0, "change.a": pytest.approx(0.1)}
