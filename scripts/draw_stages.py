"""Draw how proposals narrow down one ray: a held-out picture with its pixel, and the weights of every stage.

python scripts/draw_stages.py RUN OUT.png --view 0 --pixel 60,100

RUN is a training by `--preset proposal` or proposal-cpu. Weights are drawn over places along the ray as the first stage
lays its samples out, and labelled by distance; each mark under a panel is the border of a sample.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from nerfturbo.cli.common import load_run, open_views
from nerfturbo.data.cameras import PIXEL_CENTER
from nerfturbo.evaluation.evaluate import truth_image
from nerfturbo.sampling.histograms import Histogram
from nerfturbo.sampling.uniform import ProposedSamples

SCALE, WIDTH, PANEL, GAP, TICK = 2, 620, 96, 40, 9  # pixels before scaling
COLORS = ((110, 110, 120), (50, 100, 200), (200, 90, 40))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("output", type=Path)
    parser.add_argument("--view", type=int, default=0)
    parser.add_argument("--pixel", default="60,100", help="column,row")
    args = parser.parse_args()
    column, row = (int(part) for part in args.pixel.split(","))
    opened = load_run(args.run, "cpu")
    model, (_, test) = opened.model, open_views(opened.config, opened.model)
    x, y = (torch.tensor([value + PIXEL_CENTER]) for value in (column, row))
    rays = test.cameras.rays(torch.tensor([args.view]), x, y)
    samples = model.sampler.sample(rays)
    assert isinstance(samples, ProposedSamples), "a run whose samples proposals place"
    middle = (samples.t_starts + samples.t_ends) * 0.5
    directions = rays.directions.expand(middle.shape[0], 3)
    density = model.field(rays.origins + rays.directions * middle[:, None], directions, None)[1].float()
    thickness = density * (samples.t_ends - samples.t_starts)
    weights = torch.exp(-(thickness.cumsum(0) - thickness)) * -torch.expm1(-thickness)
    stages = [*samples.stages, Histogram(samples.edges, weights[None])]
    labels = torch.linspace(0.0, 1.0, 6)
    distances = model.sampler.span.distances(labels[None], rays)[0].tolist()
    chart = _chart(stages, list(zip(labels.tolist(), distances, strict=True)))
    pictures = [truth_image(test, args.view), model.render_image(test.cameras, args.view).rgb]
    _with_pictures(chart, pictures, (column, row)).save(args.output, optimize=True)
    print(f"{args.output}: view {args.view}, pixel {column},{row}, step {opened.state.step}")


def _chart(stages: list[Histogram], labels: list[tuple[float, float]]) -> Image.Image:
    image = Image.new("RGB", (WIDTH * SCALE, (len(stages) * (PANEL + GAP) + 24) * SCALE), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=12 * SCALE)
    for index, stage in enumerate(stages):
        edges, weights = stage.edges[0].tolist(), stage.weights[0].tolist()
        top, last = (index * (PANEL + GAP) + 20) * SCALE, index == len(stages) - 1
        bottom, color = top + PANEL * SCALE, COLORS[-1 if last else min(index, 1)]
        who = "the field" if last else f"proposal {index + 1}"
        name = f"{who}: {len(weights)} samples, the largest weight {max(weights):.2f}"
        draw.text((_x(0.0), top - 17 * SCALE), name, fill=color, font=font)
        for low, high, weight in zip(edges, edges[1:], weights, strict=False):
            height = weight / max(*weights, 1e-9) * PANEL * SCALE
            draw.rectangle([_x(low), bottom - height, max(_x(low) + 1, _x(high) - 1), bottom], fill=color)
        for edge in edges:
            draw.line([_x(edge), bottom + 2 * SCALE, _x(edge), bottom + TICK * SCALE], fill=(90, 90, 90), width=1)
    for place, distance in labels:
        where = min(_x(place), _x(1.0) - 34 * SCALE)
        draw.text((where, image.height - 22 * SCALE), f"{distance:.3g}", fill=(90, 90, 90), font=font)
    return image


def _x(place: float) -> float:
    return (12 + place * (WIDTH - 24)) * SCALE


def _with_pictures(chart: Image.Image, pictures: list[torch.Tensor], pixel: tuple[int, int]) -> Image.Image:
    """Truth and render on the left, as high as the chart; a ring about the pixel."""
    shown = []
    for picture in pictures:
        small = Image.fromarray((picture.clamp(0.0, 1.0) * 255.0 + 0.5).to(torch.uint8).numpy())
        scale = chart.height / small.height
        large = small.resize((round(small.width * scale), chart.height), Image.Resampling.BICUBIC)
        x, y = ((value + PIXEL_CENTER) * scale for value in pixel)
        for radius, color in ((16, "black"), (14, "white")):
            ImageDraw.Draw(large).ellipse([x - radius, y - radius, x + radius, y + radius], outline=color, width=4)
        shown.append(large)
    sheet = Image.new("RGB", (sum(one.width + 12 for one in shown) + chart.width, chart.height), "white")
    left = 0
    for one in (*shown, chart):
        sheet.paste(one, (left, 0))
        left += one.width + 12
    return sheet.resize((sheet.width // SCALE, sheet.height // SCALE), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main()
