"""What is concluded from a log; whether it is true, ``tests/contracts/figures/test_causes.py`` asks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from run_logs import HELD, MIB, memory_event, peak, write_run

from tba_offload import cli
from tba_offload.config import StatesConfig
from tba_offload.errors import RunLogError
from tba_offload.report import causes
from tba_offload.report.log import RunHeader, RunLogWriter, StepRecord
from tba_offload.report.ranks import path_of_rank
from tba_offload.report.why import why
from tba_offload.states import slots

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["layers.0", "layers.1"]


def event(step: int = 2, **more: Any) -> dict[str, Any]:
    phases = {
        "forward": peak(30, layer=1, in_flight=4),
        "loss": peak(100, layer=1, beside=2),
        "backward": peak(40, layer=1, read_ahead=4, gradients=10),
    }
    return memory_event(step, NAMES, **phases) | more


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, list(map(str, arguments)))


def test_the_peak_is_that_of_the_fullest_phase_by_holder(tmp_path: Path) -> None:
    found = why(write_run(tmp_path / "run.jsonl", event()))
    assert found.evidence.peak.name == "loss"
    assert found.evidence.peak.nbytes == 110 * MIB  # with the parameters
    assert {name: size // MIB for name, size in found.evidence.peak.held.items() if size} == {
        "parameters": 10,
        "beside": 2,
        "running": 98,
    }
    assert found.cause == "logits and loss"


def test_what_would_be_saved_ends_at_the_second_peak(tmp_path: Path) -> None:
    """Without logits the peak is that of backward: 40 MiB, and 10 each of gradients and parameters."""
    found = why(write_run(tmp_path / "run.jsonl", event()))
    assert found.findings[0].saves == (110 - 60) * MIB
    assert "The peak would be about 60.0 MiB, not 110 MiB." in str(found)


def test_books_that_count_more_than_was_live_are_cut(tmp_path: Path) -> None:
    found = why(write_run(tmp_path / "run.jsonl", event(phases={"forward": peak(5, in_flight=4, outputs=9)})))
    assert found.evidence.phases[0].nbytes == 15 * MIB
    assert found.evidence.phases[0].of("outputs") == MIB


def test_the_first_step_counts_only_if_it_is_alone(tmp_path: Path) -> None:
    assert why(write_run(tmp_path / "1.jsonl", event(1))).evidence.step.step == 1
    assert why(write_run(tmp_path / "2.jsonl", event(1), event(2), event(4))).evidence.step.step == 2


def test_steps_of_another_plan_do_not_count(tmp_path: Path) -> None:
    tried = event(2, placements=["keep", "keep"])
    assert why(write_run(tmp_path / "run.jsonl", tried, event(4))).evidence.step.step == 4


@pytest.mark.parametrize(
    ("placed", "budget", "change"),
    [
        ("keep", None, "place them offload"),
        ("auto", None, "give the planner a budget.activation_bytes"),
        ("auto", 90 * MIB, "a budget.activation_bytes that is lower"),
    ],
)
def test_layers_that_the_planner_keeps_are_its_business(
    tmp_path: Path, placed: str, budget: int | None, change: str
) -> None:
    keeping = event(placements=["keep", "keep"], phases={"loss": peak(100, layer=1, kept=80)})
    plan = {name: {"layer": 0, "placement": placed, "why": "default"} for name in NAMES}
    log = write_run(tmp_path / "run.jsonl", keeping, header={"plan": plan}, activation_budget_bytes=budget)
    found = why(log)
    assert found.cause == "layers that keep"
    assert change in found.findings[0].change


def test_layers_that_let_a_share_travel_keep_the_rest(tmp_path: Path) -> None:
    shares = event(placements=["offload-33%", "keep"], phases={"loss": peak(100, layer=1, kept=80)})
    found = why(write_run(tmp_path / "run.jsonl", shares))
    assert found.cause == "layers that keep"
    assert "1 of 2 layers are placed keep" in found.findings[0].what
    assert "1 of 2 layers let only a share of what they save travel: 80.0 MiB stay" in found.findings[0].what


def test_a_log_without_memory_events_tells_what_its_steps_do(tmp_path: Path) -> None:
    found = why(write_run(tmp_path / "run.jsonl"))
    assert found.evidence.peak.name == "step"
    assert found.evidence.peak.of("running") == 92 * MIB
    assert found.cause == "beside the layers"
    assert "in a phase that the log does not tell: 100 MiB" in str(found)


def test_a_fuller_step_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.jsonl", event(), steps=3)
    with path.open("a") as file:
        file.write(
            json.dumps({"event": "step", "step": 4, "seconds": 1.0, "activation_peak_bytes": 400 * MIB})
            + "\n"
        )
    assert "The activation peak was highest in step 4, at 400 MiB" in str(why(path))


def test_prediction_and_measurement_stand_side_by_side(tmp_path: Path) -> None:
    told = str(why(write_run(tmp_path / "run.jsonl", event(), predicted_peak_bytes=50 * MIB)))
    assert "Planned was an activation peak of 50.0 MiB, measured were 100 MiB, 2.00 times that." in told


def test_nothing_stands_out_where_the_model_alone_takes_memory(tmp_path: Path) -> None:
    calm = event(phases={"forward": peak(1)}, static=event()["static"] | {"parameters": 999 * MIB})
    found = why(write_run(tmp_path / "run.jsonl", calm))
    assert found.cause is None
    assert "worth a change stands out: forward and optimizer's update are about as high." in str(found)


def test_states_that_travel_are_not_to_be_offloaded_once_more(tmp_path: Path) -> None:
    large = event(phases={"forward": peak(1)}, static=event()["static"] | {"optimizer_states": 999 * MIB})
    path = write_run(tmp_path / "run.jsonl", large)
    assert "offload them too" in why(path).findings[0].change
    with path.open("a") as file:
        file.write(json.dumps({"event": "states", "optimizer": 0, "step": 2}) + "\n")
    found = why(path)
    assert found.cause == "optimizer states"
    assert "states.sub_group_bytes" in found.findings[0].change
    with path.open("a") as file:  # damaged
        file.write(json.dumps({"event": "states", "optimizer": [], "states_bytes": "many"}) + "\n")
    assert why(path).cause == "optimizer states"


@pytest.mark.parametrize("source", ["torch.cuda", "mallinfo2, sampled"])
def test_what_else_outlives_steps_is_told_where_the_program_itself_is_not_among_it(
    source: str, tmp_path: Path
) -> None:
    static = event()["static"] | {"optimizer_states": 20 * MIB}
    log = write_run(tmp_path / "run.jsonl", event(static=static), base_bytes=330 * MIB, peak_source=source)
    found = why(log)
    is_device = source == "torch.cuda"
    assert found.evidence.peak.of("others") == (300 * MIB if is_device else 0)
    assert (found.cause == "held by the program") is is_device


def test_sizes_that_advice_names_are_those_of_the_package() -> None:
    assert causes.SLOTS == slots.SLOTS
    assert StatesConfig().sub_group_on("cpu") == causes.SUB_GROUP_ON_CPU
    assert StatesConfig().sub_group_on("cuda") == causes.SUB_GROUP


def test_gradients_that_stay_for_the_next_micro_batch_cannot_be_freed_in_backward(tmp_path: Path) -> None:
    large = event(phases={"backward": peak(900, gradients=900)})
    once = why(write_run(tmp_path / "once.jsonl", large, scopes=2)).findings[0]
    again = why(write_run(tmp_path / "again.jsonl", large, scopes=4)).findings[0]
    assert (once.cause, again.cause) == ("gradients", "gradients")
    assert "states.when: backward" in once.change
    assert "states.when" not in again.change


def test_slots_of_updates_in_backward_take_the_place_of_states(tmp_path: Path) -> None:
    """Without states they come on top, and small sub-groups make them few."""
    phases = {"backward": peak(900, gradients=960), "loss": peak(600)}
    for states, left in ((0, 120), (960, 0)):
        static = event()["static"] | {"optimizer_states": states * MIB}
        found = why(write_run(tmp_path / f"{states}.jsonl", event(phases=phases, static=static), scopes=2))
        gradients = next(each for each in found.findings if each.cause == "gradients")
        assert gradients.saves == (960 - left) * MIB
        assert "states.sub_group_bytes: 40MiB" in gradients.change


def test_what_an_optimizer_works_with_is_part_of_the_update(tmp_path: Path) -> None:
    phases = {"loss": peak(10), "update": peak(300, gradients=20, beside=50)}
    found = why(write_run(tmp_path / "run.jsonl", event(phases=phases)))
    assert found.evidence.peak.name == "update"
    causes_found = {each.cause: each.saves for each in found.findings}
    assert causes_found["working memory of the optimizer"] == 250 * MIB
    assert "outputs" not in causes_found
    assert "what the optimizer works with" in str(found)
    assert "comes on top" not in str(found)
    assert "comes on top" in str(why(write_run(tmp_path / "not.jsonl", event())))


def test_outputs_are_the_programs_where_no_loss_needs_them(tmp_path: Path) -> None:
    phases = {"loss": peak(300, put_out=90), "backward": peak(200, put_out=40)}
    found = {
        each.cause: each.saves
        for each in why(write_run(tmp_path / "run.jsonl", event(phases=phases))).findings
    }
    assert found["outputs"] == 40 * MIB


def test_checkpointing_is_told_wherever_the_peak_is(tmp_path: Path) -> None:
    found = why(write_run(tmp_path / "run.jsonl", event(checkpointed=2)))
    assert found.cause == "logits and loss"
    assert found.findings[-1].cause == "framework checkpointing"
    assert "gradient checkpointing is switched on in 2 of 2 layers" in str(found)


def test_gradients_are_there_when_kept_activations_have_gone(tmp_path: Path) -> None:
    """At its peak backward has few gradients; without what layers keep it would be where it has all."""
    phases = {
        "backward": peak(100, layer=1, kept=80, gradients=2),
        "loss": peak(10),
        "update": peak(0, gradients=60),
    }
    found = why(write_run(tmp_path / "run.jsonl", event(placements=["keep"] * 2, phases=phases)))
    kept = next(each for each in found.findings if each.cause == "layers that keep")
    assert kept.saves == (112 - (10 + 60 + 1)) * MIB  # what one layer works with is 1 MiB


def test_what_is_held_elsewhere_is_not_small(tmp_path: Path) -> None:
    phases = {"loss": peak(100, small=60)}
    held = event(phases=phases, held=[["cache", 50 * MIB, False]])
    found = {each.cause: each.saves for each in why(write_run(tmp_path / "run.jsonl", held)).findings}
    assert found["held elsewhere"] == 50 * MIB
    assert found["small tensors"] == 10 * MIB


def test_frozen_weights_could_travel(tmp_path: Path) -> None:
    static = event()["static"] | {"parameters": 500 * MIB}
    told = event(static=static, frozen_weights=400 * MIB, frozen_at_once=50 * MIB)
    found = why(write_run(tmp_path / "run.jsonl", told)).findings[0]
    assert (found.cause, found.saves) == ("frozen weights", 350 * MIB)
    assert "weights: {frozen: offload}" in found.change


def test_another_backward_is_of_the_loss(tmp_path: Path) -> None:
    phases = {"loss": peak(80), "between": peak(100)}
    found = why(write_run(tmp_path / "run.jsonl", event(phases=phases)))
    assert found.cause == "logits and loss"
    assert "what is after a backward" in str(found)


def test_masters_travel_with_states(tmp_path: Path) -> None:
    static = event()["static"] | {"optimizer_states": 960 * MIB, "masters": 480 * MIB}
    first = why(write_run(tmp_path / "run.jsonl", event(static=static))).findings[0]
    assert first.cause == "optimizer states"
    assert "states and masters of optimizers take 1.41 GiB" in first.what
    assert first.saves == (1440 - 3 * 60) * MIB


def test_a_list_of_what_steps_put_out_is_not_taken_off_the_peak(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, RunHeader(strategy="offload")) as log:
        for number in range(1, 8):
            base = number * 9 * MIB
            log.write(StepRecord(step=number, seconds=0.5, activation_peak_bytes=MIB, base_bytes=base))
    told = why(path)
    assert told.cause == "graphs of earlier steps"
    assert "That would be 36.0 MiB less in the last step of the log." in str(told)


def test_states_that_come_for_many_steps_are_no_graphs(tmp_path: Path) -> None:
    """As those of LBFGS, which keeps a history."""
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, RunHeader(strategy="offload")) as log:
        for number in range(1, 8):
            base, born = number * 9 * MIB, 9 * MIB
            log.write(StepRecord(step=number, seconds=0.5, base_bytes=base, state_bytes=born))
    assert why(path).cause != "graphs of earlier steps"


def test_chunks_of_the_loss_leave_gradients_of_the_head(tmp_path: Path) -> None:
    phases = {"loss": peak(500), "backward": peak(100)}
    found = why(write_run(tmp_path / "run.jsonl", event(phases=phases, head=70 * MIB))).findings[0]
    assert (found.cause, found.saves) == ("logits and loss", (500 - 2 * 70) * 7 // 8 * MIB)


def test_of_sampled_steps_each_phase_is_the_fullest(tmp_path: Path) -> None:
    second = event(2, phases={"loss": peak(90), "update": peak(5, gradients=20)})
    fourth = event(4, phases={"loss": peak(80), "update": peak(40, gradients=20)})
    for source, update in (("mallinfo2, sampled", 60), ("cuda allocator", 25)):
        log = write_run(tmp_path / f"{update}.jsonl", second, fourth, peak_source=source)
        phases = {phase.name: phase.nbytes // MIB - 10 for phase in why(log).evidence.phases}
        assert phases == {"loss": 90, "update": update}
        assert ("memory is sampled" in str(why(log))) is (update == 60)


def test_frozen_weights_that_come_and_go_are_no_gradients(tmp_path: Path) -> None:
    told = event(phases={"backward": peak(50, gradients=3, frozen=37)})
    found = why(write_run(tmp_path / "run.jsonl", told)).evidence.peak
    assert (found.of("gradients"), found.of("frozen")) == (3 * MIB, 37 * MIB)
    assert found.nbytes == (10 + 50 + 40) * MIB  # with the parameters


def test_of_several_ranks_the_fullest_is_explained(tmp_path: Path) -> None:
    for rank, mib in enumerate((50, 400, 60)):
        name = path_of_rank(tmp_path / "run.jsonl", rank)
        fuller = event(phases={"loss": peak(mib)})
        write_run(name, fuller, header={"run": "one", "rank": rank, "ranks": 3})
    assert "In step 2 of rank 1 memory is at its peak" in str(why(tmp_path / "run.jsonl"))


def test_a_log_without_steps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="no step is in it"):
        why(write_run(tmp_path / "run.jsonl", steps=0))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"names": ["one"]}, "there are not as many names as layers"),
        ({"phases": {"forward": peak(1, layer=2)}}, "a peak is in no layer"),
        ({"phases": {"forward": peak(1) | {"nbytes": -1}}}, "phases.forward.nbytes: Input should be greater"),
        ({"phases": {"forward": peak(1) | {"held": HELD | {"kept": "all"}}}}, "phases.forward.held.kept"),
        ({"phases": {"never": peak(1)}}, "phases.never"),
        ({"static": None}, "static"),
        ({"held": [["name", 1]]}, "held.0"),
    ],
)
def test_a_damaged_event_is_named(tmp_path: Path, damage: dict[str, Any], said: str) -> None:
    with pytest.raises(RunLogError, match=f"the memory event is damaged: .*{said}"):
        why(write_run(tmp_path / "run.jsonl", event(), event(3) | damage))


# The command


def test_the_command_prints_tables_and_advice(tmp_path: Path) -> None:
    result = call("why", write_run(tmp_path / "run.jsonl", event()))
    assert (result.exit_code, result.stderr) == (0, "")
    first, *rest = result.stdout.splitlines()
    assert first == (
        "In step 2 memory is at its peak in the loss, after the last layer: 110 MiB; the activation peak is "
        "100 MiB."
    )
    assert any(line.startswith("| logits, loss and their gradients") for line in rest)
    assert any(
        line.startswith("The one change that would help most: compute the loss in 8 chunks") for line in rest
    )


def test_the_command_tells_programs_in_json(tmp_path: Path) -> None:
    result = call("why", "--json", write_run(tmp_path / "run.jsonl", event()))
    told = json.loads(result.stdout)
    assert told["cause"] == told["findings"][0]["cause"] == "logits and loss"
    assert told["peak_bytes"] == 110 * MIB
    assert {phase["phase"] for phase in told["phases"]} == {"forward", "loss", "backward", "update"}


def test_names_that_would_move_the_cursor_are_spelt_out(tmp_path: Path) -> None:
    odd = event(names=["layers.\x1b[2J", "layers.\u202e1"], phases={"forward": peak(60, layer=0)})
    result = call("why", write_run(tmp_path / "run.jsonl", odd))
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert r"layers.\x1b[2J" in result.stdout


def test_a_missing_log_is_one_line_on_stderr(tmp_path: Path) -> None:
    result = call("why", tmp_path / "none.jsonl")
    assert result.exit_code == 1
    assert "the run log cannot be read: No such file or directory" in result.stderr
