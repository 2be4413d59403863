"""The page: one file that loads nothing, with what was given to it."""

import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from evenpack.cli.main import run
from evenpack.cli.page import Curve, DrawnStep, PageData, RunView, Table, write_page
from evenpack.cli.page.drawing import drawn_ranks, pack_starts, segments, step_figure
from evenpack.cli.page.figures import curve_figure, length_edges, length_figure, run_figures, thinned
from evenpack.cli.what_if.workloads import WORKLOADS
from evenpack.scheduler.plan import PlanConfig, plan_step


def drawn_step(sync="step", ranks=4, each=6, name="rl", **settings):
    workload = WORKLOADS[name](np.random.default_rng(0), ranks, each)
    config = PlanConfig(max_tokens=workload.capacity, sync=sync)
    plan = plan_step(workload.table, num_ranks=ranks, config=config)
    return DrawnStep(title="A step", table=workload.table, plan=plan, config=config, **settings)


class Reader(HTMLParser):
    """Every attribute and every text outside of scripts."""

    def __init__(self):
        super().__init__()
        self.tags, self.texts, self.script, self.styles, self._in = [], [], [], [], None

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, data):
        {"script": self.script, "style": self.styles}.get(self._in, self.texts).append(data)


def read_page(path):
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "plan.html"
    assert (
        run(["plan", "workload:image-text", "--ranks", "4", "--samples-per-step", "8", "--steps", "3", "--html", str(path)])
        == 0
    )
    return read_page(path)


def test_the_page_loads_nothing(page):
    """No address in any attribute or style; and a policy that forbids what the library might want."""
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            if name in attributes:
                assert attributes[name] == "data:,", (tag, attributes)
    assert not re.search(r"url\(|@import|https?:", "".join(page.styles))
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "http" not in policy and "connect-src" not in policy
    assert any(attributes.get("name") == "viewport" for _, attributes in page.tags)


def test_the_page_shows_the_figures(page):
    text = " ".join(" ".join(page.texts).split())
    for shown in (
        "Karmarkar-Karp (verl)",
        "next-fit (Megatron-Core)",
        "padded batches",
        "Settings that would gain",
        "4 ranks x 8",
    ):
        assert shown in text
    assert sum("Plotly.newPlot" in script for script in page.script[1:]) == 4


def test_names_are_text_and_nothing_else(tmp_path):
    """Names of samples, runs and tables can hold anything."""
    name = "</script><img src=x onerror=alert(1)>"
    drawn = drawn_step(ids=[name] * 24)
    table = Table(title=name, header=(name,), rows=((name,),), notes=(name,))
    view = RunView(
        name=name, facts=(name,), tables=(table,), curves=(Curve(name=name, values=[1.0]),), drawn=drawn, lengths=[3]
    )
    write_page(tmp_path / "a.html", PageData(title=name, runs=(view,), summary=(name,)))
    reader = read_page(tmp_path / "a.html")
    assert not any(tag == "img" for tag, _ in reader.tags)
    assert sum(name in text for text in reader.texts) >= 6


def test_two_runs_get_the_same_axes_and_a_column_each(tmp_path):
    runs = tuple(
        RunView(
            name=f"run {low}",
            curves=(Curve(name="x", values=[low, 1.0]),),
            lengths=lengths,
            load_before=[1, top],
            load_after=[2, 2],
        )
        for low, lengths, top in ((0.5, [4, 9], 3), (0.9, [100, 3000], 7))
    )
    first, second = run_figures(runs)
    for one, other in zip(first[:2], second[:2], strict=True):
        assert one.figure.layout.yaxis.range == other.figure.layout.yaxis.range
    assert first[2].figure.data[0].x.tolist() == second[2].figure.data[0].x.tolist()
    assert first[0].figure.layout.yaxis.range[1] >= 7 / 2
    write_page(tmp_path / "two.html", PageData(title="two", runs=runs))
    assert sum("Plotly.newPlot" in script for script in read_page(tmp_path / "two.html").script[1:]) == 6
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"one run or two, got {count}"):
            PageData(title="x", runs=runs[:1] * count)


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_every_sample_is_drawn_once_where_the_plan_has_it(sync):
    drawn = drawn_step(sync)
    plan, table = drawn.plan, drawn.table
    found = segments(drawn, np.arange(4))
    assert sorted(found.sample.tolist()) == list(range(24))
    mean = plan.cost.sum() / 4
    for k, sample in enumerate(found.sample):
        r, m = found.rank[k], found.microbatch[k]
        assert (r, m) == (plan.rank[sample], plan.microbatch[sample])
        assert plan.ids(r, m)[found.place[k]] == sample
        before = plan.ids(r, m)[: found.place[k]]
        start = plan.cost[r, :m].sum() if sync == "step" else sum(plan.cost[:, j, 0].max() for j in range(m))
        assert found.time[k] == pytest.approx([(start + table.cost[before].sum()) / mean, table.cost[sample] / mean])
        assert found.tokens[k].tolist() == [m * drawn.config.max_tokens + table.padded[before].sum(), table.padded[sample]]
    # No pack begins before the one ahead of it has ended.
    starts = pack_starts(drawn)
    assert (starts[:, 1:] >= starts[:, :-1] + plan.cost[:, :-1, 0]).all()


