"""The planner's command line: its table, its plot, its reading of a server, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sglang_ssd.algorithm.acceptance import SpeculationEstimator
from sglang_ssd.algorithm.lookahead import RoundCosts, affine_cost, predict_sd, predict_ssd
from sglang_ssd.plan import fetch_estimates, main, plan, plan_inputs

FLAGS = ["--acceptance", ".8", "--power-law-r", "1", "--verify-ms", "11.5", "--draft-depth-ms", "2.54"]


@contextmanager
def server(info):
    """A server whose /server_info answers with ``info``; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(info if self.path == "/server_info" else None).encode()
            self.send_response(200 if self.path == "/server_info" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def measured_server_info():
    est = SpeculationEstimator(max_lookahead=7, max_rank=16)
    for i in range(400):
        est.observe_round(
            source="hit", num_proposed=4, num_accepted=4 if i % 3 else 1, bonus_rank=i % 2, hit=True
        )
    for num_tokens, ms in ((1, 11.0), (5, 11.5), (9, 12.0)):
        est.observe_verify(ms, num_tokens)
    est.observe_draft_depth(2.5, 16)
    return {"internal_states": [{"ssd": {"estimates": est.snapshot()._asdict()}}]}


def rows_of(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines()]
    return [line for line in lines if line and line[0].isdigit()]


def test_a_plan_is_the_best_of_what_is_allowed():
    costs = RoundCosts(affine_cost(11.5), affine_cost(2.54, 0.01), 2.54, 0.2, 0.02)
    inputs = plan_inputs(acceptance=0.8, power_law_r=1.0, costs=costs)
    allowed = {"lookaheads": [1, 2, 3, 4], "budgets": [0, 8, 16]}
    for row in plan(inputs, [1, 4, 16], **allowed):
        everything = [
            predict_ssd(k, b, row.batch_size, costs, inputs.quality).tokens_per_ms
            for k in allowed["lookaheads"]
            for b in allowed["budgets"]
        ]
        assert row.ssd.tokens_per_ms >= 0.99 * max(everything)
        assert row.ssd_tokens_per_s == pytest.approx(1000 * row.ssd.tokens_per_ms)
        assert len(row.fan_out) == row.ssd.lookahead + 1 and sum(row.fan_out) == row.ssd.budget
        sd = [1000 * predict_sd(k, row.batch_size, costs, inputs.quality) for k in allowed["lookaheads"]]
        assert row.sd_tokens_per_s == pytest.approx(max(sd))
        assert row.sd_lookahead == 1 + sd.index(max(sd))
        assert row.ar_tokens_per_s == pytest.approx(1000 / 11.5)
        assert (row.ssd.fallback == "neural") == (row.batch_size < row.fallback_threshold)


def test_the_table_has_a_line_for_each_batch_size(capsys):
    assert main([*FLAGS, "--batch-sizes", "1,2,4"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert {row[1] for row in rows} == {"87.0"}
    assert float(rows[0][4]) > float(rows[0][2]) > float(rows[0][1])


def test_a_useless_draft_is_planned_at_the_minimum(capsys):
    main(["--acceptance", "0", "--verify-ms", "11.5", "--draft-depth-ms", "2.54", "--lookaheads", "1,3,5"])
    [row] = rows_of(capsys.readouterr().out)
    assert row[7:9] == ["1", "0"]


def test_more_time_for_each_row_and_the_wire_are_counted(capsys):
    speeds = []
    for extra in (
        [],
        ["--verify-row-ms", "2"],
        ["--draft-row-ms", "1"],
        ["--service-ms", "5"],
        ["--fork-ms", "9"],
    ):
        main([*FLAGS, *extra])
        speeds.append(float(rows_of(capsys.readouterr().out)[0][4]))
    assert all(speed < speeds[0] for speed in speeds[1:])
    main([*FLAGS, "--batch-sizes", "64", "--ngram-acceptance", ".5"])
    good_backup = float(rows_of(capsys.readouterr().out)[0][4])
    main([*FLAGS, "--batch-sizes", "64"])
    assert good_backup > float(rows_of(capsys.readouterr().out)[0][4])
    main([*FLAGS, "--batch-sizes", "64", "--ngram-acceptance", ".5", "--ngram-ms", "30"])
    assert good_backup > float(rows_of(capsys.readouterr().out)[0][4])


def test_a_servers_measurements_are_read_and_flags_win(capsys):
    info = measured_server_info()
    with server(info) as url:
        assert fetch_estimates(url)["acceptance"] == pytest.approx(
            info["internal_states"][0]["ssd"]["estimates"]["acceptance"]
        )
        main(["--server-url", url + "/"])
        [row] = rows_of(capsys.readouterr().out)
        assert float(row[1]) == pytest.approx(1000 / 11.0, abs=0.1)
        main(["--server-url", url, "--verify-ms", "20"])
        [other] = rows_of(capsys.readouterr().out)
        assert float(other[1]) == pytest.approx(50.0)


@pytest.mark.parametrize("info", [{}, {"internal_states": []}, {"internal_states": [{}]}, []])
def test_a_server_without_ssd_is_an_error_that_says_so(capsys, info):
    with server(info) as url, pytest.raises(SystemExit):
        main(["--server-url", url])
    assert 'has no internal_states[0]["ssd"]' in capsys.readouterr().err


def test_an_unreachable_server_is_an_error_without_a_trace(capsys):
    with server({}) as url:
        pass
    with pytest.raises(SystemExit) as stop:
        main(["--server-url", url])
    assert stop.value.code == 2
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--acceptance", ".8", "--verify-ms", "9"], "--draft-depth-ms is needed"),
        (["--verify-ms", "9", "--draft-depth-ms", "1"], "--acceptance is needed"),
        ([*FLAGS, "--acceptance", "1.8"], "acceptance must be a probability in [0, 1], got 1.8"),
        ([*FLAGS, "--verify-ms", "0"], "--verify-ms must be above 0, got 0.0"),
        ([*FLAGS, "--verify-ms", "nan"], "--verify-ms must be above 0, got nan"),
        ([*FLAGS, "--power-law-r", "-1"], "--power-law-r must be above 0, got -1.0"),
        ([*FLAGS, "--service-ms", "-1"], "--service-ms must be 0 or more, got -1.0"),
        ([*FLAGS, "--fork-ms", "-1"], "--fork-ms must be 0 or more, got -1.0"),
        ([*FLAGS, "--ngram-acceptance", "2"], "acceptance must be a probability in [0, 1], got 2.0"),
        ([*FLAGS, "--batch-sizes", "1,x"], "expected whole numbers separated by commas, got '1,x'"),
        ([*FLAGS, "--lookaheads", "0,1"], "each must be 1 or more, got 0"),
        ([*FLAGS, "--budgets", "-4"], "each must be 0 or more, got -4"),
        (["--server-url", "file:///etc/hostname"], "--server-url must begin with http:// or https://"),
    ],
)
def test_bad_flags_stop_with_one_line_that_names_them(capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        main(flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_plot_is_an_image(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main([*FLAGS, "--batch-sizes", "1,4,16", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def test_without_a_plot_matplotlib_is_not_imported():
    code = f"import sys, sglang_ssd.plan as p; p.main({FLAGS!r}); assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_plot_without_matplotlib_stops_with_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        main([*FLAGS, "--plot", "plan.png"])
    assert "--plot plan.png needs matplotlib" in capsys.readouterr().err.splitlines()[-1]
