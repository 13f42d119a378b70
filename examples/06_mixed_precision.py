"""Mixed precision for a model of your own, in a loop of your own

Any torch model and optimizer: products in half precision, masters in fp32, a loss scale that moves by itself, and steps
that are skipped, counted and named when a gradient is not finite.
"""

import math

import torch
from torch import nn

from nerfturbo import MixedPrecision
from nerfturbo.training.precision import PrecisionName

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Image(nn.Module):
    """Frequencies stay in fp32: their arguments are too large for half precision. The layers need not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        with torch.autocast(positions.device.type, enabled=False):
            angles = positions.float()[:, :, None] * (math.pi * 2.0 ** torch.arange(6, device=positions.device))
            encoded = torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1)
        return torch.sigmoid(self.layers(encoded).float())


def picture(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and the colours there: what is to be learned."""
    y, x = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0, 1, side), indexing="ij")
    colors = torch.stack([x, y, 0.5 + 0.5 * torch.sin(12 * x) * torch.cos(9 * y)], dim=-1)
    return torch.stack([x, y], dim=-1).reshape(-1, 2).to(DEVICE), colors.reshape(-1, 3).to(DEVICE)


def main(n_steps: int = 300, side: int = 64, precision: PrecisionName = "auto") -> float:
    """Train, and return the PSNR in the end."""
    torch.manual_seed(0)
    positions, colors = picture(side)
    model = Image().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=n_steps)
    amp = MixedPrecision(model, optimizer, precision=precision, clip_norm=10.0, scheduler=scheduler)
    psnr = 0.0
    for step in range(n_steps):
        with amp.autocast():
            loss = (model(positions) - colors).square().mean()
        report = amp.step(loss)  # scale, backward, unscale, check, clip, step, schedule, zero
        if report.skipped:
            print(f"step {step} skipped: {report.bad_tensor} was not finite; the loss scale is now {amp.loss_scale:g}")
        psnr = -10.0 * math.log10(float(loss.detach()))
        if step % 100 == 99:
            print(f"step {step + 1}: {psnr:.1f} dB, gradient norm {report.gradient_norm:.2g}, in {amp.precision}")
    print(f"{amp.steps_made} steps made, {amp.steps_skipped} skipped")
    return psnr


if __name__ == "__main__":
    main()
