"""Rules: what they match, what they must look like, and what is wrong with those that take no effect."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba_offload.config.policy import LayerId, Placement, Policy, Rule, with_depths
from tba_offload.errors import ConfigError

KEEP, OFFLOAD, RECOMPUTE, AUTO = Placement.KEEP, Placement.OFFLOAD, Placement.RECOMPUTE, Placement.AUTO


def decoder(count: int, *, first: int = 0) -> list[LayerId]:
    return [LayerId(number, f"decoder.layers.{number}") for number in range(first, first + count)]


def encoder_and_decoder(count: int) -> list[LayerId]:
    return [
        LayerId(number, f"{stack}.layers.{number}", stack)
        for stack in ("encoder", "decoder")
        for number in range(count)
    ]


def policy(*rules: Rule) -> Policy:
    return Policy(OFFLOAD, rules, "policy.yaml")


def matched(match: str, layers: list[LayerId]) -> list[int]:
    rule = Rule(match, KEEP)
    return [index for index, layer in enumerate(with_depths(layers, layers)) if rule.matches(layer)]


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ("3", [3]),
        ("0-3", [0, 1, 2, 3]),
        ("3-3", [3]),
        ("0,2,8-11", [0, 2, 8, 9, 10, 11]),
        (" 0 , 2 ", [0, 2]),
        ("012", [12]),
        ("20-99", [20, 21, 22, 23]),
        ("decoder.layers.3", [3]),
        ("decoder.layers.2?", [20, 21, 22, 23]),
        ("*.layers.1*", [1, *range(10, 20)]),
        ("decoder.layers.[0,2]", [0, 2]),
        ("decoder.layers.[!0-8]", [9]),
        ("*", list(range(24))),
        ("last 1", [23]),
        (" last  3 ", [21, 22, 23]),
        ("0,last 2,last 1", [0, 22, 23]),
        ("last 99", list(range(24))),
        ("last", []),
        ("last.3", []),
        ("layers.3", []),
        ("Decoder.layers.3", []),
    ],
)
def test_match(match: str, expected: list[int]) -> None:
    assert matched(match, decoder(24)) == expected


def test_numbers_within_a_stack() -> None:
    assert matched("encoder:0-1,3", encoder_and_decoder(4)) == [0, 1, 3]
    assert matched("decoder:2", encoder_and_decoder(4)) == [6]
    assert matched("encoder:0,last 2", encoder_and_decoder(4)) == [0, 2, 3]


def test_a_module_named_by_a_number_is_matched_by_number_or_bracket() -> None:
    blocks = [LayerId(number, str(number + 1)) for number in range(3)]
    assert matched("2", blocks) == [2]
    assert matched("[2]", blocks) == [1]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), min_size=1, max_size=5))
def test_ranges_match_the_numbers_they_span(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in ranges)
    expected = {number for first, more in ranges for number in range(first, first + more + 1)}
    assert set(matched(text, decoder(60))) == expected


def test_a_huge_range_costs_nothing() -> None:
    assert matched("1-999999999999", decoder(3)) == [1, 2]


@pytest.mark.parametrize(
    ("match", "complaint"),
    [
        ("", "a layer number is missing"),
        (" ", "a layer number is missing"),
        ("-", "'-' is not a layer number"),
        ("-1", "'-1' is not a layer number or a range, the layers at the end are 'last 1'"),
        ("last 0", "'last 0' names no layer"),
        ("last -1", "'last -1' is not a layer number"),
        ("last 1-2", "'last 1-2' is not a layer number"),
        ("last two", "unexpected ' '"),
        ("1--2", "'1--2' is not a layer number"),
        ("0,,2", "a layer number is missing"),
        ("0,", "a layer number is missing"),
        ("3-1", "'3-1' runs backwards, write '1-3'"),
        ("a:b:c", "'b:c' is not a layer number"),
        ("encoder:", "a layer number is missing"),
        ("encoder:*", "'*' is not a layer number"),
        (":3", "the stack's name is missing"),
        ("0-3,decoder.layers.5", "unexpected ','"),
        ("decoder layers", "unexpected ' '"),
        ("decoder.layers.[2", "unexpected '['"),
        ("decoder.layers.2]", "unexpected ']'"),
        ("9" * 5000, "4300"),
    ],
)
def test_a_malformed_match_is_refused_when_the_rule_is_built(match: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Rule(match, KEEP, line=7)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("line 7: ")


def test_a_malformed_match_names_the_legal_forms() -> None:
    with pytest.raises(ConfigError, match=r"'0-3', '0,2,8-11'.*'encoder:0-3'.*'decoder\.layers\.2\?'"):
        Rule("-", KEEP)


def test_a_match_must_be_text() -> None:
    with pytest.raises(ConfigError, match="3 is not text"):
        Rule(3, KEEP)  # type: ignore[arg-type]


def test_the_word_of_a_placement_will_do() -> None:
    assert Rule("0", "recompute").placement is RECOMPUTE  # type: ignore[arg-type]
    legal = (
        "keep, offload, recompute, recompute-offload, recompute-except-attention, offload-remat, auto, "
        "offload-N%"
    )
    with pytest.raises(ConfigError, match=f"one of {legal}, not 'drop'"):
        Rule("0", "drop")  # type: ignore[arg-type]


def test_which_placements_run_a_layer_twice() -> None:
    """The ranks that share a layer must agree on these."""
    assert {placement.value for placement in Placement if placement.recomputes} == {
        "recompute",
        "recompute-offload",
        "recompute-except-attention",
    }


def test_lines_do_not_count_when_rules_are_compared() -> None:
    assert Rule("0", KEEP, line=1) == Rule("0", KEEP, line=2) != Rule("0", AUTO, line=1)


def test_the_first_match_wins_and_the_default_gets_the_rest() -> None:
    rules = policy(Rule("1", KEEP), Rule("0-2", RECOMPUTE), Rule("*.4", AUTO))
    assert rules.resolve(decoder(5)) == {0: RECOMPUTE, 1: KEEP, 2: RECOMPUTE, 3: OFFLOAD, 4: AUTO}


def test_without_rules_every_layer_has_the_default() -> None:
    assert Policy(AUTO).resolve(decoder(2)) == {0: AUTO, 1: AUTO}
    assert Policy(AUTO).resolve([]) == {}


def test_the_result_is_by_index_and_rules_are_judged_over_all_ranks() -> None:
    rules = policy(Rule("0-1", KEEP), Rule("6", RECOMPUTE))
    stage = decoder(2, first=6)
    assert rules.resolve(stage, everywhere=decoder(8)) == {0: RECOMPUTE, 1: OFFLOAD}
    with pytest.raises(ConfigError, match="'0-1' matches no layer"):
        rules.resolve(stage)


def test_the_last_layers_are_those_of_all_ranks() -> None:
    rules = policy(Rule("last 2", KEEP))
    assert rules.resolve(decoder(4), everywhere=decoder(8)) == dict.fromkeys(range(4), OFFLOAD)
    assert rules.resolve(decoder(4, first=4), decoder(8)) == {0: OFFLOAD, 1: OFFLOAD, 2: KEEP, 3: KEEP}


def test_the_last_layers_of_a_stack_of_unknown_depth() -> None:
    with pytest.raises(ConfigError, match="'last 2' counts from the end of a stack whose depth is not known"):
        policy(Rule("0,last 2", KEEP)).explain(LayerId(7, "layers.7"))


def test_all_rules_that_take_no_effect_are_told_at_once() -> None:
    rules = policy(Rule("0-3", KEEP, 3), Rule("9", KEEP, 4), Rule("1", AUTO, 5), Rule("x", KEEP, 6))
    with pytest.raises(ConfigError) as caught:
        rules.resolve(decoder(4))
    assert [problem.line for problem in caught.value.problems] == [4, 5, 6]
    assert [str(problem) for problem in rules.problems(decoder(4))] == str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("match", "missing"),
    [
        ("0-30", "24-30"),
        ("20-99,100", "24-99,100"),
        ("0,24,26", "24,26"),
        ("1-999999999999", "24-999999999999"),
        ("last 25", "last 25"),
        ("0-23,last 24", None),
        ("*", None),
    ],
)
def test_numbers_of_layers_that_there_are_not(match: str, missing: str | None) -> None:
    said = (
        f"policy.yaml:3: the rule '{match}' (line 3) names layers that there are not: {missing}; the layers "
        "are 0-23 (decoder.layers.0 ... decoder.layers.23)"
    )
    doubts = policy(Rule(match, KEEP, 3)).doubts(decoder(24))
    assert doubts == ([] if missing is None else [said])


def test_numbers_that_are_missing_in_a_stack_or_between_ranks() -> None:
    (doubt,) = policy(Rule("decoder:1-2", KEEP)).doubts(encoder_and_decoder(2))
    assert "there are not: 2; " in doubt
    (doubt,) = policy(Rule("0-6", KEEP)).doubts(decoder(2) + decoder(2, first=4))
    assert "there are not: 2-3,6; " in doubt
    assert policy(Rule("9", KEEP)).doubts(decoder(2)) == []  # an error, not a doubt


def test_without_a_model_rules_by_name_are_not_judged() -> None:
    layers = [LayerId(number, "") for number in range(4)]
    by_name = Rule("decoder.layers.?", AUTO, 3)
    rules = policy(by_name, Rule("*", KEEP), Rule("9", RECOMPUTE, 5))
    assert rules.unjudged(layers) == [by_name]
    assert rules.placements(layers) == {AUTO, KEEP}
    (problem,) = rules.problems(layers)
    assert str(problem).endswith("'9' (line 5) matches no layer; the layers are 0-3")


def test_layers_that_several_ranks_report_count_once() -> None:
    assert policy(Rule("0", KEEP)).resolve(decoder(1), everywhere=decoder(2) * 4) == {0: KEEP}


def test_a_rule_that_matches_no_layer() -> None:
    with pytest.raises(ConfigError) as caught:
        policy(Rule("0", KEEP, 3), Rule("24-31", KEEP, 5)).resolve(decoder(24))
    assert str(caught.value) == (
        "policy.yaml:5: the rule '24-31' (line 5) matches no layer; "
        "the layers are 0-23 (decoder.layers.0 ... decoder.layers.23)"
    )
    assert (caught.value.file, caught.value.line) == ("policy.yaml", 5)


def test_the_layers_are_described_with_gaps_and_stacks() -> None:
    with pytest.raises(ConfigError, match=r"the layers are 0-1,5 \(decoder.layers.0 ... decoder.layers.5\)$"):
        policy(Rule("x", KEEP)).resolve(decoder(2) + decoder(1, first=5))
    with pytest.raises(
        ConfigError, match=r"are encoder:0 \(encoder.layers.0\), decoder:0 \(decoder.layers.0\)$"
    ):
        policy(Rule("x", KEEP)).resolve(encoder_and_decoder(1))
    with pytest.raises(ConfigError, match=r"the model has no layers$"):
        policy(Rule("0", KEEP)).resolve([])


def test_a_stack_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match="'encoder:0' matches no layer; the layers are 0-3"):
        policy(Rule("encoder:0", KEEP)).resolve(decoder(4))


def test_a_rule_that_earlier_rules_leave_nothing() -> None:
    rules = policy(Rule("0-3", KEEP, 3), Rule("9", KEEP, 5), Rule("4-7", AUTO, 7), Rule("2-5", RECOMPUTE, 9))
    with pytest.raises(ConfigError) as caught:
        rules.resolve(decoder(12))
    assert str(caught.value).startswith("policy.yaml:9: the rule '2-5' (line 9) never takes effect")
    assert "matched by '0-3' (line 3), '4-7' (line 7);" in str(caught.value)


def test_a_rule_that_earlier_rules_leave_something() -> None:
    placements = policy(Rule("0-3", KEEP), Rule("2-4", RECOMPUTE)).resolve(decoder(5))
    assert placements[4] is RECOMPUTE


def test_bare_numbers_where_several_stacks_count_their_own() -> None:
    with pytest.raises(
        ConfigError, match=r"policy.yaml:4: .* which stack it counts in: 'encoder:0' or 'decoder:0'"
    ):
        policy(Rule("0", KEEP, 4)).resolve(encoder_and_decoder(2))
    placements = policy(Rule("decoder:0", KEEP), Rule("encoder.*", RECOMPUTE)).resolve(encoder_and_decoder(2))
    assert placements == {0: RECOMPUTE, 1: RECOMPUTE, 2: KEEP, 3: OFFLOAD}