def test_the_figure_of_a_step_says_what_each_sample_is():
    drawn = drawn_step("microbatch", ids=[f"doc<{row}>" for row in range(24)])
    figure, note, _ = step_figure(drawn)
    moved = int((drawn.plan.rank != drawn.table.home).sum())
    assert [len(trace.x) for trace in figure.data] == [24 - moved, moved] and moved > 0
    texts = [text for trace in figure.data for text in trace.customdata]
    for row in range(24):
        (text,) = [text for text in texts if f"doc&lt;{row}&gt;</b>" in text]
        assert f"{drawn.table.tokens[row]:,} tokens" in text
        assert f"rank {drawn.plan.rank[row]}, micro-batch {drawn.plan.microbatch[row]}, segment " in text
        home = drawn.table.home[row]
        assert ("read here" if home == drawn.plan.rank[row] else f"read by rank {home}") in text
    assert note.startswith(f"Every rank with {drawn.plan.num_microbatches} pack")
    # The buttons change between the two views, and back.
    time, tokens = figure.layout.updatemenus[0].buttons
    for trace, base, x in zip(figure.data, time.args[0]["base"], time.args[0]["x"], strict=True):
        assert list(trace.base) == list(base) and list(trace.x) == list(x)
    assert sum(sum(x) for x in tokens.args[0]["x"]) == drawn.table.padded.sum()


def test_many_ranks_are_drawn_in_part():
    drawn = drawn_step(ranks=64, each=4)
    ranks = drawn_ranks(drawn)
    load = drawn.plan.cost.sum(axis=(1, 2))
    assert len(ranks) == 16 and load[ranks].max() == load.max() and load[ranks].min() == load.min()
    assert step_figure(drawn)[1].startswith("16 of 64 ranks")


def test_the_histogram_counts_every_sample_and_token():
    lengths = np.array([1, 1, 2, 7, 8, 9, 4096, 4097], float)
    edges = length_edges([lengths])
    samples, tokens = length_figure(lengths, edges).data
    assert edges[0] <= 1 and edges[-1] > 4097
    assert sum(samples.y) == pytest.approx(1) and sum(tokens.y) == pytest.approx(1)
    assert samples.y[0] == pytest.approx(2 / 8)
    assert len(length_edges([np.zeros(0)])) == 2


def test_long_curves_are_means_of_neighbours():
    values = np.arange(4000.0)
    steps, thin = thinned(values, np.arange(10, 4010))
    assert len(thin) == 1334 and thin[0] == 1 and steps[0] == 11 and thin[-1] == 3999
    assert np.array_equal(thinned(values[:1500], np.arange(1500))[1], values[:1500])


@pytest.mark.parametrize("count", [60, 6000])
def test_a_curve_is_broken_where_steps_are_missing(count):
    """Values that say which step they are of: each point drawn lies at its own step, and none in the gap."""
    numbers = np.concatenate([np.arange(count // 3, count // 2), np.arange(count // 2 + count // 6, count)])
    [trace] = curve_figure([Curve(name="x", values=numbers / 1e4, steps=numbers)], 0.5).data
    there = ~np.isnan(trace.y)
    assert np.allclose(trace.x[there] / 1e4, trace.y[there]) and len(trace.x) <= 1500
    assert trace.x[0] - count // 3 < 3 and count - trace.x[-1] < 3
    gap = (trace.x >= count // 2 + 3) & (trace.x < count // 2 + count // 6 - 3)
    assert gap.any() and not there[gap].any()
    assert not trace.connectgaps


def test_a_step_without_neighbours_is_drawn_as_a_point():
    numbers = np.arange(0, 200, 2)
    [trace] = curve_figure([Curve(name="x", values=np.ones(100), steps=numbers)], 0.5).data
    assert trace.mode == "lines+markers"
    [trace] = curve_figure([Curve(name="x", values=np.ones(100))], 0.5).data
    assert trace.mode == "lines"


def test_what_stops_the_page_is_said_before_the_work(monkeypatch, tmp_path, capsys):
    arguments = ["plan", "workload:sft", "--ranks", "1", "--steps", "1", "--no-advice", "--html"]
    assert run([*arguments, str(tmp_path / "no" / "x.html")]) == 1
    assert f"--html: no folder {tmp_path / 'no'}" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    monkeypatch.setattr("evenpack.cli.what_if.simulate.simulate", None)
    assert run([*arguments, str(tmp_path / "x.html")]) == 1
    assert "an HTML page needs plotly.io: pip install 'evenpack[report]'" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_where_the_page_lies_is_said_beside_the_figures(tmp_path, capsys):
    page = tmp_path / "x.html"
    assert run(["plan", "workload:sft", "--ranks", "1", "--steps", "1", "--no-advice", "--html", str(page), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) and err == f"evenpack plan: page written to {page}\n" and page.is_file()
