"""Tables of the readme and of docs/studies, made from the JSON files under benchmarks/results.

python scripts/bench_table.py --write     # renew every table between <!-- table: NAME --> and <!-- end -->
python scripts/bench_table.py --check     # exit 1 where a page differs from its JSON
python scripts/bench_table.py benchmarks/results/h200/ablation.json     # print one: ablation, precisions or trainers
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from records import read_record

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
RENAMED = {  # flags of older files, as they are called today
    "render.thin": "sampler.merge-weak-samples",
    "render.alpha-thre": "sampler.alpha-thre",
    "sampling.near-gradient": "loss.near-gradient",
    "sampling.distortion": "loss.distortion",
    "photo.depth-weight": "loss.depth",
}


class Units(string.Formatter):
    """`{peak_bytes:MB}`, `{rate:M}`, `{seconds:.1f}`; what is missing is a dash."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "-"
        if format_spec == "MB":
            return f"{value / 1e6:.0f} MB"
        if format_spec == "GB":
            return f"{value / 1e9:.2f} GB"
        if format_spec == "M":
            return f"{value / 1e6:.1f} M"
        if format_spec == "size":
            return f"{value[0]} x {value[1]}"
        if format_spec == "flags":
            return flags(value)
        return super().format_field(value, format_spec)

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key))


def flags(text: str) -> str:
    for old, new in RENAMED.items():
        text = text.replace(old, new)
    return " ".join(f"`{flag}`" for flag in text.split()) or "as configured"


