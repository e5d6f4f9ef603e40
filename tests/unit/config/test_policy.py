"""Rules: what they match, what they must look like, and what is wrong with those that take no effect."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tba_offload as tba
from tba_offload import ConfigError, LayerId, Placement, Policy, Rule
from tba_offload.config.policy import with_depths
from tba_offload.placements import Staying, staying

KEEP, OFFLOAD, RECOMPUTE, AUTO = Placement.KEEP, Placement.OFFLOAD, Placement.RECOMPUTE, Placement.AUTO


def decoder(count: int, *, first: int = 0) -> list[LayerId]:
    return [LayerId(number, f"decoder.layers.{number}") for number in range(first, first + count)]


def two_stacks(count: int) -> list[LayerId]:
    stacks = ("encoder", "decoder")
    return [LayerId(number, f"{stack}.layers.{number}", stack) for stack in stacks for number in range(count)]


def policy(*rules: Rule) -> Policy:
    return Policy(OFFLOAD, rules, "policy.yaml")


def matched(match: str, layers: list[LayerId]) -> list[int]:
    rule = Rule(match, KEEP)
    return [index for index, layer in enumerate(with_depths(layers, layers)) if rule.matches(layer)]


MATCHES = [
    *(("3", [3]), (" 0 , 2 ", [0, 2]), ("012", [12]), ("20-99", [20, 21, 22, 23]), ("*", [*range(24)])),
    *(("last", []), ("last 99", [*range(24)]), ("0,last 2,last 1", [0, 22, 23]), ("0-1,8", [0, 1, 8])),
    *(("decoder.layers.2?", [20, 21, 22, 23]), ("decoder.layers.[0,2]", [0, 2]), ("Decoder.layers.3", [])),
]


@pytest.mark.parametrize(("match", "expected"), MATCHES)
def test_matches(match: str, expected: list[int]) -> None:
    assert matched(match, decoder(24)) == expected


def test_numbers_within_a_stack() -> None:
    assert matched("encoder:0-1,3", two_stacks(4)) == [0, 1, 3]
    assert matched("decoder:0,last 2", two_stacks(4)) == [4, 6, 7]


@pytest.mark.parametrize(
    ("match", "complaint"),
    [
        *((match, "is not a layer number or a range") for match in ("", "-", "-1", "1--2", "0,,2", "0,")),
        *(
            (match, "is not a layer number or a range")
            for match in ("last 0", "last -1", "last 1-2", "9" * 5000)
        ),
        *((match, "is not a layer number or a range") for match in ("encoder:", "encoder:*")),
        ("3-1", "'3-1' runs backwards; write '1-3'"),
    ],
)
def test_a_malformed_match_is_refused_when_the_rule_is_built(match: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Rule(match, KEEP)
    assert str(caught.value).startswith("match: malformed match ")
    assert complaint in str(caught.value)


def test_the_first_match_wins_and_the_default_gets_the_rest() -> None:
    rules = policy(Rule("1", KEEP), Rule("0-2", RECOMPUTE), Rule("*.4", AUTO))
    assert rules.resolve(decoder(5)) == {0: RECOMPUTE, 1: KEEP, 2: RECOMPUTE, 3: OFFLOAD, 4: AUTO}
    assert Policy(AUTO).resolve(decoder(2)) == {0: AUTO, 1: AUTO}


def test_the_result_is_by_index_and_rules_are_judged_over_all_ranks() -> None:
    rules = policy(Rule("0-1", KEEP), Rule("last 2", RECOMPUTE))
    stage = decoder(2, first=6)
    assert rules.resolve(stage, everywhere=decoder(8) * 2) == {0: RECOMPUTE, 1: RECOMPUTE}
    with pytest.raises(ConfigError, match="'0-1' matches no layer"):
        rules.resolve(stage)
    with pytest.raises(ConfigError, match="'last 2' needs the number of layers, which is unknown"):
        rules.explain(LayerId(7, "layers.7"))


def test_all_rules_that_take_no_effect_are_told_at_once() -> None:
    rules = policy(Rule("0-3", KEEP, 3), Rule("9", KEEP, 4), Rule("1", AUTO, 5), Rule("2-5", RECOMPUTE, 6))
    with pytest.raises(ConfigError) as caught:
        rules.resolve(decoder(4))
    assert [problem.line for problem in caught.value.problems] == [4, 5, 6]
    assert "earlier rules match all its layers: '0-3' (line 3)" in str(caught.value.problems[2])


def test_bare_numbers_where_several_stacks_count_their_own() -> None:
    with pytest.raises(
        ConfigError,
        match=r"policy.yaml:4: .* name the stack of its layer numbers: 'encoder:0' or 'decoder:0'; the "
        r"layers are encoder:0-1 \(encoder.layers.0 ... encoder.layers.1\), decoder:0-1 ",
    ):
        policy(Rule("0", KEEP, 4)).resolve(two_stacks(2))
    placements = policy(Rule("decoder:0", KEEP), Rule("encoder.*", RECOMPUTE)).resolve(two_stacks(2))
    assert placements == {0: RECOMPUTE, 1: RECOMPUTE, 2: KEEP, 3: OFFLOAD}
    with pytest.raises(ConfigError, match="'encoder:0' matches no layer; the layers are 0-3"):
        policy(Rule("encoder:0", KEEP)).resolve(decoder(4))
    with pytest.raises(ConfigError, match=r"the model has no layers$"):
        policy(Rule("0", KEEP)).resolve([])


# Names of placements, and placements that offload a percentage of the bytes


HALF = Placement("offload-50%")

sizes = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=40)


@given(sizes, sizes, st.integers(1, 99))
def test_the_share_is_met_by_each_beginning(nbytes: list[int], others: list[int], percent: int) -> None:
    stays = staying(nbytes, percent)
    away = (100 - percent) * sum(nbytes) - 100 * sum(nbytes[number] for number in stays)
    assert abs(away) <= 50 * max(nbytes)
    assert stays == {number for number in staying([*nbytes, *others], percent) if number < len(nbytes)}
    rule = Staying(percent)  # what has no size counts neither way
    assert stays == {n for n, size in enumerate(nbytes) if (rule.stays(0), rule.stays(size))[1]}


@pytest.mark.parametrize("placement", [*Placement, HALF, Placement("offload-7%")], ids=str)
def test_a_placement_is_its_name(placement: Placement) -> None:
    assert Placement(placement.value) is copy.deepcopy(placement) is placement
    assert pickle.loads(pickle.dumps(placement)) is placement
    assert f"{placement}" == placement.value == placement
    assert {placement: 1}[placement.value] == 1  # type: ignore[index]


def test_a_share_is_a_placement() -> None:
    assert [Placement(f"offload-{n}%").percent for n in range(1, 100)] == list(range(1, 100))
    assert HALF.is_offloaded
    assert HALF not in list(Placement)


@pytest.mark.parametrize(
    "word", ["offload-0%", "offload-100%", "offload-05%", "offload-5.5%", "offload-50", "offload-N%", "Keep"]
)
def test_other_words_are_errors_that_list_the_names(word: str) -> None:
    with pytest.raises(ValueError, match=r"is not a placement. The placements are keep, .*auto, offload-N%"):
        Placement(word)
    with pytest.raises(tba.ConfigError, match=r"offload-N%"):
        tba.OffloadConfig.from_yaml(f"default: {word}")
