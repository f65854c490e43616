"""Random load on a small arena: limits hold in every step, and every request ends."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from host_logic import computed_tokens, decided, make_request, make_scheduler
from mfs_trt.errors import RequestTooLargeError
from mfs_trt.request import FinishReason
from mfs_trt.scheduler.batch import prepare
from mfs_trt.scheduler.queue import rank

END = 7


@st.composite
def loads(draw):
    groups = draw(st.sampled_from([(1,), (1, 1), (1, 2), (2, 1, 3)]))
    arrivals = draw(
        st.lists(
            st.tuples(
                st.integers(0, 6),  # step of arrival
                st.integers(1, 14),  # prompt tokens
                st.integers(1, 8),  # max_tokens
                st.integers(0, len(groups) - 1),  # tier
                st.integers(0, 2),  # priority
                st.sampled_from([None, None, None, 0, 1, 5]),  # cancelled so many steps later
            ),
            min_size=1,
            max_size=8,
        )
    )
    settings_ = {
        "groups": groups,
        "block_size": draw(st.sampled_from([1, 2, 3, 4])),
        "num_frames": draw(st.integers(8, 60)),
        "budget": draw(st.sampled_from([1, 2, 3, 5, 8, 64])),
        "max_num_seqs": draw(st.integers(1, 5)),
    }
    return settings_, arrivals


class Run:
    """One load, stepped with every promise of a step checked."""

    def __init__(self, settings_, arrivals):
        self.scheduler = make_scheduler(**settings_)
        self.arrivals = arrivals
        self.accepted = []

    def step(self, step: int) -> None:
        scheduler = self.scheduler
        was_running = {r.request_id for r in scheduler.running}
        before = {r.request_id: list(r.num_computed_tokens) for r in scheduler.running}
        requests = dict(scheduler.requests)
        output = scheduler.schedule()
        assert not output.is_empty
        self.check_limits(output)
        self.check_arrays(output, requests, before)
        self.check_preemptions(output, requests, was_running)
        scheduler.kv_cache.check_integrity()
        tokens = {
            name: decided((step * 31 + len(name)) % 11) for ids in output.sampled for name in ids
        }
        scheduler.update(output, tokens)
        scheduler.kv_cache.check_integrity()

    def check_limits(self, output) -> None:
        limits = self.scheduler.limits
        assert len(self.scheduler.running) <= limits.max_num_seqs
        for items in output.segments:
            if items is not None:
                assert (items.last_tokens > items.first_tokens).all()
                num_rows = int((items.last_tokens - items.first_tokens).sum())
                assert num_rows <= limits.max_num_batched_tokens

    def check_arrays(self, output, requests, before) -> None:
        kv_cache = self.scheduler.kv_cache
        step_input = prepare(output, kv_cache.tables, kv_cache.spec.block_size)
        ids = []
        for name, last in output.computed:
            request = requests[name]
            first = before.get(name, [0])[0]
            ids += request.token_ids[first : last[0]]
            assert len(set(last)) == 1 and last[0] <= request.num_tokens
            is_sampled = name in output.sampled[request.tier]
            assert is_sampled == (last[-1] == request.num_tokens)
        assert step_input.input_ids.tolist() == ids
        written = []
        for segment in step_input.segments:
            if segment is not None:
                # Deeper rows are the first rows of the segment below, in its order.
                np.testing.assert_array_equal(segment.source_rows, np.arange(segment.num_rows))
                assert (segment.slot_mapping >= kv_cache.spec.block_size).all()  # no null frame
                written += segment.slot_mapping.ravel().tolist()
        assert len(set(written)) == len(written)

    def check_preemptions(self, output, requests, was_running) -> None:
        computed = computed_tokens(output)
        for name in output.preempted:
            victim = requests[name]
            assert name not in computed and victim.num_computed_tokens[0] == 0
            assert any(
                rank(r) < rank(victim) and (n in was_running or r.priority > victim.priority)
                for n, r in requests.items()
                if n not in output.preempted and r in self.scheduler.running
            )

    def run(self) -> None:
        step, last_arrival = 0, max(a[0] for a in self.arrivals)
        cancels = []
        while self.scheduler.has_requests or step <= last_arrival:
            for i, (at, prompt, max_tokens, tier, priority, cancel) in enumerate(self.arrivals):
                if at == step:
                    request = make_request(
                        f"{'r' * i}{i}",
                        prompt,
                        tier=tier,
                        arrival=float(at),
                        priority=priority,
                        max_tokens=max_tokens,
                        end_token_ids=[END],
                    )
                    try:
                        self.scheduler.check_fits(request)
                    except RequestTooLargeError:
                        continue
                    self.scheduler.add(request)
                    self.accepted.append(request)
                    if cancel is not None:
                        cancels.append((step + cancel, request))
            for at, request in cancels:
                if at == step and not request.is_finished:
                    self.scheduler.finish(request, FinishReason.ABORT)
            if self.scheduler.has_requests:
                self.step(step)
            step += 1
            assert step < 2000, "the load does not end"


@settings(max_examples=250, deadline=None)
@given(loads())
def test_limits_hold_in_every_step_and_every_request_ends(load):
    run = Run(*load)
    run.run()
    assert run.scheduler.kv_cache.num_used_frames == 0
    for request in run.accepted:
        if request.finish_reason is FinishReason.LENGTH:
            assert request.num_output_tokens == request.params.max_tokens
        elif request.finish_reason is FinishReason.STOP:
            assert request.output_token_ids.index(END) == request.num_output_tokens - 1
        else:
            assert request.finish_reason is FinishReason.ABORT
