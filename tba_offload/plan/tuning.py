"""The numbers that the planner was given rather than measured: unit, default, and where each comes from.

"Seeded steps" are random profiles that were planned with and without the number, or with another one, and
played on the simulator; "simulated runs" are whole trainings in which a simulated machine answers to the
plans. The rules of the window have their numbers in :mod:`tba_offload.plan.window`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """The numbers, all with their defaults."""

    # ---- what every profile takes for granted --------------------------------------------------------

    least_recomputed: float = 0.5
    """Share of the first forward. A second one takes at least that: a measurement of less is noise."""

    hook_seconds: float = 10e-6
    """Seconds of the training thread. Offloading an activation takes at least that, in either direction."""

    least_rebuilt: float = 0.05
    """Share of what their bytes are of a forward. Rebuilding activations takes at least that."""

    host_speed: float = 4.0
    """Factor by which host memory is faster than the drives until it is measured. One thread copies some 10
    GB/s and a drive of today writes 2 to 7; it is not far off, and wrong only until the first bytes have
    gone there."""

    half_life: float = 0.5
    """Steps after which the measurement of a rate counts half: a drive that has become slower is noticed
    within a few steps, and one odd step does no harm. With twice as long, 6 of 30 simulated runs changed:
    they took from 4 % less to 12.9 % more, 0.5 % more in the mean of all."""

    # ---- the profile of a step -----------------------------------------------------------------------

    alike: float = 0.25
    """Share of their bytes by which layers of one kind, which save equally many activations, differ at
    most. If they differ by half of it, plans for one kind take 0.1 % longer (median of 10 simulated steps,
    at most 3.3 %); if by all of it, 1 %, at most 11 %."""

    remembered_times: int = 3
    """Steps in which layers ran under a placement whose median tells how long they take so. 40 simulated runs
    of 40 steps, of which one in 20 takes 2 to 20 times as long, took 1.2 % longer where half of each new
    measurement was mixed into what was known, and 4.2 % longer where the first steps were slow too; of their
    last 24 predictions a tenth was off by more than 41 and 79 % then, and by 9 and 11 % with this. With 5,
    half of the predictions were off by 14 % after the machine had become 1.5 times as slow, with 3 by 6.5 %;
    with 1, by 17 % where times vary by a quarter, with 3 by 12 %."""

    large: float = 0.75
    """Share of the bytes that a plan was made for, from which a step is still like that one. Steps of this
    share take 2.1 % longer under that plan than under their own (median of 12 simulated ones), those of 0.9
    0.6 %."""

    forgotten_after: int = 64
    """Steps after which a plan is made for what runs now: all were smaller, or a layer ran in none of them.
    Otherwise steps of half the bytes would take 3.7 % longer for ever, at most 9.3 %; those of a quarter up
    to 20 %."""

    # ---- the search ----------------------------------------------------------------------------------

    margin: float = 0.02
    """Share of the budget that is left free: a prediction is not exact, and a budget is hard. Few measured
    runs cannot show what it gains: of a small GPT on a busy machine 1 of 6 broke its budget without it, by
    7 %, and 1 of 13 with it, by 1 %."""

    no_stall: float = 0.01
    """Share of the step: waiting for less than that, rebuilding included, counts as not waiting. With 0 the
    peaks of 26 seeded steps were 3.7 % higher, with 0.02 4.6 % lower, and steps took 0.2 % longer."""

    no_slower: float = 0.02
    """Share by which a step may take longer than keeping everything where memory is wanted: less is within
    what equal steps differ by. With 0 the peaks of those 26 steps were 23 % higher, with 0.04 13 % lower,
    and steps took 0.7 % longer."""

    least_freed: float = 1 / 8
    """Share of what could be freed: where memory is wanted first, freeing less counts as freeing none, for
    a drive that slow had better be left alone. A plan in force stays until it is half of that. It spares 2
    of those 26 steps transfers that would free 4 to 6 % of memory and take up to 1.2 % of the time; with
    twice as much peaks are 6 % higher."""

    slack: float = 0.9
    """Share of the measured rates that plans are made for where nothing shall wait: drives have their
    moods. On a drive at 0.9 of these rates, 26 seeded steps wait for 0.15 % of their time instead of 0.5
    %."""

    max_trials: int = 600
    """Plans that are tried on the simulator; after that many no new way is begun. With half as many none of
    26 seeded steps got another plan, with a quarter 1 of 70 with a budget took 1.6 % longer."""

    max_items: int = 120_000
    """Activations that are simulated in all trials together: half a second. Then the best so far will do.
    With half as many 1 of 26 seeded steps took 1.6 % longer, with twice as many none took less."""

    many_items: int = 4000
    """Activations of a step; one that saves more is condensed. Without that, 30 seeded steps of 4,000 to
    12,000 took 2.8 times as long to plan, up to 5.7 s instead of 1.8, and plans took 0.2 % less time,
    between 4.6 % less and 3.7 % more."""

    few_items: int = 1000
    """Activations of a condensed step, about. With half as many, plans for those steps took 0.2 % less,
    between 3.5 % less and 6.7 % more, and three quarters of the time to make; with twice as many as long,
    between 1.9 % less and 3.3 % more, and a quarter more time to make."""

    narrowest: int = 3
    """Largest activations that the smallest window holds. Smaller ones would make every activation wait for
    the one before. With 2, 7 seeded steps without a budget peaked 3.5 % higher in the mean, one 23 %; with
    4 they peaked 5 % lower, one 38 %, and 17 with a budget took 0.1 % less either way."""

    tight: tuple[int, ...] = (2, 4, 12)
    """Parts of the smallest window that are tried where nothing else keeps to the budget; the last is a
    quarter of the largest activation, so that it is in flight alone. Without them, 21 of 70 seeded steps
    had no plan that keeps to the budget instead of 7; with the last one alone, steps took up to 32 %
    longer."""

    windows: tuple[float, ...] = (0.8, 0.6, 0.4, 0.25)
    """Shares of the window with which the best plan is played too. Without that, 2 of 26 seeded steps
    without a budget peaked 4.5 and 6.9 % higher."""

    sound: int = 32
    """Number of the best plans for a slower drive that are played on the real one at most. With one alone,
    1 of 26 seeded steps took 0.7 % longer, at a peak that was 9 % lower."""

    # ---- the controller ------------------------------------------------------------------------------

    warm_up: int = 1
    """Steps whose times do not count: memory and files grow in them, and caches are cold."""

    learning: int = 3
    """Steps before there is a plan: those that warm up, and two in which layers of each kind are kept,
    recomputed and rebuilt."""

    slice_seconds: float = 2e-3
    """Seconds after a step for which it is thought about plans, where the next step needs none at once. A
    plan for 50 layers takes 80 to 360 ms; by a thread beside training it made steps of 50 small layers 1.2 to
    2.4 times as long while it was looked for."""

    slice_share: float = 0.01
    """Share of a step; where that is longer, it is thought about plans for as long: a plan for steps of 10 s
    comes after four of them instead of 180."""

    closely: int = 16
    """Steps that are all looked at closely: what is known of times is still rough. Without them, 2 of 9
    simulated runs broke their budget, one in 27 of 80 steps, by up to 1.7 %; half or twice as many changed
    no time under a budget."""

    turn: int = 8
    """Steps from one that is looked at closely to the next later on; those that surprise are, too. Ranks
    that share layers agree after these, the first few, and those around one that tries something else. Half
    or twice as many changed peaks and times of 9 simulated runs by at most 0.4 %."""

    excursions: tuple[int, ...] = (6, 12, 64)
    """Steps after which, and later whenever the last has passed again, one step tries what the plan does
    not. Without it, one simulated run that wanted memory peaked 9 % higher, and one 7 % lower."""

    astray: float = 0.1
    """Share of the predicted time by which a step that was not understood took more or less. Without it 1
    of 10 simulated runs took 3 % longer; half or twice as much changed none."""

    drift: float = 0.15
    """Share by which a drive is faster or slower than when the plan was made, if it is another drive.
    Without it, of 6 simulated runs one took 1.6 % longer, and one that wanted memory peaked 10 % higher;
    half or twice as much changed times by 0.3 % and peaks by 2 % at most."""

    big_drift: float = 1 / 3
    """The same share where smaller doubts have turned out to be idle. With ``drift`` there too, of 10
    simulated runs one took 7 % less time, one peaked 30 % higher, and planning took up to 1.9 times as
    long."""

    worth_it: float = 0.02
    """Share by which a new plan must be better, or the old one stays: plans shall not alternate. With a
    tenth of it plans changed 108 times instead of 88 in 45 simulated runs, of which two took 1 to 1.6 %
    longer; without it 136 times instead of 110 in 60, of which three took 1 to 1.9 % longer. With twice as
    much one took 4 % less."""

    rival: float = 0.25
    """Share by which a plan that places all layers alike may be predicted to be slower than that in force,
    and still is tried for a step. Recomputing all layers of a Llama of wide and narrow ones was 10.7 % faster
    than a plan that was predicted to be faster than that."""

    worth_refining: float = 0.002
    """Share for which the first plan is changed once, when a step under it was measured. Without that
    change, of 22 simulated runs one took 5.7 % longer, one 0.2 %, and one 1 % less."""

    waits: float = 0.02
    """Share of two steps: a session that waits for more, where nothing shall wait, plans for a slower
    drive. Nor is something tried that would wait for longer than that, unless nothing is known of it or of
    the drive. In a simulated run on a drive that gives 55 % of what it reports, 0.5 % of the time is waits,
    and 1.1 % without this."""

    caution: float = 0.85
    """Factor of the planned rates, each time. In that run 0.7 leaves 0.3 % of waits, at a peak that is 2 %
    higher, and 0.92 leaves 0.8 %, at one that is 8 % lower."""

    most_caution: float = 0.5
    """Least share of what was measured that plans count on. In that run 0.25 changes nothing, and with 0.75
    steps wait as if none were planned for a slower drive."""

    unmeasured: float = 0.05
    """Share of the budget that new plans leave free too, if they can: no step under them was measured yet.
    Twice as much costs a simulated run up to 5 % of its time. Without it, no budget broke in 6 runs of a
    small GPT; of 45 simulated runs 16 changed, which took from 5.8 % less to 13.7 % more, 0.1 % more in the
    mean, and 872 of 2,882 steps instead of 866 were over their budget. With a full window plans leave it
    free too, if they can: 3 of 48 runs of a small GPT whose drive changes its speed were over the budget
    before that, by up to 4.1 %, and none of 96 with it. Of 150 seeded plans 7 changed, for steps that take
    0.06 % longer in the mean of all, at most 3.9 %."""

    first_window: int = 16
    """Divisor of the budget: the first steps have this part of it in flight, as what else they hold is not
    known yet. Of small GPTs they peak at up to 0.79 of the budget, with a quarter in flight at 0.95, and
    with all of it over the budget in 8 of 10 runs, by up to 59 %."""

    most_narrowed: int = 3
    """Times that a plan is made for less than the budget, because a full window would break it. Without
    that, it would have under 16 of 89 plans for simulated steps, under 3 with one time, and under 2 with
    three; on drives ten times slower than measured 4, 1 and 1 of them peaked over the budget."""

    most_peaks: int = 16
    """Plans of which the measured peak is remembered, so that what is remembered does not grow with the
    steps. From 2 to any number, no plan of 60 simulated runs changed."""

    remembered_rests: int = 8
    """Steps of which what they needed beyond what was known is remembered; the most of them counts. As many
    have to go well until what broke the budget is forgotten, twice as many the next time, and after as many
    looks without it what lies beside a layer under a placement is. With the last
    one alone 7 of 60 simulated runs changed: one peaked 19 % higher, and steps took 0.1 % less in the
    mean."""

    recent: int = 3
    """Steps under the plan whose median time is held against the prediction. With two, one of 60 simulated
    runs took 0.1 % less."""

    remembered_steps: int = 8
    """Steps under the plan that tell by how much steps differ from each other. Steps that take longer from
    one on are noticed after the second; a window that is twice as long only lets noise of long ago count."""

    odd: float = 3.0
    """Median deviations by which times and rates must be away from what was expected of them. Of simulated
    runs of 100 steps whose times and rates vary by 10 % and more, with one in 20 that takes twice as long,
    steps with a search went from 31 to 10; from 6 to 4 of the first 14, where 4 always are."""

    doubtless: float = 0.5
    """Share by which they are others however much they differ: a drive that comes to a halt, after seven
    steps whose rates differed by up to 2.5 times, would never be noticed without it."""

    def deviation(self, found: float) -> float:
        """Get the share by which a figure is another, if it differs by a share from step to step anyway."""
        return min(self.odd * found, self.doubtless)

    def thinking(self, seconds: float) -> float:
        """Seconds for which it is thought about plans after a step that took so long."""
        return max(self.slice_seconds, self.slice_share * seconds)


TUNING = Tuning()
"""The numbers that are used."""
