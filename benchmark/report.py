"""What every benchmark here shares: facts about the machine, prompts, tables, plots and JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def machine_facts() -> dict[str, Any]:
    """What the numbers were measured on. ``load_average`` is that of the last minute before the start: on a quiet
    machine it is near 0."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": sorted(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("sglang-ssd", "sglang", "torch", "pyzmq")},
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def read_prompts() -> list[str]:
    """The texts of ``prompts.json``: varied chat prompts, no two alike."""
    return [prompt["text"] for prompt in json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))]


def chat_token_ids(model_path: str, prompts: Sequence[str]) -> list[list[int]]:
    """Each prompt as one user turn in the model's own chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
        )
        for prompt in prompts
    ]


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain-text table. Numbers are rounded to three significant places at most and set right, None is ``-``."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    is_number = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        return "  ".join(
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, is_number, strict=True)
        ).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, cells)])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def new_figure(num_columns: int = 1):
    """A figure for a file and its axes, an array of them when there are several. matplotlib is imported only where
    something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(ncols=num_columns, figsize=(7 * num_columns, 4), layout="constrained")


def save_figure(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def read_results(path: Path, setup: dict[str, Any]) -> dict[str, Any]:
    """The results that earlier parts of the same run left in ``path``, by name; none when there is no such file.

    Raises SystemExit when they are of another setup: such results are not to be mixed.
    """
    if not path.exists():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if value["setup"] != setup:
        raise SystemExit(f"{path} has results of {value['setup']}, not of {setup}: choose another --out")
    return value["results"]


def write_results(path: Path, setup: dict[str, Any], results: dict[str, Any]) -> None:
    write_json(path, {"setup": setup, "results": results})


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")
