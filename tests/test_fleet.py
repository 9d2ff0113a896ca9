"""The simulation of a fleet agrees with closed formulas, loses no request, and repeats itself."""

import importlib.util
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = RESULTS / "engine_h200_202611c.json"


@pytest.fixture(name="fleet_model")
def _fleet_model(monkeypatch):
    return load(monkeypatch, "fleet_model")


def load(monkeypatch, name):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def run_script(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "benchmarks/simulate_fleet.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def make_jobs(fleet_model, count, rate, canvases=1, steps=1, seed=3):
    """Requests with prompts of one token, which take no time."""
    rng = random.Random(seed)
    now = 0.0
    jobs = []
    for _ in range(count):
        now += rng.expovariate(rate / 1e3)
        jobs.append(fleet_model.Job(now, 1, 256 * canvases, (steps,) * canvases))
    return jobs


def mean_response(jobs):
    return statistics.mean(job.finish - job.arrival for job in jobs)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_canvas_at_a_time_waits_as_long_as_in_an_m_d_1_queue(fleet_model, load):
    """Mean time in an M/D/1 system: service * (1 + load / (2 * (1 - load)))."""
    table = fleet_model.StepTable(step_ms={0: {1: 10.0}})
    rules = fleet_model.EngineRules(max_running=1, has_own_clients=False)
    jobs = make_jobs(fleet_model, 30_000, load * 100)
    figures = fleet_model.simulate(jobs, table, rules, 1)
    assert mean_response(jobs) == pytest.approx(10 * (1 + load / (2 * (1 - load))), rel=0.05)
    assert figures["utilisation"] == pytest.approx(load, rel=0.03)


def test_steps_of_chance_wait_as_long_as_in_an_m_g_1_queue(fleet_model):
    """Pollaczek and Khinchine: the mean wait is rate * E[service^2] / (2 * (1 - load))."""
    rng = random.Random(8)
    jobs = make_jobs(fleet_model, 20_000, 60)
    for job in jobs:
        job.steps = (rng.choice((2, 4, 14)),)
    table = fleet_model.StepTable(step_ms={0: {1: 1.5}})
    fleet_model.simulate(jobs, table, fleet_model.EngineRules(max_running=1, has_own_clients=False), 1)
    services = [1.5 * steps for steps in (2, 4, 14)]
    load = 0.06 * statistics.mean(services)
    wait = 0.06 * statistics.mean(service**2 for service in services) / (2 * (1 - load))
    assert mean_response(jobs) == pytest.approx(statistics.mean(services) + wait, rel=0.05)


def test_every_request_ends_once_after_its_first_frame_and_all_work_is_done(fleet_model):
    table = fleet_model.read_engine_table(MEASURED, None)
    jobs = fleet_model.make_jobs(600, 15.0, fleet_model.AZURE_CONVERSATION, (12, 20), seed=4)
    assert any(len(job.steps) > 1 for job in jobs)
    figures = fleet_model.simulate(jobs, table, fleet_model.EngineRules(), 3)
    assert figures["finished"] == len(jobs)
    for job in jobs:
        assert job.arrival < job.first_frame <= job.finish
        assert job.prefilled == job.prompt
        assert job.canvas == len(job.steps)
        assert job.finish - job.arrival >= sum(job.steps) * table.step(1, 0)


def test_a_request_alone_takes_what_its_parts_take(fleet_model):
    table = fleet_model.StepTable(
        step_ms={0: {1: 10.0, 2: 15.0}}, prefill_ms=((0, 0.0), (1000, 50.0)), commit_ms=4.0, sizes=(1, 2)
    )
    job = fleet_model.Job(100.0, 500, 300, (16, 12))
    fleet_model.simulate([job], table, fleet_model.EngineRules(), 1)
    assert job.first_frame == 100.0 + 25.0 + 10.0
    assert job.finish == 100.0 + 25.0 + 28 * 10.0 + 4.0


def test_a_long_prompt_delays_others_by_a_chunk_only(fleet_model):
    table = fleet_model.StepTable(step_ms={0: {1: 10.0, 2: 10.0}}, prefill_ms=((0, 0.0), (10_000, 1000.0)))
    rules = fleet_model.EngineRules(prefill_chunk=1000)
    short = fleet_model.Job(0.0, 10, 256, (30,))
    long = fleet_model.Job(5.0, 9_000, 256, (2,))
    fleet_model.simulate([short, long], table, rules, 1)
    assert short.finish == pytest.approx(1.0 + 30 * 10.0 + 900.0)  # a step of 110 ms for each of nine chunks
    assert long.first_frame == pytest.approx(11.0 + 9 * 110.0)


def test_a_new_client_gets_a_slot_beside_a_full_batch(fleet_model):
    table = fleet_model.StepTable(step_ms={0: {1: 10.0}}, sizes=(1,))
    waits = {}
    for has_own_clients in (True, False):
        jobs = [fleet_model.Job(0.0, 1, 256, (50,)), fleet_model.Job(1.0, 1, 256, (1,))]
        rules = fleet_model.EngineRules(max_running=1, has_own_clients=has_own_clients)
        fleet_model.simulate(jobs, table, rules, 1)
        waits[has_own_clients] = jobs[1].finish
    assert waits == {True: 20.0, False: 510.0}


def test_more_gpus_never_raise_the_slowest_times_of_the_same_arrivals(fleet_model):
    table = fleet_model.read_engine_table(MEASURED, "fp8")
    slowest = []
    for gpus in (1, 2, 4, 8):
        jobs = fleet_model.make_jobs(1200, 12.0, fleet_model.AZURE_CONVERSATION, (16, 16), seed=2)
        figures = fleet_model.simulate(jobs, table, fleet_model.EngineRules(), gpus)
        slowest.append((figures["first_p99_ms"], figures["finish_p99_ms"]))
    for more, fewer in zip(slowest[1:], slowest, strict=False):
        assert more[0] <= fewer[0] * 1.01
        assert more[1] <= fewer[1] * 1.01


def test_a_pod_stands_for_many(fleet_model):
    """Arrivals that are split by chance are Poisson processes; one router over all GPUs is at least as good.

    Means of several seeds: the medians of one seed differ by about 4% from those of another.
    """
    table = fleet_model.read_engine_table(MEASURED, "fp8")

    def average(gpus, pods, seeds):
        runs = []
        for seed in range(seeds):
            count, rate = 500 * gpus * pods, 3.5 * gpus * pods
            jobs = fleet_model.make_jobs(count, rate, fleet_model.AZURE_CONVERSATION, (16, 16), seed=seed)
            runs.append(fleet_model.simulate(jobs, table, fleet_model.EngineRules(), gpus, pods, seed))
        return {key: statistics.mean(run[key] for run in runs) for key in runs[0]}

    one_pod = average(2, 1, 6)
    three_pods = average(2, 3, 2)
    one_router = average(6, 1, 1)
    for key, tolerance in (("first_p50_ms", 0.06), ("finish_p50_ms", 0.06), ("finish_p99_ms", 0.12), ("utilisation", 0.04)):
        assert one_pod[key] == pytest.approx(three_pods[key], rel=tolerance)
    assert one_router["first_p99_ms"] <= three_pods["first_p99_ms"]
    assert one_router["finish_p99_ms"] <= three_pods["finish_p99_ms"]


@pytest.mark.parametrize("quant", [None, "fp8"])
def test_the_table_is_what_was_measured_at_measured_points(fleet_model, quant):
    table = fleet_model.read_engine_table(MEASURED, quant)
    result = json.loads(MEASURED.read_text())["engine"]
    runs = next(one["runs"] for one in result["ours"] if one["quant"] == quant)
    for run in runs:
        assert table.step(run["canvases"], run["context"]) == run["step_ms"]
        if run["canvases"] == 1:
            assert table.prefill(0, run["context"]) + run["step_ms"] == pytest.approx(run["first_ms"])
    assert table.step(3, 512) == table.step(4, 512)  # a graph of four canvases
    assert table.step(16, 512) == 2 * table.step(8, 512)
    assert table.step(1, 512) < table.step(1, 2000) < table.step(1, 4096)


def test_a_curve_of_bench_curve_is_a_table(fleet_model, tmp_path):
    curves = [{"context": 512, "step_ms": {"1": 10.0, "8": 40.0}}, {"context": 4096, "step_ms": {"1": 12.0, "8": 50.0}}]
    path = tmp_path / "curve.json"
    path.write_text("a table\n" + json.dumps({"shape": "released", "quant": "fp8", "steps": 16, "curves": curves}))
    table = fleet_model.read_engine_table(path, "fp8")
    assert [table.step(count, context) for context in (512, 4096) for count in (1, 8)] == [10.0, 40.0, 12.0, 50.0]
    assert table.step(8, 2304) == 45.0
    with pytest.raises(ValueError, match="no steps with bf16 weights: give a result of"):
        fleet_model.read_engine_table(path, None)


def test_interpolation_is_exact_at_its_points_and_linear_between(fleet_model):
    points = [(1, 5.0), (3, 9.0), (10, 2.0)]
    assert [fleet_model.interpolate(x, points) for x in (0, 1, 2, 3, 10, 17)] == [5.0, 5.0, 7.0, 9.0, 2.0, -5.0]
    assert fleet_model.interpolate(7, [(2, 4.0)]) == 4.0


def test_a_seed_repeats_a_simulation(fleet_model):
    table = fleet_model.read_engine_table(MEASURED, "fp8")
    runs = []
    for seed in (1, 1, 2):
        jobs = fleet_model.make_jobs(300, 6.0, fleet_model.AZURE_CONVERSATION, (12, 20), seed=seed)
        runs.append(fleet_model.simulate(jobs, table, fleet_model.EngineRules(), 2, 2, seed))
    assert runs[0] == runs[1] != runs[2]


def test_lengths_are_those_of_the_trace(fleet_model, tmp_path):
    rng = random.Random(1)
    drawn = [fleet_model.AZURE_CONVERSATION.draw(rng) for _ in range(20_000)]
    assert statistics.mean(prompt for prompt, _ in drawn) == pytest.approx(1463, rel=0.05)
    assert statistics.mean(answer for _, answer in drawn) == pytest.approx(139, rel=0.05)
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16,10,20\n")
    lengths = fleet_model.read_trace(path)
    assert {lengths.draw(rng) for _ in range(100)} == {(374, 44), (10, 20)}


def test_the_milliseconds_of_a_server_are_found_in_its_bursts(monkeypatch):
    load(monkeypatch, "fleet_model")
    validation = load(monkeypatch, "fleet_validation")
    steps = {1: 50.0, 2: 80.0, 4: 130.0, 8: 250.0}
    bursts = {
        (count, canvases, each): [9.0 + 12.0 * count + canvases * each * steps[count] + (canvases - 1) * 30.0 * count]
        for count in validation.BURSTS
        for canvases, each in validation.KINDS
    }
    table, overhead = validation.fit_table(bursts)
    assert table.step_ms[0] == pytest.approx(steps)
    assert (overhead, table.prefill(0, 1), table.commit_ms) == pytest.approx((9.0, 12.0, 30.0))


def test_a_plan_ends_with_json_and_a_picture(tmp_path):
    out = tmp_path / "plan.json"
    settings = ["--users", "2000", "--quant", "fp8", "--requests", "60", "--pod", "2", "--check-pods", "--out", str(out)]
    run = run_script(*settings)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result == json.loads(out.read_text())
    (row,) = result["plan"]
    assert row["first_p99_ms"] <= result["goal_ms"]
    assert row["cost_per_million_tokens"] == pytest.approx(row["gpus"] * 3.5 / (row["tokens_per_second"] * 3600) * 1e6)
    assert str(tmp_path) not in json.dumps(result)


@pytest.mark.parametrize("name", ["fleet_h200_202611", "fleet_finish_h200_202611"])
def test_the_page_has_the_tables_of_the_committed_runs(monkeypatch, name):
    load(monkeypatch, "fleet_model")
    script = load(monkeypatch, "simulate_fleet")
    result = json.loads((RESULTS / f"{name}.json").read_text())
    page = (ROOT / "docs" / "fleet.md").read_text()
    assert script.to_markdown(result) in page
    assert result["command"] in page


def test_a_plan_is_drawn(monkeypatch, tmp_path):
    load(monkeypatch, "fleet_model")
    script = load(monkeypatch, "simulate_fleet")
    times = {"first_p50_ms": 50.0, "first_p99_ms": 100.0, "finish_p50_ms": 500.0, "finish_p99_ms": 900.0}
    out = tmp_path / "plan.json"
    out.write_text(
        json.dumps({"goal_ms": 1000, "curves": {"diffusion fp8": [{"rate": 1.0, **times}, {"rate": 2.0, **times}]}})
    )
    script.draw(out)
    assert "<svg" in out.with_suffix(".svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0"], "a canvas takes at least one step, got '0': give 16 or 12-20"),
        (["--steps", "many"], "steps are a number or LOW-HIGH, got 'many': give 16 or 12-20"),
        (["--users", "-3"], "must be a number above 0, got '-3'"),
        (["--price", "nan"], "must be a number above 0, got 'nan'"),
        (["--first-ms", "73"], "milliseconds until a first step are QUANT:CONTEXT=MS, got '73': give fp8:4096=73"),
        (["--table", "nowhere.json"], "nowhere.json is not a file of JSON"),
        (["--table", "benchmarks/results/infill_tiny_202611.json"], "has no steps with bf16 weights"),
        (["--trace", "README.md"], "give a CSV file with the columns ContextTokens and GeneratedTokens"),
        (["--goal-ms", "1", "--quant", "fp8", "--requests", "20", "--users", "1000"], "no number of GPUs keeps the goal"),
    ],
)
def test_a_mistake_gets_one_sentence(monkeypatch, capsys, arguments, sentence):
    load(monkeypatch, "fleet_model")
    script = load(monkeypatch, "simulate_fleet")
    monkeypatch.setattr(sys, "argv", ["simulate_fleet.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code not in (0, None)
    printed = capsys.readouterr()
    told = ended.value.code if isinstance(ended.value.code, str) else printed.err.splitlines()[-1]
    assert sentence in told
    assert "\n" not in told


def test_a_fleet_without_gpus_or_requests_is_refused(fleet_model):
    table = fleet_model.StepTable(step_ms={0: {1: 10.0}})
    with pytest.raises(ValueError, match="at least one GPU, got 1 pods of 0"):
        fleet_model.simulate(make_jobs(fleet_model, 1, 1.0), table, fleet_model.EngineRules(), 0)
    with pytest.raises(ValueError, match="at least one request, got none"):
        fleet_model.simulate([], table, fleet_model.EngineRules(), 1)
    with pytest.raises(ValueError, match="max_running must be at least 1, got 0"):
        fleet_model.EngineRules(max_running=0)
    with pytest.raises(ValueError, match="took -1 ms: measure it again"):
        fleet_model.StepTable(step_ms={512: {1: -1}})
    with pytest.raises(ValueError, match="positive rate, got 0 a second"):
        fleet_model.make_jobs(1, 0, fleet_model.AZURE_CONVERSATION, (16, 16))
