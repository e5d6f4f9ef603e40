"""Why memory is where it is, in plain words: the engine of ``tba-offload why``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tba_offload.formatting import readable_size, significant
from tba_offload.report import text
from tba_offload.report.causes import WORTH, Finding, findings
from tba_offload.report.evidence import HOLDERS, Evidence
from tba_offload.report.log import read_run_log
from tba_offload.report.ranks import paths_of_ranks
from tba_offload.report.text import Table

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from tba_offload.report.evidence import Phase
    from tba_offload.report.log import RunLog

_OTHERS = 2

_PHASES = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "embeddings": "embeddings",
    "between": "after backward",
    "update": "optimizer's update",
    "step": "somewhere in the step",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where memory is at its peak, what holds it, and what would help.

    ``str`` gives it in words.

    Attributes:
        evidence: All that it is based on.
        findings: Causes, the one first whose change would help most.
    """

    evidence: Evidence
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, log: RunLog) -> Diagnosis:
        """Return the diagnosis of a run.

        Raises:
            RunLogError: It has no step.
        """
        evidence = Evidence.of(log)
        return cls(evidence, tuple(findings(evidence)))

    @property
    def cause(self) -> str | None:
        """The cause whose change would help most; ``None`` if none is worth one."""
        return self.findings[0].cause if self.findings else None

    def __str__(self) -> str:
        return text.as_text(*self.parts()).removesuffix("\n")

    def parts(self) -> list[Table | str]:
        """Return what there is to say, as lines and tables."""
        return [
            _summary(self.evidence),
            holders_table(self.evidence),
            phases_table(self.evidence),
            *_sampled(self.evidence),
            *_planned(self.evidence),
            *_fuller(self.evidence),
            *self.advice(),
        ]

    def advice(self) -> list[str]:
        """Return what to do, the change first that would help most; a sentence or two for each."""
        if not self.findings:
            return [self._nothing()]
        first, *others = self.findings
        said = [
            f"Cause: {first.what}.",
            f"The one change that would help most: {first.change}.{self._then(first)}",
        ]
        told = [each for place, each in enumerate(others) if place < _OTHERS or each.is_news]
        return said + [f"Next: {each.what}; {each.change}." for each in told]

    def _nothing(self) -> str:
        """No change helps; where phases are as high as the peak, each needs one of its own."""
        evidence = self.evidence
        near = [phase for phase in evidence.phases if phase.nbytes > (1 - WORTH) * evidence.peak.nbytes]
        if len(near) < 2:
            return "Nothing that is worth a change stands out."
        high = " and ".join(_PHASES[phase.name] for phase in near)
        return f"Nothing that is worth a change stands out: {high} are about as high."

    def _then(self, finding: Finding) -> str:
        peak = self.evidence.peak.nbytes
        if not finding.is_in_peak:
            return f" That would be {readable_size(finding.saves)} less in the last step of the log."
        if not 0 < finding.saves < peak:
            return ""
        return f" The peak would be about {readable_size(peak - finding.saves)}, not {readable_size(peak)}."

    def as_json(self) -> dict[str, Any]:
        """Return the same for programs."""
        evidence = self.evidence
        return {
            "step": evidence.step.step,
            "peak_bytes": evidence.peak.nbytes,
            "peak_in": evidence.where(evidence.peak),
            "phases": [
                {"phase": phase.name, "layer": phase.layer, "bytes": phase.nbytes, "held": dict(phase.held)}
                for phase in evidence.phases
            ],
            "activation_peak_bytes": evidence.step.activation_peak_bytes,
            "predicted_peak_bytes": evidence.step.predicted_peak_bytes,
            "cause": self.cause,
            "findings": [asdict(finding) for finding in self.findings],
        }


def why(path: str | os.PathLike[str]) -> Diagnosis:
    """Return the diagnosis of a run by its log; of several ranks that of the fullest.

    Args:
        path: The run log.

    Raises:
        RunLogError: It cannot be read, or has no step.
    """
    logs = [read_run_log(found) for found in paths_of_ranks(path)]
    diagnoses = [Diagnosis.of(log) for log in logs]
    return max(diagnoses, key=lambda each: each.evidence.peak.nbytes)


def show(diagnosis: Diagnosis) -> None:
    """Print it."""
    text.show(*diagnosis.parts())


def _summary(evidence: Evidence) -> str:
    peak, step = evidence.peak, evidence.step
    rank = f" of rank {evidence.log.header.rank}" if evidence.log.header.ranks > 1 else ""
    measured = step.activation_peak_bytes
    activations = "" if measured is None else f"; the activation peak is {readable_size(measured)}"
    return (
        f"In step {step.step}{rank} memory is at its peak in {evidence.where(peak)}: "
        f"{readable_size(peak.nbytes)}{activations}."
    )


def holders_table(evidence: Evidence) -> Table:
    """Return what holds memory at the peak, the largest first."""
    peak = evidence.peak
    held = sorted(((size, name) for name, size in peak.held.items() if size), reverse=True)
    total = max(peak.nbytes, 1)
    rows = [(_holder(name, peak), readable_size(size), f"{size / total:.0%}") for size, name in held]
    return Table(("Held by", "Size", "Share"), rows, right=("Size", "Share"), title="What holds it")


def _holder(name: str, phase: Phase) -> str:
    if name == "running" and phase.name == "loss":
        return "logits, loss and their gradients"
    if name == "running" and phase.name == "embeddings":
        return "embeddings, and their gradients while they are made"
    if name == "running" and phase.name == "between":
        return "what clipping works with, or another backward"
    if name == "running" and phase.name == "update":
        return "what the optimizer works with"
    if name == "beside" and phase.name in {"backward", "embeddings"}:
        return "made beside layers, or gradients that wait for another (a head tied to embeddings)"
    if name == "running" and phase.name == "step":
        return "not known to the offloader"
    return HOLDERS[name]


def phases_table(evidence: Evidence) -> Table:
    """Return the peak of each phase."""
    rows = [
        (_PHASES[phase.name], readable_size(phase.nbytes), evidence.where(phase)) for phase in evidence.phases
    ]
    return Table(("Phase", "Peak", "At"), rows, right=("Peak",), title="Phases of the step")


def _sampled(evidence: Evidence) -> Iterator[str]:
    if evidence.memory is not None and evidence.is_cpu:
        yield "On a CPU memory is sampled: a phase may have been higher for a moment, above all a short one."


def _fuller(evidence: Evidence) -> Iterator[str]:
    fuller = evidence.fuller
    if fuller is not None:
        yield (
            f"The activation peak was highest in step {fuller.step}, at "
            f"{readable_size(fuller.activation_peak_bytes or 0)}; what held it then is not in the log, or "
            "belongs to another plan."
        )


def _planned(evidence: Evidence) -> Iterator[str]:
    step = evidence.step
    planned, measured = step.predicted_peak_bytes, step.activation_peak_bytes
    if measured is None:
        yield "The activation peak was not measured: attach(..., measure_memory=True)."
    elif planned is None:
        yield f"No plan predicted the activation peak; {readable_size(measured)} were measured."
    else:
        ratio = significant(measured / planned) if planned else "many"
        yield (
            f"Planned was an activation peak of {readable_size(planned)}, measured were "
            f"{readable_size(measured)}, {ratio} times that."
        )
