"""Windows of several steps: bounded delays, in order, and nothing is lost."""

import pytest

from evenpack.scheduler.testing import run_ranks

from ..helpers import flat, names_of, open_scheduler, text_sample


def with_heavy(heavy, count=40, length=10):
    """Return a function from a rank to samples, of which those named by (rank, index) are 900 tokens long."""
    return lambda rank: [text_sample(900 if (rank, index) in heavy else length, f"{rank}-{index}") for index in range(count)]


def run(source, num_ranks=2, **settings):
    """Return per rank the names, carried samples, delays and imbalance of every step."""

    def fn(rank, num_ranks):
        with open_scheduler(source(rank), max_tokens=1024, **settings) as scheduler:
            return [
                (list(flat(names_of(step))), step.stats.num_carried, step.stats.longest_delay, step.stats.efficiency)
                for step in scheduler
            ]

    return run_ranks(fn, num_ranks)


@pytest.mark.parametrize("sync", ["step", "microbatch"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_heavy_samples_meet_and_every_sample_is_trained_once(prefetch, sync):
    logs = run(with_heavy({(0, 1), (1, 13)}), lookahead=4, prefetch=prefetch, sync=sync)
    names = [[set(names) for names, *_ in log] for log in logs]
    assert sorted(flat([sorted(step) for log in names for step in log])) == sorted(
        f"{rank}-{index}" for rank in range(2) for index in range(40)
    )
    assert [len(log) for log in logs] == [10, 10]  # as many steps as without a window
    together = [any({"0-1", "1-13"} & step for step in steps) for steps in zip(*names, strict=True)]
    assert sum(together) == 1
    at = together.index(True)
    assert all(len({"0-1", "1-13"} & log[at]) == 1 for log in names)
    assert [log[at][3] for log in logs] > [0.95, 0.95]
    assert max(delay for log in logs for _, _, delay, _ in log) <= 3


def test_a_sample_waits_no_longer_than_the_window_allows():
    """Alone as it is, it runs at the latest three steps after its turn."""
    logs = run(with_heavy({(0, 20)}, count=80), lookahead=4)
    at = next(number for number, (names, *_) in enumerate(logs[0]) for log in logs if "0-20" in log[number][0])
    assert at == 5 + 3 and logs[0][at][2] == 3


def test_equal_samples_keep_their_order():
    logs = run(lambda rank: [text_sample(10, f"{rank}-{index}") for index in range(24)], lookahead=4)
    for number, steps in enumerate(zip(*logs, strict=True)):
        expected = {f"{rank}-{4 * number + index}" for rank in range(2) for index in range(4)}
        assert {name for names, *_ in steps for name in names} == expected
        assert steps[0][2] == 0 and steps[0][3] == 1.0


@pytest.mark.parametrize("lookahead", [1, 3])
def test_sources_of_different_length(lookahead):
    """`drain` trains what the others still have; `stop` leaves what is in no full step, and no more."""
    heavy = {(0, 3), (0, 9), (1, 4)}

    def source(rank):
        return with_heavy(heavy, count=14 + 5 * rank)(rank)

    logs = run(source, lookahead=lookahead, on_exhausted="drain")
    assert len(logs[0]) == 5
    everything = [f"{rank}-{index}" for rank in range(2) for index in range(14 + 5 * rank)]
    assert sorted(name for log in logs for names, *_ in log for name in names) == sorted(everything)
    logs = run(source, lookahead=lookahead, on_exhausted="stop")
    assert len(logs[0]) == 3
    full = [f"{rank}-{index}" for rank in range(2) for index in range(12)]
    assert sorted(name for log in logs for names, *_ in log for name in names) == sorted(full)


def test_carried_samples_of_a_state_are_trained_by_a_run_with_another_window():
    def fn(rank, num_ranks):
        samples = with_heavy({(0, 0)}, count=16)(rank)
        with open_scheduler(samples, lookahead=3, max_tokens=1024) as scheduler:
            names = list(flat(names_of(next(scheduler))))
            state = scheduler.state_dict()
        with open_scheduler(samples, max_tokens=1024) as scheduler:
            scheduler.load_state_dict(state)
            return len(state["carried"]), names, [list(flat(names_of(step))) for step in scheduler]

    outcomes = run_ranks(fn, 2)
    assert sum(count + len(names) for count, names, _ in outcomes) == 2 * 12  # three steps of four samples were in view
    found = [name for _, names, rest in outcomes for name in (*names, *flat(rest))]
    assert sorted(found) == sorted(f"{rank}-{index}" for rank in range(2) for index in range(16))


def test_a_step_above_the_bounds_is_told_once():
    with pytest.warns(RuntimeWarning, match="step_tokens_tolerance") as caught:
        logs = run_ranks(over_mean, 2)
    assert logs[0] == logs[1] and max(logs[0]) > 1.1
    told = [str(one.message) for one in caught if "step_tokens_tolerance" in str(one.message)]
    assert len(told) == 1 and "a sample of 900 tokens costs more than a rank's share of a step" in told[0]


def test_samples_in_view_that_fill_the_memory_are_told_of(monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 2)
    with pytest.warns(
        RuntimeWarning, match=r"samples that wait for a later step take 0\.0 GiB on a rank, .*a smaller lookahead \(it is 3\)"
    ):
        run_ranks(over_mean, 2)


def over_mean(rank, num_ranks):
    """Return what every step holds over the mean."""
    with open_scheduler(with_heavy({(0, 1), (0, 30)}, count=60)(rank), lookahead=3, max_tokens=1024) as scheduler:
        return [step.stats.tokens_over_mean for step in scheduler]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_inside_a_window_reaches_every_rank(prefetch):
    def broken(rank):
        for index in range(40):
            if (rank, index) == (1, 25):
                raise OSError("the disk is gone")
            yield text_sample(10, f"{rank}-{index}")

    def fn(rank, num_ranks):
        with open_scheduler(broken(rank), lookahead=3, prefetch=prefetch) as scheduler:
            steps = 0
            with pytest.raises(Exception, match="the disk is gone") as caught:
                for _ in scheduler:
                    steps += 1
        return steps, str(caught.value)

    first, second = run_ranks(fn, 2)
    assert first == second and first[0] == 4  # sample 25 is one of step 6, which is in view from step 4 on
