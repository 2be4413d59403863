"""`evenpack plan`: its figures against plans made by hand, its advice, its messages."""

import json
import random

import msgspec
import numpy as np
import pytest

from evenpack.cli.main import run
from evenpack.cli.what_if.lengths import Samples, read_samples
from evenpack.cli.what_if.pool import cost_of_config, make_pool, usual_cost, workload_samples
from evenpack.cli.what_if.simulate import METHODS, Setting, advice_on, draw_steps, simulate
from evenpack.cli.what_if.workloads import WORKLOADS, image_text, text_cost
from evenpack.scheduler.cost.model import CostModel
from evenpack.scheduler.offline import Permutation
from evenpack.scheduler.plan import PlanConfig, SampleTable, plan_step
from evenpack.scheduler.stats import step_stats

from ..collate.encoding import tiny

LENGTHS = np.random.default_rng(3).integers(20, 900, 150)


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text("\n".join(json.dumps({"num_tokens": int(length)}) for length in LENGTHS))
    return path


def plan_json(capsys, *arguments):
    assert run(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_figures_are_those_of_plans_made_by_hand(sync, lengths_file, capsys):
    """Steps are consecutive parts of shuffled epochs; every figure is a mean of what `step_stats` says."""
    shown = plan_json(
        capsys, lengths_file, "--ranks", 4, "--samples-per-step", 8, "--max-tokens", 1024, "--sync", sync,
        "--steps", 6, "--seed", 5, "--no-advice", "--tolerance", 0.02, "--microbatch-cost", 30, "--align", 8,
    )  # fmt: skip
    config = PlanConfig(max_tokens=1024, sync=sync, tolerance=0.02, microbatch_cost=30 * 1024, align=8)
    orders = [Permutation(150, 5 * 1_000_003 + epoch)(0, 150) for epoch in range(2)]
    rows = [order[at : at + 32] for order in orders for at in range(0, 128, 32)][:6]
    plans, stats, work = [], [], []
    for number, row in enumerate(rows):
        table = SampleTable.from_lengths(
            LENGTHS[row], align=8, cost=text_cost(LENGTHS[row]), home=np.arange(32) // 8, nbytes=16 * LENGTHS[row] + 256
        )
        plans.append(plan_step(table, num_ranks=4, config=config))
        stats.append(step_stats(table, plans[-1], config=config, step=number))
        work.append((int(table.cost.sum()), int(table.nbytes.sum())))
    ours = shown["methods"][0]
    assert ours["name"] == "evenpack" and ours["relative_cost"] == 1
    assert ours["step_cost"] == np.mean([plan.value for plan in plans])
    assert ours["above_bound"] == pytest.approx(np.mean([p.value for p in plans]) / np.mean([p.lower_bound for p in plans]) - 1)
    assert ours["imbalance"] == pytest.approx(np.mean([one.imbalance for one in stats]))
    assert ours["num_microbatches"] == np.mean([one.num_microbatches for one in stats])
    assert ours["moved_bytes"] == np.mean([one.moved_bytes for one in stats])
    assert ours["moved_share"] == pytest.approx(sum(one.moved_bytes for one in stats) / sum(total for _, total in work))
    assert ours["padding_share"] == pytest.approx(
        1 - sum(one.tokens for one in stats) / sum(one.padded_tokens for one in stats)
    )
    assert ours["padding_share"] > 0
    assert ours["efficiency"] == pytest.approx(np.mean([w / (4 * p.value) for (w, _), p in zip(work, plans, strict=True)]))


def test_other_methods_are_measured_on_the_same_steps(lengths_file, capsys):
    shown = plan_json(capsys, lengths_file, "--ranks", 4, "--samples-per-step", 8, "--max-tokens", 1024, "--steps", 2)
    pool = make_pool(read_samples(lengths_file), usual_cost(vision=False))
    setting = Setting(num_ranks=4, samples_per_step=8, steps=2, config=PlanConfig(max_tokens=1024, align=1))
    for entry in shown["methods"]:
        plans = [
            METHODS[entry["name"]](pool.table(rows, num_ranks=4, align=1), num_ranks=4, config=setting.config)
            for rows in draw_steps(pool, setting)
        ]
        assert entry["step_cost"] == np.mean([plan.value for plan in plans])
        assert entry["moved_bytes"] == np.mean([plan.moved_bytes for plan in plans])
        if entry["name"] in ("padded batches", "in-batch packing"):
            assert entry["moved_bytes"] == 0
    names = [entry["name"] for entry in shown["methods"]]
    assert names == list(METHODS) and len(names) == 5


def test_a_window_of_steps_is_one_more_method_on_the_same_samples(capsys):
    arguments = ["workload:sft", "--ranks", 32, "--sync", "microbatch", "--steps", 12, "--no-advice"]
    alone, window = (plan_json(capsys, *arguments, *more)["methods"] for more in ((), ("--lookahead", 4)))
    assert [entry["name"] for entry in window][:2] == ["evenpack", "evenpack, 4 steps in view"]
    assert [window[0], *window[2:]] == alone
    assert window[1]["step_cost"] < 0.9 * window[0]["step_cost"] and window[1]["efficiency"] > window[0]["efficiency"]
    assert run(["plan", *map(str, arguments), "--lookahead", "129"]) == 1
    assert "--lookahead must be at most 128, got 129" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_answer(lengths_file, capsys):
    arguments = [lengths_file, "--ranks", 4, "--samples-per-step", 8, "--max-tokens", 1024, "--steps", 3]
    first, second = plan_json(capsys, *arguments), plan_json(capsys, *arguments)
    assert first == second
    assert plan_json(capsys, *arguments, "--seed", 1)["methods"] != first["methods"]
    drawn = [plan_json(capsys, "workload:rl", "--ranks", 2, "--steps", 2, "--seed", seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] and drawn[0]["samples"] != drawn[2]["samples"]


def test_an_epoch_is_drawn_once_before_the_next():
    setting = Setting(num_ranks=2, samples_per_step=5, steps=5, config=PlanConfig(max_tokens=8))

    def pool(count):
        return make_pool(Samples(source="x", tokens=np.arange(1, count + 1)), usual_cost(vision=False))

    steps = list(draw_steps(pool(23), setting))
    assert len(steps) == 5 and all(len(step) == 10 for step in steps)
    assert len(set(steps[0]) | set(steps[1])) == 20 and len(set(steps[2]) | set(steps[3])) == 20
    assert steps[0].tolist() != steps[2].tolist()
    with pytest.raises(ValueError, match="9 samples, and one step of 2 ranks x 5 samples takes 10: lower"):
        next(draw_steps(pool(9), setting))


@pytest.mark.parametrize("oversize", ["drop", "truncate"])
def test_samples_above_the_capacity_are_counted(oversize, lengths_file, capsys):
    """One that fills a pack is not above it."""
    limit = int(np.sort(LENGTHS)[100])
    above = int((limit < LENGTHS).sum())
    arguments = ["plan", str(lengths_file), "--ranks", "2", "--max-tokens", str(limit), "--oversize", oversize, "--no-advice"]
    assert run([*arguments]) == 0
    out = capsys.readouterr().out
    done = "left out" if oversize == "drop" else "cut to it"
    wanted = f"{above} of 150 samples ({above / 150:.1%}) are longer than a pack of --max-tokens {limit} and {done} (oversize"
    assert out.startswith(wanted), out
    shown = plan_json(capsys, *arguments[1:])
    counted = {"drop": (150 - above, above, 0), "truncate": (150, 0, above)}[oversize]
    assert tuple(shown["samples"][name] for name in ("count", "dropped", "truncated")) == counted
    assert shown["samples"]["length"]["longest"] == limit


def test_advice_is_what_the_other_setting_gives():
    """Twice the capacity, simulated by hand on the same samples; the best comes first."""
    samples, _ = workload_samples("long-tail", 512, 0)
    pool = make_pool(msgspec.structs.replace(samples, tokens=np.minimum(samples.tokens, 3000)), usual_cost(vision=False))
    config = PlanConfig(max_tokens=4096, microbatch_cost=300 * 1024, align=1)
    setting = Setting(num_ranks=4, samples_per_step=16, steps=3, config=config)
    simulation = simulate(pool, setting)
    found = advice_on(simulation, setting)
    assert [one.gain for one in found] == sorted((one.gain for one in found), reverse=True)
    changed = simulate(pool, msgspec.structs.replace(setting, config=msgspec.structs.replace(config, max_tokens=8192)))
    [larger] = [one for one in found if one.kind == "max_tokens"]
    assert "max_tokens=8192" in larger.text
    assert larger.gain == pytest.approx(1 - changed.figures["evenpack"].step_cost / simulation.figures["evenpack"].step_cost)
    assert larger.gain > 0.01, "fewer micro-batches save their fixed cost"


def test_advice_is_in_the_answer(lengths_file, capsys):
    arguments = ["plan", str(lengths_file), "--ranks", "2", "--max-tokens", "3000", "--steps", "4", "--microbatch-cost", "900"]
    assert run(arguments) == 0
    assert "What would gain, in time per unit of work:" in (out := capsys.readouterr().out)
    advice = plan_json(capsys, *arguments[1:])["advice"]
    assert [one["gain"] > 0.01 and one["text"] in out for one in advice] == [True] * len(advice) != []


@pytest.mark.parametrize("name", WORKLOADS)
def test_built_in_workloads(name, capsys):
    written = name.replace(" ", "-")
    shown = plan_json(capsys, "--workload", written, "--ranks", 2, "--samples-per-step", 4, "--steps", 2, "--no-advice")
    assert shown["setting"]["max_tokens"] == WORKLOADS[name](np.random.default_rng(0), 1, 8).capacity
    assert shown["methods"][0]["above_bound"] >= 0


def test_costs_of_images_are_those_of_the_workload():
    """The typical model of the command and the workload's own figures agree up to rounding of the coefficients."""
    samples, _ = workload_samples("image-text", 200, 4)
    pool = make_pool(samples, usual_cost(vision=True))
    table = image_text(np.random.default_rng(4), 1, 200, phases=2).table
    assert np.array_equal(pool.cost[:, 1], table.cost[:, 1])
    assert np.allclose(pool.cost[:, 0], table.cost[:, 0], rtol=1e-5, atol=1)
    assert np.array_equal(pool.media, table.media)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    from transformers import Qwen2_5_VLConfig, Qwen3Config

    folder = tmp_path_factory.mktemp("configs")
    Qwen2_5_VLConfig().save_pretrained(folder / "vl")
    Qwen3Config().save_pretrained(folder / "text")
    return folder


def test_the_cost_of_a_model_comes_from_its_configuration(configs):
    from transformers import Qwen2_5_VLConfig

    cost = cost_of_config(str(configs / "vl"))
    assert cost.model == CostModel.from_config(Qwen2_5_VLConfig())
    assert cost_of_config(str(configs / "vl" / "config.json"), cp_size=2).model == CostModel.from_config(
        Qwen2_5_VLConfig(), cp_size=2
    )
    assert (cost.merge, cost.patch_bytes, cost.name) == (2, 14 * 14 * 3 * 2 * 4, "qwen2_5_vl")
    samples = Samples(source="x", tokens=np.array([50, 60]), grids=[[(1, 4, 6), (2, 4, 4)], []])
    pool = make_pool(samples, cost)
    assert pool.cost.tolist() == [list(cost.model.sample_cost(50, [(1, 4, 6), (2, 4, 4)])), list(cost.model.sample_cost(60))]
    assert pool.media.tolist() == [3, 0]
    assert pool.nbytes.tolist() == [50 * 16 + 256 + 56 * cost.patch_bytes, 60 * 16 + 256]
    few = make_pool(Samples(source="x", tokens=np.array([50]), vision_tokens=np.array([6])), cost)
    assert few.cost[0, 0] == cost.model.sample_cost(50, [(1, 4, 6)])[0]


def test_context_parallel_packs_are_planned_as_the_scheduler_does(lengths_file, capsys):
    shown = plan_json(
        capsys,
        lengths_file,
        "--ranks",
        2,
        "--samples-per-step",
        20,
        "--max-tokens",
        1003,
        "--cp",
        2,
        "--steps",
        1,
        "--no-advice",
    )
    rows = Permutation(150, 0)(0, 40)
    table = SampleTable.from_lengths(LENGTHS[rows], align=4, cost=text_cost(LENGTHS[rows]), home=np.arange(40) // 20)
    plan = plan_step(table, num_ranks=2, config=PlanConfig(max_tokens=1003), cp_size=2)
    assert shown["methods"][0]["step_cost"] == plan.value
    assert shown["methods"][0]["num_microbatches"] == plan.num_microbatches
    assert shown["setting"]["cp_size"] == 2


def test_a_rounded_capacity_and_a_single_step_are_said(lengths_file, capsys):
    arguments = [
        "plan",
        str(lengths_file),
        "--ranks",
        "2",
        "--samples-per-step",
        "20",
        "--no-advice",
        "--cp",
        "2",
        "--max-tokens",
    ]
    assert run([*arguments, "4095", "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "max_tokens 4,094, 2 GPUs a pack (4,095 rounded down: segments are padded to multiples of 4)" in out
    assert "figures of one step" in out and "means" not in out
    assert run([*arguments, "4096", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "rounded down" not in out and "means over 2 steps" in out


def test_a_method_that_is_ahead_within_the_tolerance_is_explained(lengths_file, capsys):
    """Moving everything finds a plan that is a little better; what that is worth depends on the tolerance."""
    arguments = ["--ranks", 4, "--samples-per-step", 16, "--max-tokens", 1024, "--steps", 2, "--no-advice", "--tolerance", 0.3]
    shown = plan_json(capsys, lengths_file, *arguments)
    ours, *others = shown["methods"]
    ahead = [one for one in others if one["step_cost"] < ours["step_cost"] and one["moved_share"] > ours["moved_share"]]
    assert ahead and all(ours["step_cost"] < 1.3 * one["step_cost"] for one in ahead)
    for tolerance, notes in ((0.3, len(ahead)), (0, 0)):
        assert run(["plan", str(lengths_file), *map(str, arguments[:-1]), str(tolerance)]) == 0
        out = capsys.readouterr().out
        assert out.count("is ahead by less than --tolerance") == notes
    assert f"it moves {ours['moved_share']:.0%} of the bytes instead of {ahead[0]['moved_share']:.0%}" not in out


def test_an_offline_index_is_read(tmp_path, capsys):
    from evenpack.scheduler import OfflineIndex

    rng = random.Random(0)
    pictures = [{"image": tiny.picture(rng)} for _ in range(9)]
    examples = [
        {"messages": [
            {"role": "user", "content": [{"type": "image", "image": one["image"]}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "A cat"},
        ]}
        for one in pictures
    ]  # fmt: skip
    index = OfflineIndex.build(tmp_path, examples, tiny.encoder(), progress=False)
    samples = read_samples(tmp_path)
    assert samples.tokens.tolist() == index.tokens(np.arange(9)).tolist()
    with pytest.raises(ValueError, match="--column x: an offline index has no columns"):
        read_samples(tmp_path, column="x")
    assert list(samples.grids) == [index.grids(number) for number in range(9)]
    shown = plan_json(capsys, tmp_path, "--ranks", 2, "--samples-per-step", 2, "--max-tokens", 2000, "--no-advice")
    assert shown["samples"]["count"] == 9


WRONG = [
    (["nothing.jsonl", "--max-tokens", "8"], "no file or folder nothing.jsonl; a built-in workload is written workload:NAME"),
    (["workload:sft", "--column", "x"], "--column names a column of a file, and workload 'sft' is built in"),
    (["workload:nix"], "no workload 'nix'; there are sft, bimodal, long-tail,"),
    ([], "give either a file of lengths or a workload"),
    (["FILE", "--workload", "sft"], "give either a file of lengths or a workload"),
    (["FILE"], "--max-tokens is missing"),
    (["FILE", "--max-tokens", "0"], "--max-tokens must be an integer of at least 1, got 0"),
    (["FILE", "--max-tokens", "1000", "--ranks", "0"], "--ranks must be an integer of at least 1, got 0"),
    (["FILE", "--max-tokens", "1000", "--ranks", "4097"], "--ranks must be at most 4,096, got 4,097"),
    (["FILE", "--max-tokens", "1000", "--ranks", "4096", "--samples-per-step", "257"], "at most 1,048,576 samples, got 4,096"),
    (["FILE", "--max-tokens", "1000", "--ranks", "10"], "150 samples, and one step of 10 ranks x 16 samples takes 160"),
    (["FILE", "--max-tokens", "1000", "--tolerance", "2"], "--tolerance must be a number from 0.0 to 1.0, got 2.0"),
    (["FILE", "--max-tokens", "1000", "--column", "x"], "has no column 'x'; it has num_tokens"),
    (["FILE", "--max-tokens", "1000", "--model", "nothing"], "--model nothing: no such file"),
    (["FILE", "--max-tokens", "10"], "150 of 150 samples are longer than a pack's 10 tokens (the samples have 21 to 878)"),
    (["FILE", "--max-tokens", "500", "--oversize", "error"], "training would stop at the first; raise --max-tokens, or pass"),
    (["FILE", "--max-tokens", "3", "--align", "8"], "--max-tokens 3 x --cp 1 is below --align 8"),
    (["FILE", "--max-tokens", "1000", "--seed", "-1"], "--seed must be an integer of at least 0, got -1"),
    (["FILE", "--max-tokens", "1000", "--steps", "0"], "--steps must be an integer of at least 1, got 0"),
]


@pytest.mark.parametrize("arguments, message", WRONG)
def test_wrong_input_is_one_line(arguments, message, lengths_file, capsys):
    given = [str(lengths_file) if one == "FILE" else one for one in arguments]
    assert run(["plan", *(["--ranks", "2"] if "--ranks" not in given else []), *given]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("evenpack plan: ") and err.count("\n") == 1
    assert message in err


def test_media_need_a_model_with_a_tower(configs, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"tokens": 90, "image_grid_thw": [[1, 4, 4]]}\n' * 40)
    arguments = ["plan", str(tmp_path / "a.jsonl"), "--ranks", "2", "--max-tokens", "400", "--no-advice", "--model"]
    assert run([*arguments, str(configs / "text")]) == 1
    assert "has media, and qwen3 has no vision tower" in capsys.readouterr().err
    assert run([*arguments, str(configs / "vl")]) == 0
    assert run([*arguments[:5], "50", *arguments[6:], str(configs / "vl"), "--oversize", "truncate"]) == 1
    assert "some with media" in capsys.readouterr().err


def test_usage(capsys):
    for arguments, code in ((["plan", "x"], 2), (["plan", "x", "--ranks", "2", "--sync", "never"], 2), (["plan", "--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            run(arguments)
        assert ended.value.code == code
    assert "evenpack plan lengths.jsonl --ranks 64 --max-tokens 8192" in capsys.readouterr().out


def test_most_samples_left_out_are_said_first_and_by_the_exit_code(lengths_file, capsys):
    limit = int(np.sort(LENGTHS)[60])
    above = int((limit < LENGTHS).sum())
    arguments = [
        "plan",
        str(lengths_file),
        "--ranks",
        "2",
        "--samples-per-step",
        "4",
        "--max-tokens",
        str(limit),
        "--no-advice",
    ]
    assert run(arguments) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        f"MOST SAMPLES ARE LEFT OUT: {above} of 150 samples ({above / 150:.1%}) are longer than a pack of --max-tokens"
    )
    for oversize, done in (("drop", "dropped"), ("truncate", "cut")):
        assert run([*arguments, "--max-dropped", "0.01", "--oversize", oversize]) == 3
        out, err = capsys.readouterr()
        assert f"{above / 150:.1%} of the samples are {done}, --max-dropped is 0.01" in err
        assert out.startswith(f"MOST SAMPLES ARE {'LEFT OUT' if oversize == 'drop' else 'CUT'}: {above} of 150")
        assert run([*arguments, "--max-dropped", f"{above / 150}", "--oversize", oversize]) == 0
        capsys.readouterr()
    assert run([*arguments, "--max-dropped", "0.9"]) == 0
    assert run([*arguments, "--max-dropped", "2"]) == 1
    assert "--max-dropped must be a number from 0.0 to 1.0, got 2.0" in capsys.readouterr().err
