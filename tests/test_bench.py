"""The arithmetic and the reports of `kdagen bench`, which need no GPU."""

import json

import pytest

from kdagen import bench_report
from kdagen.bench_report import Point, Timing
from kdagen.cli import main

GIB = 1 << 30


def point(heads=12, rows=1, us=4.0, limit=2.0, **peers):
    timings = {"op": us, "limit": limit, "copy": 3.0, "warm": 1.5, **peers}
    return Point(heads, rows, 69, True, {name: Timing(value, value, value) for name, value in timings.items()})


def test_fr_75_bytes_are_the_state_read_and_written():
    assert bench_report.state_bytes(12, 1) == 12 * 2 * 64 * 1024
    assert point(us=4.0).gigabytes_per_second("op") == pytest.approx(12 * 131072 / 4e-6 / 1e9)


def test_fr_75_the_ring_is_larger_than_the_cache_wherever_a_model_makes_it_so():
    assert bench_report.ring_layers(12, 1, 60 << 20, 100 * GIB) == (161, True)  # 69 layers of 0.75 MiB would fit
    assert bench_report.ring_layers(12, 64, 60 << 20, 100 * GIB) == (69, True)
    layers, cold = bench_report.ring_layers(96, 256, 60 << 20, 20 * GIB)
    assert layers == int(0.6 * 20 * GIB) // (96 * 256 * 65536) and cold
    assert bench_report.ring_layers(96, 256, 60 << 20, 1 << 20)[0] == 1


def test_long_graphs_are_replayed_less_often_but_often_enough_for_a_spread():
    assert [bench_report.replays_for(ms) for ms in (0.0, 0.2, 5.0, 7.5, 18.0, 1000.0)] == [30, 30, 30, 20, 10, 10]


def test_the_limit_is_a_share():
    assert point(us=4.0, limit=3.0).of_limit() == 0.75


def test_a_timing_is_a_median_with_its_spread():
    timing = Timing.of([float(n) for n in range(1, 102)])
    assert (timing.median_us, timing.low_us, timing.high_us) == (51.0, 11.0, 91.0)
    assert Timing.of([5.0]) == Timing(5.0, 5.0, 5.0)


def test_the_table_is_aligned_and_says_what_it_counts():
    text = bench_report.table([point(), point(96, 256, 418.7, 381.07)])
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["heads", "rows", "layers", "us"]
    assert len(lines[0]) == len(lines[1]) == len(lines[2])
    assert "0.91" in lines[2] and "limit: the best in-place kernel" in text
    cached = bench_report.table([Point(12, 1, 69, False, point().timings)])
    assert "69 (cached)" in cached


def test_peers_have_their_time_and_ratio_where_they_were_timed():
    text = bench_report.table([point(us=4.0, vllm=6.0), point(96, 2, us=5.0)])
    header, first, second = text.splitlines()[:3]
    assert header.endswith("vllm us  times") and first.endswith("6.00   1.50") and second.endswith("-      -")
    assert point(us=4.0, vllm=6.0).times_faster_than("vllm") == 1.5
    assert point(vllm=6.0).peers == ["vllm"] and point().peers == []


def test_json_has_the_environment_and_every_timing(tmp_path):
    path = tmp_path / "bench.json"
    bench_report.write_json(path, [point(vllm=6.0)], {"device": "a GPU", "command": "kdagen bench"})
    record = json.loads(path.read_text())
    assert record["environment"]["command"] == "kdagen bench"
    assert record["points"][0]["times_faster_than"] == {"vllm": 1.5} and record["points"][0]["of_limit"] == 0.5
    assert record["points"][0]["timings"]["op"] == {"median_us": 4.0, "low_us": 4.0, "high_us": 4.0}


def test_the_plot_is_a_picture(tmp_path):
    path = tmp_path / "bench.png"
    bench_report.write_plot(
        path,
        [point(h, b, 4.0 * b, **({"vllm": 5.0 * b} if h == 12 else {})) for h in (12, 96) for b in (1, 8, 64)],
        "title",
    )
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.mark.parametrize("killed", [KeyboardInterrupt, SystemExit])
def test_a_run_that_ends_early_keeps_what_it_measured(killed, monkeypatch, tmp_path, capsys):
    from kdagen import bench

    def measure(heads, rows, peers):
        if rows == 4:
            raise killed
        return point(heads, rows)

    facts = {name: f"the {name}" for name in ("device", "driver", "runtime", "torch", "date", "command")}
    for name, value in (("require_gpu", lambda: None), ("environment", lambda: facts), ("measure", measure)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench.op, "prepare", lambda heads: None)
    monkeypatch.setattr(bench, "find_peers", lambda tree, heads: [])
    path = tmp_path / "bench.json"
    if killed is KeyboardInterrupt:
        assert bench.main_report([12], [1, 2, 4, 8], path, None) == 130
        out = capsys.readouterr().out
        assert all(fact in out for fact in facts.values()) and "  12     2" in out
    else:
        with pytest.raises(SystemExit):
            bench.main_report([12], [1, 2, 4, 8], path, None)
    assert [p["rows"] for p in json.loads(path.read_text())["points"]] == [1, 2]


def test_without_a_gpu_bench_says_so(capsys):
    assert main(["bench"]) == 1
    assert capsys.readouterr().err.startswith("kdagen: bench: expected a GPU that torch sees, got torch 2")
    assert main(["bench", "--rows", "0"]) == 2
    assert capsys.readouterr().err == "kdagen: --rows: expected batch sizes of 1 or more, got 0\n"