def values(name: str) -> Any:
    return read_record(ROOT / "benchmarks" / "results" / f"{name}.json")["values"]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def listed(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """One line for each of the rows; a column is a header and the format of its cells."""
    form = Units()
    cells = [[form.format(cell, **row) for cell in columns.values()] for row in rows]
    return table(list(columns), [["-" if cell.startswith("- ") else cell for cell in line] for line in cells])


def number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


# Of names, flags and ops: what is not offered any more.
GONE = (
    "sparsity",
    "pixels of four rays",
    "rays all over the pixel",
    "pixel-spread",
    "rays-per-pixel",
    "voxel_variation",
    "error-guided",
    "train.draw",
)


def offered(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    named = ((row, str([row.get(key) for key in ("name", "flags", "op")])) for row in rows)
    return [row for row, words in named if not any(gone in words for gone in GONE)]


def ablation(found: dict[str, Any]) -> str:
    first, rows = found["rows"][0], []
    for row in offered(found["rows"]):
        name = row["name"].replace("pictures", "images")
        if row["psnr"] is None:
            rows.append([name, row.get("error") or "-", "", "", "", ""])
            continue
        memory = number(None if row["peak_bytes"] is None else row["peak_bytes"] / 1e6, ".0f", " MB")
        times = f"{row['seconds'] / first['seconds']:.2f}"
        rows.append([name, f"{row['seconds']:.1f} s", times, memory, f"{row['psnr']:.2f} dB"])
        rows[-1].append("" if row is first else f"{row['psnr'] - first['psnr']:+.2f}")
    headers = ["technique", "training", "times as long", "memory", "PSNR", "dB more"]
    if first["peak_bytes"] is None:  # measured on GPUs alone
        headers, *rows = ([*line[:3], *line[4:]] for line in [headers, *rows])
    return table(headers, rows)


def precision(found: dict[str, Any]) -> str:
    rows = []
    for line in found["same_batch"]:
        memory = None if line["peak_bytes"] is None else line["peak_bytes"] / 1e6
        speed = number(line["samples_per_second"] / 1e6, ".1f", " M")
        rows.append([line["kind"], speed, number(line["samples_per_second_ratio"], ".2f")])
        rows[-1] += [number(memory, ".0f", " MB"), number(line["peak_bytes_ratio"], ".2f")]
        rows[-1] += [number(line["psnr"], ".2f", " dB"), number(line["psnr_difference"], "+.2f"), str(line["skipped"])]
    headers = ["precision", "samples/s", "times fp32", "memory", "of fp32's", "PSNR", "dB more", "skipped"]
    return "\n\n".join([table(headers, rows), *equal_time(found)])


def precision_presets() -> str:
    """A row for each preset: memory and PSNR of fp32, and what the others differ by."""
    found: dict[str, dict[str, Any]] = {}
    for row in values("h200/precision_presets"):
        found.setdefault(row["preset"], {})[row["kind"]] = row
    rows = []
    for name, kinds in found.items():
        rows.append([f"`{name}`", str(kinds["fp32"]["steps"]), f"{kinds['fp32']['psnr']:.2f} dB"])
        for kind in ("fp16", "bf16"):
            row = kinds.get(kind)
            rows[-1] += ["-"] if row is None else [f"{row['psnr_difference']:+.2f} dB, {row['peak_bytes_ratio']:.2f}"]
    return table(["preset", "steps", "fp32", "fp16: PSNR, memory", "bf16"], rows)


def host_pixels() -> str:
    found = values("h200/host_pixels")
    rows = [{"place": place, **found[place]} for place in ("device", "host")]
    columns = {"pixels": "{place}", "a step": "{step_ms:.2f} ms", "ratio": "{ratio:.2f}", "memory": "{peak_bytes:MB}"}
    return listed(rows, columns)


def equal_time(found: dict[str, Any]) -> list[str]:
    """Where a coarse pass places fine samples: what a step takes, what fp32's time buys, and that in words."""
    if not found.get("fine_samples"):
        return []
    steps, times = [], []
    for search in found["fine_samples"]:
        parts = [number(search["passes"][name], ".2f", " ms") for name in ("coarse", "fine", "rest")]
        steps.append([search["kind"], *parts, number(search["step_ms"], ".2f", " ms")])
        steps[-1] += [number(search["ratio"], ".2f"), str(search["fine_samples"])]
    for line in found["same_time"]:
        memory = None if line["peak_bytes"] is None else line["peak_bytes"] / 1e6
        times.append([line["kind"], str(line["fine_samples"]), f"{line['steps']:.0f}", f"{line['seconds']:.1f} s"])
        times[-1] += [f"{line['rays_per_second'] / 1e3:.1f} k", f"{line['samples_per_second'] / 1e6:.2f} M"]
        times[-1] += [number(memory, ".0f", " MB"), number(line["psnr"], ".2f", " dB")]
        times[-1] += [number(line["psnr_difference"], "+.2f"), number(line["ssim"], ".3f")]
    headers = ["precision", "coarse pass", "fine pass", "rest", "a step", "times fp32's", "fine samples to train with"]
    tables = [table(headers, steps)]
    headers = ["precision", "fine samples", "steps", "training", "rays/s", "samples/s", "memory"]
    tables += [table([*headers, "PSNR", "dB more", "SSIM"], times)] if times else []
    return [*tables, "\n".join(f"- {text}" for text in found["in_words"])]


def trainers(found: dict[str, Any]) -> str:
    rows, measured = [], any(loop.get("peak_bytes") for loop in found["loops"])  # a CPU has no allocator to ask
    for loop in found["loops"]:
        times = [
            number(loop["step_ms"], ".2f", " ms"),
            number(loop["ratio"], ".3f"),
            number(loop["psnr"], ".2f", " dB"),
        ]
        memory = [number(loop["peak_bytes"] and loop["peak_bytes"] / 1e9, ".2f", " GB")] if measured else []
        rows.append([loop["label"], *times, *memory, str(loop["lines"])])
    return table(["loop", "a step", "to plain", "PSNR", *(["memory"] if measured else []), "lines"], rows)


def marks(name: str) -> str:
    found = values(name)["median_psnr"]
    return " / ".join(f"{mark['psnr']:.1f}" for mark in found) + " dB"


def link(*names: str) -> str:
    return ", ".join(f"[json](benchmarks/results/{name}.json)" for name in names)


def readme() -> str:
    lego, scenes = values("h200/lego_scene"), {row["scene"]: row for row in values("h200/scenes")}
    step, render = values("h200/step_profile")["as configured"], values("h200/render")["timings"][0]
    video, half = values("h200/outputs")["video"], values("h200/precision_ngp")["same_batch"]
    fp16 = next(line for line in half if line["kind"] == "fp16")
    fastest = {row["op"]: row for row in reversed(values("cpu/ops")) if row["backend"] == "cpu"}
    at = [f"{mark['psnr']:.1f}" for mark in lego["median_psnr"] if mark["seconds"] in (1, 5, 20)]
    fox, fern = scenes["ngp/fox"]["psnr"], scenes["llff/fern"]["psnr"]
    quality, bicycle = values("h200/quality_lego")[0], values("h200/bicycle_scene")["runs"][0]["marks"][0]
    outdoors, similar = f"{bicycle['psnr']:.1f} dB", f"{bicycle['ssim']:.2f}"
    gpu, cpu = "H200", "2 ARM cores"
    faster = values("cpu/step")["timings"][1]["ratio"]
    return table(
        ["what", "on", "result", "from"],
        [
            ["lego 800x800 after 1 / 5 / 20 s", gpu, f"{' / '.join(at)} dB", link("h200/lego_scene")],
            [
                "lego, preset `quality`, 60 s",
                gpu,
                f"{quality['psnr']['as configured']:.1f} dB",
                link("h200/quality_lego"),
            ],
            [
                "photos: fox 540x960 / fern 504x378, 60 s, no flags",
                gpu,
                f"{fox:.1f} / {fern:.1f} dB",
                link("h200/scenes"),
            ],
            [
                "photos: bicycle 1279x850, 60 s, no flags",
                gpu,
                f"{outdoors}, SSIM {similar}",
                link("h200/bicycle_scene"),
            ],
            ["training step, 2^18 samples", gpu, f"{step['step_ms_wall']:.2f} ms", link("h200/step_profile")],
            [
                "fp16 against fp32",
                gpu,
                f"{fp16['samples_per_second_ratio']:.1f}x faster, {fp16['peak_bytes_ratio']:.2f} of the memory",
                link("h200/precision_ngp"),
            ],
            [
                "800x800 frame / 120 of them as MP4",
                gpu,
                f"{render['milliseconds']:.1f} ms / {video['with_encoding_seconds']:.1f} s",
                link("h200/render", "h200/outputs"),
            ],
            ["lego 200x200 after 1 / 2 / 5 min", cpu, marks("cpu/lego_scene"), link("cpu/lego_scene")],
            ["built-in scene after 10 / 20 / 30 / 60 s", cpu, marks("cpu/toybox_scene"), link("cpu/toybox_scene")],
            [
                "step / hash encoding / marching against plain torch",
                cpu,
                f"{faster:.0f}x / {fastest['hash_encode']['total_ratio']:.0f}x / "
                f"{fastest['march']['total_ratio']:.0f}x faster",
                link("cpu/step", "cpu/ops"),
            ],
        ],
    )


def reliability() -> list[tuple[str, str, str]]:
    kill, tests = values("h200/kill_resume"), values("h200/gpu_tests")["runs"]
    return [
        (
            f"{kill['commands']} runs killed {kill['kills']} times, {kill['inside_a_save']} inside a save",
            f"{kill['lost']} lost or not equal to the bit",
            "kill_resume",
        ),
        (
            f"the tests that need a GPU, {len(tests)} times in a row",
            f"{tests[0]['passed']} passed, {sum(run['exit'] != 0 for run in tests)} failures",
            "gpu_tests",
        ),
    ]


def gpu_figures() -> str:
    lego, profile = values("h200/lego_scene"), values("h200/step_profile")
    step, fixed = profile["as configured"], profile["deterministic"]
    start, page = values("h200/first_preview"), values("h200/live_page")["cost"]
    vanilla, long = values("h200/vanilla_lego"), values("h200/long_run")
    made = long["trainers"]
    frame, video = values("h200/render")["timings"][0], values("h200/outputs")["video"]
    compat, quality = values("h200/compat_step")["ours"], values("h200/quality_lego")[0]
    seconds = " / ".join(f"{mark['seconds']:.0f}" for mark in lego["median_psnr"])

    def skipped(run: dict[str, Any]) -> str:
        return f"{run['rows'][-1]['skipped']} skipped, all weights finite"

    rows = [
        (f"PSNR after {seconds} s of training, median of 3 seeds", marks("h200/lego_scene"), "lego_scene"),
        ("the same after a run of 5 s", marks("h200/lego_5s"), "lego_5s"),
        ("samples skipped", f"{lego['runs'][0]['samples_skipped_fraction']:.1%}", "lego_scene"),
        ("preset `quality`, 60 s", f"{quality['psnr']['as configured']:.1f} dB", "quality_lego"),
        (
            "training step",
            f"{step['step_ms_wall']:.2f} ms, {step['rays_per_second'] / 1e6:.0f} M rays/s",
            "step_profile",
        ),
        ("kernel time of wall time", f"{step['kernel_over_wall']:.1%}", "step_profile"),
        ("step in deterministic mode", f"{fixed['step_ms_wall']:.2f} ms", "step_profile"),
        ("original NeRF's step, 2^16 samples", f"{values('h200/vanilla_step')['timings'][1]['step_ms']:.2f} ms", ""),
        (
            "original NeRF, all 50 test views",
            f"{vanilla['psnr']:.1f} dB after {vanilla['train_seconds']:.0f} s",
            "vanilla_lego",
        ),
        ("T-NeRF's step, 2^16 samples", f"{values('h200/tnerf_step')[0]['ms']:.2f} ms", "tnerf_step"),
        *((f"`{run['preset']}`, {run['steps']:,} steps", skipped(run), "long_run") for run in long["runs"]),
        (
            f"{len(made)} trainers made and dropped: GPU memory after the first / the last",
            f"{made[0]['gpu_bytes'] / 1e6:.0f} / {made[-1]['gpu_bytes'] / 1e6:.0f} MB",
            "long_run",
        ),
        (
            "command to first step, kernels not cached / cached",
            f"{start['cold']['training_starts']:.1f} / {start['cached']['training_starts']:.1f} s",
            "first_preview",
        ),
        (
            "command to first preview",
            f"{start['cold']['first_preview']:.1f} / {start['cached']['first_preview']:.1f} s",
            "first_preview",
        ),
        ("800x800 frame", f"{frame['milliseconds']:.1f} ms", "render"),
        (f"{video['frames']} frames of 800x800 as MP4", f"{video['with_encoding_seconds']:.2f} s", "outputs"),
        (
            "viewer, share of training time: idle / moving camera",
            f"{page['idle']:.1%} / {page['moving']:.1%}",
            "live_page",
        ),
        ("nerfacc's loop over `nerfturbo.compat`", f"{compat['ms_per_step_median']:.1f} ms a step", "compat_step"),
        *reliability(),
    ]
    return table(["what", "measured", "file"], [[a, b, f"`h200/{c or 'vanilla_step'}.json`"] for a, b, c in rows])


def cpu_figures() -> str:
    start, page, pool = values("cpu/first_preview"), values("cpu/live_page")["cost"], values("cpu/large_pool")
    kill, planted = values("cpu/kill_resume"), ("mutants", "mutants_fresh", "mutants_seed6")
    video, runs = values("cpu/outputs")["video"], pool["runs"]
    rows = [
        ("built-in scene, PSNR after 10 / 20 / 30 / 60 s", marks("cpu/toybox_scene"), "toybox_scene"),
        ("lego 200x200, PSNR after 1 / 2 / 5 min", marks("cpu/lego_scene"), "lego_scene"),
        ("training step", f"{values('cpu/step')['timings'][1]['step_ms']:.1f} ms", "step"),
        (
            "command to first preview, kernels not cached / cached",
            f"{start['cold']['first_preview']:.1f} / {start['cached']['first_preview']:.1f} s",
            "first_preview",
        ),
        (f"{video['frames']} frames of 200x200 as MP4", f"{video['with_encoding_seconds']:.1f} s", "outputs"),
        (
            "viewer, share of training time: idle / moving camera",
            f"{page['idle']:.1%} / {page['moving']:.1%}",
            "live_page",
        ),
        (
            f"{pool['pictures']} 4K images from a mapped file: peak memory, first / second start",
            f"{runs['first']['peak_rss_bytes'] / 1e9:.2f} GB, {runs['first']['opened_seconds']:.0f} / "
            f"{runs['again']['opened_seconds']:.1f} s",
            "large_pool",
        ),
        (
            f"{kill['commands']:,} commands killed {kill['kills']:,} times and started again",
            f"{kill['lost']} lost or not equal to the bit",
            "kill_resume",
        ),
    ]
    for name in planted:
        bugs = values(f"cpu/{name}")
        found = f"tests noticed {bugs['noticed_before']}, notice {bugs['noticed']} today"
        found += f", {bugs.get('gone', 0)} gone with their code, {bugs['equivalent']} change nothing"
        rows.append((f"{bugs['planted']} bugs planted in the code, one at a time", found, name))
    return table(["what", "measured", "file"], [[a, b, f"`cpu/{c}.json`"] for a, b, c in rows])


def ops() -> str:
    rows = [row for row in offered(values("cpu/ops")) if row["backend"] == "cpu"]
    headers = {"op": "`{op}`", "size": "{size}", "forward, times faster": "{forward_ratio:.1f}"}
    return listed(rows, headers | {"with gradients": "{total_ratio:.1f}"})


def kernels(name: str) -> str:
    rows = values(name)["as configured"]["kernels"]
    return listed(rows, {"kernel": "`{kernel}`", "us a step": "{us_per_step:.0f}", "launches": "{launches_per_step:g}"})


def frames() -> str:
    columns = {"size": "{width} x {height}", "by": "`{way}`", "time": "{milliseconds:.1f} ms"}
    return listed(values("h200/render")["timings"], columns)


def scenes() -> str:
    rows = []
    slow = {row["scene"]: row for row in values("cpu/scenes")}
    for fast in values("h200/scenes"):
        small = slow[fast["scene"]]
        cells = [
            fast["scene"],
            fast["format"],
            f"{fast['views']['train']} + {fast['views'][fast['scored_on']]}",
            fast["preset"],
        ]
        for row in (small, fast):
            cells += ["{}x{}".format(*row["resolution"]), f"{row['psnr']:.2f} dB", f"{row['blurred_psnr']:.2f} dB"]
        rows.append(cells)
    headers = ["scene", "format", "train + test", "preset", "CPU size", "180 s", "blurred", "GPU size", "60 s"]
    return table([*headers, "blurred"], rows)


def variants(rows: Iterable[Mapping[str, Any]]) -> str:
    columns = {
        "flags": "{flags:flags}",
        "samples per ray": "{samples_per_ray:.1f}",
        "training": "{training_psnr:.2f} dB",
    }
    return listed(rows, columns | {"held out": "{psnr[as configured]:.2f} dB"})


def quality_gpu() -> str:
    rows = offered(values("h200/quality"))
    columns = {"flags": "{flags:flags}", "training": "{training_psnr:.2f}", "held out": "{psnr[as configured]:.2f}"}
    columns |= {"`--refine 2`": "{psnr[refine 2]:.2f}", "`--rays 2`": "{psnr[4 rays]:.2f}"}
    return listed(rows, columns)


def short(rows: Iterable[Mapping[str, Any]], common: str) -> list[dict[str, Any]]:
    """Rows without the flags that all of them have."""
    return [{**row, "flags": row["flags"].replace(common, "").strip()} for row in rows]


def merged(where: str, key: str) -> str:
    common = "train.max-rays=1024 train.initial-rays=1024 train.batch-samples=262144 render.alpha-thre=0"
    rows = short(short(values(where)[key], common), common.replace("1024", "512").replace(" render.alpha-thre=0", ""))
    columns = {"flags": "{flags:flags}", "seed": "{seed}", "samples per ray": "{samples_per_ray:.1f}"}
    return listed(rows, columns | {"rays a step": "{rays_per_step:.0f}", "held out": "{psnr[as configured]:.2f} dB"})


def quality_cpu() -> str:
    common = "train.max-rays=512 train.initial-rays=512 train.batch-samples=262144 render.alpha-thre=0"
    return variants(short(offered(values("cpu/quality")["lego, 100 x 100, 512 rays a step"]), common))


def quality_presets() -> str:
    columns = {"preset": "`{preset}`", "flags": "{flags:flags}", "steps": "{steps}", "CPU time": "{user_seconds:.1f} s"}
    return listed(
        values("cpu/quality")["lego, 100 x 100, by CPU time of one thread"], columns | {"PSNR": "{psnr:.2f} dB"}
    )


def hidden() -> str:
    columns = {"rule": "{rule}", "cells emptied": "{hidden:.0%}", "training": "{training_psnr:.2f} dB"}
    return listed(values("h200/hidden"), columns | {"val": "{psnr:.2f} dB"})


def dynamic() -> str:
    run = values("h200/dynamic")["runs"][0]
    rows = [*run["marks"], {"seconds": run["seconds"], "step": run["steps"], "psnr": run["psnr"]}]
    return listed(rows, {"training": "{seconds:.0f} s", "steps": "{step}", "PSNR, val": "{psnr:.2f} dB"})


def deep_dynamic() -> str:
    names = {"tnerf": "`tnerf`", "dnerf": "`dnerf`"}
    rows = [
        [names[run["name"]], f"{run['seconds']:.0f} s", f"{run['gpu_bytes'] / 1e9:.2f} GB", f"{run['psnr']:.2f} dB"]
        for run in values("h200/dynamic_deep")["runs"]
    ]
    rows += [["nerfacc's T-NeRF, test split", "44 min, TITAN RTX", "11 GB", "24.32 dB"]]
    rows += [["D-NeRF, test split", "days", "", "21.64 dB"]]
    return table(["", "training", "memory", "PSNR"], rows)


def few() -> str:
    """Pairs of runs without and with the depth loss."""
    rows = []
    for key in ("few: beer", "few: fern", "few: toybox"):
        runs = [run for run in values("cpu/photos")[key] if "prototype" not in run["case"]]
        rows += [{**run, "scene": key[5:], "case": run["case"].replace(" ", "=")} for run in runs]
    columns = {"scene": "{scene}", "flags": "{case:flags}", "seed": "{seed}", "held out": "{psnr:.2f} dB"}
    return listed(rows, columns | {"depth error": "{depth_error:.3f}", "light within 10%": "{there:.0%}"})


def exposed() -> str:
    found = {key[9:]: runs for key, runs in values("cpu/photos").items() if key.startswith("exposed: ")}
    rows = []
    for scene, run in [(scene, run) for scene, runs in found.items() for run in runs]:
        flag = run["case"].removeprefix("pictures as they were").strip()
        images = "as they were" if run["case"].startswith("pictures") else "changed"
        rows.append([scene, images, f"`{flag}`" if flag else "", str(run["seed"])])
        scores = (run["psnr"], run.get("plain_right_halves"), run.get("right_halves"))
        rows[-1] += [number(score, ".2f", " dB") for score in scores]
    return table(["scene", "images", "flags", "seed", "test views", "right halves", "left halves fitted"], rows)


def cameras() -> str:
    columns = {"cameras": "{case}", "steps": "{steps}", "angle": "{degrees_after:.2f}", "off by": "{seen_after:.3f}"}
    columns |= {"PSNR": "{psnr:.1f} dB", "`--align-poses`": "{psnr_aligned:.1f} dB"}
    return listed(values("cpu/cameras_toybox"), columns)


def cameras_of_captures() -> str:
    columns = {
        "scene": "{scene}",
        "cameras": "{case}",
        "seed": "{seed}",
        "angle": "{degrees_after:.2f}",
        "PSNR": "{psnr:.2f} dB",
    }
    names = ("fox", "fox_1", "bicycle", "bicycle_wrong")
    return listed([{"seed": 0} | row for name in names for row in values(f"cpu/cameras_{name}")], columns)


def methods(name: str) -> str:
    columns = {"method": "{method}", "steps": "{steps}", "training": "{train_seconds:.0f} s", "PSNR": "{psnr:.1f} dB"}
    return listed(values(name)[0]["rows"], columns | {"SSIM": "{ssim:.3f}", "seconds a view": "{frame_seconds:.2f}"})


def captures(name: str) -> str:
    """Seeds of one variant in one line; rows of a first form of a technique are left out."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in values(name):
        if not row.get("note"):
            size, views = "{}x{}".format(*row["resolution"]), str(len(row["views"]))
            key = (row["scene"], size, row["preset"], flags(row["flags"]), str(row["steps"]), views)
            groups.setdefault(key, []).append(f"{row['psnr']:.2f}")
    rows = [[*key, ", ".join(scores)] for key, scores in sorted(groups.items())]
    return table(["capture", "size", "preset", "flags", "steps", "views", "held out, dB (one per seed)"], rows)


def choices(name: str) -> str:
    """Variants that were trained for some seconds, by scene; `FAST` and `PROPOSALS` are said above the table."""
    fast = "sampler.coarse-samples=64,64 sampler.n-samples=32 train.max-rays=32768 train.batch-samples=1048576 "
    fast += "field.n-levels=10 field.max-resolution=8192 field.log2-entries=21"
    proposals = "sampler.resolutions=512,2048 sampler.log2-entries=20 sampler.levels=7"
    rows = []
    for row in values(name):
        if "error" in row:
            continue
        given = row["flags"].replace(fast, "FAST").replace(proposals, "PROPOSALS")
        cells = [row["scene"], f"{row['seconds']:.0f}", f"`{given}`" if given else "", row.get("note", "")]
        ssim = row.get("ssim")
        cells += [f"{row['seconds'] / row['steps'] * 1e3:.2f}", f"{row['psnr']['as configured']:.2f}"]
        rows.append([*cells, "" if ssim is None else f"{ssim:.3f}"])
    return table(["scene", "s", "flags", "", "ms a step", "held out, dB", "SSIM"], rows)


def anti_alias() -> str:
    rows = []
    for on in ("cpu", "h200"):
        for row in values(f"{on}/anti_alias"):
            scene = f"{row['scene']} at an eighth" if on == "cpu" else row["scene"]
            given = f"`{row['flags']}`" if row["flags"] else ""
            rows.append(
                [scene, given, row.get("note", ""), number(row.get("seconds"), ".0f", " s"), f"{row['steps']:,}"]
            )
            rows[-1] += [f"{row['psnr']['as configured']:.2f}", f"{row['ssim']:.3f}"]
    return table(["scene", "flags", "", "training", "steps", "held out, dB", "SSIM"], rows)


def scored(name: str) -> str:
    """The test views of a scene at marks of training time, one row per mark of the first seed."""
    rows = values(name)["runs"][0]["marks"]
    return listed(rows, {"s": "{mark:.0f}", "steps": "{step:,}", "test views": "{psnr:.2f} dB", "SSIM": "{ssim:.3f}"})


def same_memory() -> str:
    found = values("h200/precision_ngp_memory")
    columns = {"precision": "{kind}", "samples a step": "{batch_samples:,}", "memory": "{peak_bytes:MB}"}
    columns |= {"samples/s": "{samples_per_second:M}", "training": "{seconds:.1f} s", "PSNR": "{psnr:.2f} dB"}
    return listed([*found["same_batch"], *found["same_memory"]], columns)


def rates() -> str:
    groups: dict[tuple[str, ...], list[str]] = {}
    for key, rows in values("h200/vanilla_rate").items():
        for row in rows:
            groups.setdefault((key, row["kind"], flags(row["flags"])), []).append(f"{row['psnr']:.2f}")
    rows = [[*key, ", ".join(scores)] for key, scores in groups.items()]
    return table(["scene", "precision", "flags", "held out, dB (one per seed)"], rows)


def checkpointing() -> str:
    rows = [row for row in values("h200/checkpointing")["rows"] if row["fits"]]
    rows = [{**row, "way": "checkpointed" if row["checkpointing"] else "plain"} for row in rows]
    columns = {"samples a step": "{batch_samples:,}", "backward": "{way}", "a step": "{step_ms:.1f} ms"}
    return listed(rows, columns | {"memory": "{peak_bytes:MB}"})


def voxels(name: str) -> str:
    rows = []
    for run in values(name):
        cells = [f"{mark['psnr']:.1f} dB" for mark in run["marks"]]
        rows.append([f"`{run['run']}`", *cells, f"{run['psnr']:.1f} dB", str(run["steps"])])
        rows[-1].append(f"{run['parameters'] / 1e6:.2f} M")
    at = [f"{mark['seconds']:.0f} s" for mark in values(name)[0]["marks"]]
    return table(["preset", *at, "60 s", "steps", "parameters"], rows)


def pretrained() -> str:
    rows = []
    for name, study in values("cpu/pretrained").items():
        for target in study["targets"] if isinstance(study, dict) else []:
            rows.append({"name": name, **target})
    columns = {"scene": "{name}", "to": "{psnr:.0f} dB", "from random": "{plain[step]} steps"}
    columns |= {"from the zoo": "{pretrained[step]} steps", "share": "{share_of_steps:.2f}"}
    return listed([row for row in rows if row["plain"] and row["pretrained"]], columns)


def collectives() -> str:
    found = values("h200/distributed")["collectives"]
    rows = [{"way": way, **row} for way, row in found.items() if way != "no team, deterministic"]
    return listed(rows, {"collectives, world size 1": "{way}", "a step": "{step_ms:.2f} ms"})


def parity() -> str:
    found = values("h200/distributed")["parity"]
    names = {
        "first_gradient_relative_error": "first gradients, relative",
        "first_ten_losses_relative_error": "first ten losses, relative",
        "loss_curve_relative_error": f"all {found['steps']} losses, relative",
    }
    rows = [[text, f"{found[key]:.1e}"] for key, text in names.items()]
    rows.append(["ranks against each other", "equal to the bit" if found["ranks_equal_to_the_bit"] else "different"])
    return table(["two gloo ranks on one GPU against one process with twice the rays", "difference"], rows)


def exports() -> str:
    gpu, cpu = values("h200/outputs")["exports"], values("cpu/outputs")["exports"]
    form, rows = Units(), []
    for name, row in gpu.items():
        on_gpu = form.format("{seconds:.1f} s, {peak_memory_bytes:GB} + {peak_gpu_memory_bytes:GB} GPU", **row)
        rows.append(
            [name.replace("_", " "), on_gpu, form.format("{seconds:.1f} s, {peak_memory_bytes:GB}", **cpu[name])]
        )
    return table(["export at 256^3", "lego, H200", "toybox, two ARM cores"], rows)


def surface() -> str:
    above, around = values("cpu/outputs")["surface"], values("cpu/surface")["surface"]
    names = {"accuracy": "mesh to surface", "completeness": "surface to mesh, where a camera sees it"}
    names |= {"completeness_everywhere": "surface to mesh, everywhere"}
    rows = [[text, f"{around[key]:.2f}", f"{above[key]:.2f}"] for key, text in names.items()]
    rows.append(["surface that a camera sees", f"{around['seen_fraction']:.0%}", f"{above['seen_fraction']:.0%}"])
    return table(["mean distance in voxels, toybox at 256^3", "cameras all around", "cameras above"], rows)


def capture_meshes() -> str:
    form, rows = Units(), []
    for name, found in values("cpu/capture_meshes").items():
        for way in ("level", "fused"):
            if (made := found[way]).get("error"):
                rows.append([name, way, "no surface", "-", "-", "-"])
                continue
            score, memory = made["texture"], form.format("{peak_memory_bytes:GB}", **made)
            own = f"{score['against_photos']:.1f} dB ({score['field_against_photos']:.1f})"
            rows.append([name, way, f"{score['covered']:.0%}", own, f"{score['against_field']:.1f} dB", memory])
    return table(["capture", "mesh", "covered", "to the photos (the field)", "to the field", "memory"], rows)


def splats() -> str:
    columns = {"capture": "{scene}, {width}x{height}", "machine": "{on}", "splats": "{splats:,}"}
    columns |= {"size": "{megabytes:.0f} MB", "time": "{seconds:.0f} s", "steps": "{tune_steps:,}"}
    columns |= {"to the field": "{against_field:.1f} dB"}
    columns |= {"to the photos (the field)": "{against_photos:.1f} dB ({field_against_photos:.1f})"}
    names = {"h200": "H200", "cpu": "two x86 cores"}
    return listed(({**row, **row["score"], "on": names[on]} for on in names for row in values(f"{on}/splats")), columns)


def web() -> str:
    page = values("h200/web_page")["means"]
    columns = {"export": "{name}", "time": "{seconds:.0f} s", "size": "{megabytes:.1f} MB", "blocks": "{blocks:,}"}
    columns |= {"to the field": "{against_field:.1f} dB", "to the photos": "{against_photos:.1f} dB"}
    columns |= {"steps a pixel": "{steps_per_pixel:.1f}", "fetches a pixel": "{fetches_per_pixel:.1f}"}
    rows = [{"name": name, **row} for name, row in values("h200/web").items()]
    return listed([*rows, {"name": "default, in headless Chromium", **page}], columns)


def phases() -> str:
    found = values("h200/compat_step")["ours"]["phases"]["synchronized_ms"]
    return table(list(found), [[f"{value:.2f} ms" for value in found.values()]])


def five_lines() -> str:
    rows = []
    for machine, what in (("cpu", "two ARM cores, to 22 dB"), ("h200", "one H200, to 24 dB")):
        found = values(f"{machine}/five_lines")
        times = [f"{found[way]['seconds_to_target']:.1f} s" for way in ("plain", "five lines changed")]
        rows.append([what, *times, f"{found['speed_up']:.1f}"])
    return table(["machine", "plain, 40 lines", "five lines changed", "times faster"], rows)


def own_tests() -> str:
    rows = values("cpu/public_code")["tests"]
    return table(
        ["nerfacc", "on", "passed", "not meant to work", "why"],
        [[row["version"], row["device"], str(row["passed"]), str(row["not_meant"]), row["why"] or "-"] for row in rows],
    )


def public_code() -> str:
    rows = []
    for row in values("cpu/public_code")["repositories"]:
        where = f"[{row['repository']}](https://github.com/{row['repository']}) `{row['commit']}`"
        first, last = row["loss"]
        rows.append([where, row["for"], row["ran"], row["changed"], row["stubbed"], f"{first:g} to {last:g}"])
        rows[-1].append(f"{row['steps_per_second']:.2f}")
    headers = ["repository", "written for", "what ran", "changed", "stubbed", "loss", "steps/s"]
    return table(headers, rows)


def nerfbaselines() -> str:
    columns = {"scene": "{dataset}", "size": "{width}x{height}", "preset": "{preset}", "steps": "{steps:,}"}
    columns |= {"training": "{train_seconds:.0f} s", "test views": "{test_views}"}
    columns |= {"PSNR": "{psnr:.2f} dB", "SSIM": "{ssim:.4f}"}
    return listed([values("cpu/nerfbaselines"), values("h200/nerfbaselines")], columns)


TABLES: dict[str, Callable[[], str]] = {
    "nerfbaselines": nerfbaselines,
    "readme": readme,
    "gpu": gpu_figures,
    "cpu": cpu_figures,
    "ops": ops,
    "kernels": lambda: kernels("h200/step_profile"),
    "kernels-capture": lambda: kernels("h200/capture_profile"),
    "choices-ngp": lambda: choices("h200/ngp_choice"),
    "choices-cpu": lambda: listed(
        values("cpu/ngp_choice"),
        {"scene": "{scene}", "steps of the run": "{run}", "after": "{step}", "flags": "`{flags}`", "dB": "{psnr:.2f}"},
    ),
    "choices-quality-cpu": lambda: listed(
        values("cpu/quality_choice"),
        {"scene": "{scene}", "flags": "`{flags}`", "dB": "{psnr:.2f}", "SSIM": "{ssim:.3f}"},
    ),
    "choices-captures": lambda: choices("h200/captures_choice"),
    "choices-proposals": lambda: choices("h200/captures_proposals"),
    "anti-alias": anti_alias,
    "choices-long": lambda: choices("h200/captures_long"),
    "padding": lambda: choices("cpu/padding"),
    "schedule-ngp": lambda: listed(
        [
            row
            | {"found": " / ".join(f"{mark['psnr']:.2f}" for mark in row["marks"])}
            | {"given": f"`{row['flags']}`" if row["flags"] else ""}
            for row in values("h200/ngp_schedule")
        ],
        {"scene": "{scene}", "flags": "{given}", "": "{note}", "steps": "{steps:,}", "held out, dB": "{found}"},
    ),
    "choices-hierarchy": lambda: choices("h200/hierarchy_rate"),
    "steps-hierarchy": lambda: choices("h200/hierarchy_steps"),
    "choices-schedule": lambda: choices("h200/captures_schedule"),
    "bicycle-scene": lambda: scored("h200/bicycle_scene"),
    "frames": frames,
    "scenes": scenes,
    "ablation-h200": lambda: ablation(values("h200/ablation")),
    "ablation-cpu": lambda: ablation(values("cpu/ablation")),
    "ablation-begun": lambda: ablation(values("h200/ablation_begun")),
    "ablation-beer": lambda: ablation(values("cpu/ablation_beer")),
    "checkpointing": checkpointing,
    "quality-h200": quality_gpu,
    "quality-cpu": quality_cpu,
    "quality-presets": quality_presets,
    "merged-lego-h200": lambda: merged("h200/thin", "lego"),
    "merged-fox-h200": lambda: merged("h200/thin", "fox, near gradients 1 (the default of nested grids since)"),
    "merged-lego-cpu": lambda: merged("cpu/quality", "thinning by runs: lego, 100 x 100, 1024 rays a step"),
    "hidden": hidden,
    "dynamic": dynamic,
    "dynamic-deep": deep_dynamic,
    "few": few,
    "exposed": exposed,
    "cameras": cameras,
    "cameras-captures": cameras_of_captures,
    "unbounded-h200": lambda: methods("h200/unbounded"),
    "unbounded-cpu": lambda: methods("cpu/unbounded"),
    "captures-h200": lambda: captures("h200/captures"),
    "captures-cpu": lambda: captures("cpu/captures"),
    "precision-ngp": lambda: precision(values("h200/precision_ngp")),
    "precision-vanilla": lambda: precision(values("h200/precision_vanilla")),
    "precision-memory": same_memory,
    "precision-presets": precision_presets,
    "host-pixels": host_pixels,
    "precision-hierarchy-h200": lambda: precision(values("h200/precision_hierarchy")),
    "precision-hierarchy-cpu": lambda: precision(values("cpu/precision_hierarchy")),
    "rates": rates,
    "voxels-h200": lambda: voxels("h200/voxels"),
    "voxels-cpu": lambda: voxels("cpu/voxels"),
    "pretrained": pretrained,
    "trainers-h200": lambda: trainers(values("h200/trainers")),
    "trainers-cpu": lambda: trainers(values("cpu/trainers")),
    "collectives": collectives,
    "parity": parity,
    "exports": exports,
    "surface": surface,
    "capture-meshes": capture_meshes,
    "splats": splats,
    "web": web,
    "phases": phases,
    "five-lines": five_lines,
    "own-tests": own_tests,
    "public-code": public_code,
}


def renewed(text: str) -> str:
    """A page with its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[4]}", text)


def renew(*, write: bool) -> int:
    stale = [page for page in PAGES if renewed(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'renewed' if write else 'differs from benchmarks/results'}", file=sys.stderr)
        if write:
            page.write_text(renewed(page.read_text()))
    return 1 if stale and not write else 0


def main() -> int:
    if sys.argv[1:] in (["--write"], ["--check"]):
        return renew(write=sys.argv[1] == "--write")
    found = read_record(sys.argv[1])["values"]
    kinds = {"rows": ablation, "same_batch": precision, "loops": trainers}
    made = next((make for key, make in kinds.items() if key in found), None)
    if made is None:
        print("neither an ablation nor precisions nor trainers", file=sys.stderr)
        return 2
    print(made(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
