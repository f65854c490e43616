"""The policies as functions: within bounds, monotone, and steady where the situation wavers."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_trt.scheduler.policies import (
    CALM_STEPS,
    CLIMB_RESERVE,
    MIN_DWELL,
    MIN_TOKENS,
    PRESSED_STEPS,
    STAY_RESERVE,
    WINDOW,
    CascadeView,
    DeadlineView,
    LoadView,
    cascade_tier,
    deadline_tier,
    is_calm,
    is_pressed,
    load_level,
    load_tier,
)

SECONDS = st.floats(0, 100)


@st.composite
def tier_bounds(draw):
    """Low, present and high tier of a family of up to six."""
    low = draw(st.integers(0, 5))
    high = draw(st.integers(low, 5))
    return low, draw(st.integers(low, high)), high


@st.composite
def deadline_views(draw):
    low, tier, high = draw(tier_bounds())
    seconds = draw(st.lists(SECONDS, min_size=high + 1, max_size=high + 1))
    return DeadlineView(tier, low, high, draw(st.floats(-10, 200)), seconds)


# -- deadline ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(deadline_views())
def test_a_deadline_picks_the_highest_tier_that_meets_it(view):
    chosen = deadline_tier(view)
    assert view.low <= chosen <= view.high

    def is_feasible(tier):
        reserve = STAY_RESERVE if tier <= view.tier else CLIMB_RESERVE
        return view.seconds_by_tier[tier] * reserve <= view.seconds_left

    assert not any(is_feasible(tier) for tier in range(chosen + 1, view.high + 1))
    assert chosen == view.low or is_feasible(chosen)


@settings(deadline=None)
@given(deadline_views(), st.floats(0, 100))
def test_more_time_never_gives_a_lower_tier(view, more):
    later = replace(view, seconds_left=view.seconds_left + more)
    assert deadline_tier(later) >= deadline_tier(view)


def test_a_request_at_the_edge_stays_where_it_is():
    """What meets the deadline as the present tier may be too little time to climb to it."""
    seconds = [1.0, 4.0]
    left = 4.0 * (STAY_RESERVE + CLIMB_RESERVE) / 2
    for tier in (0, 1):
        assert deadline_tier(DeadlineView(tier, 0, 1, left, seconds)) == tier


# -- load ----------------------------------------------------------------------------------------


class Server:
    """The level of a server whose queue is what the test says, step by step."""

    def __init__(self, highest_level: int = 3) -> None:
        self.view = LoadView(0, highest_level, MIN_DWELL, 0, 0)
        self.levels: list[int] = []

    def step(self, num_waiting: int, num_running: int = 8) -> int:
        view = self.view
        pressed, calm = is_pressed(num_waiting, num_running), is_calm(num_waiting, num_running)
        view = replace(
            view,
            num_steps_at_level=view.num_steps_at_level + 1,
            num_pressed_steps=view.num_pressed_steps + 1 if pressed else 0,
            num_calm_steps=view.num_calm_steps + 1 if calm else 0,
        )
        level = load_level(view)
        steps = 0 if level != view.level else view.num_steps_at_level
        self.view = replace(view, level=level, num_steps_at_level=steps)
        self.levels.append(level)
        return level


@settings(deadline=None)
@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 16), st.integers(1, 60)), max_size=12),
    tier_bounds(),
)
def test_load_never_leaves_the_bounds_and_moves_one_tier_at_a_time(highest, queues, bounds):
    server = Server(highest)
    low, _, high = bounds
    for num_waiting, num_running, num_steps in queues:
        for _ in range(num_steps):
            level = server.step(num_waiting, num_running)
            assert 0 <= level <= highest
            assert low <= load_tier(level, low, high) <= high
    moves = [
        i
        for i, (a, b) in enumerate(zip([0, *server.levels], server.levels, strict=False))
        if a != b
    ]
    pairs = zip([0, *server.levels], server.levels, strict=False)
    assert all(abs(a - b) <= 1 for a, b in pairs)
    assert all(b - a >= MIN_DWELL for a, b in zip(moves, moves[1:], strict=False))


def test_a_queue_that_stays_gives_up_tier_after_tier_and_one_that_drains_takes_them_back():
    server = Server(highest_level=2)
    for _ in range(100):
        server.step(10)
    assert server.levels[: PRESSED_STEPS - 1] == [0] * (PRESSED_STEPS - 1)
    assert server.levels[PRESSED_STEPS - 1] == 1 and server.levels[-1] == 2
    for _ in range(200):
        server.step(0)
    drained = server.levels[100:]
    assert drained == sorted(drained, reverse=True)
    assert drained[CALM_STEPS - 2] == 2 and drained[CALM_STEPS - 1] == 1 and drained[-1] == 0


@settings(deadline=None)
@given(st.integers(1, CALM_STEPS - 1), st.integers(1, CALM_STEPS - 1), st.integers(2, 30))
def test_an_oscillating_queue_does_not_make_it_flap(num_full, num_empty, num_rounds):
    """Once given up, a tier is not taken back between two fillings of the queue."""
    server = Server(highest_level=1)
    for _ in range(num_rounds):
        for num_waiting in [8] * num_full + [0] * num_empty:
            server.step(num_waiting)
    assert server.levels == sorted(server.levels)


def test_a_queue_between_the_thresholds_changes_nothing():
    for level in (0, 1):
        server = Server()
        server.view = replace(server.view, level=level)
        for _ in range(100):
            assert server.step(num_waiting=1, num_running=8) == level


def test_a_queue_that_forms_for_a_moment_is_no_load():
    server = Server()
    for _ in range(20):
        for num_waiting in [30] * (PRESSED_STEPS - 1) + [0]:
            server.step(num_waiting)
    assert set(server.levels) == {0}


# -- cascade -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    tier_bounds(),
    st.lists(st.floats(-20, 0), max_size=3 * WINDOW),
    st.floats(-20, 0),
)
def test_a_cascade_climbs_exactly_when_the_mean_of_the_window_is_under_the_threshold(
    bounds, log_probs, threshold
):
    _, tier, high = bounds
    chosen = cascade_tier(CascadeView(tier, high, log_probs, threshold))
    window = log_probs[-WINDOW:]
    is_unsure = len(log_probs) >= MIN_TOKENS and sum(window) / len(window) < threshold
    assert chosen == (tier + 1 if is_unsure and tier < high else tier)


def test_old_tokens_outside_the_window_do_not_count():
    sure, unsure = -0.1, -3.0
    sure_now = [unsure] * 50 + [sure] * WINDOW
    unsure_now = [sure] * 50 + [unsure] * WINDOW
    assert cascade_tier(CascadeView(0, 2, sure_now, -1.0)) == 0
    assert cascade_tier(CascadeView(0, 2, unsure_now, -1.0)) == 1
